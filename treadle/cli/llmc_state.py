"""`treadle check --llmc-state`: a model against what PyTorch computed with it.

The same comparisons, in the same order and with the same lines, as llm.c's `test_gpt2.c`; for
models in bfloat16 with the tolerances of its `test_gpt2.cu`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from treadle.backends import Backend
from treadle.generate import write_weight
from treadle.graph.op import Graph, cast
from treadle.graph.program import Program
from treadle.graph.value import Value
from treadle.interop.llmc import (
    STEPS,
    TENSORS,
    State,
    model_version,
    read_llmc,
    read_state,
    tensors,
)
from treadle.models.base import declare, read_weights
from treadle.models.gpt2 import GPT2
from treadle.passes.fuse import fuse
from treadle.train.program import OptimizerSettings, add_update, train_graph

_SHOWN_LOGITS, _SHOWN = 10, 5
_OPTIMIZER = OptimizerSettings(betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01, grad_clip=0.0)
_LR = 1e-4
# Losses of ten steps of GPT-2 124M on llm.c's batch, whose state does not record them.
_GPT2_124M = (
    *(5.270007133483887, 4.059706687927246, 3.3751230239868164, 2.8007826805114746),
    *(2.315382242202759, 1.8490285873413086, 1.3946564197540283, 0.9991465210914612),
    *(0.6240804195404053, 0.37651097774505615),
)


@dataclass(frozen=True)
class _Tolerances:
    """Largest differences. A gradient may differ by `relative` of its value on top."""

    logits: float
    loss: float
    gradients: Mapping[str, float]
    relative: float = 0.0


_FP32 = _Tolerances(1e-2, 1e-2, dict.fromkeys(TENSORS, 2e-2))
_BF16_GRADIENTS = (
    *(5e-1, 4e-3, 1e-1, 4e-2, 5e-2, 3.5e-2, 2e-2, 3e-2),
    *(5e-2, 3e-2, 3e-2, 3e-2, 2e-2, 1e-2, 1e-1, 2e-2),
)
_BF16 = _Tolerances(25.0, 5e-2, dict(zip(TENSORS, _BF16_GRADIENTS, strict=True)), 0.079)


def compare(model_path: Path, state_path: Path, backend: Backend) -> bool:
    """Prints llm.c's comparison of a model with its debug state; whether all of it agrees."""
    imported = read_llmc(model_path)
    model = imported.model
    assert isinstance(model, GPT2)
    version = model_version(model_path)
    state = read_state(state_path, model)
    limits, precision = (_BF16, "bf16") if version == 5 else (_FP32, "fp32")
    _print_sizes(model, state)
    executable = backend.load(_program(model, state, precision))
    for name, array in imported.weights.items():
        write_weight(executable, name, array)
    executable.write("tokens", state.tokens)
    executable.write("targets", state.targets)
    executable.write("inv_count", np.float32(1.0 / state.tokens.size))
    executable.run("logits")
    fine = _logits(executable.read("logits"), state.logits, limits.logits)
    expected = _expected_losses(model, state)
    for step in range(STEPS):
        started = time.perf_counter()
        executable.run("micro_first")
        took = 1e3 * (time.perf_counter() - started)
        loss = float(executable.read("loss")) / state.tokens.size
        if step == 0:
            fine &= _loss(loss, state.loss, limits.loss)
            fine &= _gradients(model, executable, state, limits)
        _update(executable, step)
        verdict = ""
        if expected:
            ok = abs(expected[step] - loss) < limits.loss
            fine, verdict = fine and ok, f" OK = {ok:d}"
        print(f"step {step}: loss {loss:.6f} (took {took:.6f} ms){verdict}")
    if not expected:
        print("the state records no losses of these steps to compare with")
    print(f"overall okay: {fine:d}")
    executable.close()
    return fine


def _print_sizes(model: GPT2, state: State) -> None:
    print("[GPT-2]")
    print(f"max_seq_len: {model.block_size}")
    print(f"vocab_size: {model.vocab_size}")
    print(f"num_layers: {model.n_layer}")
    print(f"num_heads: {model.n_head}")
    print(f"channels: {model.n_embd}")
    print(f"num_parameters: {model.n_parameters()}")
    print("[State]")
    print(f"batch_size: {state.tokens.shape[0]}")
    print(f"seq_len: {state.tokens.shape[1]}")


