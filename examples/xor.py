"""Exclusive or: the smallest problem that no line solves, and one hidden layer does.

python examples/xor.py [auto|cpu|numpy]
"""

from __future__ import annotations

import sys

import numpy as np

import treadle
from treadle import ops


def loss(w1, b1, w2, b2, x, y):
    """The mean squared error of the answers; x is [4, 2], y is [4, 1]."""
    hidden = ops.linear(x, w1, b1, activation="relu")  # [4, 16]
    return ops.mean_squared_error(ops.linear(hidden, w2, b2), y)


def fit(device: str = "auto") -> np.ndarray:
    """What a network says to (0, 0), (0, 1), (1, 0) and (1, 1) after learning: [4, 1]."""
    x = np.array([[0, 0], [0, 1], [1, 0], [1, 1]], np.float32)
    y = np.array([[0], [1], [1], [0]], np.float32)
    rng = np.random.default_rng(0)
    w1, w2 = rng.normal(size=(2, 16)), rng.normal(size=(16, 1)) / 4
    start = {"w1": w1, "b1": np.zeros(16), "w2": w2, "b2": np.zeros(1)}
    step = treadle.compile(loss, start, {"x": x.shape, "y": y.shape}, lr=0.02, device=device)
    for i in range(201):
        value = step(x=x, y=y)
        if i % 50 == 0:
            print(f"step {i:3}   loss {value:.6f}")
    return np.maximum(x @ step["w1"] + step["b1"], 0) @ step["w2"] + step["b2"]


if __name__ == "__main__":
    for pair, answer in zip(("00", "01", "10", "11"), fit(*sys.argv[1:]), strict=True):
        print(f"{pair[0]} xor {pair[1]} = {round(answer.item())}   ({answer.item():+.3f})")
