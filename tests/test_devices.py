"""Devices: what is listed, what `auto` takes, and what is said where something is missing."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from opencl_fakes import FakeDevice, FakePlatform, no_pyopencl, pocl, pretend
from runs import ROOT, fail, run, succeed
from treadle import backends
from treadle.backends import auto, cpu, first_use, opencl
from treadle.backends.cpu import CpuBackend
from treadle.backends.numpy import NumpyBackend
from treadle.cases import Case, all_cases
from treadle.checks import Check
from treadle.cli import check as check_command
from treadle.cli import profile
from treadle.errors import BackendError
from treadle.graph.op import Gpu
from treadle.graph.program import Program
from treadle.ops.elementwise import scale
from treadle.train.run import build_model

Patch = pytest.MonkeyPatch
HOST = auto.host()
RADEON, ARC, POCL_CPU = "AMD Radeon Vega 8", "Intel Arc A770", "pthread-haswell"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: object, monkeypatch: Patch) -> Iterator[None]:
    monkeypatch.setenv("TREADLE_CACHE", str(tmp_path))
    yield
    monkeypatch.undo()
    opencl.module.cache_clear()


@pytest.fixture
def laptop(monkeypatch: Patch) -> None:
    """A processor, and two GPUs behind it."""
    pocl = FakePlatform("PoCL", [FakeDevice(POCL_CPU, type=2)])
    rusticl = FakePlatform("rusticl", [FakeDevice(RADEON)])
    pretend(monkeypatch, pocl, rusticl, FakePlatform("Intel(R) OpenCL", [FakeDevice(ARC)]))


def devices() -> dict:
    return json.loads(succeed("devices", "--json"))


# ---------------------------------------------------------------- treadle devices


def test_everything_is_listed(laptop: None, monkeypatch: Patch) -> None:
    monkeypatch.setattr(auto, "measured", lambda name: {"host": 100, "device": 300})
    found = devices()
    names = [d["device"] for d in found["devices"] if d["device"] != "cpu"]
    assert names == ["numpy", "opencl:0", "opencl:1", "opencl:2"]
    radeon = found["devices"][-3]
    assert radeon["name"] == RADEON and radeon["kind"] == "GPU"
    assert radeon["platform"] == "rusticl OpenCL 3.0" and radeon["driver"] == "1.0"
    assert (radeon["memory"], radeon["units"]) == (4 << 30, 8)
    assert (radeon["group"], radeon["local"]) == (256, 32768)
    assert radeon["features"] == ["fp16", "unified memory"]
    assert found["devices"][-1]["kind"] == "CPU" and found["notes"] == []
    assert found["auto"]["device"] == HOST and "0.33 times" in found["auto"]["why"]
    shown = succeed("devices")
    assert all(word in shown for word in (RADEON, ARC, "4.0 GiB", "32 KiB", "auto takes " + HOST))
    assert '--device "opencl:AMD"' in shown


@pytest.mark.skipif(not cpu.available(), reason="the C kernels are not built")
def test_the_processor_with_its_instruction_set_and_threads(
    laptop: None, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(auto, "FAMILIES", [])
    (row,) = [d for d in devices()["devices"] if d["device"] == "cpu"]
    assert row["features"][:2] == [CpuBackend(1).library.isa, f"{row['units']} threads"] or (
        row["units"] == 1
    )


def test_what_a_driver_does_not_tell_is_left_out(monkeypatch: Patch) -> None:
    class Silent(FakeDevice):
        @property
        def extensions(self) -> str:  # type: ignore[override]
            raise OSError("no answer")

        @extensions.setter
        def extensions(self, value: str) -> None:
            pass

    pretend(monkeypatch, FakePlatform("PoCL", [Silent("odd", type=2)]))
    assert devices()["devices"][-1]["features"] == ["unified memory"]


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("rusticl", ["RUSTICL_ENABLE=radeonsi", "render"]),
        ("Clover", ["rusticl"]),
        ("Intel(R) OpenCL", ["/dev/dri"]),
    ],
)
@pytest.mark.parametrize("broken", [False, True])
def test_a_platform_without_a_device_has_a_remedy(
    name: str, told: list[str], broken: bool, monkeypatch: Patch
) -> None:
    pretend(monkeypatch, FakePlatform(name, broken=broken))
    (note,) = devices()["notes"]
    assert note.startswith(f"{name} shows no device: ") and all(word in note for word in told)
    refused = fail("check", "--device", "opencl")
    assert all(word in refused for word in [name, *told, "--device cpu"])


def test_without_pyopencl_the_package_is_named(monkeypatch: Patch) -> None:
    no_pyopencl(monkeypatch)
    assert "pip install 'treadle[opencl]'" in succeed("devices")
    assert devices()["auto"]["device"] == HOST


def test_without_a_driver_packages_are_named(monkeypatch: Patch) -> None:
    pretend(monkeypatch)
    assert "pocl-opencl-icd" in succeed("devices")


def test_a_loader_that_breaks_is_told(monkeypatch: Patch) -> None:
    def broken() -> None:
        raise RuntimeError("undefined symbol")

    monkeypatch.setattr(opencl, "module", broken)
    assert "opencl: undefined symbol" in succeed("devices")
    assert "undefined symbol" in devices()["auto"]["why"]


def test_pocl_is_listed() -> None:
    pocl()
    assert "Portable Computing Language" in succeed("devices")


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("device", "told"),
    [
        ("opencl:3", ["'3'", f"0: {RADEON}", f"1: {ARC}", f"2: {POCL_CPU}", "--device cpu"]),
        ("opencl:GeForce", ["'GeForce'", RADEON, "--device cpu"]),
        ("opencl:8", ["'8'"]),  # which is in the name of a Vega 8
    ],
)
def test_a_device_that_is_not_there(laptop: None, device: str, told: list[str]) -> None:
    refused = fail("check", "--device", device)
    assert all(word in refused for word in told)


def test_no_pyopencl(monkeypatch: Patch) -> None:
    no_pyopencl(monkeypatch)
    refused = fail("check", "--device", "opencl")
    assert "pip install 'treadle[opencl]'" in refused and "--device cpu" in refused


@pytest.mark.parametrize(
    ("variable", "value", "told"),
    [
        ("GROUP", "abc", ["'abc'", "whole number"]),
        ("GROUP", "0", ["'0'", "whole number"]),
        ("VECTOR", "-1", ["'-1'", "whole number"]),
        ("GROUP", "63", ["32 work-items", "64", "--device cpu"]),
        ("LOCAL", "16384", ["16,384 bytes", "32,768", "--device cpu"]),
    ],
)
def test_settings_that_no_kernel_works_with(
    variable: str, value: str, told: list[str], monkeypatch: Patch
) -> None:
    monkeypatch.setenv(f"TREADLE_OPENCL_{variable}", value)
    refused = fail("check", "--device", pocl())
    assert "TREADLE_OPENCL_" in refused and all(word in refused for word in told)


def test_no_driver(monkeypatch: Patch) -> None:
    pretend(monkeypatch)
    refused = fail("check", "--device", "opencl")
    assert all(w in refused for w in ("mesa-opencl-icd", "docs/opencl.md", "--device cpu"))


def test_a_broken_driver(laptop: None) -> None:
    refused = fail("check", "--device", "opencl:vega")
    assert all(w in refused for w in (RADEON, "OUT_OF_HOST_MEMORY", "update", "--device cpu"))


def test_a_driver_that_is_too_old(monkeypatch: Patch) -> None:
    clover = FakePlatform("Clover", [FakeDevice(RADEON, version="OpenCL 1.1 Mesa 22.3.6")])
    pretend(monkeypatch, clover)
    refused = fail("check", "--device", "opencl")
    assert all(w in refused for w in (RADEON, "1.1", "1.2", "--device cpu"))


def test_out_of_device_memory_has_both_sizes() -> None:
    backend = opencl.OpenClBackend(pocl())
    backend.device = SimpleNamespace(name="Tiny", global_mem_size=1 << 29)
    program = Program()
    program.buffer("large", (3 << 28,))
    with pytest.raises(BackendError) as refused:
        backend.load(program)
    told = str(refused.value)
    assert all(w in told for w in ("3.00 GiB", "0.50", "Tiny", "batch_size", "--device cpu"))


def test_memory_that_others_have_taken(monkeypatch: Patch) -> None:
    backend = opencl.OpenClBackend(pocl())
    cl, program = opencl.module(), Program()
    graph = program.graph("op")
    graph.assign(program.buffer("y", (4,)), scale(graph.read(program.buffer("x", (4,))), 2.0))

    def refuse(*_: object) -> None:
        raise cl.MemoryError("clCreateBuffer failed: MEM_OBJECT_ALLOCATION_FAILURE")

    monkeypatch.setattr(cl, "Buffer", refuse)
    with pytest.raises(BackendError, match=r"^out of device memory: .* GiB of the .*--device cpu"):
        backend.load(program)


def test_kernels_that_do_not_compile() -> None:
    backend = opencl.OpenClBackend(pocl())
    grid = opencl.Grid("elementwise", (1,), 64, (("T", "nonsense"),))
    with pytest.raises(BackendError, match=r"cannot compile elementwise\.cl.*--device cpu"):
        backend.kernel("fill", grid)


# ---------------------------------------------------------------- auto


def compare(patch: Patch, **microseconds: int) -> list[str]:
    """Lets comparisons have these results, by name; returns the names as they are measured."""
    asked: list[str] = []

    def measured(name: str) -> dict[str, int]:
        asked.append(name)
        device = microseconds[name.replace(":", "")]
        return {auto.HOST: 1000 if device else 0, auto.DEVICE: device}

    patch.setattr(auto, "measured", measured)
    return asked


def test_auto_takes_the_gpu_that_wins_and_measures_once(laptop: None, monkeypatch: Patch) -> None:
    asked = compare(monkeypatch, opencl0=500, opencl1=100)
    expected = auto.Choice("opencl:1", f"{ARC} multiplies matrices 10 times as fast as the CPU")
    assert auto.choose() == expected == auto.choose()
    assert asked == ["opencl:0", "opencl:1"]  # and never the processor


def test_auto_measures_again_with_another_driver(monkeypatch: Patch) -> None:
    asked = compare(monkeypatch, opencl0=500)
    for version in ("1.0", "2.0", "1.0"):
        pretend(monkeypatch, FakePlatform(devices=[FakeDevice(RADEON, driver_version=version)]))
        assert auto.choose().device == "opencl:0"
    assert len(asked) == 2


def test_auto_keeps_the_cpu_where_the_gpu_is_hardly_faster(
    laptop: None, monkeypatch: Patch
) -> None:
    compare(monkeypatch, opencl0=900, opencl1=2000)
    choice = auto.choose()
    assert choice.device == HOST and f"{RADEON} multiplies matrices 1.1 times" in choice.why


def test_auto_keeps_the_cpu_where_the_comparison_fails(laptop: None, monkeypatch: Patch) -> None:
    asked = compare(monkeypatch, opencl0=0, opencl1=0)
    for _ in range(2):
        choice = auto.choose()
        assert choice == auto.Choice(HOST, f"{RADEON} failed in a comparison")
    assert len(asked) == 2  # a driver that hangs does so once


def test_auto_never_takes_a_processor(monkeypatch: Patch) -> None:
    pretend(monkeypatch, FakePlatform("PoCL", [FakeDevice(POCL_CPU, type=2)]))
    asked = compare(monkeypatch)
    assert auto.choose().device == HOST and asked == []


def test_auto_falls_back_where_its_choice_does_not_start(laptop: None, monkeypatch: Patch) -> None:
    compare(monkeypatch, opencl0=100, opencl1=100)
    backend, why = backends.select("auto")
    assert backend.name == HOST and "does not start" in why and "\n" not in why


def test_auto_costs_nothing_without_pyopencl(monkeypatch: Patch) -> None:
    no_pyopencl(monkeypatch)
    monkeypatch.setattr(opencl, "devices", lambda: pytest.fail("looked for"))
    assert auto.choose().device == HOST


def test_a_comparison_in_another_process(monkeypatch: Patch) -> None:
    times = auto.measured("numpy")
    assert times.keys() == {auto.HOST, auto.DEVICE} and min(times.values()) > 0
    nothing = {auto.HOST: 0, auto.DEVICE: 0}
    assert auto.measured("opencl:no such device") == nothing
    monkeypatch.setattr(auto, "TIMEOUT", 0.001)
    assert auto.measured("numpy") == nothing
    monkeypatch.setattr(auto, "TIMEOUT", 60.0)
    monkeypatch.setattr(sys, "executable", str(ROOT / "no such program"))
    assert auto.measured("numpy") == nothing


@pytest.mark.parametrize("device", ["cpu:1", "auto:cpu", "numpy:2", "abacus"])
def test_names_that_are_none(device: str) -> None:
    with pytest.raises(BackendError, match=rf"{device}.*one of auto, cpu, numpy"):
        backends.select(device)


# ---------------------------------------------------------------- treadle check


class OnGpu(NumpyBackend):
    """The reference, as if it were a GPU."""

    target = Gpu()


def test_a_check_of_a_gpu(monkeypatch: Patch) -> None:
    cases = [case for case in all_cases() if case.op.name in ("scale", "mul")]
    monkeypatch.setattr(check_command, "all_cases", lambda: cases)
    monkeypatch.setattr(check_command, "select", lambda *_: (OnGpu(), "asked for"))

    def symmetry(case: Case, backend: object, dtype: str) -> Check:
        if case.op.name == "mul" and dtype == "bfloat16":
            raise BackendError("the driver failed")
        return Check(0.0, 1.0)

    monkeypatch.setattr(check_command, "symmetry", symmetry)
    timed = []
    monkeypatch.setattr(check_command, "_speed", lambda *args: timed.append(args))
    shown = run("check", "--device", "opencl:vega")
    assert shown.code == 1 and timed == [("opencl:vega", None)]
    assert "gradient" not in shown.out and "FAILED" in shown.out
    assert "the driver failed" in shown.out and shown.out.count("bfloat16 of mul") == sum(
        "bfloat16" in case.dtypes for case in cases if case.op.name == "mul"
    )
    assert run("check", "--device", "opencl:vega", "--quick").code == 1 and len(timed) == 1


def test_the_reference_model_is_timed_there_and_on_the_cpu(
    monkeypatch: Patch, capsys: pytest.CaptureFixture[str]
) -> None:
    reference = profile.LADDER[check_command.REFERENCE]
    model = build_model(reference)
    assert round(model.n_parameters() / 1e6, 1) == 5.3
    assert (model.vocab_size, model.n_layer, model.block_size) == (16000, 6, 128)
    assert reference.train.batch_size == 4
    small = profile._sizes(2, vocab_size=9, n_layer=1, n_head=1, n_embd=8, block_size=4)
    monkeypatch.setitem(profile.LADDER, check_command.REFERENCE, small)
    check_command._speed("numpy", 1, steps=2)
    lines = capsys.readouterr().out.splitlines()
    rates = [float(x.split()[-1].replace(",", "")) for x in lines if "numpy" in x or "cpu," in x]
    assert len(rates) == 1 + cpu.available() and min(rates) > 0
    assert "467 tokens/s" in lines[-1] and "Vega 8" in lines[-1]


def test_what_takes_long_is_told_in_one_line(
    monkeypatch: Patch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("TREADLE_CACHE", str(tmp_path))
    for patience, lines in ((1e9, []), (-1.0, [f"1 of 4 so far; they are kept in {tmp_path}"])):
        monkeypatch.setattr(first_use, "PATIENCE", patience)
        with first_use.shown("a device", 4) as each:
            assert [*each("ab"), *each("cd")] == list("abcd")
        told = capsys.readouterr().err.splitlines()
        assert told == [f"preparing kernels for a device, {line}" for line in lines]
