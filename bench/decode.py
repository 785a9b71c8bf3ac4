"""Writing text a token at a time, against transformers' `generate`.

    python bench/decode.py [PRESET ...] [--precision fp32|bf16] [--tokens N] [--prompt N]
                           [--torch PYTHON] [--json FILE]

All contestants get the same random weights and the same prompt, and write greedily. First the
tokens must agree: ours in fp32 with those of transformers in fp32, all of them; in bf16 the table
says how many agree before the first that does not. Then they take turns; a turn is one whole call,
prompt included. transformers runs in a process of its own and waits for a message between turns.
--torch names a Python that has torch and transformers, where this one does not.

Every token needs every weight once, save the rows of the embeddings that it does not look up. The
floor is the time to read them at the bandwidth that a reading loop reaches, on as many threads, in
turns with the others in the same run; "floor" is the part of a token's time that it accounts for.
Attention's cache, which grows with the text, is not counted.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import common
import treadle
from common import PRESETS, Setting
from treadle.backends.cpu import CpuBackend
from treadle.generate import Decoder, Sampling, Writer, add_generation, write_weight
from treadle.graph.program import Program
from treadle.graph.value import STORAGE
from treadle.models.base import declare, shadow
from treadle.models.gpt2 import GPT2
from treadle.ops.optim import GlobalNorm

SEED = 1
# Weights this many times larger than a fresh model's write a text that does not repeat itself.
LOUDNESS = 3.0
PEER = "transformers"
READ_BYTES = 1 << 29


def weights_of(model: GPT2) -> dict[str, np.ndarray]:
    """Random weights, float32."""
    return {p.name: p.initial(SEED) * (LOUDNESS if p.decays else 1) for p in model.parameters()}


# ---------------------------------------------------------------- contestants

Write = Callable[[list[int], int], tuple[float, list[int]]]


def treadle_writer(
    model: GPT2, weights: dict[str, np.ndarray], precision: str, threads: int
) -> tuple[Write, int]:
    """Ours: a function from a prompt and a number of tokens to the seconds and the new ids; and the
    bytes of weights that a token needs."""
    program = Program()
    declare(program, model, precision, masters=False)
    add_generation(program, model)
    executable = CpuBackend(threads).load(program)
    for name, array in weights.items():
        write_weight(executable, name, array)

    def write(prompt: list[int], tokens: int) -> tuple[float, list[int]]:
        start = time.perf_counter()
        decoder = Decoder(executable, model.block_size)
        writer = Writer(decoder, [prompt], tokens, [Sampling(0.0)])
        ids = [token for (token,) in writer if token is not None]
        return time.perf_counter() - start, ids

    looked_up = {"transformer.wpe.weight"}
    if not model.tie_embeddings:
        looked_up.add("transformer.wte.weight")
    skipped = looked_up | {shadow(name) for name in looked_up}
    stored = [b for b in program.buffers.values() if b.role in ("weight", "shadow")]
    nbytes = sum(
        b.size * np.dtype(STORAGE[b.dtype]).itemsize for b in stored if b.name not in skipped
    )
    return write, nbytes


class Transformers:
    """decode_transformers.py, running."""

    def __init__(self, python: str, checkpoint: str, threads: int) -> None:
        script = Path(__file__).with_name("decode_transformers.py")
        self.process = subprocess.Popen(
            [python, str(script), checkpoint, str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.versions = self._receive()

    def _receive(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        while line and not line.startswith("{"):  # what libraries print when they are imported
            line = self.process.stdout.readline()
        if not line:
            raise SystemExit(
                f"{PEER} does not take part; --torch names a Python that has torch and transformers"
            )
        return json.loads(line)

    def write(self, prompt: list[int], tokens: int) -> tuple[float, list[int]]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"prompt": prompt, "tokens": tokens}) + "\n")
        self.process.stdin.flush()
        answer = self._receive()
        return answer["seconds"], answer["ids"]

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def reader(threads: int) -> Callable[[], list[float]]:
    """Measures the seconds that reading READ_BYTES takes: the sum of squares of a buffer."""
    program = Program()
    graph = program.graph("read")
    scale = graph.read(program.buffer("scale", (), "float32", "input"))
    x = graph.read(program.buffer("x", (READ_BYTES // 4,), "float32", "input"))
    for i, value in enumerate(graph.apply(GlobalNorm(0.0), scale, x)):
        graph.assign(program.buffer(f"y{i}", value.shape, value.dtype, "output"), value)
    executable = CpuBackend(threads).load(program)
    executable.write("x", np.ones(READ_BYTES // 4, np.float32))

    def read() -> list[float]:
        start = time.perf_counter()
        executable.run("read")
        executable.read("y0")
        return [time.perf_counter() - start]

    return read


# ---------------------------------------------------------------- checking and measuring


def agreeing(ids: list[int], others: list[int]) -> int:
    """How many are equal before the first that is not."""
    pairs = list(zip(ids, others, strict=True))
    return next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))


def measure(
    model: GPT2, options: argparse.Namespace, setting: Setting
) -> tuple[dict[str, str], list[dict[str, Any]]]:
    """The peer's versions, and a row of the table for each contestant."""
    weights, threads, tokens = weights_of(model), setting.threads, options.tokens
    rng = np.random.default_rng(SEED)
    prompt = [int(i) for i in rng.integers(model.vocab_size, size=options.prompt)]
    with tempfile.TemporaryDirectory() as folder:
        treadle.LanguageModel(model, weights=weights, device="numpy").save(f"{folder}/model")
        peer = Transformers(options.torch, f"{folder}/model", threads)
    _, reference = peer.write(prompt, tokens)
    writers: dict[str, Write] = {}
    read_bytes, agreed = {}, {}
    for precision in options.precision:
        writers[precision], read_bytes[precision] = treadle_writer(
            model, weights, precision, threads
        )
        _, ids = writers[precision](prompt, tokens)
        agreed[precision] = agreeing(ids, reference)
        if precision == "fp32" and agreed[precision] < tokens:
            raise SystemExit(f"token {agreed[precision]} differs: {ids}, {PEER} {reference}")
    writers[PEER] = peer.write
    agreed[PEER] = tokens

    def turn(write: Write) -> list[float]:
        return [write(prompt, tokens)[0]]

    runs: dict[str, Callable[[], list[float]]] = {w: partial(turn, writers[w]) for w in writers}
    runs["read"] = reader(threads)
    times = common.alternate(runs, setting.rounds)
    peer.close()
    reading = times.pop("read")
    bandwidth = READ_BYTES / common.summary(reading, reading)["median"]
    rows = []
    for who, turns in times.items():
        found = common.summary(times[PEER], turns)
        seconds = common.summary(turns, turns)
        nbytes = read_bytes.get(who, read_bytes.get("fp32"))
        rows.append(
            {
                "contestant": who if who == PEER else "treadle",
                "precision": "fp32" if who == PEER else who,
                "rate": tokens / seconds["median"],
                "best": tokens / seconds["min"],
                "speedup": found["ratio"],
                "floor": nbytes and nbytes / bandwidth / (seconds["median"] / tokens),
                "agreed": agreed[who],
                "distinct": len(set(reference)),
                "bandwidth": bandwidth,
                "turns": turns,
            }
        )
    print(f"reading at {bandwidth / 1e9:.1f} GB/s; {len(set(reference))} distinct tokens")
    return peer.versions, rows


