"""Recomputation: less memory, the same bits; on any model that uses scopes."""

from __future__ import annotations

import numpy as np
import pytest

from treadle.backends import cpu
from treadle.backends.base import Backend
from treadle.backends.numpy import NumpyBackend
from treadle.config import RECOMPUTE
from treadle.graph.check import check
from treadle.graph.op import Graph
from treadle.graph.plan import Plan, plan
from treadle.graph.program import Program
from treadle.graph.value import Value
from treadle.models.gpt2 import GPT2
from treadle.ops.elementwise import add, mul, silu
from treadle.ops.linear import linear
from treadle.ops.loss import mean_squared_error
from treadle.passes.recompute import recompute
from treadle.train.program import OptimizerSettings, train_graph
from treadle.train.session import Session, build_program

AGAIN = [how for how in RECOMPUTE if how != "none"]
BATCH, TIME, WIDTH = 4, 32, 32
BYTES = {"fp32": 4, "bf16": 2}


def gpt2(n_layer: int = 3, dropout: float = 0.1) -> GPT2:
    return GPT2(65, n_layer, n_head=2, n_embd=WIDTH, block_size=TIME, dropout=dropout)


@pytest.fixture(params=["numpy", "cpu"])
def backend(request: pytest.FixtureRequest) -> Backend:
    if request.param == "numpy":
        return NumpyBackend()
    if not cpu.available():
        pytest.skip("the C kernels are not built")
    return cpu.CpuBackend(threads=2)


# ---------------------------------------------------------------- bits


def trained(backend: Backend, how: str, precision: str, grad_accum: int) -> list[bytes]:
    """Losses, norms, weights and moments of three steps."""
    rng = np.random.default_rng(5)
    session = Session(
        *(gpt2(), backend, OptimizerSettings(), BATCH, TIME, grad_accum),
        precision=precision,
        recompute=how,
    )
    session.initialise()
    results = []
    for step in range(3):
        tokens = rng.integers(0, 65, (BATCH, TIME + 1)).astype(np.int32)
        made = session.step(step, tokens[:, :-1], tokens[:, 1:], lr=1e-2)
        results.append(np.array([made.loss, made.grad_norm]))
    results += [*session.weights().values(), *session.optimizer_state().values()]
    session.executable.close()
    return [array.tobytes() for array in results]


@pytest.mark.parametrize("grad_accum", [1, 2])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_training_has_the_same_bits(backend: Backend, precision: str, grad_accum: int) -> None:
    kept = trained(backend, "none", precision, grad_accum)
    for how in AGAIN:
        assert trained(backend, how, precision, grad_accum) == kept, how


# ---------------------------------------------------------------- memory


def micro(how: str, n_layer: int, precision: str) -> Plan:
    program = build_program(
        gpt2(n_layer), OptimizerSettings(), BATCH, TIME, False, precision, recompute=how
    )
    return plan(program.graphs["micro_first"], "cpu")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_each_layer_keeps_what_it_should(precision: str) -> None:
    """What one more layer adds to the arena: with "block" its input, with "gelu" all but 4C."""
    more = {}
    for how in RECOMPUTE:
        six, seven = (micro(how, n, precision).arena_bytes for n in (6, 7))
        more[how] = seven - six
    token = BATCH * TIME * WIDTH * BYTES[precision]
    assert more["block"] == token
    assert more["none"] - more["gelu"] == 4 * token
    assert more["none"] > 12 * token


def test_the_price_is_a_forward_pass_of_the_blocks() -> None:
    flops = {how: micro(how, 6, "fp32").cost.flops for how in RECOMPUTE}
    forward, tokens = 2 * 12 * WIDTH * WIDTH * 6, BATCH * TIME
    assert 0 < flops["gelu"] - flops["none"] < 0.02 * flops["none"]
    # Of each block the last product need not be repeated: nobody but the next block reads it.
    assert 0.6 * forward * tokens < flops["block"] - flops["none"] < 1.1 * forward * tokens


# ---------------------------------------------------------------- other models


def gated(scopes: list[str], how: str) -> Program:
    """The training program of a residual network of gated layers, each in its scope."""
    program = Program()
    names = [f"{kind}{i}" for i in range(len(scopes)) for kind in ("gate", "up", "down")]
    for name in names:
        program.buffer(name, (8, 8), "float32", "weight")
    for name in ("x", "y"):
        program.buffer(name, (16, 8), "float32", "input")

    def loss(g: Graph, seed: Value) -> Value:
        h = g.read(program.buffers["x"])
        for i, scope in enumerate(scopes):
            gate, up, down = (g.read(program.buffers[f"{k}{i}"]) for k in ("gate", "up", "down"))
            with g.scope(scope), g.scope("inner"):
                h = add(h, linear(mul(silu(linear(h, gate)), linear(h, up)), down))
        return mean_squared_error(h, g.read(program.buffers["y"]))[0]

    train_graph(program, names, OptimizerSettings(), loss, again=how)
    return program


def test_any_scopes_will_do(backend: Backend) -> None:
    results, arenas = {}, {}
    for how in RECOMPUTE:
        program = gated(["first", "second", "third", "fourth"], how)
        rng = np.random.default_rng(2)
        executable = backend.load(program)
        for b in program.buffers.values():
            if b.role in ("weight", "input"):
                executable.write(b.name, rng.standard_normal(b.shape))
        executable.write("inv_count", 0.01)
        executable.run("micro_first")
        outputs = [b.name for b in program.buffers.values() if b.role in ("grad", "output")]
        results[how] = [executable.read(name).tobytes() for name in outputs]
        arenas[how] = plan(program.graphs["micro_first"], None).arena_bytes
        executable.close()
    assert len(results["none"]) == 13 and np.any(np.frombuffer(results["none"][-1], np.float32))
    assert results["gelu"] == results["none"] and results["block"] == results["none"]
    assert arenas["block"] < arenas["gelu"] < arenas["none"]


def test_a_graph_without_scopes_or_gradients_stays_as_it_is() -> None:
    program = Program()
    g = program.graph("forward")
    x = g.read(program.buffer("x", (3, 4), "float32", "input"))
    w = g.read(program.buffer("w", (4, 4), "float32", "weight"))
    with g.scope("h.0"):
        y = silu(linear(x, w))
    g.assign(program.buffer("y", (3, 4), "float32", "output"), silu(y))
    before = str(g)
    for how in RECOMPUTE:
        assert str(recompute(g, how)) == before
        check(g)
