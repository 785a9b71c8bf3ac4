/* Matrix multiplication: C = epilogue(scale A B).

   A task owns a block of C, a group of rows by a block of columns, and runs over the whole of K in
   blocks of a fixed size. For each it packs its part of B into scratch, which stays in the second-level
   cache, and runs the register tile of kernels/tile.h over A's panels. Partial sums of K blocks are kept
   in scratch as fp32 and added in order, so that the bits follow from the shape alone.

   The sizes of blocks are the caller's (ops/tiles.py); `matmul_pack` packs A beforehand where many
   column blocks share it, and otherwise each task packs its own rows. */

#include "activation.h"
#include "call.h"
#include "tile.h"

/* ---- sizes, as both kernels see them ----------------------------------------------------------------- */

enum { ACCUMULATE = 1, OUTPUT_F32 = 2 };

/* Row panels of a group: `rows` rows in panels of at most MR rows, as even as possible. */
INLINE int64_t panels_of(int64_t rows) { return ceil_div(rows, MR); }

/* ---- packing A ---------------------------------------------------------------------------------------- */

/* a[panel][k][MR] for rows first .. first+rows-1 of A and kc columns; a panel's stride is `stride`. */
static void pack_rows(float *packed, int64_t stride, const T *a, int64_t row, int64_t col,
                      int64_t rows, int64_t kc) {
    int64_t panels = panels_of(rows);
    for (int64_t p = 0; p < panels; p++) {
        int64_t i = part_start(rows, panels, p), end = part_start(rows, panels, p + 1);
        pack_a(packed + p * stride, a + i * row, row, col, end - i, kc);
    }
}

/* ptr: packed, a.  dim: M, K, a's row stride, a's column stride, row groups, K blocks.
   packed [group][panel][K][MR] fp32.  tasks: row groups x K blocks. */
KERNEL(matmul_pack) {
    const int64_t M = c->dim[0], K = c->dim[1], row = c->dim[2], col = c->dim[3];
    const int64_t groups = c->dim[4], blocks = c->dim[5];
    const int64_t g = task / blocks, block = task % blocks;
    const int64_t i = part_start(M, groups, g), rows = part_start(M, groups, g + 1) - i;
    const int64_t k = part_start(K, blocks, block), kc = part_start(K, blocks, block + 1) - k;
    const int64_t group_stride = panels_of(ceil_div(M, groups)) * MR * K;
    float *packed = (float *)c->ptr[0] + g * group_stride + k * MR;
    pack_rows(packed, K * MR, (const T *)c->ptr[1] + i * row + k * col, row, col, rows, kc);
}

/* ---- the epilogue ------------------------------------------------------------------------------------- */

typedef struct {
    void *out; /* T, or float with OUTPUT_F32 */
    T *pre;
    const float *bias;
    const void *residual; /* of the output's dtype */
    int64_t stride, flags, activation;
    float scale;
} epilogue;

INLINE vf load_out(const void *p, int64_t at, int64_t n, const int f32) {
    return f32 ? vloadn_f32((const float *)p + at, n) : vloadn((const T *)p + at, n);
}

/* One tile row of up to two vectors. */
INLINE void finish_rows(const epilogue *e, const float *tile, int64_t i0, int64_t j0, int64_t rows,
                        int64_t cols, const int64_t activation, const int f32) {
    const vf scale = vset(e->scale);
    for (int64_t j = 0; j < cols; j += VL) {
        const int64_t n = min_i64(VL, cols - j);
        const vf bias = e->bias ? vloadn_f32(e->bias + j0 + j, n) : vzero();
        for (int64_t i = 0; i < rows; i++) {
            const int64_t at = (i0 + i) * e->stride + j0 + j;
            vf x = vfma(vload_f32(tile + i * NR + j), scale, bias);
            if (e->pre) vstoren(e->pre + at, x, n);
            x = vactivation(activation, x);
            if (e->residual) x = x + load_out(e->residual, at, n, f32);
            if (e->flags & ACCUMULATE) x = load_out(e->out, at, n, f32) + x;
            if (f32) {
                vstoren_f32((float *)e->out + at, x, n);
            } else {
                vstoren((T *)e->out + at, x, n);
            }
        }
    }
}

