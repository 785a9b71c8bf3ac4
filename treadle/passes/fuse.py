"""Fusion: nodes that one kernel computes at once become one node.

Runs after differentiation, because fused ops have no gradient of their own. Values keep their
identity, so that whatever reads them stays valid; only the nodes that produce them change.

    matmul, activation          -> matmul with an activation, its argument as second output
    matmul, gated               -> matmul with a gate, its own result as second output
    matmul, activation_grad     -> matmul with the activation's slope as a factor
    matmul, add                 -> matmul with a residual
    matmul, matmul, sum         -> the second with the first as its residual
    rmsnorm, add                -> rmsnorm with a residual
    layernorm_grad, sum         -> layernorm_grad into the other term (rmsnorm_grad as well)
    embedding_grad, sum         -> embedding_grad into the other term (tied embeddings)
    embedding_grad, accumulate  -> embedding_grad into the buffer
    matmul, accumulate          -> matmul into the buffer
    linear_cross_entropy, accumulate -> the same with its weight's gradient into the buffer
"""

from __future__ import annotations

from dataclasses import replace

from treadle.graph.op import Graph, Node, Op, Sum
from treadle.graph.value import Value
from treadle.ops.classifier import LinearCrossEntropy, LinearCrossEntropyInto
from treadle.ops.elementwise import Activation, ActivationGrad, Add, Gated
from treadle.ops.embedding import EmbeddingGrad
from treadle.ops.linear import MatMul, MatMulInto
from treadle.ops.norm import LayerNormGrad, RMSNorm, RMSNormGrad
from treadle.ops.optim import Accumulate


def fuse(graph: Graph) -> Graph:
    """Rewrite the graph's nodes in place by the rules above, and return it.

    Its results must have been assigned: nodes that reach no buffer are dropped first, since a dead
    reader would keep a rule from firing.
    """
    graph.prune()
    rules = (_activation, _gate, _slope, _residual, _norm_residual, _norm_grad, _tied_embedding)
    for rule in (*rules, _embedding_into, _matmul_into, _classifier_into):
        sweep = _Sweep(graph)
        for node in list(graph.nodes):
            rule(sweep, node)
        sweep.finish()
    return graph


# ---------------------------------------------------------------- one rule's pass


class _Sweep:
    """Where every node stands, and the replacements so far.

    `slots[i]` holds the nodes that stand at position i, `place` the position of a node; a node
    that was replaced has the position of the one that took its place.
    """

    def __init__(self, graph: Graph) -> None:
        graph.relink()
        self.graph = graph
        self.slots = [[node] for node in graph.nodes]
        self.place = {id(node): i for i, node in enumerate(graph.nodes)}
        self.writes: dict[str, set[int]] = {}
        for i, node in enumerate(graph.nodes):
            for v in node.outputs:
                if v.buffer is not None:
                    self.writes.setdefault(v.buffer.name, set()).add(i)

    def made(self, value: Value) -> int:
        """The position at which a value is produced; -1 for a buffer's first content."""
        return -1 if value.node is None else self.place[id(value.node)]

    def readers(self, value: Value) -> list[int]:
        """The positions at which a value is read."""
        return [self.place[id(node)] for node in value.users]

    def current(self, node: Node, at: int) -> bool:
        """Whether all inputs of a node would still be current if it stood at a later position."""
        start = self.place[id(node)]
        names = [v.buffer.name for v in node.inputs if v is not None and v.buffer is not None]
        return not any(start <= w < at for name in names for w in self.writes.get(name, ()))

    def replace(self, old: tuple[Node, ...], new: tuple[Node, ...], at: int) -> None:
        """Let the nodes `new` stand at position `at` instead of the nodes `old`."""
        for node in old:
            i = self.place[id(node)]
            self.slots[i].remove(node)
            for v in node.outputs:
                if v.buffer is not None:
                    self.writes[v.buffer.name].discard(i)
            self.place[id(node)] = at
        for node in new:
            self.slots[at].append(node)
            self.place[id(node)] = at
            for i, v in enumerate(node.outputs):
                v.node, v.index = node, i
                if v.buffer is not None:
                    self.writes.setdefault(v.buffer.name, set()).add(at)

    def finish(self) -> None:
        """Hand the nodes to the graph."""
        self.graph.nodes = [node for slot in self.slots for node in slot]
        self.graph.relink()


def _producer(value: Value | None, op: type[Op], index: int = 0) -> Node | None:
    """The node of just this op whose output `index` the value is; None for one in a buffer."""
    if value is None or value.buffer is not None or value.node is None or value.index != index:
        return None
    return value.node if type(value.node.op) is op else None


def _only(value: Value, user: Node) -> bool:
    """Whether `user` alone reads the value, and once."""
    return value.users == [user] and user.inputs.count(value) == 1


def _plain(node: Node) -> bool:
    """Whether a MatMul has no residual yet."""
    return len(node.inputs) < 4


