"""How fast backends multiply two matrices: what `--device auto` compares.

    python -m treadle.measure cpu opencl:0

prints the seconds of each as JSON. It is a program of its own because a driver may hang or crash.
"""

from __future__ import annotations

import json
import sys
import time

import numpy as np

from treadle.backends import named
from treadle.backends.base import Backend
from treadle.graph.program import Program
from treadle.ops.linear import matmul

SIZE = 1024
SECONDS = 0.2  # of repetitions on each device


def program() -> Program:
    """y = a · b, SIZE x SIZE; and a flag that is read to wait for it."""
    made = Program()
    graph = made.graph("product")
    a, b = (graph.read(made.buffer(name, (SIZE, SIZE), role="input")) for name in "ab")
    graph.assign(made.buffer("y", (SIZE, SIZE), role="output"), matmul(a, b))
    made.buffer("flag", (1,), role="scalar")
    return made


def seconds(backend: Backend) -> float:
    """Seconds of a product, the least of several. BackendError where it cannot run."""
    executable = backend.load(program())
    rng = np.random.default_rng(0)
    for name in "ab":
        executable.write(name, rng.standard_normal((SIZE, SIZE)))

    def once() -> float:
        start = time.perf_counter()
        executable.run("product")
        executable.read("flag")  # devices work in order
        return time.perf_counter() - start

    once()  # the first use of memory is slow
    end, found = time.perf_counter() + SECONDS, [once()]
    while time.perf_counter() < end:
        found.append(once())
    executable.close()
    return min(found)


if __name__ == "__main__":
    print(json.dumps({device: seconds(named(device)) for device in sys.argv[1:]}))
