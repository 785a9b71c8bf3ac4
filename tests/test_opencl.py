"""The OpenCL backend as a whole: training, bits, memory in pieces, and its kernels for CUDA."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from gpu_device import DEVICE, opencl
from ours import losses_on_a_text
from runs import ROOT, SMALL, assert_same_run, metrics, succeed, write_text
from treadle import backends
from treadle.backends import cpu, gpu
from treadle.backends.base import Backend
from treadle.cases import all_cases
from treadle.checks import inputs_of
from treadle.generate import write_weight
from treadle.graph.op import Gpu, Grid
from treadle.graph.plan import plan
from treadle.graph.program import Program
from treadle.models.base import declare
from treadle.models.gpt2 import GPT2
from treadle.ops.random import normal, stream_of
from treadle.train.program import OptimizerSettings, add_training

MODEL = GPT2(vocab_size=67, n_layer=2, n_head=2, n_embd=32, block_size=24, dropout=0.1)
BATCH = 4


def training(precision: str = "fp32") -> Program:
    """The program of a tiny GPT-2."""
    program = Program()
    declare(program, MODEL, precision)
    add_training(program, MODEL, OptimizerSettings(), BATCH, MODEL.block_size, False)
    return program


def train(backend: Backend, steps: int, precision: str = "fp32") -> tuple[list[float], np.ndarray]:
    """The losses of so many steps, and a weight after them."""
    run = backend.load(training(precision))
    for p in MODEL.parameters():
        first = normal(1, stream_of(p.name), p.shape, p.std) if p.std else np.full(p.shape, p.fill)
        write_weight(run, p.name, first)
    rng = np.random.default_rng(5)
    shape = (BATCH, MODEL.block_size)
    losses = []
    run.write("loss_limit", np.inf)
    run.write("apply", 1.0)
    for step in range(1, steps + 1):
        tokens = rng.integers(0, MODEL.vocab_size, shape)
        run.write("tokens", tokens)
        run.write("targets", (tokens + 1) % MODEL.vocab_size)
        run.write("random", [3, step, 0, 0])
        scalars = (2e-3, 1 - 0.9**step, 1 - 0.99**step, 1 / tokens.size)
        for name, value in zip(
            ("lr", "correction1", "correction2", "inv_count"), scalars, strict=True
        ):
            run.write(name, value)
        run.run("micro_first", "update")
        losses.append(float(run.read("loss")) / tokens.size)
    weight = np.array(run.read("transformer.h.1.mlp.c_fc.weight"))
    run.close()
    return losses, weight


# ---------------------------------------------------------------- training


def test_training_agrees_with_the_reference() -> None:
    ours, _ = train(opencl(), 50)
    expected, _ = train(backends.select("numpy")[0], 50)
    assert expected[-1] < 0.8 * expected[0]
    np.testing.assert_allclose(ours, expected, rtol=1e-3)


@pytest.mark.skipif(not cpu.available(), reason="the C kernels are not built")
def test_300_steps_of_tinyshakespeare_are_those_of_the_processor(shared_data: Path) -> None:
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 64, "block_size": 32}
    ours, theirs = (
        losses_on_a_text(b, shared_data / "tinyshakespeare.txt", 8, 300, **sizes)
        for b in (opencl(), cpu.CpuBackend())
    )
    assert ours[-1] < ours[0] - 1
    np.testing.assert_allclose(ours, theirs, rtol=1e-3)


def test_bf16_training_agrees_with_fp32() -> None:
    ours, _ = train(opencl(), 50, "bf16")
    expected, _ = train(opencl(), 50)
    np.testing.assert_allclose(ours, expected, rtol=2e-2)


def test_a_resumed_run_is_the_run_at_a_stretch(tmp_path: Path) -> None:
    opencl()
    text = write_text(tmp_path / "text.txt")
    flags = (*SMALL, "--device", DEVICE, "--set", "model.dropout=0.1", "--steps", 20)
    succeed("train", "--data", text, *flags, "--out", tmp_path / "whole")
    succeed("train", "--data", text, *flags, "--out", tmp_path / "cut", "--run-steps", 9)
    succeed("train", "--data", text, "--out", tmp_path / "cut", "--device", DEVICE)
    assert_same_run(tmp_path / "whole", tmp_path / "cut", 20)


@pytest.mark.skipif(not cpu.available(), reason="the C kernels are not built")
@pytest.mark.parametrize("devices", [("cpu", DEVICE), (DEVICE, "cpu")], ids=["from cpu", "to cpu"])
def test_checkpoints_move_between_devices(tmp_path: Path, devices: tuple[str, str]) -> None:
    opencl()
    text = write_text(tmp_path / "text.txt")
    flags = (*SMALL, "--steps", 20)
    out = tmp_path / "moved"
    succeed("train", "--data", text, *flags, "--out", tmp_path / "stayed", "--device", devices[0])
    succeed("train", "--data", text, *flags, "--out", out, "--device", devices[0], "--run-steps", 9)
    succeed("train", "--data", text, "--out", out, "--device", devices[1])
    ours, expected = (
        [row["loss"] for row in metrics(tmp_path / run) if "loss" in row]
        for run in ("moved", "stayed")
    )
    np.testing.assert_allclose(ours, expected, rtol=1e-3)


# ---------------------------------------------------------------- bits

SCRIPT = """
import hashlib
from test_opencl import opencl, train
losses, weight = train(opencl(), 5, {precision!r})
print("bits", hashlib.sha256(weight.tobytes()).hexdigest(), losses)
"""


def bits(precision: str, **environment: str) -> str:
    """What a process of its own finds after five steps."""
    found = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(precision=precision)],
        env=os.environ | {"PYTHONPATH": f"{ROOT / 'tests'}{os.pathsep}{ROOT}"} | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return next(line for line in found.stdout.splitlines() if line.startswith("bits"))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_same_bits_for_any_number_of_threads(precision: str) -> None:
    opencl()
    first = bits(precision)
    assert bits(precision) == first
    for threads in ("1", "3"):
        limits = {"POCL_MAX_PTHREAD_COUNT": threads, "POCL_CPU_MAX_CU_COUNT": threads}
        assert bits(precision, **limits, POCL_AFFINITY="0") == first


def test_small_work_groups_train() -> None:
    expected, _ = train(opencl(), 10)
    small = opencl(least=True)
    assert isinstance(small.target, Gpu)
    assert (small.target.group, small.target.local) == (64, 32768)
    np.testing.assert_allclose(train(small, 10)[0], expected, rtol=1e-4)


def test_every_cut_of_a_kernel_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = train(opencl(), 2)
    monkeypatch.setattr(gpu.Tuning, "choose", lambda self, call: len(call.grids) - 1)
    losses, weight = train(opencl(), 2)
    assert losses == expected[0]
    np.testing.assert_array_equal(weight, expected[1])


# ---------------------------------------------------------------- memory, merging


def test_memory_in_pieces_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = opencl()
    expected = train(backend, 3)
    assert isinstance(backend.target, Gpu)
    monkeypatch.setattr(backend, "target", replace(backend.target, allocation=1 << 16))
    losses, weight = train(backend, 3)
    assert losses == expected[0]
    np.testing.assert_array_equal(weight, expected[1])


def test_merged_updates_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = opencl()
    expected = train(backend, 3)
    monkeypatch.setattr(gpu, "_merge", lambda last, call: False)
    losses, weight = train(backend, 3)
    assert losses == expected[0]
    np.testing.assert_array_equal(weight, expected[1])


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_an_update_is_a_few_launches(precision: str) -> None:
    program, target = training(precision), Gpu(256, 49152)
    found = plan(program.graphs["update"], target)
    layout = gpu.regions(program, None)
    merged = [c.launch.kernel for c in gpu.calls(found, gpu.locator(layout, None))]
    assert len(found.launches) > 50
    assert merged == ["norm_squares", "norm_combine", "adamw", "adamw"]


# ---------------------------------------------------------------- the same kernels for CUDA


# Definitions that are sizes alone: kernels that differ in nothing else compile alike.
SIZES = {"LANES", "D", "CHUNKS", "CHUNK", "OWN", "STEP", "BM", "BN", "BK", "TM", "TN", "FEW"}
# And what only chooses between lines that compile anyway; nvcc takes seconds for each file.
SIZES |= {"ACT", "VA", "VB", "VC", "EXTRAS"}


def grids() -> list[Grid]:
    """One of each source and set of definitions in the table, by OpenCL's lowering."""
    found: dict[tuple[object, ...], Grid] = {}
    for case in all_cases():
        for dtype in case.dtypes:
            program = Program()
            graph = program.graph("op")
            specs, _ = inputs_of(case, dtype)
            values = [
                None
                if s is None
                else graph.read(program.buffer(f"in{i}", s.shape, s.dtype, "input"))
                for i, s in enumerate(specs)
            ]
            for i, out in enumerate(graph.apply(case.op, *values)):
                if out.buffer is None:
                    graph.assign(program.buffer(f"out{i}", out.shape, out.dtype, "output"), out)
            for launch in plan(graph, Gpu(256, 49152)).launches:
                for grid in launch.grids:
                    kinds = tuple(d[0] if d[0] in SIZES else d for d in grid.defines)
                    found.setdefault((grid.source, kinds), grid)
    return list(found.values())


