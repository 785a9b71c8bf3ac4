"""Each fusion against its unfused subgraph, and where it must not happen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from zlib import crc32

import numpy as np
import pytest

from treadle.backends.cpu import CpuBackend, available
from treadle.backends.numpy import NumpyBackend
from treadle.graph.autograd import gradients
from treadle.graph.check import check
from treadle.graph.op import Graph, add_all
from treadle.graph.program import Program
from treadle.graph.value import Value
from treadle.ops import elementwise
from treadle.ops.classifier import linear_cross_entropy
from treadle.ops.elementwise import activation, add, gated, mul, scale, sum_leading
from treadle.ops.embedding import Embedding
from treadle.ops.linear import linear, matmul
from treadle.ops.norm import layernorm, rmsnorm
from treadle.ops.optim import accumulate
from treadle.passes.fuse import fuse

ROWS, INNER, OUTER, VOCABULARY = 6, 5, 7, 9
BACKENDS = [
    NumpyBackend("float64"),
    pytest.param(
        "cpu", marks=pytest.mark.skipif(not available(), reason="the C kernels are not built")
    ),
]


class Sketch:
    """A program of one graph, whose buffers are declared as they are read."""

    def __init__(self) -> None:
        self.program = Program()
        self.graph: Graph = self.program.graph("g")

    def read(self, name: str, *shape: int, dtype: str = "float32") -> Value:
        return self.graph.read(self.program.buffer(name, shape, dtype, "input"))

    def output(self, name: str, value: Value) -> None:
        buffer = self.program.buffer(name, value.shape, value.dtype, "output")
        self.graph.assign(buffer, value)

    def ops(self) -> list[str]:
        return [node.op.name for node in self.graph.nodes]


Build = Callable[[Sketch], None]


def run(build: Build, backend: NumpyBackend | str, fused: bool) -> tuple[dict, Sketch]:
    """The content of all buffers after one run, from numbers that depend on their names alone."""
    sketch = Sketch()
    build(sketch)
    if fused:
        assert fuse(sketch.graph) is sketch.graph
        check(sketch.graph)
    device = CpuBackend(threads=2) if isinstance(backend, str) else backend
    executable = device.load(sketch.program)
    for name, buffer in sketch.program.buffers.items():
        rng = np.random.default_rng(crc32(name.encode()))
        if buffer.dtype == "int32":
            executable.write(name, rng.integers(0, VOCABULARY, buffer.shape))
        else:
            executable.write(name, rng.standard_normal(buffer.shape))
    executable.run("g")
    result = {name: executable.read(name) for name in sketch.program.buffers}
    executable.close()
    return result, sketch


def agree(build: Build, backend: NumpyBackend | str) -> Sketch:
    """Check that fusing changes no buffer's content; returns the fused sketch."""
    plain, _ = run(build, backend, fused=False)
    ours, sketch = run(build, backend, fused=True)
    tolerance = 1e-5 if isinstance(backend, str) else 1e-12
    for name, expected in plain.items():
        np.testing.assert_allclose(
            ours[name], expected, rtol=tolerance, atol=tolerance, err_msg=name
        )
    return sketch


def product(s: Sketch, bias: bool = True) -> Value:
    """linear(x, w, b): [ROWS, OUTER]."""
    b = s.read("b", OUTER) if bias else None
    return linear(s.read("x", ROWS, INNER), s.read("w", INNER, OUTER), b)


def differentiate(s: Sketch, y: Value, names: Sequence[str]) -> list[Value]:
    """Gradients of a weighted sum of y with respect to buffers read before."""
    weights = s.read("weights", *y.shape)
    loss = sum_leading(mul(y, weights), ())
    return gradients(loss, [s.graph.reads[name] for name in names])


# ---------------------------------------------------------------- matmul, activation


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", elementwise.ACTIVATIONS)
def test_activation_joins_its_product(backend: NumpyBackend | str, kind: str) -> None:
    def build(s: Sketch) -> None:
        y = activation(product(s), kind)
        dx, dw, db = differentiate(s, y, ["x", "w", "b"])
        s.output("y", scale(y, 2.0))
        for name, value in (("dx", dx), ("dw", dw), ("db", db)):
            s.output(name, value)

    sketch = agree(build, backend)
    assert "activation" not in sketch.ops()
    fused = sketch.graph.nodes[0]
    assert fused.op.attributes()["activation"] == kind
    assert fused.used(1), "backward reads the argument of the activation"