static void finish(const epilogue *e, const float *tile, int64_t i, int64_t j, int64_t rows,
                   int64_t cols) {
    const int f32 = sizeof(T) == sizeof(float) || (e->flags & OUTPUT_F32);
    if (e->activation == ACT_NONE && f32) {
        finish_rows(e, tile, i, j, rows, cols, ACT_NONE, 1);
    } else if (e->activation == ACT_NONE) {
        finish_rows(e, tile, i, j, rows, cols, ACT_NONE, 0);
    } else {
        finish_rows(e, tile, i, j, rows, cols, e->activation, f32);
    }
}

/* ---- few rows ------------------------------------------------------------------------------------------

   With one or two rows, as when a model writes token by token, B is read once and packing it would cost
   more than the product. The order of summation is that of the register tile: a row has the same bits
   alone and among others. */

#define FEW_ROWS 2
#define FEW_VECTORS (VL == 8 ? 4 : 8)

typedef struct {
    const T *a, *b;
    int64_t a_row, a_col, b_row, b_col, K, k_blocks;
} product;

/* total[v][i] = row i of A times columns v VL .. of B, which has unit column stride; `cols` in all. */
INLINE void rows_by_columns(const product *p, vf total[FEW_VECTORS][FEW_ROWS], const int m,
                            const int whole, int64_t j, int64_t cols) {
    for (int64_t kb = 0; kb < p->k_blocks; kb++) {
        vf sum[FEW_VECTORS][FEW_ROWS] = {0};
        const int64_t end = part_start(p->K, p->k_blocks, kb + 1);
        for (int64_t k = part_start(p->K, p->k_blocks, kb); k < end; k++) {
            const T *b = p->b + k * p->b_row + j;
            vf a[FEW_ROWS];
            UNROLL for (int i = 0; i < m; i++) a[i] = vset(to_f32(p->a[i * p->a_row + k * p->a_col]));
            UNROLL for (int v = 0; v < FEW_VECTORS; v++) {
                const int64_t n = cols - v * VL;
                if (!whole && n <= 0) break;
                vf x = whole ? vload(b + v * VL) : vloadn(b + v * VL, min_i64(VL, n));
                UNROLL for (int i = 0; i < m; i++) sum[v][i] = vfma(a[i], x, sum[v][i]);
            }
        }
        UNROLL for (int v = 0; v < FEW_VECTORS; v++) {
            UNROLL for (int i = 0; i < m; i++) total[v][i] = kb ? total[v][i] + sum[v][i] : sum[v][i];
        }
    }
}

/* total[i] = row i of A times VL columns of B, which has unit row stride. */
INLINE void rows_by_rows(const product *p, vf total[FEW_ROWS], const int m, int64_t j, int64_t cols) {
    for (int64_t kb = 0; kb < p->k_blocks; kb++) {
        vf sum[FEW_ROWS] = {0};
        const int64_t end = part_start(p->K, p->k_blocks, kb + 1);
        for (int64_t k = part_start(p->K, p->k_blocks, kb); k < end; k += VL) {
            const int64_t nk = min_i64(VL, end - k);
            vf x[VL];
            load_rows_(x, p->b + j * p->b_col + k, p->b_col, cols, nk);
            transpose(x);
            UNROLL for (int l = 0; l < VL; l++) {
                if (l == nk) break;
                UNROLL for (int i = 0; i < m; i++) {
                    vf a = vset(to_f32(p->a[i * p->a_row + (k + l) * p->a_col]));
                    sum[i] = vfma(a, x[l], sum[i]);
                }
            }
        }
        UNROLL for (int i = 0; i < m; i++) total[i] = kb ? total[i] + sum[i] : sum[i];
    }
}

INLINE void few_rows(const product *p, const epilogue *e, const int m, int64_t i0, int64_t j0,
                     int64_t cols) {
    float tile[FEW_ROWS * NR];
    const int64_t step = p->b_col == 1 ? FEW_VECTORS * VL : VL;
    for (int64_t j = 0; j < cols; j += step) {
        const int64_t n = min_i64(step, cols - j);
        vf total[FEW_VECTORS][FEW_ROWS] = {0};
        if (p->b_col != 1) {
            rows_by_rows(p, total[0], m, j0 + j, n);
        } else if (n == step) {
            rows_by_columns(p, total, m, 1, j0 + j, n);
        } else {
            rows_by_columns(p, total, m, 0, j0 + j, n);
        }
        for (int64_t v = 0; v * VL < n; v++) {
            UNROLL for (int i = 0; i < m; i++) vstore_f32(tile + i * NR, total[v][i]);
            finish(e, tile, i0, j0 + j + v * VL, m, min_i64(VL, n - v * VL));
        }
    }
}