def compiles(grid: Grid, architecture: int) -> str:
    """NVRTC's complaints about a kernel; no GPU and no driver are needed."""
    from cuda.bindings import nvrtc

    def checked(result: tuple) -> object:
        assert int(result[0]) in (0, int(nvrtc.nvrtcResult.NVRTC_ERROR_COMPILATION)), result
        return result[1] if len(result) == 2 else result[0]

    text = gpu.source("cuda", grid).encode()
    program = checked(nvrtc.nvrtcCreateProgram(text, b"kernel.cu", 0, [], []))
    options = [f"-arch=sm_{architecture}".encode(), b"-fmad=false", b"-std=c++17"]
    failed = int(checked(nvrtc.nvrtcCompileProgram(program, len(options), options))) != 0
    log = b" " * int(checked(nvrtc.nvrtcGetProgramLogSize(program)))  # type: ignore[call-overload]
    checked(nvrtc.nvrtcGetProgramLog(program, log))
    nvrtc.nvrtcDestroyProgram(program)
    return log.decode(errors="replace") if failed else ""


@pytest.mark.skipif(sys.platform == "darwin", reason="NVIDIA has no compiler for macOS")
@pytest.mark.parametrize("architecture", [75])
def test_cuda_compiles_every_kernel(architecture: int) -> None:
    with ThreadPoolExecutor(2) as pool:
        found = grids()
        for grid, told in zip(
            found, pool.map(lambda g: compiles(g, architecture), found), strict=True
        ):
            assert not told, f"{grid}: {told[:2000]}"
