"""Matrix multiplication against NumPy's BLAS (and PyTorch's, where it is installed).

    python bench/matmul.py [--threads N] [--rounds N] [--seconds S] [--only TEXT] [--json FILE]

Every product is first compared with float64. Then the contestants take turns, several rounds of
them, in this one process: on a machine that others use too, read the ratios, not the GFLOP/s.
"""

# ruff: noqa: E402 - what NumPy's BLAS reads from the environment has to go before NumPy is loaded

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

# What shells export for one BLAS version slows another down; the peers run as they choose to.
for variable in ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE"):
    os.environ.pop(variable, None)

import numpy as np

from treadle import ops
from treadle.backends.cpu import CpuBackend
from treadle.graph.program import Program

# What each product is for, M, N, K, and which of A and B is stored transposed.
SHAPES = [
    ("square", 1024, 1024, 1024, ""),
    ("gpt2 mlp up", 256, 3072, 768, ""),
    ("gpt2 mlp up, dx", 256, 768, 3072, "b"),
    ("gpt2 mlp up, dw", 768, 3072, 256, "a"),
    ("gpt2 mlp down, dw", 3072, 768, 256, "a"),
    ("gpt2 mlp up, 4 x 1024", 4096, 3072, 768, ""),
    ("gpt2 head, 64 rows", 64, 50257, 768, "b"),
    ("char mlp up", 768, 512, 128, ""),
    ("char mlp up, dx", 768, 128, 512, "b"),
    ("char mlp up, dw", 128, 512, 768, "a"),
    ("char head", 768, 65, 128, ""),
    ("char head, dx", 768, 128, 65, "b"),
    ("char head, dw", 128, 65, 768, "a"),
    ("5m head", 512, 16000, 128, ""),
    ("5m head, dx", 512, 128, 16000, "b"),
    ("5m head, dw", 128, 16000, 512, "a"),
    ("tiny", 64, 192, 64, ""),
    ("one row", 1, 3072, 768, ""),
    ("one row, head", 1, 50257, 768, "b"),
]
# Contestants' own threads spin for a while after their last call; the next one waits that out.
PAUSE_SECONDS = 0.1


class Product:
    """C = A · B of random operands, and every contestant's way to compute it."""

    def __init__(self, m: int, n: int, k: int, transposed: str, backend: CpuBackend) -> None:
        rng = np.random.default_rng(m + n + k)
        stored_a, stored_b = [k, m] if "a" in transposed else [m, k], [k, n]
        if "b" in transposed:
            stored_b = [n, k]
        a, b = (rng.standard_normal(shape).astype(np.float32) for shape in (stored_a, stored_b))
        self.a, self.b = a.T if "a" in transposed else a, b.T if "b" in transposed else b
        self.flops = 2 * m * n * k
        program = Program()
        buffers = [
            program.buffer(x, s, role="input") for x, s in (("a", stored_a), ("b", stored_b))
        ]
        out = program.buffer("c", (m, n))
        graph = program.graph("product")
        x, y = (graph.read(buffer) for buffer in buffers)
        graph.assign(
            out, ops.matmul(x, y, transpose_a="a" in transposed, transpose_b="b" in transposed)
        )
        self.executable = backend.load(program)
        self.executable.write("a", a)
        self.executable.write("b", b)

    def contestants(self, threads: int) -> dict[str, Callable[[int], None]]:
        """Each computes the product as often as it is told."""
        out = np.empty((self.a.shape[0], self.b.shape[1]), np.float32)

        def run_treadle(times: int) -> None:
            self.executable.run(*["product"] * times)

        def run_numpy(times: int) -> None:
            for _ in range(times):
                np.matmul(self.a, self.b, out=out)

        found: dict[str, Callable[[int], None]] = {"treadle": run_treadle, "numpy": run_numpy}
        try:
            import torch
        except ImportError:
            return found
        torch.set_num_threads(threads)
        a, b, c = (torch.from_numpy(x) for x in (self.a, self.b, out))

        def run_torch(times: int) -> None:
            for _ in range(times):
                torch.matmul(a, b, out=c)

        return {**found, "torch": run_torch}

    def check(self) -> float:
        """Largest error against float64 as a part of what is allowed: twice NumPy's, and a floor
        for single rows, which NumPy sums in another way. AssertionError when it is above 1."""
        self.executable.run("product")
        exact = self.a.astype(np.float64) @ self.b.astype(np.float64)
        error = np.abs(self.executable.read("c") - exact).max()
        floor = self.a.shape[1] * 2.0**-24
        allowed = 2 * np.abs(self.a @ self.b - exact).max() + floor
        assert error <= allowed, f"error {error:.2e}, allowed {allowed:.2e}"
        return float(error / allowed)


def measure(product: Product, threads: int, rounds: int, seconds: float) -> dict[str, float]:
    """Median seconds of one product, by contestant; rounds alternate."""
    contestants = product.contestants(threads)
    times: dict[str, list[float]] = {name: [] for name in contestants}
    repeats = {}
    for name, run in contestants.items():
        run(1)
        start = time.perf_counter()
        run(1)
        repeats[name] = max(1, int(seconds / rounds / (time.perf_counter() - start)))
    for _ in range(rounds):
        for name, run in contestants.items():
            time.sleep(PAUSE_SECONDS)
            run(1)
            start = time.perf_counter()
            run(repeats[name])
            times[name].append((time.perf_counter() - start) / repeats[name])
    return {name: median(values) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description="Matrix multiplication, side by side.")
    parser.add_argument("--threads", type=int, help="of treadle and torch; default: all cores")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each contestant")
    parser.add_argument("--seconds", type=float, default=0.3, help="of each contestant, a shape")
    parser.add_argument("--only", default="", help="shapes whose name contains this text")
    parser.add_argument("--json", type=Path, help="write the measurements to this file")
    options = parser.parse_args()

    backend = CpuBackend(threads=options.threads)
    print(f"{backend.describe()}; numpy {np.__version__}; {platform.processor() or 'unknown cpu'}")
    rows = []
    for name, m, n, k, transposed in SHAPES:
        if options.only not in name:
            continue
        product = Product(m, n, k, transposed, backend)
        error = product.check()
        seconds = measure(product, backend.threads, options.rounds, options.seconds)
        product.executable.close()
        if not rows:
            peers = [peer for peer in seconds if peer != "treadle"]
            heads = "".join(f"{peer:>9}{'ratio':>7}" for peer in peers)
            print(
                f"{'GFLOP/s':24}{'M':>6}{'N':>7}{'K':>7} {'T':2}{'error':>6}{'treadle':>9}{heads}"
            )
        speed = {who: product.flops / value / 1e9 for who, value in seconds.items()}
        ratios = {peer: speed["treadle"] / speed[peer] for peer in peers}
        cells = "".join(f"{speed[peer]:9.1f}{ratios[peer]:7.2f}" for peer in peers)
        print(
            f"{name:24}{m:6}{n:7}{k:7} {transposed:2}{error:6.2f}{speed['treadle']:9.1f}{cells}",
            flush=True,
        )
        rows.append(
            {
                "name": name,
                "shape": {"m": m, "n": n, "k": k, "transposed": transposed},
                "error": error,
                "seconds": seconds,
                "gflops": speed,
                "ratio": ratios,
            }
        )
    if options.json:
        report = {"device": backend.describe(), "library": backend.library.info, "shapes": rows}
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