def test_activation_alone_saves_no_argument() -> None:
    def build(s: Sketch) -> None:
        s.output("y", scale(activation(product(s), "gelu"), 2.0))

    sketch = agree(build, NumpyBackend("float64"))
    assert sketch.ops() == ["matmul", "scale"]
    assert sketch.graph.nodes[0].out(1) is None


def test_only_one_activation_joins_and_only_as_the_first_step() -> None:
    def build(s: Sketch) -> None:
        pre = product(s)
        s.output("y", add(activation(activation(pre, "gelu"), "relu"), activation(pre, "silu")))

    sketch = agree(build, NumpyBackend("float64"))
    assert sketch.ops() == ["matmul", "activation", "activation", "add"]


@pytest.mark.parametrize("assigned", ["product", "activation"])
def test_activation_stays_out_of_buffers(assigned: str) -> None:
    def build(s: Sketch) -> None:
        pre = product(s)
        y = activation(pre, "gelu")
        s.output("kept", pre if assigned == "product" else y)
        s.output("y", scale(y, 2.0))

    assert agree(build, NumpyBackend("float64")).ops() == ["matmul", "activation", "scale"]


# ---------------------------------------------------------------- matmul, gated


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", elementwise.ACTIVATIONS)
def test_gate_joins_the_product_that_it_opens(backend: NumpyBackend | str, kind: str) -> None:
    def build(s: Sketch) -> None:
        x = s.read("x", ROWS, INNER)
        gate = linear(x, s.read("w_gate", INNER, OUTER))
        y = linear(gated(gate, product(s), kind), s.read("w_down", OUTER, INNER))
        grads = differentiate(s, add(x, y), ["x", "w", "b", "w_gate", "w_down"])
        s.output("y", scale(y, 2.0))
        for name, value in zip(("dx", "dw", "db", "dw_gate", "dw_down"), grads, strict=True):
            s.output(name, value)

    sketch = agree(build, backend)
    assert "gated" not in sketch.ops()
    (fused,) = [n for n in sketch.graph.nodes if n.op.attributes().get("gated")]
    assert fused.op.attributes()["activation"] == kind
    assert fused.used(1), "backward reads the product"


def _gates_itself(s: Sketch) -> None:
    y = product(s)
    s.output("y", scale(gated(y, y, "silu"), 2.0))


def _product_read_before(s: Sketch) -> None:
    y = product(s)
    gate = scale(y, 3.0)
    s.output("y", scale(gated(gate, y, "silu"), 2.0))


def _gated_into_a_buffer(s: Sketch) -> None:
    s.output("y", gated(s.read("gate", ROWS, OUTER), product(s), "silu"))


@pytest.mark.parametrize("build", [_gates_itself, _product_read_before, _gated_into_a_buffer])
def test_gate_stays_out(build: Build) -> None:
    assert "gated" in agree(build, NumpyBackend("float64")).ops()


# ---------------------------------------------------------------- matmul, activation_grad


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", elementwise.ACTIVATIONS)
def test_slope_joins_the_product_before_it(backend: NumpyBackend | str, kind: str) -> None:
    def build(s: Sketch) -> None:
        y = linear(activation(product(s), kind), s.read("w2", OUTER, INNER))
        for name, value in zip(
            ("dx", "dw", "db"), differentiate(s, y, ["x", "w", "b"]), strict=True
        ):
            s.output(name, value)

    sketch = agree(build, backend)
    assert "activation_grad" not in sketch.ops()
    assert kind in [node.op.attributes().get("slope") for node in sketch.graph.nodes]


def test_slope_stays_out_of_a_product_that_is_read_elsewhere() -> None:
    sketch = Sketch()
    dy = matmul(sketch.read("dy", ROWS, INNER), sketch.read("w", INNER, OUTER))
    slope = elementwise.ActivationGrad("gelu")
    (dx,) = sketch.graph.apply(slope, dy, sketch.read("pre", ROWS, OUTER))
    sketch.output("both", add(scale(dx, 2.0), dy))
    fuse(sketch.graph)
    assert "activation_grad" in sketch.ops()