/* ---- the product -------------------------------------------------------------------------------------- */

/* ptr: out [M, N], pre [M, N] or NULL, a, b, bias [N] or NULL, residual [M, N] or NULL, packed a or NULL.
   dim: M, N, K, a's row and column stride, b's row and column stride, the output's row stride, row
   groups, column blocks, K blocks, activation, flags.  num: scale.
   pre = scale a b + bias;  out = (out +) (residual +) f(pre).  tasks: row groups x column blocks. */
KERNEL(matmul) {
    const int64_t M = c->dim[0], N = c->dim[1], K = c->dim[2];
    const int64_t a_row = c->dim[3], a_col = c->dim[4], b_row = c->dim[5], b_col = c->dim[6];
    const int64_t groups = c->dim[8], col_blocks = c->dim[9], k_blocks = c->dim[10];
    const epilogue e = {.out = c->ptr[0], .pre = c->ptr[1], .bias = c->ptr[4],
                        .residual = c->ptr[5], .stride = c->dim[7], .activation = c->dim[11],
                        .flags = c->dim[12], .scale = (float)c->num[0]};
    const T *a = c->ptr[2], *b = c->ptr[3];
    const float *packed = c->ptr[6];

    const int64_t g = task % groups, block = task / groups;
    const int64_t i0 = part_start(M, groups, g), rows = part_start(M, groups, g + 1) - i0;
    /* Columns are dealt in units of 32, the widest NR, so that only the last block has a tail. */
    const int64_t units = ceil_div(N, 32);
    const int64_t j0 = part_start(units, col_blocks, block) * 32;
    const int64_t cols = min_i64(N, part_start(units, col_blocks, block + 1) * 32) - j0;
    if (rows <= FEW_ROWS) {
        const product p = {.a = a + i0 * a_row, .b = b, .a_row = a_row, .a_col = a_col,
                           .b_row = b_row, .b_col = b_col, .K = K, .k_blocks = k_blocks};
        if (rows == 1) {
            few_rows(&p, &e, 1, i0, j0, cols);
        } else {
            few_rows(&p, &e, 2, i0, j0, cols);
        }
        return;
    }

    const int64_t kc_most = ceil_div(K, k_blocks);
    const int64_t panels = panels_of(rows), col_panels = ceil_div(cols, NR);
    const int64_t group_stride = panels_of(ceil_div(M, groups)) * MR * K;

    float *b_panels = scratch;
    float *tiles = b_panels + col_panels * NR * kc_most;
    float *a_panels = tiles + panels * col_panels * MR * NR;

    for (int64_t kb = 0; kb < k_blocks; kb++) {
        const int64_t k = part_start(K, k_blocks, kb), kc = part_start(K, k_blocks, kb + 1) - k;
        const float *a_block = packed + g * group_stride + k * MR;
        int64_t a_stride = K * MR;
        if (!packed) {
            a_block = a_panels;
            a_stride = kc * MR;
            pack_rows(a_panels, a_stride, a + i0 * a_row + k * a_col, a_row, a_col, rows, kc);
        }
        pack_b(b_panels, b + k * b_row + j0 * b_col, b_row, b_col, kc, cols);
        for (int64_t jp = 0; jp < col_panels; jp++) {
            const int64_t j = jp * NR, n = min_i64(NR, cols - j);
            for (int64_t p = 0; p < panels; p++) {
                const int64_t i = part_start(rows, panels, p);
                const int64_t m = part_start(rows, panels, p + 1) - i;
                float *tile = tiles + (k_blocks > 1 ? (jp * panels + p) * MR * NR : 0);
                tile_kernels[m - 1][n > VL](kc, a_block + p * a_stride, b_panels + j * kc, tile, kb > 0);
                if (kb == k_blocks - 1) finish(&e, tile, i0 + i, j0 + j, m, n);
            }
        }
    }
}