COLUMNS: list[common.Column] = [
    ("contestant", -14, str),
    ("precision", -9, str),
    ("rate", 9, common.decimals(1)),
    ("best", 9, common.decimals(1)),
    ("speedup", 8, common.decimals(2)),
    ("floor", 6, common.decimals(2)),
    ("agreed", 7, str),
]


def main() -> None:
    made = common.parser("Writing text, side by side.", ["124m-1024"], seconds=0.0)
    made.add_argument("--tokens", type=int, default=128, help="to write in a turn; %(default)s")
    made.add_argument("--prompt", type=int, default=16, help="its tokens; %(default)s")
    made.add_argument(
        "--torch", default=sys.executable, metavar="PYTHON", help="that has transformers"
    )
    options, setting = common.parse(made)
    report = common.header(setting)
    report["presets"] = {}
    print(f"tokens/s of {options.tokens} tokens after {options.prompt}, speedup over {PEER}")
    for name in options.presets:
        model = PRESETS[name].model
        print(f"\n{name}: {model.n_parameters() / 1e6:.2f}M parameters")
        report["peers"], report["presets"][name] = measure(model, options, setting)
        common.show(COLUMNS, None)
        for row in report["presets"][name]:
            common.show(COLUMNS, row)
    common.save(options.json, report)


if __name__ == "__main__":
    main()
