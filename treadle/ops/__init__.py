"""The ops that models are built from: functions on symbolic values."""

from treadle.graph.op import cast, zeros
from treadle.ops.attention import attention
from treadle.ops.cached_attention import cached_attention
from treadle.ops.classifier import linear_cross_entropy
from treadle.ops.elementwise import (
    activation,
    add,
    copy,
    gated,
    gelu,
    gelu_erf,
    mul,
    relu,
    reshape,
    scale,
    silu,
    softcap,
    sum_leading,
)
from treadle.ops.embedding import embedding, select_row
from treadle.ops.linear import linear, matmul
from treadle.ops.loss import cross_entropy, mean, mean_squared_error
from treadle.ops.norm import layernorm, rmsnorm
from treadle.ops.optim import accumulate, adamw, clip, sgd
from treadle.ops.random import dropout
from treadle.ops.rope import rope

__all__ = [
    "accumulate",
    "activation",
    "adamw",
    "add",
    "attention",
    "cached_attention",
    "cast",
    "clip",
    "copy",
    "cross_entropy",
    "dropout",
    "embedding",
    "gated",
    "gelu",
    "gelu_erf",
    "layernorm",
    "linear",
    "linear_cross_entropy",
    "matmul",
    "mean",
    "mean_squared_error",
    "mul",
    "relu",
    "reshape",
    "rmsnorm",
    "rope",
    "scale",
    "select_row",
    "sgd",
    "silu",
    "softcap",
    "sum_leading",
    "zeros",
]
