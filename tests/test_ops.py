"""Every op: gradients against finite differences, and each backend against the float64 oracle."""

from __future__ import annotations

import os

import pytest

from gpu_device import opencl
from treadle import checks
from treadle.backends.cpu import CpuBackend, available, instruction_sets
from treadle.cases import Case, all_cases

CASES = all_cases()
# Rows of each op in `make test`, as the device would have it, and with the smallest work-groups, in
# which kernels have most steps to get wrong; `make test-opencl` takes all.
OPENCL_ROWS = {"own": 2, "least": 6}
# Every one that was built and that the processor runs, unless one is asked for.
CHOSEN = os.environ.get("TREADLE_ISA")
INSTRUCTION_SETS = ([CHOSEN] if CHOSEN else instruction_sets()) if available() else []


@pytest.mark.parametrize("case", [c for c in CASES if c.gradient], ids=lambda c: c.title)
def test_gradient_checking(case: Case) -> None:
    result = checks.gradient(case)
    assert result.ok, f"gradient error {result.error:.2e} above {result.limit:.2e}"


@pytest.mark.skipif(not available(), reason="the C kernels are not built")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.title)
def test_backend_symmetry(case: Case, dtype: str) -> None:
    if dtype not in case.dtypes:
        pytest.skip(f"no {dtype} kernel")
    results = checks.symmetries(case, [CpuBackend(2, isa) for isa in INSTRUCTION_SETS], dtype)
    for isa, result in zip(INSTRUCTION_SETS, results, strict=True):
        assert result.ok, f"{isa}: error {result.error:.2e} above {result.limit:.2e}"


def opencl_cases() -> list[tuple[Case, str]]:
    """All rows where TREADLE_OPENCL_ROWS says `all`; else a few of each op, from the first to the
    last, because a driver compiles kernels for minutes. Each with `own` or `least`."""
    if os.environ.get("TREADLE_OPENCL_ROWS") == "all":
        return [(case, form) for form in OPENCL_ROWS for case in CASES]
    kinds: dict[tuple[str, str], list[Case]] = {}
    for case in CASES:  # the functions of an activation are kernels of their own
        kinds.setdefault((case.op.name, getattr(case.op, "kind", "")), []).append(case)
    return [
        (rows[i], form)
        for form, count in OPENCL_ROWS.items()
        for rows in kinds.values()
        for i in sorted({n * (len(rows) - 1) // (count - 1) for n in range(count)})
    ]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("case", "form"), opencl_cases(), ids=lambda x: x if isinstance(x, str) else x.title
)
def test_opencl_symmetry(case: Case, form: str, dtype: str) -> None:
    if dtype not in case.dtypes:
        pytest.skip(f"no {dtype} kernel")
    result = checks.symmetry(case, opencl(least=form == "least"), dtype)
    assert result.ok, f"error {result.error:.2e} above {result.limit:.2e}"
