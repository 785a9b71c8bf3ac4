"""Linear + cross-entropy beyond the table of cases: against the two ops apart, in chunks of any
size, on any number of threads, with NaN, with outputs that nobody uses; and its memory."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from treadle.backends.cpu import CpuBackend, available
from treadle.backends.numpy import NumpyBackend
from treadle.errors import DTypeError, GraphError, ShapeError
from treadle.graph.autograd import gradients
from treadle.graph.op import Fill, Graph, Launch, Op, Slice
from treadle.graph.plan import Plan, plan
from treadle.graph.program import Program
from treadle.graph.value import Spec, Value
from treadle.models.base import declare
from treadle.models.gpt2 import GPT2
from treadle.ops.classifier import (
    LinearCrossEntropy,
    LinearCrossEntropyLoss,
    chunks,
    linear_cross_entropy,
)
from treadle.ops.elementwise import scale
from treadle.ops.linear import linear
from treadle.ops.loss import cross_entropy
from treadle.train.program import OptimizerSettings, add_training

cpu = pytest.mark.skipif(not available(), reason="the C kernels are not built")
ROWS, VOCABULARY, CHANNELS = 37, 1201, 33
DLOSS = 0.3


class Sketch:
    """A graph over x [ROWS, CHANNELS], weight [VOCABULARY, CHANNELS], targets and dloss."""

    def __init__(self, dtype: str = "float32") -> None:
        self.program = Program()
        self.graph: Graph = self.program.graph("op")
        self.x = self.read("x", (ROWS, CHANNELS), dtype)
        self.weight = self.read("weight", (VOCABULARY, CHANNELS), dtype)
        self.targets = self.read("targets", (ROWS,), "int32")
        self.dloss = self.read("dloss", (), "float32")

    def read(self, name: str, shape: tuple[int, ...], dtype: str) -> Value:
        return self.graph.read(self.program.buffer(name, shape, dtype, "input"))

    def output(self, **values: Value) -> None:
        for name, value in values.items():
            buffer = self.program.buffer(name, value.shape, value.dtype, "output")
            self.graph.assign(buffer, value)

    def apply(self, op: Op, *outputs: str) -> None:
        """The op on the inputs; of its outputs those that are named are kept."""
        inputs = [self.x, self.weight, self.targets]
        inputs += [self.dloss] if isinstance(op, LinearCrossEntropy) else []
        found = dict(
            zip(("loss", "count", "dx", "dweight"), self.graph.apply(op, *inputs), strict=False)
        )
        self.output(**{name: found[name] for name in outputs})

    def run(self, backend: CpuBackend | NumpyBackend, **inputs: np.ndarray) -> dict:
        executable = backend.load(self.program)
        for name, array in (numbers() | inputs).items():
            executable.write(name, array)
        executable.run("op")
        names = [b.name for b in self.program.buffers.values() if b.role == "output"]
        results = {name: executable.read(name) for name in names}
        executable.close()
        return results

    def launches(self) -> list[Launch]:
        return plan(self.graph, "cpu").launches


def numbers() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(2)
    targets = rng.integers(0, VOCABULARY, ROWS)
    targets[[3, 20]] = -1
    return {
        "x": rng.standard_normal((ROWS, CHANNELS)),
        "weight": 0.3 * rng.standard_normal((VOCABULARY, CHANNELS)),
        "targets": targets,
        "dloss": np.asarray(DLOSS),
    }


ALL = ("loss", "count", "dx", "dweight")


def assert_same(ours: Mapping, theirs: Mapping) -> None:
    assert list(ours) == list(theirs)
    for name in theirs:
        np.testing.assert_array_equal(ours[name], theirs[name], err_msg=name)


# ---------------------------------------------------------------- against the two ops apart


def _apart(s: Sketch) -> tuple[Value, Value]:
    return cross_entropy(linear(s.x, s.weight, transpose_weight=True), s.targets)


def _together(s: Sketch) -> tuple[Value, Value]:
    return linear_cross_entropy(s.x, s.weight, s.targets, s.dloss)


def _loss_only(s: Sketch) -> tuple[Value, Value]:
    return linear_cross_entropy(s.x, s.weight, s.targets)


@pytest.mark.parametrize("build", [_together, _loss_only])
@pytest.mark.parametrize(
    "backend", [NumpyBackend("float64"), pytest.param("cpu", marks=cpu)], ids=["numpy", "cpu"]
)
def test_equals_the_two_ops_apart(build: object, backend: NumpyBackend | str) -> None:
    results = []
    for loss_of in (_apart, build):
        s = Sketch()
        loss, count = loss_of(s)
        dx, dweight = gradients(loss, [s.x, s.weight], s.dloss)
        s.output(loss=loss, count=count, dx=dx, dweight=dweight)
        results.append(s.run(CpuBackend(2) if isinstance(backend, str) else backend))
    tolerance = 1e-5 if isinstance(backend, str) else 1e-12
    for name, expected in results[0].items():
        size = np.abs(expected).max()
        np.testing.assert_allclose(results[1][name], expected, atol=tolerance * size, err_msg=name)
    assert results[1]["count"] == ROWS - 2


def test_gradient_with_dloss_is_no_product_more() -> None:
    s = Sketch()
    loss, _ = _together(s)
    gradients(loss, [s.x, s.weight], s.dloss)
    assert [node.op.name for node in s.graph.nodes] == ["linear_cross_entropy"]


def test_another_gradient_than_dloss_is_refused() -> None:
    s = Sketch()
    loss, count = _together(s)
    with pytest.raises(GraphError, match=r"\[linear_cross_entropy\] expected %dloss, .*got %one"):
        gradients(loss, [s.x])
    with pytest.raises(GraphError, match="got none, %dloss"):
        gradients(count, [s.x], s.dloss)
    with pytest.raises(GraphError, match="leave dloss out"):
        gradients(scale(loss, 2.0), [s.x], s.dloss)


def test_loss_only_takes_any_gradient() -> None:
    s = Sketch()
    loss, _ = _loss_only(s)
    (dx,) = gradients(scale(loss, 2.0), [s.x])
    s.output(dx=dx)
    twice = s.run(NumpyBackend("float64"))["dx"]
    s = Sketch()
    s.apply(LinearCrossEntropy(), "dx")
    np.testing.assert_allclose(twice, s.run(NumpyBackend("float64"))["dx"] * 2 / DLOSS, rtol=1e-12)


# ---------------------------------------------------------------- chunks and threads


@pytest.mark.parametrize("rows", [1, 255, 256, 257, 4096])
@pytest.mark.parametrize("vocabulary", [1, 65, 16000, 50257])
@pytest.mark.parametrize("most", [None, 1, 100])
def test_chunks_are_even_and_cover_all_rows(rows: int, vocabulary: int, most: int | None) -> None:
    found = chunks(rows, vocabulary, most)
    assert [start for start, _ in found] == [0, *(end for _, end in found[:-1])]
    assert found[-1][1] == rows
    sizes = [end - start for start, end in found]
    assert min(sizes) >= 1 and max(sizes) - min(sizes) <= 1
    assert max(sizes) <= (most or rows)


@cpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_same_bits_on_any_number_of_threads(dtype: str) -> None:
    results = []
    for threads in (1, 2, 5):
        s = Sketch(dtype)
        s.apply(LinearCrossEntropy(chunk=10), *ALL)
        results.append(s.run(CpuBackend(threads)))
    assert_same(results[1], results[0])
    assert_same(results[2], results[0])


@cpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("chunk", [1, 10, 36, 37])
def test_chunks_change_only_the_order_of_sums(dtype: str, chunk: int) -> None:
    results = []
    for size in (None, chunk):
        s = Sketch(dtype)
        s.apply(LinearCrossEntropy(chunk=size), *ALL)
        results.append(s.run(CpuBackend(2)))
    for name, tolerance in (("loss", 1e-6), ("count", 0), ("dx", 8e-3), ("dweight", 4e-3)):
        scale = np.abs(results[0][name]).max()
        limit = scale * (tolerance if dtype == "bfloat16" else min(tolerance, 1e-6))
        assert np.abs(results[1][name] - results[0][name]).max() <= limit, name


@cpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_loss_alone_is_the_same_loss(dtype: str) -> None:
    results = []
    for op in (LinearCrossEntropy(chunk=10), LinearCrossEntropyLoss(chunk=10)):
        s = Sketch(dtype)
        s.apply(op, "loss", "count")
        results.append(s.run(CpuBackend(2)))
    assert_same(*results)


# ---------------------------------------------------------------- special values


@cpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nan_stays_visible(dtype: str, bad: float) -> None:
    s = Sketch(dtype)
    s.apply(LinearCrossEntropy(chunk=10), *ALL)
    x = numbers()["x"]
    x[14, 2] = bad
    found = s.run(CpuBackend(2), x=x)
    assert np.isnan(found["loss"]) and found["count"] == ROWS - 2
    assert np.isnan(found["dx"][14]).all()
    assert np.isfinite(np.delete(found["dx"], 14, axis=0)).all()
    assert np.isnan(found["dweight"]).any(axis=1).all(), "each token's logit was one of the row's"


@cpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_without_a_target_everything_is_zero(dtype: str) -> None:
    s = Sketch(dtype)
    s.apply(LinearCrossEntropy(chunk=10), *ALL)
    found = s.run(CpuBackend(2), targets=np.full(ROWS, -1))
    assert all((array == 0).all() for array in found.values())


# ---------------------------------------------------------------- launches and memory


@cpu
def test_outputs_that_nobody_uses_are_not_computed() -> None:
    kernels, values = {}, {}
    for kept in (("dx", "dweight"), ("dx",), ("dweight",), ()):
        s = Sketch()
        s.apply(LinearCrossEntropy(chunk=10), "loss", *kept)
        kernels[kept] = [launch.kernel for launch in s.launches()]
        values[kept] = s.run(CpuBackend(2))
        for name in kept:
            np.testing.assert_array_equal(values[kept][name], values["dx", "dweight"][name])
    products = {kept: names.count("matmul_f32") for kept, names in kernels.items()}
    assert products[()] == len(chunks(ROWS, VOCABULARY, 10))
    assert products["dweight",] == 2 * products[()]
    assert products["dx", "dweight"] - products["dx",] == products[()]
    assert "classifier_backward_f32" not in kernels[()]


@cpu
@pytest.mark.parametrize("op", [LinearCrossEntropy(chunk=4), LinearCrossEntropyLoss(chunk=4)])
def test_memory_is_for_one_chunk(op: Op) -> None:
    s = Sketch()
    s.apply(op, "loss")
    chunk = 4 * VOCABULARY * 4
    assert plan(s.graph, "cpu").arena_bytes < 2 * chunk < ROWS * VOCABULARY * 4


@cpu
@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("graph", ["micro_first", "micro", "evaluate"])
def test_a_model_holds_neither_its_logits_nor_a_second_gradient(tie: bool, graph: str) -> None:
    model = GPT2(9001, n_layer=1, n_head=2, n_embd=8, block_size=512, tie_embeddings=tie)
    program = Program()
    declare(program, model)
    add_training(program, model, OptimizerSettings(), 4, 512, True)
    found = plan(program.graphs[graph], "cpu")
    rows, matrix = 4 * 512, 9001 * 8 * 4
    assert found.arena_bytes < rows * 9001 * 4 / 3
    held = [v for n in found.graph.nodes for v in n.outputs if v.buffer is None]
    assert not any(v.nbytes >= matrix and v.shape == (9001, 8) and v.users for v in held)
    names = [node.op.name for node in found.graph.nodes]
    expected = {"micro_first": "", "micro": "_into", "evaluate": "_loss"}[graph]
    assert names.count(f"linear_cross_entropy{expected}") == 1
    assert "sum" not in names and "cross_entropy" not in names


def _phases(*arguments: tuple[int, int, int, int]) -> Plan:
    """The plan of a node whose launches write bytes [a, b) and read bytes [c, d) of a buffer."""

    class Copies(Fill):
        def lower(self, backend: str, node: object) -> list[Launch]:
            y = node.outputs[0]  # type: ignore[attr-defined]
            return [
                Launch("copy_f32", [Slice(y, a, b - a), Slice(y, c, d - c)], 1)
                for a, b, c, d in arguments
            ]

    program = Program()
    graph = program.graph("g")
    (y,) = graph.apply(Copies((64,)))
    graph.assign(program.buffer("y", (64,), "float32", "output"), y)
    return plan(graph, "cpu")


def test_slices_meet_exactly_where_they_overlap() -> None:
    assert _phases((0, 64, 128, 192), (64, 128, 192, 256)).phases == [0]
    assert _phases((0, 64, 128, 192), (64, 129, 192, 256)).phases == [0, 1], "written after read"
    assert _phases((0, 64, 128, 192), (64, 128, 63, 64)).phases == [0, 1], "read after written"
    assert _phases((0, 64, 128, 192), (63, 65, 192, 256)).phases == [0, 1], "written twice"
    assert "copy_f32(@y, @y+128)" in str(_phases((0, 64, 128, 192)))


# ---------------------------------------------------------------- errors


def test_inputs_that_do_not_fit() -> None:
    op = LinearCrossEntropy()
    x, weight = Spec((3, 5)), Spec((7, 5))
    targets, dloss = Spec((3,), "int32"), Spec(())
    with pytest.raises(ShapeError, match=r"expected a weight \['V', 5\], got \[7, 4\]"):
        op.infer(x, Spec((7, 4)), targets, dloss)
    with pytest.raises(ShapeError, match=r"expected targets \[3\], got \[4\]"):
        op.infer(x, weight, Spec((4,), "int32"), dloss)
    with pytest.raises(ShapeError, match=r"expected shape \[\], got \[1\]"):
        op.infer(x, weight, targets, Spec((1,)))
    with pytest.raises(ShapeError, match=r"expected x \[\.\.\., C\], got \[0, 5\]"):
        op.infer(Spec((0, 5)), weight, Spec((0,), "int32"), dloss)
    with pytest.raises(DTypeError, match="expected targets of int32"):
        op.infer(x, weight, Spec((3,)), dloss)
    with pytest.raises(DTypeError, match="expected a weight of float32, got bfloat16"):
        op.infer(x, Spec((7, 5), "bfloat16"), targets, dloss)
    with pytest.raises(DTypeError, match="expected float32, got bfloat16"):
        op.infer(x, weight, targets, Spec((), "bfloat16"))
