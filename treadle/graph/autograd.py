"""Reverse-mode differentiation: graph in, graph out.

Walks the node list backwards once (no recursion), asks each op on a path between `wrt` and the
loss for the gradients of just the inputs that matter, and sums where a value was used more than
once. See Griewank & Walther, "Evaluating Derivatives", section 3.2 (incremental reverse mode).
"""

from __future__ import annotations

from collections.abc import Sequence

from treadle.errors import GraphError
from treadle.graph.op import Fill, add_all, cast, zeros
from treadle.graph.value import FLOATS, Value, wide

BACKWARD_SCOPE = "grad"  # the scope of the nodes that differentiation appends


def gradients(loss: Value, wrt: Sequence[Value], seed: Value | None = None) -> list[Value]:
    """Append the nodes that compute d(loss)/d(wrt) and return those values.

    loss: a scalar of shape (). wrt: float values of the same graph. seed: the gradient flowing
    into the loss, shape (); 1 when absent. A `wrt` that the loss does not depend on gets zeros; the
    gradient of a bfloat16 `wrt` is float32.
    GraphError when the loss is not a scalar or a path crosses an op without a gradient.
    """
    graph = loss.graph
    if loss.shape != ():
        raise GraphError(f"[gradients] expected a loss of shape (), got {loss.spec}; sum it first")
    for w in wrt:
        if w.dtype not in FLOATS:
            raise GraphError(f"[gradients] %{w.name} is {w.dtype}; only floats have gradients")

    nodes = list(graph.nodes)
    depends = {id(w) for w in wrt}
    for node in nodes:
        if any(v is not None and id(v) in depends for v in node.inputs):
            depends.update(id(v) for v in node.outputs)

    if seed is None:
        seed = graph.apply(Fill((), 1.0, loss.dtype), name="one")[0]
    pending: dict[int, list[Value]] = {id(loss): [seed]}
    settled: dict[int, Value] = {}
    wanted = {id(w) for w in wrt}

    def settle(value: Value) -> Value | None:
        parts = pending.pop(id(value), None)
        if parts is None:
            return None
        # What is differentiated with respect to keeps its gradient wide: float32 for bfloat16.
        dtype = wide(value.dtype) if id(value) in wanted else value.dtype
        with graph.scope(BACKWARD_SCOPE):
            total = add_all([cast(p, dtype) for p in parts])
        if id(value) in wanted:
            settled[id(value)] = total
        return total

    for node in reversed(nodes):
        if not any(id(v) in pending for v in node.outputs):
            continue
        needs = [v is not None and id(v) in depends and v.dtype in FLOATS for v in node.inputs]
        dys = [settle(v) for v in node.outputs]
        if not any(needs):
            continue
        with graph.scope(BACKWARD_SCOPE):
            dxs = node.op.grad(node, dys, needs)
        for v, dx, need in zip(node.inputs, dxs, needs, strict=True):
            if need and v is not None and dx is not None:
                if dx.shape != v.shape:
                    raise GraphError(
                        f"[{node.op.name}] gradient of %{v.name} has shape {dx.shape}, "
                        f"the value has {v.shape}"
                    )
                pending.setdefault(id(v), []).append(dx)

    results = []
    for w in wrt:
        if id(w) not in settled and settle(w) is None:
            settled[id(w)] = zeros(graph, w.shape, wide(w.dtype))
        results.append(settled[id(w)])
    return results
