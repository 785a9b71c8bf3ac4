"""Rusticl, Mesa's OpenCL: a row of each op, and a short training. `make test-rusticl`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpu_device import DEVICE, opencl
from runs import metrics, succeed, write_text
from treadle import checks
from treadle.cases import Case, all_cases

pytestmark = pytest.mark.skipif(
    "rusticl" not in DEVICE, reason="`make test-rusticl` runs these with Mesa's driver"
)


def first_of_each() -> list[Case]:
    """The middle row of each op."""
    by_op: dict[str, list[Case]] = {}
    for case in all_cases():
        by_op.setdefault(case.op.name, []).append(case)
    return [rows[len(rows) // 2] for rows in by_op.values()]


@pytest.mark.parametrize("case", first_of_each(), ids=lambda c: c.title)
def test_an_op(case: Case) -> None:
    result = checks.symmetry(case, opencl(), "float32")
    assert result.ok, f"error {result.error:.2e} above {result.limit:.2e}"


def test_a_short_training(tmp_path: Path) -> None:
    """The losses are those of the processor."""
    assert os.environ.get("RUSTICL_ENABLE")
    opencl()  # and no kernel is measured, whichever test a worker runs first
    text = write_text(tmp_path / "text.txt", words=300)
    flags = ("--n-layer", 1, "--n-head", 2, "--n-embd", 16, "--block-size", 8, "--batch-size", 4)
    flags = (*flags, "--steps", 12, "--set", "train.sample_every=0")
    losses = []
    for device in (DEVICE, "cpu"):
        out = tmp_path / device.replace(":", "-")
        succeed("train", "--data", text, *flags, "--device", device, "--out", out)
        losses.append([line["loss"] for line in metrics(out)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
