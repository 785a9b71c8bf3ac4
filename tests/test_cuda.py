"""The CUDA backend on an NVIDIA GPU: `make test-cuda`. One test needs none."""

from __future__ import annotations

import os
import random
import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from ours import losses_on_a_text
from runs import SMALL, assert_same_run, succeed, write_text
from treadle import checks
from treadle.backends import cpu, gpu
from treadle.backends.cuda import CudaBackend
from treadle.backends.streams import STREAMS, schedule
from treadle.cases import Case, all_cases
from treadle.errors import BackendError
from treadle.graph.op import Grid, Launch

on_gpu = pytest.mark.cuda


@cache
def backend() -> CudaBackend:
    """One for all; where there is no GPU, those who asked for it by `make test-cuda` are told."""
    try:
        return CudaBackend()
    except BackendError as error:
        pytest.fail(str(error))


# ---------------------------------------------------------------- kernels


@on_gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", all_cases(), ids=lambda c: c.title)
def test_backend_symmetry(case: Case, dtype: str) -> None:
    if dtype not in case.dtypes:
        pytest.skip(f"no {dtype} kernel")
    result = checks.symmetry(case, backend(), dtype)
    assert result.ok, f"error {result.error:.2e} above {result.limit:.2e}"


# ---------------------------------------------------------------- training


@on_gpu
def test_300_steps_of_tinyshakespeare_are_those_of_the_processor(shared_data: Path) -> None:
    if not cpu.available():
        pytest.skip("the C kernels are not built")
    sizes = {"n_layer": 4, "n_head": 4, "n_embd": 128, "block_size": 64}
    ours, theirs = (
        losses_on_a_text(b, shared_data / "tinyshakespeare.txt", 12, 300, **sizes)
        for b in (backend(), cpu.CpuBackend())
    )
    assert ours[-1] < ours[0] - 1
    assert np.max(np.abs(ours / theirs - 1)) <= 1e-3


@on_gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16", "tf32"])
def test_a_run_that_is_cut_and_resumed_is_the_run_at_a_stretch(
    precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit, also where what was measured has been forgotten in between."""
    text = write_text(tmp_path / "text.txt")
    flags = (*SMALL, "--device", "cuda", "--precision", precision, "--steps", 40)
    flags = (*flags, "--set", "model.dropout=0.1", "--set", "checkpoint.keep=0")
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    succeed("train", "--data", text, *flags, "--out", whole)
    succeed("train", "--data", text, *flags, "--out", cut, "--run-steps", 20)
    monkeypatch.setenv("TREADLE_CACHE", str(tmp_path / "empty"))
    succeed("train", "--data", text, "--out", cut)
    assert_same_run(whole, cut, 40)


@on_gpu
def test_checkpoints_move_between_devices(tmp_path: Path) -> None:
    text, out = write_text(tmp_path / "text.txt"), tmp_path / "run"
    first = (*SMALL, "--steps", 30, "--device", "cpu", "--run-steps", 10)
    succeed("train", "--data", text, *first, "--out", out)
    told = succeed("train", "--data", text, "--out", out, "--device", "cuda", "--run-steps", 10)
    assert "the run began elsewhere" in told
    succeed("train", "--data", text, "--out", out, "--device", "cpu")


@on_gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_gpt2_124m_is_that_of_pytorch(precision: str) -> None:
    """Logits and gradients from random weights: fp32 within 1e-5 of PyTorch's in norm, on the same
    GPU; bf16 within twice the error of PyTorch's own."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    sys.path.append(str(Path(__file__).parent / "parity"))
    import ours
    import peer
    from treadle.interop.hf import read_hf

    torch.manual_seed(0)
    torch.set_float32_matmul_precision("highest")
    config = transformers.GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    model = peer.randomised(transformers.GPT2LMHeadModel(config))
    tokens, targets = peer.batch(config.vocab_size, 2, 64)
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        imported = read_hf(peer.save(model, Path(folder) / "gpt2"))
    wanted = peer.numbers(model, tokens, targets, steps=1)
    found = ours.numbers(
        imported.model, imported.weights, tokens, targets, "cuda", precision, steps=1
    )
    rows = {name: error for name, *_, error in peer.rows(found, wanted)}
    if precision == "fp32":
        assert max(rows.values()) <= 1e-5
        return
    theirs = peer.numbers(model.to(torch.bfloat16), tokens, targets, steps=1)
    for name, *_, limit in peer.rows(theirs, wanted):
        assert rows[name] <= 2 * limit, name


# ---------------------------------------------------------------- order


def test_calls_on_several_streams_keep_the_order_of_one() -> None:
    """Random calls: whoever touches what another wrote, or writes what it touched, comes behind it
    by the streams' own order and by waiting."""
    draw = random.Random(7)
    for _ in range(50):
        calls = []
        for _ in range(60):
            memory = [
                gpu.Memory(draw.randrange(2), draw.randrange(12), draw.randrange(1, 4))
                for _ in range(draw.randrange(1, 4))
            ]
            source = draw.choice(["elementwise", "elementwise", "cudnn"])
            grid = Grid(source, (1,), 0 if source == "cudnn" else 64)
            launch = Launch("k", [], writes=draw.randrange(1, len(memory) + 1))
            calls.append(gpu.Call(launch, list(memory), [], [grid]))
        slots = schedule(calls)
        behind: list[set[int]] = []
        last: dict[int, int] = {}
        for i, slot in enumerate(slots):
            assert 0 <= slot.stream < STREAMS
            before = {*slot.waits, *([last[slot.stream]] if slot.stream in last else [])}
            behind.append(before.union(*(behind[j] for j in before)))
            last[slot.stream] = i
        for i, call in enumerate(calls):
            for j in range(i):
                assert j in behind[i] or not _clash(calls[j], call)


def _clash(a: gpu.Call, b: gpu.Call) -> bool:
    return any(
        x.piece == y.piece
        and x.offset < y.offset + y.nbytes
        and y.offset < x.offset + x.nbytes
        and (i < a.launch.writes or j < b.launch.writes)
        for i, x in enumerate(a.memory)
        for j, y in enumerate(b.memory)
        if x is not None and y is not None
    )


def test_without_cuda_one_line_says_what_is_missing() -> None:
    if os.environ.get("TREADLE_TEST_CUDA"):
        pytest.skip("there is CUDA")
    try:
        CudaBackend()
    except BackendError as error:
        assert "--device cpu" in str(error) and "\n" not in str(error)
