/* Products of small matrices in scratch: fp32, C[rows][vectors VL], rows a multiple of ROWS. Attention is
   made of them. A sum over k runs from first to last, in one multiply-add each. */
#ifndef TREADLE_PRODUCT_H
#define TREADLE_PRODUCT_H

#include "tile.h"

#define ROWS 8 /* rows of a product come in this number */
#if VL == 16 || defined(__aarch64__)
#define WIDE 4 /* vectors of a row that a register tile holds, by the number of registers */
#else
#define WIDE 2
#endif

INLINE int64_t round_up(int64_t n, int64_t unit) { return ceil_div(n, unit) * unit; }

enum { STORE, ADD, RESCALE };

/* A(m, k) = a[m * am + k * ak], one of the strides 1; B and C have rows of `bk` and `cm` floats. */
typedef struct {
    const float *a;
    int64_t am, ak;
    const float *b;
    int64_t bk;
    float *c;
    int64_t cm;
} operands;

/* One register tile of C = start + A B: start is 0, C, or C times a factor for each column. */
INLINE void register_tile(const int rows, const int vectors, const int mode, operands o, int64_t k,
                          const float *factor) {
    vf acc[ROWS][WIDE];
    UNROLL for (int i = 0; i < rows; i++) {
        UNROLL for (int v = 0; v < vectors; v++) {
            acc[i][v] = mode == STORE ? vzero() : vload_f32(o.c + i * o.cm + v * VL);
            if (mode == RESCALE) acc[i][v] *= vload_f32(factor + v * VL);
        }
    }
    for (; k > 0; k--, o.a += o.ak, o.b += o.bk) {
        vf b[WIDE];
        UNROLL for (int v = 0; v < vectors; v++) b[v] = vload_f32(o.b + v * VL);
        UNROLL for (int i = 0; i < rows; i++) {
            vf a = vset(o.a[i * o.am]);
            UNROLL for (int v = 0; v < vectors; v++) acc[i][v] = vfma(a, b[v], acc[i][v]);
        }
    }
    UNROLL for (int i = 0; i < rows; i++) {
        UNROLL for (int v = 0; v < vectors; v++) vstore_f32(o.c + i * o.cm + v * VL, acc[i][v]);
    }
}

/* A column of register tiles; `triangular`: A(m, k) is zero where k < m. */
INLINE void tile_column(const int height, const int vectors, const int mode, operands o, int64_t rows,
                        int64_t k, const float *factor, int triangular) {
    for (int64_t m = 0; m < rows; m += height) {
        const int64_t skip = triangular ? m / ROWS * ROWS : 0;
        operands at = o;
        at.a += m * o.am + skip * o.ak;
        at.b += skip * o.bk;
        at.c += m * o.cm;
        register_tile(height, vectors, mode, at, k - skip, factor);
    }
}

INLINE void product(const int mode, operands o, int64_t rows, int64_t vectors, int64_t k,
                    const float *factor, int triangular) {
    for (; vectors > 0; vectors -= WIDE, o.b += WIDE * VL, o.c += WIDE * VL, factor += WIDE * VL) {
        if (vectors == 1) tile_column(8, 1, mode, o, rows, k, factor, triangular);
#if WIDE == 4
        else if (vectors == 2) tile_column(8, 2, mode, o, rows, k, factor, triangular);
        else if (vectors == 3) tile_column(4, 3, mode, o, rows, k, factor, triangular);
#endif
        else tile_column(4, WIDE, mode, o, rows, k, factor, triangular);
    }
}

/* C[rows][vectors VL] = A B with A[rows][k], rows of `am` floats. */
static void multiply(const float *a, int64_t am, const float *b, int64_t bk, float *c, int64_t cm,
                     int64_t rows, int64_t vectors, int64_t k) {
    product(STORE, (operands){a, am, 1, b, bk, c, cm}, rows, vectors, k, c, 0);
}

/* C += A B with A[rows][k]. */
static void multiply_add(const float *a, int64_t am, const float *b, int64_t bk, float *c, int64_t cm,
                         int64_t rows, int64_t vectors, int64_t k, int triangular) {
    product(ADD, (operands){a, am, 1, b, bk, c, cm}, rows, vectors, k, c, triangular);
}

/* C += A^T B with A[k][rows]. */
static void multiply_add_transposed(const float *a, int64_t ak, const float *b, int64_t bk, float *c,
                                    int64_t cm, int64_t rows, int64_t vectors, int64_t k) {
    product(ADD, (operands){a, 1, ak, b, bk, c, cm}, rows, vectors, k, c, 0);
}

/* C = C factor + A^T B with A[k][rows], a factor for each column. */
static void rescale_add_transposed(const float *a, int64_t ak, const float *b, int64_t bk, float *c,
                                   int64_t cm, int64_t rows, int64_t vectors, int64_t k,
                                   const float *factor) {
    product(RESCALE, (operands){a, 1, ak, b, bk, c, cm}, rows, vectors, k, factor, 0);
}

#endif