# ---------------------------------------------------------------- computing


def _program(model: GPT2, state: State, precision: str) -> Program:
    """Graphs `logits`, `micro_first` and `update` on the state's batch."""
    program = Program()
    declare(program, model, precision)
    shape = state.tokens.shape
    tokens = program.buffer("tokens", shape, "int32", "input")
    targets = program.buffer("targets", shape, "int32", "input")
    g = program.graph("logits")
    w = read_weights(program, g, model)
    logits = cast(model.logits(w, model.hidden(w, g.read(tokens))), "float32")
    g.assign(program.buffer("logits", state.logits.shape, "float32", "output"), logits)
    fuse(g)

    def loss(graph: Graph, seed: Value) -> Value:
        weights = read_weights(program, graph, model)
        return model.loss(weights, graph.read(tokens), graph.read(targets), seed=seed)[0]

    names = [p.name for p in model.parameters()]
    train_graph(program, names, _OPTIMIZER, loss)
    add_update(program, dict.fromkeys(names, True), _OPTIMIZER)  # llm.c decays every weight
    return program


def _update(executable: Any, step: int) -> None:
    b1, b2 = _OPTIMIZER.betas
    executable.write("lr", np.float32(_LR))
    executable.write("correction1", np.float32(1.0 - b1 ** (step + 1)))
    executable.write("correction2", np.float32(1.0 - b2 ** (step + 1)))
    executable.write("apply", np.float32(1.0))
    executable.run("update")


def _expected_losses(model: GPT2, state: State) -> tuple[float, ...]:
    if state.losses or abs(state.loss - _GPT2_124M[0]) > 1e-5:
        return state.losses
    return _GPT2_124M if (model.n_layer, model.n_embd) == (12, 768) else ()


# ---------------------------------------------------------------- comparing


def _logits(ours: np.ndarray, theirs: np.ndarray, limit: float) -> bool:
    left, right = ours.reshape(-1), theirs.reshape(-1)
    for a, b in zip(right[:_SHOWN_LOGITS], left[:_SHOWN_LOGITS], strict=True):
        print(f"{a:f}, {b:f}")
    difference = np.abs(left - right)
    wrong = np.flatnonzero(~(difference < limit))  # a NaN is wrong, too
    if wrong.size:
        at = int(wrong[0])
        row, column = divmod(at, ours.shape[-1])
        print(f"MISMATCH AT INDEX {row},{column}: {right[at]:f} {left[at]:f}")
    print(f"{'NOT ' if wrong.size else ''}OK (LOGITS), max_diff = {difference.max():e}")
    return not wrong.size


def _loss(ours: float, theirs: float, limit: float) -> bool:
    ok = abs(ours - theirs) < limit
    print(f"LOSS {'OK' if ok else 'MISMATCH'}: {ours:f} {theirs:f}")
    return ok


def _gradients(model: GPT2, executable: Any, state: State, limits: _Tolerances) -> bool:
    gradients = {p.name: executable.read(f"{p.name}.grad") for p in model.parameters()}
    oks = [
        _tensor(name, ours, state.gradients[name], limits.gradients[name], limits.relative)
        for name, ours in tensors(model, gradients)
    ]
    return all(oks)


def _tensor(name: str, ours: np.ndarray, theirs: np.ndarray, limit: float, relative: float) -> bool:
    left, right = ours.reshape(-1), theirs.reshape(-1)
    difference = np.abs(left - right)
    ok = difference <= limit + relative * np.abs(right)
    print(f"d{name}")
    for a, b, fine in zip(left[:_SHOWN], right[:_SHOWN], ok[:_SHOWN], strict=True):
        print(f"{'OK' if fine else 'NOT OK'} {a:f} {b:f}")
    print(f"TENSOR {'OK' if ok.all() else 'NOT OK'}, maxdiff = {difference.max():e}")
    return bool(ok.all())
