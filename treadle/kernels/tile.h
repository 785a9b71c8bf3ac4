/* The register tile of matrix multiplication, and the packing that feeds it.

   A tile is MR rows of NR = 2 VL columns, held in registers while K runs by. It reads A from a panel
   laid out [k][MR] and B from a panel laid out [k][NR], both fp32 whatever the tensors hold. */
#ifndef TREADLE_TILE_H
#define TREADLE_TILE_H

#include "vec.h"

/* As many rows as leave registers for two vectors of B and one element of A; where VL < MR, a
   multiple of VL, which packing relies on. */
#if VL == 16
#define MR 14
#elif VL == 8
#define MR 6
#elif defined(__SSE2__)
#define MR 4
#else
#define MR 8
#endif
#define NR (2 * VL)

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

/* ---- the microkernel -------------------------------------------------------------------------------- */

/* tile[mr][NR] = (add ? tile : 0) + sum over k of a[k][i] b[k][j], for the first nv vectors of a row. */
INLINE void tile_body_(const int mr, const int nv, int64_t kc, const float *a, const float *b,
                       float *tile, int add) {
    vf acc[MR][2];
    UNROLL for (int i = 0; i < mr; i++) {
        UNROLL for (int v = 0; v < nv; v++) acc[i][v] = vzero();
    }
    for (int64_t k = 0; k < kc; k++) {
        vf bv[2];
        UNROLL for (int v = 0; v < nv; v++) bv[v] = vload_f32(b + v * VL);
        UNROLL for (int i = 0; i < mr; i++) {
            vf av = vset(a[i]);
            UNROLL for (int v = 0; v < nv; v++) acc[i][v] = vfma(av, bv[v], acc[i][v]);
        }
        a += MR;
        b += NR;
    }
    UNROLL for (int i = 0; i < mr; i++) {
        UNROLL for (int v = 0; v < nv; v++) {
            float *t = tile + i * NR + v * VL;
            vstore_f32(t, add ? vload_f32(t) + acc[i][v] : acc[i][v]);
        }
    }
}

typedef void tile_kernel(int64_t kc, const float *a, const float *b, float *tile, int add);

#define TILE_KERNEL_(mr, nv) \
    static __attribute__((noinline)) void tile_##mr##x##nv( \
        int64_t kc, const float *a, const float *b, float *tile, int add) { \
        tile_body_(mr, nv, kc, a, b, tile, add); \
    }
#define TILE_ROW_(mr) TILE_KERNEL_(mr, 1) TILE_KERNEL_(mr, 2)
#define TILE_ENTRY_(mr) {tile_##mr##x1, tile_##mr##x2}

TILE_ROW_(1) TILE_ROW_(2) TILE_ROW_(3) TILE_ROW_(4)
#if MR >= 6
TILE_ROW_(5) TILE_ROW_(6)
#endif
#if MR >= 8
TILE_ROW_(7) TILE_ROW_(8)
#endif
#if MR >= 14
TILE_ROW_(9) TILE_ROW_(10) TILE_ROW_(11) TILE_ROW_(12) TILE_ROW_(13) TILE_ROW_(14)
#endif

/* By number of rows less one, and by number of vectors less one. */
static tile_kernel *const tile_kernels[MR][2] = {
    TILE_ENTRY_(1), TILE_ENTRY_(2), TILE_ENTRY_(3), TILE_ENTRY_(4),
#if MR >= 6
    TILE_ENTRY_(5), TILE_ENTRY_(6),
#endif
#if MR >= 8
    TILE_ENTRY_(7), TILE_ENTRY_(8),
#endif
#if MR >= 14
    TILE_ENTRY_(9), TILE_ENTRY_(10), TILE_ENTRY_(11), TILE_ENTRY_(12), TILE_ENTRY_(13),
    TILE_ENTRY_(14),
#endif
};

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

/* ---- packing ---------------------------------------------------------------------------------------- */

/* panel[k][MR] = rows x kc elements at a, whose element (i, k) is a[i * row + k * col]; one of the
   strides is 1. Lanes beyond `rows` hold zeros or what was there: no result depends on them. */
INLINE void pack_a(float *panel, const T *a, int64_t row, int64_t col, int64_t rows, int64_t kc) {
    for (int64_t i0 = 0; i0 < rows; i0 += VL) {
        const int64_t n = min_i64(VL, rows - i0), lanes = min_i64(VL, MR - i0);
        float *to = panel + i0;
        if (col == 1) {
            for (int64_t k = 0; k < kc; k += VL, to += VL * MR) {
                const int64_t nk = min_i64(VL, kc - k);
                vf x[VL];
                load_rows_(x, a + i0 * row + k, row, n, nk);
                transpose(x);
                UNROLL for (int j = 0; j < VL; j++) {
                    if (j < nk) vstoren_f32(to + j * MR, x[j], lanes);
                }
            }
        } else {
            for (int64_t k = 0; k < kc; k++) {
                vstoren_f32(to + k * MR, vloadn(a + i0 + k * col, n), lanes);
            }
        }
    }
}

/* panels[j][k][NR] = kc x cols elements at b, whose element (k, j) is b[k * row + j * col]; one of the
   strides is 1. The last panel is filled up with zeros to a whole number of vectors. */
INLINE void pack_b(float *panels, const T *b, int64_t row, int64_t col, int64_t kc, int64_t cols) {
    if (col == 1) {
        for (int64_t k = 0; k < kc; k++) {
            const T *from = b + k * row;
            float *to = panels + k * NR;
            int64_t j = 0;
            for (; j + NR <= cols; j += NR, to += kc * NR) {
                vstore_f32(to, vload(from + j));
                vstore_f32(to + VL, vload(from + j + VL));
            }
            for (; j < cols; j += VL, to += VL) {
                vstore_f32(to, vloadn(from + j, min_i64(VL, cols - j)));
            }
        }
        return;
    }
    for (int64_t j = 0; j < cols; j += VL) {
        float *to = panels + j / NR * kc * NR + j % NR;
        const int64_t n = min_i64(VL, cols - j);
        for (int64_t k = 0; k < kc; k += VL, to += VL * NR) {
            const int64_t nk = min_i64(VL, kc - k);
            vf x[VL];
            load_rows_(x, b + j * col + k, col, n, nk);
            transpose(x);
            UNROLL for (int i = 0; i < VL; i++) {
                if (i < nk) vstore_f32(to + i * NR, x[i]);
            }
        }
    }
}

#endif
