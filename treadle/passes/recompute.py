"""Recomputation: what the backward pass reads is computed again, so that it need not be kept.

Runs after fusion. Nodes are repeated as fusion left them, on the same inputs, so the kernels are
the same and so are the bits of every result; dropout draws the same numbers, which follow from its
name and the step. Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost".

    gelu    activations, whatever their kind, and products of two tensors (as in gated layers):
            each costs little, and the inputs that it is made from are kept for its gradient anyway
    block   all that is made inside of a scope of the graph and stays in it: of each transformer
            block the input alone is kept
"""

from __future__ import annotations

from treadle.graph.autograd import BACKWARD_SCOPE
from treadle.graph.op import Graph, Node, Op
from treadle.graph.value import Value
from treadle.ops.elementwise import Activation, Gated, Mul
from treadle.ops.linear import MatMul

# How some outputs of a node are made once more: an op, its inputs, and those outputs.
Recipe = tuple[Op, tuple[Value | None, ...], tuple[Value, ...]]


def recompute(graph: Graph, how: str = "none") -> Graph:
    """Rewrite a differentiated graph in place, and return it. how: "none", "gelu" or "block".

    A repeated node stands before the first node that needs it in the backward pass.
    """
    if how == "none":
        return graph
    recipe = {"gelu": _activation, "block": _inside}[how]
    graph.prune()
    nodes = graph.nodes
    start = next((i for i, n in enumerate(nodes) if _scope(n) == BACKWARD_SCOPE), len(nodes))
    forward, backward = nodes[:start], nodes[start:]

    # By id of a value, the place in the backward pass where it is needed first.
    needed: dict[int, int] = {}
    for place in reversed(range(len(backward))):
        needed.update((id(v), place) for v in backward[place].inputs)
    repeated: list[tuple[int, Recipe]] = []
    for node in reversed(forward):
        found = recipe(node)
        places = [needed[id(v)] for v in found[2] if id(v) in needed] if found else []
        if found and places:
            place = min(places)
            needed.update((id(v), min(place, needed.get(id(v), place))) for v in found[1])
            repeated.append((place, found))

    copies: dict[int, Value] = {}
    before: list[list[Node]] = [[] for _ in backward]
    for place, (op, inputs, outputs) in reversed(repeated):
        name = f"{BACKWARD_SCOPE}/again/{outputs[0].name}"
        made = graph.apply(op, *(copies.get(id(v), v) for v in inputs), name=name)
        before[place].append(graph.nodes.pop())
        copies.update((id(v), made[v.index]) for v in outputs)
    for node in backward:
        node.inputs = tuple(copies.get(id(v), v) for v in node.inputs)
    graph.nodes = forward
    for group, node in zip(before, backward, strict=True):
        graph.nodes += [*group, node]
    graph.relink()
    return graph


def _activation(node: Node) -> Recipe | None:
    """An activation, gated or not, alone or at the end of a matrix product, or a product of two
    tensors."""
    op, y = node.op, node.outputs[0]
    if y.buffer is not None:
        return None
    if type(op) is MatMul and op.activation is not None and op.gated:
        return Gated(op.activation), (node.inputs[3], node.outputs[1]), (y,)
    if type(op) is MatMul and op.activation is not None and len(node.inputs) < 4:
        return Activation(op.activation), (node.outputs[1],), (y,)
    return (op, node.inputs, (y,)) if isinstance(op, Activation | Gated | Mul) else None


def _inside(node: Node) -> Recipe | None:
    """A node in a scope, with those of its outputs that no other part of the forward pass reads."""
    scope = _scope(node)
    if scope is None or any(v.buffer is not None for v in node.outputs):
        return None
    own = (scope, BACKWARD_SCOPE)
    inner = tuple(v for v in node.outputs if all(_scope(n) in own for n in v.users))
    return (node.op, node.inputs, inner) if inner else None


def _scope(node: Node) -> str | None:
    """The outermost scope that a node was made in."""
    return node.name.partition("/")[0] if "/" in node.name else None
