"""What the tests of C kernels share: a probe of the headers, call lists, and matmul by hand."""

from __future__ import annotations

import ctypes
import math
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

from treadle.backends import build as builder
from treadle.ops.tiles import Tiles, matmul_tiles

COMPILER = builder.find_compiler()
if COMPILER is None:
    if os.environ.get("CI"):
        raise RuntimeError("these tests need GCC or Clang")
    pytest.skip("no C compiler", allow_module_level=True)

VECTOR_FUNCTIONS = (
    *("vexp", "vlog", "vtanh", "verf", "vsigmoid", "vrsqrt", "vsqrt", "vrelu", "vabs"),
    "vhalf_exp_clamped",
)

PROBE = r"""
#include "call.h"
#include "philox.h"

INLINE vf vhalf_exp_clamped(vf x) { return vset(0.5f) * vexp(vclamp(x, -1.0f, 1.0f)); }

#define MAP(f) \
    EXPORT void map_##f(int64_t n, const float *x, float *y) { \
        for (int64_t i = 0; i < n; i += VL) { \
            int64_t m = n - i < VL ? n - i : VL; \
            vstoren_f32(y + i, f(vloadn_f32(x + i, m)), m); \
        } \
    }
@MAPS@

EXPORT int lanes(void) { return VL; }

EXPORT void copy(int64_t n, const T *x, float *y, T *z) {
    vstoren_f32(y, vloadn(x, n), n);
    vstoren(z, vloadn(x, n), n);
}
EXPORT void whole(const float *x, T *z, float *y) {
    vstore(z, vload_f32(x));
    vstore_f32(y, vload(z));
}
EXPORT void narrow(int64_t n, const float *x, T *z, T *scalar) {
    for (int64_t i = 0; i < n; i += VL) {
        int64_t m = n - i < VL ? n - i : VL;
        vstoren(z + i, vloadn_f32(x + i, m), m);
    }
    for (int64_t i = 0; i < n; i++) scalar[i] = from_f32(x[i]);
}
EXPORT void pairs(const float *a, const float *b, const float *c, float *out) {
    vf x = vload_f32(a), y = vload_f32(b), z = vload_f32(c);
    vf r[] = {vmax(x, y), vmin(x, y), vfma(x, y, z), vcopysign(x, y), vselect(vlt(x, y), x, z),
              vselect(vm_and(vm_first(3), vm_not(veq(x, y))), y, z),
              vselect(vm_or(vge(x, y), visnan(z)), x, y), vfrom_i(viota())};
    memcpy(out, r, sizeof r);
}
EXPORT void horizontal(const float *x, float *out) {
    out[0] = vsum(vload_f32(x));
    out[1] = vhmax(vload_f32(x));
}
EXPORT void random_words(uint32_t *counter, const uint32_t *key) {
    philox(counter, key[0], key[1]);
}
EXPORT void random_vectors(uint32_t *words, const uint32_t *key, float *uniform) {
    vu x[4];
    memcpy(x, words, sizeof x);
    vphilox(x, key[0], key[1]);
    memcpy(words, x, sizeof x);
    for (int i = 0; i < VL; i++) uniform[VL + i] = uniform_from_bits(words[i]);
    vstore_f32(uniform, vuniform_from_bits(x[0]));
}

/* Walker: add_one counts every task; chain reads what the phase before wrote. */
KERNEL(add_one) {
    int64_t *seen = c->ptr[0];
    seen[task] += c->dim[0];
    *(int64_t *)scratch = task;
}
KERNEL(chain) {
    const int64_t *from = c->ptr[1];
    int64_t *to = c->ptr[0], n = c->dim[0], sum = 0;
    for (int64_t i = 0; i < n; i++) sum += from[i] * (i + task + 1);
    to[task] = sum % 1000003;
}
"""


def supported_isas() -> list[str]:
    """The instruction sets of the compiler's target that this machine runs."""
    names = [isa.name for isa in builder.ISAS if isa.family == COMPILER.family]
    library = load_library(names[0])
    return [name for name in names if library.treadle_supports(name.encode())]


def load_library(isa: str) -> ctypes.CDLL:
    """The kernels for an instruction set, built when they are not up to date."""
    (result,) = builder.build(isas=[isa])
    assert result.path is not None, result.message
    assert result.message == "", "the kernels compile without warnings"
    return ctypes.CDLL(str(result.path))


ISAS = supported_isas()