# ---------------------------------------------------------------- matmul, activation


def _activation(sweep: _Sweep, node: Node) -> None:
    op = node.op
    product = _producer(node.inputs[0], MatMul) if isinstance(op, Activation) else None
    if product is None or node.outputs[0].buffer is not None:
        return
    pre, a = product.outputs[0], product.inputs[0]
    assert isinstance(op, Activation) and isinstance(product.op, MatMul) and a is not None
    if product.op.activation is None and _plain(product) and pre.dtype == a.dtype:
        fused = replace(product.op, activation=op.kind)
        made = Node(fused, product.inputs, (node.outputs[0], pre), product.name)
        sweep.replace((product, node), (made,), sweep.place[id(product)])


# ---------------------------------------------------------------- matmul, gated


def _gate(sweep: _Sweep, node: Node) -> None:
    op = node.op
    product = _producer(node.inputs[1], MatMul) if isinstance(op, Gated) else None
    if product is None or node.outputs[0].buffer is not None:
        return
    gate, pre, at = node.inputs[0], product.outputs[0], sweep.place[id(node)]
    assert isinstance(op, Gated) and isinstance(product.op, MatMul) and gate is not None
    if (
        product.op.activation is None
        and _plain(product)
        and gate is not pre
        and pre.dtype == product.inputs[0].dtype  # type: ignore[union-attr]
        and sweep.current(product, at)
        and min(sweep.readers(pre)) >= at
    ):
        inputs = (*(*product.inputs, None)[:3], gate)
        fused = replace(product.op, activation=op.kind, gated=True)
        made = Node(fused, inputs, (node.outputs[0], pre), product.name)
        sweep.replace((product, node), (made,), at)


# ---------------------------------------------------------------- matmul, activation_grad


def _slope(sweep: _Sweep, node: Node) -> None:
    op = node.op
    product = _producer(node.inputs[0], MatMul) if isinstance(op, ActivationGrad) else None
    if product is None or node.outputs[0].buffer is not None:
        return
    dy, x = node.inputs
    at = sweep.place[id(node)]
    assert isinstance(op, ActivationGrad) and isinstance(product.op, MatMul) and dy is not None
    if (
        product.op.activation is None
        and len(product.inputs) == 2
        and _only(dy, node)
        and sweep.current(product, at)
    ):
        fused = replace(product.op, slope=op.kind)
        made = Node(fused, (*product.inputs, None, x), node.outputs, product.name)
        sweep.replace((product, node), (made,), at)


# ---------------------------------------------------------------- matmul, add; two matmuls, sum


def _residual(sweep: _Sweep, node: Node) -> None:
    summed = isinstance(node.op, Sum) and len(node.inputs) == 2
    products = summed and all(_producer(v, MatMul) for v in node.inputs)
    if not (isinstance(node.op, Add) or products) or node.outputs[0].buffer is not None:
        return
    at = sweep.place[id(node)]
    # The second term first: in x + f(x) it is the branch, and x the residual that is there already.
    for value, residual in (node.inputs[::-1], node.inputs):
        product = _producer(value, MatMul)
        assert value is not None and residual is not None
        if product is None or not _plain(product) or residual.shape != value.shape:
            continue
        rest = product.outputs[1:]
        if (
            _only(value, node)
            and sweep.current(product, at)
            and all(v.buffer is None and min(sweep.readers(v), default=at) >= at for v in rest)
        ):
            inputs = (*(*product.inputs, None)[:3], residual)
            made = Node(product.op, inputs, (node.outputs[0], *rest), product.name)
            sweep.replace((product, node), (made,), at)
            return


# ---------------------------------------------------------------- rmsnorm, add


def _norm_residual(sweep: _Sweep, node: Node) -> None:
    if not isinstance(node.op, Add):
        return
    at = sweep.place[id(node)]
    for value, residual in (node.inputs[::-1], node.inputs):
        norm = _producer(value, RMSNorm)
        assert value is not None and residual is not None
        if norm is None or len(norm.inputs) > 2 or residual.shape != value.shape:
            continue
        rstd = norm.outputs[1]
        if (
            _only(value, node)
            and sweep.current(norm, at)
            and rstd.buffer is None
            and min(sweep.readers(rstd), default=at) >= at
        ):
            outputs = (node.outputs[0], rstd)
            made = Node(norm.op, (*norm.inputs, residual), outputs, norm.name)
            sweep.replace((norm, node), (made,), at)
            return


# ---------------------------------------------------------------- layernorm_grad, sum


def _norm_grad(sweep: _Sweep, node: Node) -> None:
    if not isinstance(node.op, Sum) or len(node.inputs) != 2:
        return
    at = sweep.place[id(node)]
    for value, term in (node.inputs, node.inputs[::-1]):
        grad = _producer(value, LayerNormGrad) or _producer(value, RMSNormGrad)
        assert value is not None and term is not None
        if grad is None or len(grad.inputs) > (5 if isinstance(grad.op, LayerNormGrad) else 4):
            continue
        if _only(value, node) and sweep.current(grad, at):
            made = Node(grad.op, (*grad.inputs, term), node.outputs, grad.name)
            sweep.replace((grad, node), (made,), at)
            return