# ---------------------------------------------------------------- matmul, add


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("swapped", [True, False])
def test_residual_joins_its_product(backend: NumpyBackend | str, bias: bool, swapped: bool) -> None:
    def build(s: Sketch) -> None:
        y, residual = product(s, bias), scale(s.read("r", ROWS, OUTER), 3.0)
        total = add(y, residual) if swapped else add(residual, y)
        dx, dr = differentiate(s, total, ["x", "r"])
        s.output("y", scale(total, 2.0))
        s.output("dx", dx)
        s.output("dr", dr)

    sketch = agree(build, backend)
    assert "add" not in sketch.ops()
    assert sketch.ops()[:2] == ["scale", "matmul"], "at the position of the add"


@pytest.mark.parametrize("backend", BACKENDS)
def test_residual_joins_after_the_activation(backend: NumpyBackend | str) -> None:
    def build(s: Sketch) -> None:
        y = activation(product(s), "gelu")
        total = add(s.read("r", ROWS, OUTER), y)
        dx, dr = differentiate(s, total, ["x", "r"])
        s.output("y", scale(total, 2.0))
        s.output("dx", dx)
        s.output("dr", dr)

    sketch = agree(build, backend)
    assert "add" not in sketch.ops() and "activation" not in sketch.ops()


def test_of_two_products_one_is_the_residual() -> None:
    def build(s: Sketch) -> None:
        y = add(product(s), matmul(s.read("x2", ROWS, 3), s.read("w2", 3, OUTER)))
        s.output("y", scale(y, 2.0))

    assert agree(build, NumpyBackend("float64")).ops() == ["matmul", "matmul", "scale"]


def _used_twice(s: Sketch) -> Value:
    y = product(s)
    s.output("z", scale(y, 3.0))
    return add(s.read("r", ROWS, OUTER), y)


def _added_to_itself(s: Sketch) -> Value:
    y = product(s)
    return add(y, y)


def _broadcast(s: Sketch) -> Value:
    return add(product(s), s.read("row", OUTER))


def _argument_read_before(s: Sketch) -> Value:
    pre = product(s)
    y = activation(pre, "gelu")
    return add(scale(pre, 2.0), y)


def _weight_superseded(s: Sketch) -> Value:
    y = product(s)
    accumulate(s.read("w", INNER, OUTER), s.read("dw", INNER, OUTER))
    return add(s.read("r", ROWS, OUTER), y)


@pytest.mark.parametrize(
    "build_sum",
    [_used_twice, _added_to_itself, _broadcast, _argument_read_before, _weight_superseded],
)
def test_residual_stays_out(build_sum: Callable[[Sketch], Value]) -> None:
    def build(s: Sketch) -> None:
        s.output("y", scale(build_sum(s), 2.0))

    assert "add" in agree(build, NumpyBackend("float64")).ops()


@pytest.mark.parametrize("assigned", ["product", "sum"])
def test_residual_stays_out_of_buffers(assigned: str) -> None:
    def build(s: Sketch) -> None:
        y = product(s)
        total = add(s.read("r", ROWS, OUTER), y)
        s.output("kept", y if assigned == "product" else total)
        s.output("y", scale(total, 2.0))

    assert "add" in agree(build, NumpyBackend("float64")).ops()


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_of_two_products_are_one_sum(backend: NumpyBackend | str) -> None:
    def build(s: Sketch) -> None:
        x = scale(s.read("x", ROWS, INNER), 2.0)
        other = linear(x, s.read("w2", INNER, OUTER))
        dx = differentiate(s, mul(product_of(s, x), other), ["x"])[0]
        s.output("dx", dx)

    def product_of(s: Sketch, x: Value) -> Value:
        return linear(x, s.read("w", INNER, OUTER))

    ops = agree(build, backend).ops()
    assert "sum" not in ops and ops.count("matmul") == 4


# ---------------------------------------------------------------- rmsnorm, add


@pytest.mark.parametrize("backend", BACKENDS)
def test_residual_joins_its_norm(backend: NumpyBackend | str) -> None:
    def build(s: Sketch) -> None:
        x, gain = s.read("x", ROWS, INNER), s.read("gain", INNER)
        y = add(scale(x, 2.0), rmsnorm(activation(x, "silu"), gain, offset=1.0))
        grads = differentiate(s, mul(y, y), ["x", "gain"])
        s.output("y", scale(y, 2.0))
        for name, value in zip(("dx", "dgain"), grads, strict=True):
            s.output(name, value)

    sketch = agree(build, backend)
    assert "add" not in sketch.ops()
    (norm,) = [n for n in sketch.graph.nodes if n.op.name == "rmsnorm"]
    assert len(norm.inputs) == 3 and norm.used(1), "backward reads rstd"


