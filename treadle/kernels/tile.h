/* Blocks of vectors: what kernels that multiply matrices share, transposition above all. */
#ifndef TREADLE_TILE_H
#define TREADLE_TILE_H

#include "vec.h"

#if defined(__clang__)
#define UNROLL _Pragma("clang loop unroll(full)")
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#elif __GNUC__ >= 12
#define UNROLL _Pragma("GCC unroll 16")
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define UNROLL _Pragma("GCC unroll 16")
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (vi){__VA_ARGS__})
#endif

INLINE int64_t min_i64(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

/* Part i of n items in `parts` parts whose sizes differ by at most one: its first item. */
INLINE int64_t part_start(int64_t n, int64_t parts, int64_t i) { return n * i / parts; }

/* ---- transposition ---------------------------------------------------------------------------------- */

#if VL == 16
#define TRANSPOSE_STEPS_(STEP) \
    STEP(8, (0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23), \
         (8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31)) \
    STEP(4, (0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27), \
         (4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31)) \
    STEP(2, (0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29), \
         (2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31)) \
    STEP(1, (0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30), \
         (1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31))
#elif VL == 8
#define TRANSPOSE_STEPS_(STEP) \
    STEP(4, (0, 1, 2, 3, 8, 9, 10, 11), (4, 5, 6, 7, 12, 13, 14, 15)) \
    STEP(2, (0, 1, 8, 9, 4, 5, 12, 13), (2, 3, 10, 11, 6, 7, 14, 15)) \
    STEP(1, (0, 8, 2, 10, 4, 12, 6, 14), (1, 9, 3, 11, 5, 13, 7, 15))
#else
#define TRANSPOSE_STEPS_(STEP) \
    STEP(2, (0, 1, 4, 5), (2, 3, 6, 7)) \
    STEP(1, (0, 4, 2, 6), (1, 5, 3, 7))
#endif

#define UNPACK_(...) __VA_ARGS__
#define TRANSPOSE_STEP_(s, low, high) \
    UNROLL for (int i = 0; i < VL; i++) { \
        if (!(i & s)) { \
            vf a = x[i], b = x[i + s]; \
            x[i] = SHUFFLE(a, b, UNPACK_ low); \
            x[i + s] = SHUFFLE(a, b, UNPACK_ high); \
        } \
    }

/* x[i][j] becomes x[j][i]: blocks of VL/2, VL/4, ... 1 trade places across the diagonal. */
INLINE void transpose(vf x[VL]) { TRANSPOSE_STEPS_(TRANSPOSE_STEP_) }

/* x[i] = the first nk elements of row i of p, for the first `rows` rows; zero elsewhere. */
INLINE void load_rows_(vf x[VL], const T *p, int64_t stride, int64_t rows, int64_t nk) {
    if (rows == VL && nk == VL) {
        UNROLL for (int i = 0; i < VL; i++) x[i] = vload(p + i * stride);
    } else {
        UNROLL for (int i = 0; i < VL; i++) {
            x[i] = i < rows ? vloadn(p + i * stride, nk) : vzero();
        }
    }
}

#endif
