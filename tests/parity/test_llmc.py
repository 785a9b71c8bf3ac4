"""llm.c's check against PyTorch, on models made anew by tools/make_llmc_state.py."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from runs import run
from treadle.interop import llmc
from treadle.models.gpt2 import GPT2

pytestmark = pytest.mark.parity

TOOL = Path(__file__).parents[2] / "tools" / "make_llmc_state.py"
SIZES = {
    "odd": {"vocab": 131, "block": 19, "layers": 3, "heads": 3, "channels": 39, "time": 17},
    "wide": {"vocab": 1000, "block": 64, "layers": 2, "heads": 4, "channels": 128, "time": 64},
}


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("device", ["cpu", "numpy"])
def test_logits_loss_gradients_and_ten_steps(name: str, device: str, tmp_path: Path) -> None:
    flags = [f"--{key}={value}" for key, value in SIZES[name].items()]
    paths = [tmp_path / "model.bin", tmp_path / "state.bin"]
    subprocess.run([sys.executable, str(TOOL), *map(str, paths), *flags], check=True)
    result = run("check", "--device", device, "--llmc-state", *paths)
    assert result.code == 0 and "overall okay: 1" in result.out, result.out

    # llm.c's tolerances are wide; these are ours.
    model = llmc.read_llmc(paths[0]).model
    assert isinstance(model, GPT2)
    state = llmc.read_state(paths[1], model)
    found = re.findall(r"^d(\w+)$.*?maxdiff = (\S+)$", result.out, re.M | re.S)
    assert tuple(tensor for tensor, _ in found) == llmc.TENSORS
    for tensor, difference in found:
        largest = float(np.abs(state.gradients[tensor]).max())
        assert float(difference) <= 1e-5 * largest, (tensor, difference, largest)
    (logits,) = re.findall(r"max_diff = (\S+)", result.out)
    assert float(logits) <= 1e-5 * float(np.abs(state.logits).max())
    losses = [float(x) for x in re.findall(r"^step \d: loss (\S+)", result.out, re.M)]
    np.testing.assert_allclose(losses, state.losses, atol=1e-5)
