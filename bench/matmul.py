"""The matrix products of training and generation, against PyTorch and NumPy's BLAS.

    python bench/matmul.py [PRESET ...] [--precision fp32|bf16] [--only TEXT] [--cold]
                           [--threads N] [--processor-time] [--json FILE]

Of each linear layer of a preset: forward, the input's gradient and the weight's, as the model
stores them; and the products of single rows, with which it generates. In bf16 results are bf16,
but a weight's gradient is fp32 (PyTorch's is bf16). A sample of rows is first compared with
float64. Then the contestants take turns in this one process, with pauses in which their threads go
to sleep. NumPy, which has no bf16, takes OPENBLAS_NUM_THREADS threads.

--cold: the weight is another one in each call, so that it comes from memory, as in training.
--processor-time, with one thread: other programs on the machine do not count.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

# Before NumPy, whose BLAS would else be what the environment makes of it.
import common
from common import PRESETS, Preset, Setting

# isort: split
import numpy as np

from treadle import ops
from treadle.backends.cpu import CpuBackend
from treadle.graph.program import Program
from treadle.graph.value import from_bfloat16, to_bfloat16

try:
    import torch
except ImportError:
    torch = None

DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
# ‖x - y‖ / ‖y‖ from float64, for results of that precision.
TOLERANCE = {"float32": 1e-5, "bfloat16": 5e-3}
CHECKED_ROWS = 32
# More than caches hold.
COLD_BYTES = 200_000_000
GENERATED_ROWS = (1, 8)

Run = Callable[[int], None]


@dataclass(frozen=True)
class Product:
    """C[M, N] = A[M, K] · B[K, N]. transposed: which of A and B is stored as its transpose."""

    name: str
    m: int
    n: int
    k: int
    transposed: str = ""

    @property
    def flops(self) -> int:
        return 2 * self.m * self.n * self.k


def products(preset: Preset) -> Iterator[Product]:
    """Those of a training step, and of generation."""
    rows = preset.rows
    yield Product("square", 1024, 1024, 1024)
    for name, (k, n, _) in preset.linears().items():
        if name == "head" and preset.model.tie_embeddings:  # its weight is stored [N, K]
            forward, grad_x, grad_w = ("b", "", (n, k))
        else:
            forward, grad_x, grad_w = ("", "b", (k, n))
        yield Product(name, rows, n, k, forward)
        yield Product(f"{name}, dx", rows, k, n, grad_x)
        yield Product(f"{name}, dw", *grad_w, rows, "a")
        for few in GENERATED_ROWS:
            yield Product(f"{name}, {few} row{'s' * (few > 1)}", few, n, k, forward)


# ---------------------------------------------------------------- contestants


class Contest:
    """A product of random operands, and every contestant's way to compute it."""

    def __init__(self, product: Product, precision: str, cold: bool, backend: CpuBackend) -> None:
        m, n, k, transposed = product.m, product.n, product.k, product.transposed
        rng = np.random.default_rng(m + n + k)
        shape_a = (k, m) if "a" in transposed else (m, k)
        shape_b = (n, k) if "b" in transposed else (k, n)
        dtype = DTYPES[precision]
        a, b = (rng.standard_normal(shape, dtype=np.float32) for shape in (shape_a, shape_b))
        if precision == "bf16":
            a, b = (from_bfloat16(to_bfloat16(x)) for x in (a, b))
        self.a, self.b = a.T if "a" in transposed else a, b.T if "b" in transposed else b
        self.output = "float32" if "a" in transposed else dtype
        item = 2 if precision == "bf16" else 4
        self.copies = math.ceil(COLD_BYTES / (item * b.size)) if cold else 1

        program = Program()
        left = program.buffer("a", shape_a, dtype, "input")
        out = program.buffer("c", (m, n), self.output)
        for i in range(self.copies):
            right = program.buffer(f"b{i}", shape_b, dtype, "input")
            graph = program.graph(f"product{i}")
            flags = {f"transpose_{x}": x in transposed for x in "ab"}
            x, y = graph.read(left), graph.read(right)
            graph.assign(out, ops.matmul(x, y, **flags, dtype=self.output))
        self.executable = backend.load(program)
        self.executable.write("a", a)
        for i in range(self.copies):
            self.executable.write(f"b{i}", b)
        self.graphs = [f"product{i}" for i in range(self.copies)]

    def contestants(self, precision: str, threads: int) -> dict[str, Run]:
        """Each computes the product as often as it is told."""
        turn = 0

        def run_treadle(times: int) -> None:
            nonlocal turn
            chosen = [self.graphs[(turn + i) % self.copies] for i in range(times)]
            turn += times
            self.executable.run(*chosen)

        found: dict[str, Run] = {"treadle": run_treadle}
        weights = [self.b] + [self.b.copy(order="K") for _ in range(self.copies - 1)]
        if torch is not None:
            torch.set_num_threads(threads)
            dtype = torch.bfloat16 if precision == "bf16" else torch.float32
            x, out = torch.from_numpy(self.a).to(dtype), torch.empty(0, dtype=dtype)
            found["torch"] = peer(
                partial(torch.matmul, x), [torch.from_numpy(w).to(dtype) for w in weights], out
            )
        if precision == "fp32":
            result = np.empty((self.a.shape[0], self.b.shape[1]), np.float32)
            found["numpy"] = peer(partial(np.matmul, self.a), weights, result)
        return found

    def error(self) -> float:
        """‖x - y‖ / ‖y‖ over a sample of rows, y in float64."""
        self.executable.run(self.graphs[0])
        rng = np.random.default_rng(0)
        rows = rng.choice(len(self.a), min(len(self.a), CHECKED_ROWS), replace=False)
        exact = self.a[rows].astype(np.float64) @ self.b.astype(np.float64)
        difference = self.executable.read("c")[rows] - exact
        return float(np.linalg.norm(difference) / np.linalg.norm(exact))


