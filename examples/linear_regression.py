"""The smallest model there is: find the w and b of a line y = w x + b from points on it.

python examples/linear_regression.py [auto|cpu|numpy]
"""

from __future__ import annotations

import sys

import numpy as np

import treadle
from treadle import ops


def loss(w, b, x, y):
    """The mean squared error of the line; x and y are [N, 1], w is [1, 1] and b is [1]."""
    return ops.mean_squared_error(ops.linear(x, w, b), y)


def fit(device: str = "auto") -> tuple[float, float]:
    """The w and b that AdamW finds for y = 2x + 1."""
    x = np.linspace(-1, 1, 32, dtype=np.float32)[:, None]
    y = 2 * x + 1
    start = {"w": np.zeros((1, 1)), "b": np.zeros(1)}
    inputs = {"x": x.shape, "y": y.shape}
    step = treadle.compile(loss, start, inputs, lr=0.05, device=device)
    for i in range(401):
        value = step(x=x, y=y)
        if i % 100 == 0:
            print(f"step {i:3}   loss {value:.6f}")
    return step["w"].item(), step["b"].item()


if __name__ == "__main__":
    w, b = fit(*sys.argv[1:])
    print(f"y = {w:.3f} x + {b:.3f}")