def test_residual_stays_out_of_a_norm_that_is_read_elsewhere() -> None:
    def build(s: Sketch) -> None:
        x = s.read("x", ROWS, INNER)
        y = rmsnorm(x, s.read("gain", INNER))
        s.output("z", scale(y, 3.0))
        s.output("y", scale(add(x, y), 2.0))

    assert "add" in agree(build, NumpyBackend("float64")).ops()


# ---------------------------------------------------------------- layernorm_grad, sum


def norm_branch(sketch: Sketch, norm: Callable[[Value, Value], Value] = layernorm) -> Value:
    """d(loss)/dx of x + norm(x) · w, summed where it was needed."""
    x, w = sketch.read("x", ROWS, INNER), sketch.read("w", INNER, INNER)
    y = add(x, matmul(norm(x, sketch.read("gain", INNER)), w))
    return gradients(sum_leading(mul(y, y), ()), [x])[0]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("norm", [layernorm, rmsnorm])
def test_norm_gradient_joins_the_one_that_passes_by(
    backend: NumpyBackend | str, norm: Callable[[Value, Value], Value]
) -> None:
    sketch = agree(lambda sketch: sketch.output("dx", norm_branch(sketch, norm)), backend)
    (node,) = [n for n in sketch.graph.nodes if n.op.name == f"{norm.__name__}_grad"]
    assert len(node.inputs) == (6 if norm is layernorm else 5)
    assert node.outputs[0].buffer is not None


def test_norm_gradient_used_elsewhere_stays() -> None:
    def build(sketch: Sketch) -> None:
        sketch.output("dx", norm_branch(sketch))
        (node,) = [n for n in sketch.graph.nodes if n.op.name == "layernorm_grad"]
        sketch.output("twice", scale(node.outputs[0], 2.0))

    sketch = agree(build, "cpu" if available() else NumpyBackend("float64"))
    (node,) = [n for n in sketch.graph.nodes if n.op.name == "layernorm_grad"]
    assert len(node.inputs) == 5


# ---------------------------------------------------------------- matmul, accumulate


@pytest.mark.parametrize("backend", BACKENDS)
def test_weight_gradient_accumulates_in_its_buffer(backend: NumpyBackend | str) -> None:
    def build(s: Sketch) -> None:
        dx, dw = differentiate(s, activation(product(s), "gelu"), ["x", "w"])
        total = accumulate(s.read("w.grad", INNER, OUTER), dw)
        s.output("dx", dx)
        s.output("norm", sum_leading(mul(total, total), ()))

    sketch = agree(build, backend)
    assert sketch.ops().count("matmul_into") == 1 and "accumulate" not in sketch.ops()


def test_accumulation_moves_to_the_product() -> None:
    def build(s: Sketch) -> None:
        dw = matmul(s.read("x", ROWS, INNER), s.read("dy", ROWS, OUTER), transpose_a=True)
        s.output("z", scale(s.read("more", ROWS), 2.0))
        accumulate(s.read("w.grad", INNER, OUTER), dw)

    assert agree(build, NumpyBackend("float64")).ops() == ["matmul_into", "scale"]


def test_two_gradients_accumulate_one_after_the_other() -> None:
    def build(s: Sketch) -> None:
        first = matmul(s.read("x", ROWS, INNER), s.read("dy", ROWS, OUTER), transpose_a=True)
        second = matmul(s.read("x2", ROWS, INNER), s.read("dy", ROWS, OUTER), transpose_a=True)
        accumulate(accumulate(s.read("w.grad", INNER, OUTER), first), second)

    sketch = agree(build, NumpyBackend("float64"))
    assert sketch.ops() == ["matmul_into", "matmul_into"]


def test_accumulation_waits_for_readers_of_the_old_content() -> None:
    def build(s: Sketch) -> None:
        dw = matmul(s.read("x", ROWS, INNER), s.read("dy", ROWS, OUTER), transpose_a=True)
        into = s.read("w.grad", INNER, OUTER)
        s.output("old", scale(into, 2.0))
        accumulate(into, dw)

    assert agree(build, NumpyBackend("float64")).ops() == ["scale", "matmul_into"]


