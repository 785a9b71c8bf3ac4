"""Lowering to NVIDIA's libraries, where a GPU has them: matrix products and attention.

A launch whose grid has no work-items names a library; backends/cublaslt.py and backends/cudnn.py
run it.
"""

from __future__ import annotations

from treadle.graph.op import Arg, Grid, Launch, Target, Temp, pointwise
from treadle.graph.value import SUFFIX, itemsize, wide
from treadle.ops.elementwise import slope_launches

LIBRARY_ALIGN = 8  # elements of a row that cuBLASLt's epilogues want a multiple of


def matmul(
    target: Target,
    y: Arg,
    a: Arg,
    b: Arg,
    sizes: tuple[int, int, int],
    dtype: str,
    y_dtype: str,
    *,
    transpose_a: bool = False,
    transpose_b: bool = False,
    a_stride: int | None = None,
    y_stride: int | None = None,
    bias: Arg = None,
    activation: str | None = None,
    pre: Arg = None,
    residual: Arg = None,
    accumulate: bool = False,
    gated: bool = False,
    slope: str | None = None,
) -> list[Launch]:
    """The launches of one product; arguments as those of linear.matmul_launches.

    The bias, the residual or what is accumulated to, and GELU with its argument or its slope go
    into the product where cuBLASLt can; the rest are kernels of their own.
    """
    m, n, k = sizes
    able = n % LIBRARY_ALIGN == 0 and y_dtype == dtype == "bfloat16"
    fused = (
        able
        and activation == "gelu"
        and pre is not None
        and not (gated or accumulate or residual is not None)
    )
    whole = activation is None or fused  # the product is the result
    out = y_dtype if whole else dtype
    product = y if whole else pre if pre is not None else Temp(m * n * itemsize(dtype), "pre")
    inside = able and slope == "gelu"
    launches: list[Launch] = []
    if bias is not None and out != wide(dtype):  # cuBLASLt's bias has the result's dtype
        copy = Temp(n * itemsize(out), "bias")
        launches += _pointwise(target, "cast", [wide(dtype), out], [copy, bias], [n])
        bias = copy
    late = residual if accumulate or not whole or slope else None
    argument = residual if inside else pre if fused else None
    launches.append(
        Launch(
            "matmul_slope" if inside else "matmul",
            [product, argument, a, b, bias, None if late is not None else residual],
            1 if inside else 2,
            [
                *(m, n, k, int(transpose_a), int(transpose_b)),
                *(a_stride or (m if transpose_a else k), k if transpose_b else n, y_stride or n),
                int(accumulate and whole),
            ],
            grids=[Grid("cublaslt", (), 0, (("T", SUFFIX[dtype]), ("U", SUFFIX[out])))],
        )
    )
    size = m * n
    if slope is not None:
        return [
            *launches,
            *([] if inside else slope_launches(target, slope, out, y, residual, size)),
        ]
    if not whole and gated:
        kernel = f"gated_{activation}_forward"
        return [*launches, *_pointwise(target, kernel, [dtype], [y, late, product], [size])]
    result = y
    if not whole:
        result = Temp(size * itemsize(dtype), "result") if accumulate else y
        launches += _pointwise(target, f"{activation}_forward", [dtype], [result, product], [size])
    if late is not None:
        launches += _pointwise(target, "add", [y_dtype], [result, result, late], [size, size])
    if result is not y:
        launches += _pointwise(target, "add", [y_dtype], [y, y, result], [size, size])
    return launches


def _pointwise(
    target: Target, kernel: str, dtypes: list[str], args: list[Arg], dims: list[int]
) -> list[Launch]:
    return pointwise(target, "elementwise", kernel, dtypes, args, 1, dims)


# ---------------------------------------------------------------- attention


def attends(dtype: str, head_size: int, *special: object) -> bool:
    """Whether cuDNN computes attention of this dtype and head size. special: what it does not do
    here, where it is set: dropout, a window, a softcap."""
    return dtype == "bfloat16" and head_size % 8 == 0 and head_size <= 128 and not any(special)


def attention(
    args: list[Arg], writes: int, backward: bool, dims: list[int], scale: float
) -> list[Launch]:
    """Attention, or its gradient. dims: B, T, H, K, D. args: y, lse, qkv, or dqkv, dy, qkv, y,
    lse."""
    kernel = "sdpa_backward" if backward else "sdpa_forward"
    return [Launch(kernel, args, writes, dims, [scale], grids=[Grid("cudnn", (), 0)])]
