"""The peak memory that a run prints at its start is what its process needs.

Run as a program, this file is that process: TEXT FOLDER FLAGS…
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from runs import ROOT, SMALL, TIMEOUT, succeed, write_text
from treadle.backends import cpu

# What is not laid out by the plan: the file that is written, batches, Python's own growth.
SLACK = 6 << 20
LARGE = (
    *("--n-layer", "4", "--n-head", "4", "--n-embd", "128", "--block-size", "128"),
    *("--batch-size", "12", "--tokenizer", "char", "--steps", "3", "--set", "checkpoint.every=1"),
)


def status(key: str) -> int:
    """A line of /proc/self/status, in bytes."""
    text = Path("/proc/self/status").read_text(encoding="utf-8")
    found = re.search(rf"^{key}:\s+(\d+) kB", text, re.MULTILINE)
    assert found is not None
    return int(found[1]) << 10


def measured(text: str, folder: Path, flags: list[str]) -> dict[str, float]:
    """Bytes by which a run lets this process grow at most, and those that it announces. A small run
    comes before it, so that all modules are there."""
    succeed("train", "--data", text, *SMALL, "--steps", 2, "--out", folder / "small")
    before, most = status("VmRSS"), status("VmHWM")
    said = succeed("train", "--data", text, *LARGE, *flags, "--out", folder / "large")
    planned = re.search(r"peak memory ([\d.]+) MiB", said)
    assert planned is not None and status("VmHWM") > most
    return {"grown": status("VmHWM") - before, "planned": float(planned[1]) * 2**20}


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.skipif(not cpu.available(), reason="the C kernels are not built")
@pytest.mark.parametrize("flags", ["--precision fp32", "--precision bf16 --recompute block"])
def test_a_run_needs_the_memory_that_it_announces(tmp_path: Path, flags: str) -> None:
    text = write_text(tmp_path / "text.txt", words=20_000)
    done = subprocess.run(
        [sys.executable, __file__, text, tmp_path, *flags.split()],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert 0.9 * found["planned"] < found["grown"] <= found["planned"] + SLACK, found


if __name__ == "__main__":
    print(json.dumps(measured(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])))