def _gradient_used_twice(s: Sketch) -> None:
    dw = matmul(s.read("x", ROWS, INNER), s.read("dy", ROWS, OUTER), transpose_a=True)
    s.output("z", scale(dw, 3.0))
    accumulate(s.read("w.grad", INNER, OUTER), dw)


def _gradient_assigned(s: Sketch) -> None:
    dw = matmul(s.read("x", ROWS, INNER), s.read("dy", ROWS, OUTER), transpose_a=True)
    s.output("kept", dw)
    accumulate(s.read("w.grad", INNER, OUTER), dw)


def _buffer_is_an_operand(s: Sketch) -> None:
    into = s.read("square", INNER, INNER)
    accumulate(into, matmul(s.read("x", INNER, INNER), into))


def _order_impossible(s: Sketch) -> None:
    x = s.read("x", ROWS, INNER)
    dw = matmul(x, s.read("dy", ROWS, OUTER), transpose_a=True)
    into = s.read("w.grad", INNER, OUTER)
    s.output("old", scale(into, 2.0))  # needs the old content, after the product
    accumulate(x, s.read("dx", ROWS, INNER))  # the product's operand is gone afterwards
    accumulate(into, dw)


@pytest.mark.parametrize(
    "build", [_gradient_used_twice, _gradient_assigned, _buffer_is_an_operand, _order_impossible]
)
def test_accumulation_stays_out(build: Build) -> None:
    ops = agree(build, NumpyBackend("float64")).ops()
    assert "accumulate" in ops and "matmul_into" not in ops


# ---------------------------------------------------------------- linear_cross_entropy


