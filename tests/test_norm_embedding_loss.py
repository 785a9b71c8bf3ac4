"""Layer norm, embedding and loss beyond the table of cases: absent outputs, memory taken over,
any number of threads, NaN, and what does not fit."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from treadle.backends.cpu import CpuBackend, available
from treadle.errors import DTypeError, GraphError, ShapeError
from treadle.graph.autograd import gradients
from treadle.graph.op import Graph
from treadle.graph.program import Program
from treadle.graph.value import Value
from treadle.ops import loss, norm
from treadle.ops.elementwise import copy, scale
from treadle.ops.embedding import EmbeddingGrad, embedding

cpu = pytest.mark.skipif(not available(), reason="the C kernels are not built")


def build(program: Program, **arrays: np.ndarray) -> tuple[Graph, list[Value]]:
    """A graph, and a value read from an input buffer for each array."""
    graph = program.graph("op")
    dtypes = {"i": "int32", "f": "float32"}
    values = [
        graph.read(program.buffer(name, a.shape, dtypes[a.dtype.kind], "input"))
        for name, a in arrays.items()
    ]
    return graph, values


def results(
    program: Program, outputs: Sequence[Value], threads: int, **arrays: np.ndarray
) -> list[np.ndarray]:
    """Runs the graph on the cpu backend and returns the outputs."""
    graph = program.graphs["op"]
    for i, y in enumerate(outputs):
        graph.assign(program.buffer(f"out{i}", y.shape, y.dtype, "output"), y)
    executable = CpuBackend(threads).load(program)
    for name, a in arrays.items():
        executable.write(name, a)
    executable.run("op")
    read = [executable.read(f"out{i}") for i in range(len(outputs))]
    executable.close()
    return read


@cpu
@pytest.mark.parametrize("frozen", [False, True])
def test_layernorm_without_saved_statistics(frozen: bool) -> None:
    rng = np.random.default_rng(0)
    x, w, b = rng.standard_normal((37, 65)), rng.standard_normal(65), rng.standard_normal(65)
    program = Program()
    _, values = build(program, x=x, w=w, b=b)
    y = norm.layernorm(*values[: 2 if frozen else 3])
    assert y.node is not None
    (launch,) = y.node.op.lower("cpu", y.node)
    assert launch.args[1] is None
    (got,) = results(program, [y], 2, x=x, w=w, b=b)
    inputs = (x, w) if frozen else (x, w, b)
    np.testing.assert_allclose(got, norm.LayerNorm().reference(*inputs)[0], atol=1e-5)


@cpu
def test_layernorm_weight_gradient_without_bias() -> None:
    rng = np.random.default_rng(1)
    x, w, target = rng.standard_normal((67, 33)), rng.standard_normal(33), np.zeros((67, 33))
    program = Program()
    _, (xv, wv, tv) = build(program, x=x, w=w, t=target)
    loss_sum, _ = loss.mean_squared_error(norm.layernorm(xv, wv), tv)
    (dw,) = gradients(loss_sum, [wv])
    assert dw.node is not None
    assert dw.node.out(1) is None
    (got,) = results(program, [dw], 2, x=x, w=w, t=target)
    xhat = norm.LayerNorm().reference(x, np.ones(33))[0]
    np.testing.assert_allclose(got, (2 * xhat * xhat * w).sum(axis=0), rtol=1e-4)


@cpu
def test_same_bits_for_any_number_of_threads() -> None:
    rng = np.random.default_rng(2)
    tokens, targets = rng.integers(0, 50, (2, 5, 123))
    arrays = {
        "wte": rng.standard_normal((50, 130)),
        "wpe": rng.standard_normal((123, 130)),
        "g": rng.standard_normal(130),
        "b": rng.standard_normal(130),
        "tokens": tokens,
        "targets": targets,
    }
    runs = []
    for threads in (1, 2, 5):
        program = Program()
        _, (wte, wpe, g, b, tok, tgt) = build(program, **arrays)
        x = norm.layernorm(embedding(tok, wte, wpe), g, b)
        total, count = loss.cross_entropy(x, tgt)
        outputs = [total, count, *gradients(total, [wte, wpe, g, b])]
        runs.append(results(program, outputs, threads, **arrays))
    for other in runs[1:]:
        for a, c in zip(runs[0], other, strict=True):
            assert a.tobytes() == c.tobytes()


@cpu
def test_in_place_over_logits_and_into() -> None:
    rng = np.random.default_rng(3)
    x, targets = rng.standard_normal((33, 65)), rng.integers(-1, 65, 33)
    tokens, dy, head = (
        rng.integers(0, 9, (3, 11)),
        rng.standard_normal((3, 11, 65)),
        np.ones((9, 65)),
    )
    program = Program()
    graph, (xv, tv, kv, dv, hv) = build(program, x=x, t=targets, k=tokens, dy=dy, head=head)
    logits = scale(xv, 2.0)
    total, _ = loss.cross_entropy(logits, tv)
    (dlogits,) = gradients(total, [logits])
    into = scale(hv, 3.0)
    dwte = graph.apply(EmbeddingGrad(9), kv, dv, into)[0]
    outputs = [copy(dlogits), copy(dwte)]
    got = results(program, outputs, 2, x=x, t=targets, k=tokens, dy=dy, head=head)
    plan = CpuBackend(1).load(program).plans["op"]
    assert plan.place(dlogits).offset == plan.place(logits).offset
    assert plan.place(dwte).offset == plan.place(into).offset
    _, _, lse = loss.CrossEntropy().reference(2 * x, targets)
    want = loss.CrossEntropyGrad().reference(np.ones(()), 2 * x, targets, lse)[0]
    np.testing.assert_allclose(got[0], want, atol=1e-6)
    want = EmbeddingGrad(9).reference(tokens, dy, 3 * head)[0]
    np.testing.assert_allclose(got[1], want, atol=1e-5)


@cpu
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("at", [0, 20, 64, 2500])
def test_nan_logit_is_visible(bad: float, at: int) -> None:
    x = np.zeros((3, 2501))
    x[1, at] = bad
    targets = np.array([5, 6, 7])
    for ignored in (False, True):
        targets[1] = -1 if ignored else 6
        program = Program()
        _, (xv, tv) = build(program, x=x, t=targets)
        total, count = loss.cross_entropy(xv, tv)
        (dx,) = gradients(total, [xv])
        total, count, dx = results(program, [total, count, dx], 2, x=x, t=targets)
        assert np.isnan(total) != ignored
        assert count == 3 - ignored
        assert np.isnan(dx[1]).any() != ignored
        assert np.isfinite(dx[[0, 2]]).all()


@cpu
def test_all_targets_ignored() -> None:
    x, targets = np.full((31, 65), np.nan), np.full(31, -1)
    program = Program()
    _, (xv, tv) = build(program, x=x, t=targets)
    total, count = loss.cross_entropy(xv, tv)
    (dx,) = gradients(total, [xv])
    total, count, dx = results(program, [total, count, dx], 2, x=x, t=targets)
    assert total == 0.0
    assert count == 0.0
    assert not dx.any()


@cpu
def test_nan_reaches_layernorm_outputs() -> None:
    x, w = np.ones((3, 33)), np.ones(33)
    x[1, 32] = np.nan
    program = Program()
    _, (xv, wv) = build(program, x=x, w=w)
    (y,) = results(program, [norm.layernorm(xv, wv)], 1, x=x, w=w)
    assert np.isnan(y[1]).all()
    assert np.isfinite(y[[0, 2]]).all()


def test_what_does_not_fit() -> None:
    f, i = np.zeros((2, 3, 4)), np.zeros((2, 3), np.int32)
    _, (x, tokens, w, wte, wpe) = build(
        Program(), x=f, tokens=i, w=np.zeros(5), wte=np.zeros((9, 4)), wpe=np.zeros((2, 4))
    )
    with pytest.raises(ShapeError, match=r"\[layernorm\] expected weight \[4\], got \[5\]"):
        norm.layernorm(x, w)
    with pytest.raises(ShapeError, match=r"\[embedding\] expected wpe .* at least 3 positions"):
        embedding(tokens, wte, wpe)
    with pytest.raises(DTypeError, match=r"\[embedding\] expected tokens of int32"):
        embedding(wte, wte)
    with pytest.raises(ShapeError, match=r"\[cross_entropy\] expected targets \[9\]"):
        loss.cross_entropy(wte, tokens)
    with pytest.raises(ShapeError, match=r"\[mean_squared_error\] expected shape"):
        loss.mean_squared_error(x, wte)


def test_saved_statistics_have_no_gradient() -> None:
    _, (x, w) = build(Program(), x=np.zeros((2, 4)), w=np.zeros(4))
    _, mean, _ = x.graph.apply(norm.LayerNorm(), x, w)
    total, _ = loss.mean_squared_error(mean, mean)
    with pytest.raises(GraphError, match="mean and rstd have no gradient"):
        gradients(total, [x])