def pointer(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def compile_probe(isa: str, folder: Path) -> dict[str, ctypes.CDLL]:
    """The text above, compiled as the kernels are, for each dtype."""
    source = folder / "probe.c"
    maps = "\n".join(f"MAP({name})" for name in VECTOR_FUNCTIONS)
    source.write_text(PROBE.replace("@MAPS@", maps))
    flags = next(i for i in builder.ISAS if i.name == isa and i.family == COMPILER.family).flags
    loaded = {}
    for dtype, define in builder.DTYPE_FLAGS.items():
        target = folder / f"probe_{dtype}.so"
        command = [*COMPILER.command, *builder.COMPILE_FLAGS, *flags, define, "-fPIC", "-shared"]
        command += ["-I", str(builder.PACKAGE / "kernels"), str(source), "-o", str(target), "-lm"]
        subprocess.run(command, check=True)
        loaded[dtype] = ctypes.CDLL(str(target))
    return loaded


CALL = np.dtype([("kernel", "u8"), ("tasks", "i8"), ("ptr", "u8"), ("dim", "u8"), ("num", "u8")])


class Calls:
    """A call list for the walker; keeps its arrays alive."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, int, int, int, int]] = []
        self.kept: list[np.ndarray] = []
        self.first = [0]

    def add(
        self,
        library: ctypes.CDLL,
        kernel: str,
        tasks: int,
        arrays: list[np.ndarray | None],
        dims: list[int],
        nums: list[float] | None = None,
    ) -> None:
        address = ctypes.cast(getattr(library, kernel), ctypes.c_void_p).value
        assert address is not None
        ptr = np.array([0 if a is None else a.ctypes.data for a in arrays], np.uint64)
        dim, num = np.array(dims, np.int64), np.array(nums or [0.0], np.float64)
        self.kept += [ptr, dim, num, *(a for a in arrays if a is not None)]
        self.rows.append((address, tasks, ptr.ctypes.data, dim.ctypes.data, num.ctypes.data))

    def end_phase(self) -> None:
        self.first.append(len(self.rows))

    def run(self, library: ctypes.CDLL, threads: int, scratch_bytes: int = 64) -> None:
        calls = np.array(self.rows, CALL)
        first = np.array(self.first, np.int64)
        stride = -(-scratch_bytes // 64) * 64
        scratch, beyond = guarded_bytes(threads * stride)
        status = library.treadle_run(
            pointer(calls), pointer(first), ctypes.c_int64(first.size - 1),
            ctypes.c_int(threads), pointer(scratch), ctypes.c_int64(stride),
        )  # fmt: skip
        assert status == 0
        assert (beyond == 0xFF).all(), "nothing is written beside scratch"


def aligned_bytes(count: int) -> np.ndarray:
    """Bytes at a multiple of 64, filled with 0xFF: floats among them are NaN."""
    raw = np.full(count + 64, 0xFF, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + count]


def guarded_bytes(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Such bytes, and those that follow them."""
    whole = aligned_bytes(count + 4096)
    return whole[:count], whole[count:]


def erf64(x: np.ndarray) -> np.ndarray:
    return np.vectorize(math.erf)(x)


def rounded_to_bf16(x: np.ndarray) -> np.ndarray:
    """Round to nearest even on the bits; NaN becomes quiet."""
    bits = x.view(np.uint32).astype(np.uint64)
    even = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(x), (bits >> 16) | 0x40, even).astype(np.uint16)


ACTIVATIONS = [None, "gelu", "gelu_erf", "relu", "silu"]


def activated(kind: str | None, x: np.ndarray) -> np.ndarray:
    if kind == "gelu":
        return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    if kind == "gelu_erf":
        return 0.5 * x * (1 + erf64(x / np.sqrt(2.0)).astype(x.dtype))
    if kind == "relu":
        return np.maximum(x, 0)
    return x / (1 + np.exp(-x)) if kind == "silu" else x


def strides(a: np.ndarray) -> tuple[int, int]:
    return a.strides[0] // a.itemsize, a.strides[1] // a.itemsize


def run_matmul(
    library: ctypes.CDLL,
    out: np.ndarray,
    a: np.ndarray,
    b: np.ndarray,
    *,
    pre: np.ndarray | None = None,
    bias: np.ndarray | None = None,
    residual: np.ndarray | None = None,
    activation: str | None = None,
    accumulate: bool = False,
    scale: float = 1.0,
    threads: int = 2,
    tiles: Tiles | None = None,
) -> None:
    """out = (out +) (residual +) f(scale a b + bias); transposes are NumPy views."""
    (m, k), n = a.shape, b.shape[1]
    cut = tiles or matmul_tiles(m, n, k, a.itemsize, strides(a))
    suffix = "f32" if a.dtype == np.float32 else "bf16"
    flags = accumulate + 2 * (out.dtype == np.float32)
    calls = Calls()
    packed, beyond = guarded_bytes(cut.packed_bytes)
    if cut.packed_bytes:
        shared, lines = (b.T, n) if cut.by_rows else (a, m)
        dims = [lines, k, *strides(shared), int(cut.by_rows)]
        calls.add(library, f"matmul_pack_{suffix}", cut.pack_tasks, [packed, shared], dims)
        calls.end_phase()
    dims = [m, n, k, *strides(a), *strides(b), strides(out)[0]]
    dims += [int(cut.by_rows), cut.blocks, cut.k_blocks, ACTIVATIONS.index(activation), flags]
    arrays = [out, pre, a, b, bias, residual, packed if cut.packed_bytes else None]
    calls.add(library, f"matmul_{suffix}", cut.tasks, arrays, dims, [scale])
    calls.end_phase()
    calls.run(library, threads, cut.scratch_bytes)
    assert (beyond == 0xFF).all(), "nothing is written beside the packed operand"
