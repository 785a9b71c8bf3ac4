"""How fast texts become tokens, and in how much memory.

    python bench/prepare.py ../shared/data/quijote.txt --megabytes 1000 --threads 2

The texts are made of the lines of a real one, drawn at random, in files of 16 MB: words are as
frequent as they are in it, and no two documents are the same. Reading, cleaning, filters,
duplicates, training a BPE and encoding are all measured, in one run of `treadle prepare`. Memory is
the sum over its processes, sampled five times a second on Linux; a page that two of them share
counts twice.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

FILE_BYTES = 16_000_000
VOCAB_SIZE = 16_000


def make_texts(source: Path, folder: Path, total: int) -> None:
    """Writes `total` bytes of paragraphs of random lines of a text."""
    lines = [line for line in source.read_text(encoding="utf-8").splitlines() if line]
    rng = random.Random(0)
    number = 0
    while total > 0:
        size = min(total, FILE_BYTES)
        parts: list[str] = []
        made = 0
        while made < size:
            part = "\n".join(rng.choices(lines, k=rng.randint(2, 30))) + "\n\n"
            parts.append(part)
            made += len(part.encode())
        (folder / f"{number:04d}.txt").write_bytes(
            "".join(parts).encode()[:size].rsplit(b"\n", 1)[0]
        )
        total -= size
        number += 1


def memory(pid: int) -> int:
    """Resident bytes of a process and of those that it started."""
    total, family = 0, {pid}
    for path in sorted(Path("/proc").glob("[0-9]*/status"), key=lambda p: int(p.parent.name)):
        with contextlib.suppress(OSError):
            fields = dict(line.split(":", 1) for line in path.read_text().splitlines())
            if {int(fields["Pid"]), int(fields["PPid"])} & family and "VmRSS" in fields:
                family.add(int(fields["Pid"]))
                total += int(fields["VmRSS"].split()[0]) * 1024
    return total


def main() -> None:
    """Measures one run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("text", type=Path, help="the text whose lines are drawn")
    parser.add_argument("--megabytes", type=int, default=200)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--vocab-size", type=int, default=VOCAB_SIZE)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        texts, out = Path(folder, "texts"), Path(folder, "out")
        texts.mkdir()
        make_texts(given.text, texts, given.megabytes * 1_000_000)
        command = [
            *(sys.executable, "-m", "treadle", "prepare", str(texts), "--out", str(out)),
            *("--tokenizer", "bpe", "--vocab-size", str(given.vocab_size)),
            *("--threads", str(given.threads)),
        ]
        load = os.getloadavg()[0] if hasattr(os, "getloadavg") else float("nan")
        before = os.times()
        start = time.perf_counter()
        run = subprocess.Popen(command)
        peak = 0
        while run.poll() is None:
            peak = max(peak, memory(run.pid))
            time.sleep(0.2)
        seconds = time.perf_counter() - start
        after = os.times()
        busy = after.children_user + after.children_system
        busy -= before.children_user + before.children_system
        counts = json.loads((out / "metadata.json").read_bytes())["counts"]
    print(
        f"{given.megabytes} MB in {seconds:.1f} s: {given.megabytes / seconds:.1f} MB/s with "
        f"{given.threads} processes (load {load:.1f} before); {busy:.1f} s of processor time, "
        f"{given.megabytes / busy:.1f} MB for each; {peak / 1e6:.0f} MB resident at most; "
        f"{counts['train.bin']['tokens'] + counts['val.bin']['tokens']:,} tokens"
    )


if __name__ == "__main__":
    main()