def classifier(s: Sketch, x: Value, weight: Value) -> Value:
    """The loss of a linear layer's output, seeded with `dloss`."""
    targets = s.read("targets", *x.shape[:-1], dtype="int32")
    return linear_cross_entropy(x, weight, targets, s.read("dloss"))[0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_classifier_accumulates_in_its_buffer(backend: NumpyBackend | str) -> None:
    def build(s: Sketch) -> None:
        x, weight = s.read("x", ROWS, INNER), s.read("w", VOCABULARY, INNER)
        dx, dweight = gradients(classifier(s, x, weight), [x, weight], s.read("dloss"))
        s.output("dx", dx)
        accumulate(s.read("w.grad", VOCABULARY, INNER), dweight)

    assert agree(build, backend).ops() == ["linear_cross_entropy_into"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("accumulates", [True, False])
def test_tied_classifier_and_embedding_share_a_buffer(
    backend: NumpyBackend | str, accumulates: bool
) -> None:
    def build(s: Sketch) -> None:
        wte = s.read("wte", VOCABULARY, INNER)
        h = s.graph.apply(Embedding(), s.read("tokens", 2, 3, dtype="int32"), wte)[0]
        loss = classifier(s, activation(h, "gelu"), wte)
        (dwte,) = gradients(loss, [wte], s.read("dloss"))
        if accumulates:
            accumulate(s.read("wte.grad", VOCABULARY, INNER), dwte)
        else:
            s.output("wte.grad", dwte)

    graph = agree(build, backend).graph
    first, last = (n for n in graph.nodes if "cross_entropy" in n.name or "embedding_" in n.op.name)
    assert first.op.name == f"linear_cross_entropy{'_into' if accumulates else ''}"
    assert last.inputs[2] is first.outputs[3]
    assert {n.op.name for n in graph.nodes}.isdisjoint(("sum", "accumulate"))


def _gradient_of_classifier_used_twice(s: Sketch, dweight: Value) -> None:
    s.output("z", scale(dweight, 3.0))


def _old_content_is_read_afterwards(s: Sketch, dweight: Value) -> None:
    s.output("old", scale(s.read("w.grad", VOCABULARY, INNER), 2.0))


@pytest.mark.parametrize(
    "also", [_gradient_of_classifier_used_twice, _old_content_is_read_afterwards]
)
def test_classifier_stays_out_of_the_buffer(also: Callable[[Sketch, Value], None]) -> None:
    def build(s: Sketch) -> None:
        x, weight = s.read("x", ROWS, INNER), s.read("w", VOCABULARY, INNER)
        (dweight,) = gradients(classifier(s, x, weight), [weight], s.read("dloss"))
        also(s, dweight)
        accumulate(s.read("w.grad", VOCABULARY, INNER), dweight)

    assert "accumulate" in agree(build, NumpyBackend("float64")).ops()


# ---------------------------------------------------------------- embedding gradients


def tied(s: Sketch) -> Value:
    """dwte of a model whose embedding is its output layer as well: [VOCABULARY, INNER]."""
    tokens = s.read("tokens", 2, 3, dtype="int32")
    wte = s.read("wte", VOCABULARY, INNER)
    h = activation(s.graph.apply(Embedding(), tokens, wte)[0], "gelu")
    return differentiate(s, linear(h, wte, transpose_weight=True), ["wte"])[0]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("in_buffer", [True, False])
def test_tied_embedding_adds_to_the_output_layers_gradient(
    backend: NumpyBackend | str, in_buffer: bool
) -> None:
    def build(s: Sketch) -> None:
        dwte = tied(s)
        s.output("dwte", dwte if in_buffer else scale(dwte, 2.0))

    sketch = agree(build, backend)
    assert "sum" not in sketch.ops()
    scatter = next(n for n in sketch.graph.nodes if n.op.name == "embedding_grad")
    term = scatter.inputs[2]
    assert term is not None
    assert (term.buffer is not None) == in_buffer
    assert term.buffer == scatter.outputs[0].buffer, "one memory for both"


@pytest.mark.parametrize("backend", BACKENDS)
def test_tied_embedding_accumulates_in_its_buffer(backend: NumpyBackend | str) -> None:
    def build(s: Sketch) -> None:
        total = accumulate(s.read("wte.grad", VOCABULARY, INNER), tied(s))
        s.output("norm", sum_leading(mul(total, total), ()))

    ops = agree(build, backend).ops()
    assert "sum" not in ops and "accumulate" not in ops
    assert ops.index("matmul_into") < ops.index("embedding_grad")


@pytest.mark.parametrize("backend", BACKENDS)
def test_untied_embedding_accumulates_in_its_buffer(backend: NumpyBackend | str) -> None:
    def build(s: Sketch) -> None:
        tokens = s.read("tokens", 2, 3, dtype="int32")
        y = s.graph.apply(Embedding(), tokens, s.read("wte", VOCABULARY, INNER))[0]
        (dwte,) = differentiate(s, y, ["wte"])
        accumulate(s.read("wte.grad", VOCABULARY, INNER), dwte)

    sketch = agree(build, backend)
    assert "accumulate" not in sketch.ops()
    assert sketch.graph.nodes[-1].inputs[2] is sketch.graph.reads["wte.grad"]


def test_embedding_gradient_used_elsewhere_stays() -> None:
    def build(s: Sketch) -> None:
        dwte = tied(s)
        sum_node = dwte.node
        assert sum_node is not None
        scatter = next(v for v in sum_node.inputs if v and v.node and "embed" in v.node.op.name)
        s.output("z", scale(scatter, 2.0))
        s.output("dwte", dwte)

    assert "sum" in agree(build, NumpyBackend("float64")).ops()


def test_embedding_gradient_in_a_sum_of_three_stays() -> None:
    def build(s: Sketch) -> None:
        dwte = tied(s)
        assert dwte.node is not None
        parts = [v for v in dwte.node.inputs if v is not None]
        s.output("dwte", add_all([*parts, s.read("more", VOCABULARY, INNER)]))

    assert "sum" in agree(build, NumpyBackend("float64")).ops()


@pytest.mark.parametrize("touch", ["read", "written"])
def test_tied_embedding_leaves_a_buffer_in_use_alone(touch: str) -> None:
    def build(s: Sketch) -> None:
        buffer = s.program.buffer("dwte", (VOCABULARY, INNER), "float32", "grad")
        if touch == "read":
            s.output("old", scale(s.graph.read(buffer), 2.0))
        else:
            s.graph.assign(buffer, scale(s.read("more", VOCABULARY, INNER), 2.0))
        dwte = tied(s)
        s.graph.assign(buffer, dwte)

    sketch = agree(build, NumpyBackend("float64"))
    scatter = next(n for n in sketch.graph.nodes if n.op.name == "embedding_grad")
    assert scatter.inputs[2] is not None and scatter.inputs[2].buffer is None
