/* Products of few rows: A B with 1 to 8 rows of A, as when a model writes token by token.

   Such a product is as fast as B can be read, once, and packing B would cost more than multiplying. The
   order of summation is that of the register tile (panel.h): a row has the same bits alone and among
   others. So each sum runs along K in one chain, and speed comes from many sums side by side: columns of B
   where they lie side by side, and else lines of B, a vector of which is transposed in registers. */
#ifndef TREADLE_GEMV_H
#define TREADLE_GEMV_H

#include "panel.h"

#define FEW_ROWS 8
#define FEW_COLUMNS 512 /* whose sums stay in the first-level cache */

/* Vectors of columns that are handled at a time: at least two, and whole cache lines of a row of B. */
#define LINE_ELEMENTS (CACHE_LINE / (int)sizeof(T))
#define ACROSS (2 * VL < LINE_ELEMENTS ? LINE_ELEMENTS / VL : 2)
/* Units of K that go into a sum between loading and storing it; and how far ahead rows are fetched. */
#define FEW_UNITS (ACROSS == 2 ? 4 : 2)
#define ONE_UNITS 8
#define AHEAD_UNITS 16
/* Groups of VL lines whose sums run side by side, and bytes of a line that are fetched ahead. */
#define GROUPS 2
#define AHEAD_BYTES 512

typedef struct {
    operand a, b;
    int64_t rows, K, k_blocks;
} few_product;

/* ---- B with columns side by side -------------------------------------------------------------------- */

/* b[v] = the units of K that begin with element k, for ACROSS vectors of columns from j on, of which `left`
   are there. */
INLINE void load_across(vf b[ACROSS], const few_product *p, int64_t k, int64_t j, int64_t left) {
    const int64_t next = k + 1 < p->K ? p->b.k : 0;
    const T *from = p->b.at + k * p->b.k + j;
    const T *ahead = from + AHEAD_UNITS * UNIT * p->b.k;
    UNROLL for (int r = 0; r < UNIT; r++) {
        UNROLL for (int i = 0; i < ACROSS * VL; i += LINE_ELEMENTS) __builtin_prefetch(ahead + r * p->b.k + i);
    }
    if (left >= ACROSS * VL && (UNIT == 1 || next)) {
        UNROLL for (int v = 0; v < ACROSS; v += 2) join_units_2(b + v, from + v * VL, next);
    } else {
        UNROLL for (int v = 0; v < ACROSS; v++) {
            const int64_t n = min_i64(VL, left - v * VL);
            b[v] = n > 0 ? join_units(from + v * VL, next, n) : vzero();
        }
    }
}

/* sum[i][j] += a[u][i] b[u][j] for n units u, the first of which begins with element k. */
INLINE void few_by_columns(const few_product *p, const int m, const int n, int64_t k, const float *a,
                           float *sum, int64_t j0, int64_t cols) {
    for (int64_t j = 0; j < cols; j += ACROSS * VL) {
        vf b[FEW_UNITS][ACROSS];
        UNROLL for (int u = 0; u < n; u++) load_across(b[u], p, k + u * UNIT, j0 + j, cols - j);
        UNROLL for (int i = 0; i < m; i++) {
            float *to = sum + i * FEW_COLUMNS + j;
            UNROLL for (int v = 0; v < ACROSS; v++) {
                vf s = vload_f32(to + v * VL);
                UNROLL for (int u = 0; u < n; u++) s = vdot(vset(a[u * m + i]), b[u][v], s);
                vstore_f32(to + v * VL, s);
            }
        }
    }
}

/* The same for one row, which needs no b to stay. */
INLINE void one_by_columns(const few_product *p, const int n, int64_t k, const float *a, float *sum,
                           int64_t j0, int64_t cols) {
    for (int64_t j = 0; j < cols; j += ACROSS * VL) {
        vf s[ACROSS];
        UNROLL for (int v = 0; v < ACROSS; v++) s[v] = vload_f32(sum + j + v * VL);
        UNROLL for (int u = 0; u < n; u++) {
            vf b[ACROSS];
            load_across(b, p, k + u * UNIT, j0 + j, cols - j);
            UNROLL for (int v = 0; v < ACROSS; v++) s[v] = vdot(vset(a[u]), b[v], s[v]);
        }
        UNROLL for (int v = 0; v < ACROSS; v++) vstore_f32(sum + j + v * VL, s[v]);
    }
}