# ---------------------------------------------------------------- embedding gradients


def _tied_embedding(sweep: _Sweep, node: Node) -> None:
    if not isinstance(node.op, Sum) or len(node.inputs) != 2:
        return
    at = sweep.place[id(node)]
    for value, term in (node.inputs, node.inputs[::-1]):
        scatter = _producer(value, EmbeddingGrad)
        assert value is not None and term is not None
        if scatter is None or len(scatter.inputs) > 2:
            continue
        if _only(value, node) and sweep.current(scatter, at):
            made = Node(scatter.op, (*scatter.inputs, term), node.outputs, scatter.name)
            result = node.outputs[0]
            if _exclusive(sweep, result) and _only(term, node) and term.buffer is None:
                # Computed in the buffer from the start, so that the scatter finds it in place.
                term.buffer, term.version = result.buffer, result.version
                _supersede(result)
            sweep.replace((scatter, node), (made,), at)
            return


def _exclusive(sweep: _Sweep, value: Value) -> bool:
    """Whether a value lives in a buffer that nothing else in the graph reads or writes."""
    if value.buffer is None or len(sweep.writes[value.buffer.name]) > 1:
        return False
    first = sweep.graph.reads.get(value.buffer.name)
    return first is None or not first.users


def _supersede(value: Value) -> None:
    """Make room for one more version of a buffer before its last one, which is `value`."""
    assert value.buffer is not None
    value.version += 1
    value.graph.versions[value.buffer.name] = value.version


def _embedding_into(sweep: _Sweep, node: Node) -> None:
    if not isinstance(node.op, Accumulate):
        return
    into, value = node.inputs
    scatter = _producer(value, EmbeddingGrad)
    at = None if scatter is None else _position(sweep, scatter, node)
    if scatter is None or at is None:
        return
    tokens, dy, term = (*scatter.inputs, None)[:3]
    result = node.outputs[0]
    if term is None:
        made = Node(scatter.op, (tokens, dy, into), node.outputs, scatter.name)
        sweep.replace((scatter, node), (made,), at)
    elif result.buffer is not None and sweep.graph.versions[result.buffer.name] == result.version:
        # into + (term + scatter) becomes (into + term) + scatter: both add to the buffer in place.
        name = sweep.graph.unique(f"{node.name}/into")
        half = Value(sweep.graph, name, result.spec, None, 0, result.buffer, result.version)
        _supersede(result)
        adding = Node(Accumulate(), (into, term), (half,), name)
        made = Node(scatter.op, (tokens, dy, half), node.outputs, scatter.name)
        sweep.replace((scatter, node), (adding, made), at)


# ---------------------------------------------------------------- into a buffer


def _position(sweep: _Sweep, node: Node, adding: Node) -> int | None:
    """Where a node can stand that adds into the buffer of `adding`, an Accumulate of the node's
    output: in the node's place if possible, else in that of `adding`; None where neither is."""
    into, value = adding.inputs
    assert into is not None and value is not None
    if not _only(value, adding) or any(v and v.buffer == into.buffer for v in node.inputs):
        return None
    first, last = sweep.place[id(node)], sweep.place[id(adding)]
    if sweep.made(into) < first and not any(first <= i < last for i in sweep.readers(into)):
        return first
    return last if sweep.current(node, last) else None


def _matmul_into(sweep: _Sweep, node: Node) -> None:
    if not isinstance(node.op, Accumulate):
        return
    into, value = node.inputs
    product = _producer(value, MatMul)
    at = None if product is None else _position(sweep, product, node)
    if product is None or at is None or len(product.outputs) > 1:
        return
    if product.op.attributes()["slope"] is not None:
        return
    inputs = (*(*product.inputs, None, None)[:4], into)
    op = MatMulInto(**product.op.attributes())
    sweep.replace((product, node), (Node(op, inputs, node.outputs, product.name),), at)


def _classifier_into(sweep: _Sweep, node: Node) -> None:
    if not isinstance(node.op, Accumulate):
        return
    into, value = node.inputs
    classifier = _producer(value, LinearCrossEntropy, index=3)
    # Its other outputs are read on the way, so it stays where it is.
    if classifier is None or _position(sweep, classifier, node) != sweep.place[id(classifier)]:
        return
    op = LinearCrossEntropyInto(**classifier.op.attributes())
    outputs = (*classifier.outputs[:3], node.outputs[0])
    made = Node(op, (*classifier.inputs, into), outputs, classifier.name)
    sweep.replace((classifier, node), (made,), sweep.place[id(classifier)])
