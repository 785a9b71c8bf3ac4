"""The checker: what every graph must satisfy before it is planned."""

from __future__ import annotations

from treadle.errors import GraphError
from treadle.graph.op import Graph


def check(graph: Graph) -> None:
    """GraphError unless the graph is well formed.

    Values are produced once and before use; inferred specs equal the recorded ones; names are
    unique; a buffer's superseded content is not read, nor does a node read a buffer that it writes
    unless its op works in place.
    """

    def fail(message: str) -> None:
        raise GraphError(f"[check] graph '{graph.name}': {message}")

    known = {id(v) for v in graph.reads.values()}
    names = {v.name for v in graph.reads.values()}
    current = dict.fromkeys(graph.reads, 0)
    for node in graph.nodes:
        op = node.op
        for v in node.inputs:
            if v is None:
                continue
            if id(v) not in known:
                fail(f"'{node.name}' reads %{v.name} before it is produced")
            if v.buffer is not None and v.version != current.get(v.buffer.name, 0):
                fail(f"'{node.name}' reads a superseded value of @{v.buffer.name}")
        specs = tuple(op.infer(*(None if v is None else v.spec for v in node.inputs)))
        if len(specs) != len(node.outputs):
            fail(f"'{node.name}' has {len(node.outputs)} outputs, its op infers {len(specs)}")
        for v, spec in zip(node.outputs, specs, strict=True):
            if v.spec != spec:
                fail(f"%{v.name} is {v.spec}, its op infers {spec}")
            if v.node is not node or id(v) in known:
                fail(f"%{v.name} is produced twice")
            if v.name in names:
                fail(f"the name %{v.name} is used twice")
            known.add(id(v))
            names.add(v.name)
            if v.buffer is not None:
                if v.version != current.get(v.buffer.name, 0) + 1:
                    fail(f"'{node.name}' updates @{v.buffer.name} out of order")
                current[v.buffer.name] = v.version
                for k, w in enumerate(node.inputs):
                    shared = w is not None and w.buffer == v.buffer
                    allowed = (*op.inplace.get(v.index, ()), op.updates.get(v.index))
                    if shared and k not in allowed:
                        fail(
                            f"'{node.name}' cannot write @{v.buffer.name} while it reads it; "
                            "assign a copy of its result"
                        )
        for out, source in op.updates.items():
            updated, value = node.outputs[out], node.inputs[source]
            if value is None or updated.buffer != value.buffer:
                fail(f"'{node.name}' does not update the buffer it reads")
