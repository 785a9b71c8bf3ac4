"""Every op: gradients against finite differences, and each backend against the float64 oracle."""

from __future__ import annotations

import pytest

from treadle import checks
from treadle.backends.cpu import CpuBackend, available
from treadle.cases import Case, all_cases

CASES = all_cases()


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
    result = checks.symmetry(case, CpuBackend(threads=2), dtype)
    assert result.ok, f"error {result.error:.2e} above {result.limit:.2e}"