/* sum[i][j] for kc elements from k on. */
INLINE void sum_by_columns(const few_product *p, const int m, int64_t k, int64_t kc, const float *a,
                           float *sum, int64_t j0, int64_t cols) {
    int64_t u = 0;
    memset(sum, 0, sizeof(float) * m * FEW_COLUMNS);
    if (m == 1) {
        for (; u + ONE_UNITS <= units(kc); u += ONE_UNITS) {
            one_by_columns(p, ONE_UNITS, k + u * UNIT, a + u, sum, j0, cols);
        }
        for (; u < units(kc); u++) one_by_columns(p, 1, k + u * UNIT, a + u, sum, j0, cols);
        return;
    }
    for (; u + FEW_UNITS <= units(kc); u += FEW_UNITS) {
        few_by_columns(p, m, FEW_UNITS, k + u * UNIT, a + u * m, sum, j0, cols);
    }
    for (; u < units(kc); u++) few_by_columns(p, m, 1, k + u * UNIT, a + u * m, sum, j0, cols);
}

/* ---- B with columns that run along K ---------------------------------------------------------------- */

/* sum[i][j] of GROUPS x VL columns, of which `cols` are there, for kc elements from k on. */
INLINE void sum_by_lines(const few_product *p, const int m, int64_t k, int64_t kc, const float *a,
                         float *sum, int64_t j, int64_t cols) {
    vf s[GROUPS][FEW_ROWS] = {{{0}}};
    const operand b = at_k(at_line(p->b, j), k);
    const int64_t reach = AHEAD_BYTES / (int64_t)sizeof(T), beyond = GROUPS * VL * b.line - kc;
    for (int64_t from = 0; from < kc; from += UNIT * VL, a += VL * m) {
        const int64_t n = min_i64(UNIT * VL, kc - from), nu = units(n);
        const int64_t ahead = reach + (from + reach < kc ? 0 : beyond);
        UNROLL for (int g = 0; g < GROUPS; g++) {
            const int64_t left = cols - g * VL;
            if (left <= 0) break;
            vf x[VL];
            load_lines(x, at_k(at_line(b, g * VL), from), VL, min_i64(VL, left), n, ahead);
            transpose(x);
            UNROLL for (int u = 0; u < VL; u++) {
                if (u == nu) break;
                UNROLL for (int i = 0; i < m; i++) s[g][i] = vdot(vset(a[u * m + i]), x[u], s[g][i]);
            }
        }
    }
    UNROLL for (int g = 0; g < GROUPS; g++) {
        UNROLL for (int i = 0; i < m; i++) vstore_f32(sum + i * FEW_COLUMNS + g * VL, s[g][i]);
    }
}

/* ---- both ------------------------------------------------------------------------------------------- */

/* Adds A B over n elements of K from k on, a chain, to total[i][j]; the first one sets it. */
INLINE void few_chain(const few_product *p, const int m, float *total, int64_t j0, int64_t cols, int64_t k,
                      int64_t n, float *scratch) {
    float *sum = scratch, *packed = sum + FEW_ROWS * FEW_COLUMNS;
    const operand at = at_k(p->a, k);
    const float *a = packed;
    if (m == 1 && at.k == 1 && UNIT * sizeof(T) == sizeof(float) && p->K % UNIT == 0) {
        a = (const float *)at.at;
    } else if (m == 1 && at.k == 1 && UNIT == 1) {
        int64_t i = 0;
        for (; i + VL <= n; i += VL) vstore_f32(packed + i, vload(at.at + i));
        if (i < n) vstoren_f32(packed + i, vloadn(at.at + i, n - i), n - i);
    } else {
        pack_panel(packed, m, at, p->rows, n);
    }
    if (p->b.k == 1) {
        for (int64_t j = 0; j < cols; j += GROUPS * VL) {
            sum_by_lines(p, m, k, n, a, sum + j, j0 + j, min_i64(GROUPS * VL, cols - j));
        }
    } else {
        sum_by_columns(p, m, k, n, a, sum, j0, cols);
    }
    for (int i = 0; i < m; i++) {
        for (int64_t at = i * FEW_COLUMNS, j = 0; j < cols; j += VL) {
            vf s = vload_f32(sum + at + j);
            vstore_f32(total + at + j, k ? vload_f32(total + at + j) + s : s);
        }
    }
}

/* total[i][j] of up to FEW_COLUMNS columns from j0 on; m >= rows, and what is beyond them is not read. */
INLINE void few_columns(const few_product *p, const int m, float *total, int64_t j0, int64_t cols,
                        float *scratch) {
    for (int64_t kb = 0; kb < p->k_blocks; kb++) {
        int64_t k = k_start(p->K, p->k_blocks, kb);
        const int64_t end = k_start(p->K, p->k_blocks, kb + 1), step = UNIT * chain_length(units(end - k));
        do {
            few_chain(p, m, total, j0, cols, k, min_i64(step, end - k), scratch);
            k += step;
        } while (k < end);
    }
}

#endif