def peer(multiply: Callable[..., Any], weights: list[Any], out: Any) -> Run:
    """Products with one weight after another."""
    turn = 0

    def run(times: int) -> None:
        nonlocal turn
        for _ in range(times):
            multiply(weights[turn % len(weights)], out=out)
            turn += 1

    return run


# ---------------------------------------------------------------- measuring


def measure(
    product: Product, precision: str, cold: bool, backend: CpuBackend, setting: Setting, clock: Any
) -> dict[str, Any]:
    """A row of the table."""
    contest = Contest(product, precision, cold, backend)
    error = contest.error()
    if not error <= TOLERANCE[contest.output]:
        raise SystemExit(f"{product}, {precision}: {error:.1e} off float64")

    def turn(run: Run, repeats: int) -> list[float]:
        run(1)
        begin = clock()
        run(repeats)
        return [(clock() - begin) / repeats]

    runs = {}
    for who, run in contest.contestants(precision, setting.threads).items():
        once = min(turn(run, 1)[0] for _ in range(3))
        runs[who] = partial(turn, run, max(1, math.ceil(setting.seconds / once)))
    turns = common.alternate(runs, setting.rounds)
    contest.executable.close()
    row: dict[str, Any] = {"product": product.name, "T": product.transposed, "error": error}
    row |= {"M": product.m, "N": product.n, "K": product.k, "precision": precision, "turns": turns}
    for who, seconds in turns.items():
        summary = common.summary(seconds, turns["treadle"])
        row[who] = product.flops / summary["median"] / 1e9
        row[f"{who} ratio"] = summary["ratio"]
    if peak := setting.gflops[precision]:
        row["peak"] = row["treadle"] / peak
    return row


COLUMNS: list[common.Column] = [
    ("product", -20, str),
    *((name, 6, str) for name in "MNK"),
    ("T", -2, str),
    ("precision", -9, str),
    ("treadle", 8, common.decimals(1)),
    ("peak", 5, common.decimals(2)),
    ("torch", 7, common.decimals(1)),
    ("torch ratio", 11, common.decimals(2)),
    ("numpy", 7, common.decimals(1)),
    ("numpy ratio", 11, common.decimals(2)),
    ("error", 8, "{:.1e}".format),
]


def main() -> None:
    parser = common.parser("Matrix products, side by side.", ["char", "5m", "124m-64"], 0.03)
    parser.add_argument("--only", default="", help="products whose name contains this text")
    parser.add_argument("--cold", action="store_true", help="weights come from memory")
    parser.add_argument(
        "--processor-time", action="store_true", help="instead of time; with --threads 1"
    )
    options, setting = common.parse(parser)
    if options.processor_time and setting.threads != 1:
        parser.error("--processor-time needs --threads 1")
    clock = time.process_time if options.processor_time else time.perf_counter
    backend = CpuBackend(setting.threads)
    peers = {"numpy": np.__version__} | ({"torch": torch.__version__} if torch else {})
    report = common.header(setting, **peers)
    report |= {"cold": options.cold, "processor_time": options.processor_time, "products": []}
    print("GFLOP/s; ratio = Treadle's speed / the other's")
    common.show(COLUMNS, None)
    seen = set()
    for precision in options.precision:
        for product in (p for name in options.presets for p in products(PRESETS[name])):
            key = (product.m, product.n, product.k, product.transposed, precision)
            if options.only not in product.name or key in seen:
                continue
            seen.add(key)
            row = measure(product, precision, options.cold, backend, setting, clock)
            common.show(COLUMNS, row)
            report["products"].append(row)
    common.save(options.json, report)


if __name__ == "__main__":
    main()
