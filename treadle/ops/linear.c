/* Matrix multiplication: C = epilogue(scale A B).

   One dimension of C is cut into parts, a task each; the other runs through whole. A task packs its own
   operand (columns of B, or rows of A) block by block into scratch, which stays in the second-level
   cache, and runs the register tile of kernels/panel.h over it and the panels of the operand that all
   tasks share. `matmul_pack` packs the shared one beforehand where that pays, so that every element is
   packed once. K runs in blocks of a fixed size, and each in chains of additions; their sums are fp32,
   kept in scratch and added in order, so that the bits follow from the shape alone.

   The sizes are the caller's (ops/tiles.py). Pairs of bf16 are multiplied where the compiler has
   __AVX512BF16__. */

#include "activation.h"
#include "call.h"
#include "gemv.h"

enum { ACCUMULATE = 1, OUTPUT_F32 = 2, GATED = 4 };

/* ---- packing the shared operand ------------------------------------------------------------------------ */

/* ptr: packed, operand.  dim: lines, K, the operand's line and K stride, whether lines are columns of B.
   packed [panel][K][MR or NR].  tasks: as many parts of K. */
KERNEL(matmul_pack) {
    const int64_t lines = c->dim[0], K = c->dim[1], columns = c->dim[4];
    const int64_t k = k_start(K, c->tasks, task), kc = k_start(K, c->tasks, task + 1) - k;
    const operand o = {c->ptr[1], c->dim[2], c->dim[3]};
    float *packed = c->ptr[0];
    if (!columns && in_place(o, K)) return;
    if (columns) {
        pack(packed + k / UNIT * NR, units(K) * NR, NR, at_k(o, k), lines, kc);
    } else {
        pack(packed + k / UNIT * MR, units(K) * MR, MR, at_k(o, k), lines, kc);
    }
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

/* Rows i0 .. and columns j0 .. of C from their sums, which have rows of `row` floats. */
INLINE void finish_rows(const epilogue *e, const float *sum, int64_t row, int64_t i0, int64_t j0,
                        int64_t rows, int64_t cols, const int64_t activation, const int f32) {
    const vf scale = vset(e->scale);
    for (int64_t j = 0; j < cols; j += VL) {
        const int64_t n = min_i64(VL, cols - j);
        const vf bias = e->bias ? vloadn_f32(e->bias + j0 + j, n) : vzero();
        for (int64_t i = 0; i < rows; i++) {
            const int64_t at = (i0 + i) * e->stride + j0 + j;
            vf x = vfma(vload_f32(sum + i * row + j), scale, bias);
            if (e->pre) storen_sum(e->pre + at, x, n);
            /* Of what is stored, so that it can be computed again from there. */
            if (e->flags & GATED) {
                x = vactivation(activation, load_out(e->residual, at, n, f32)) * stored_sum(x);
            } else {
                if (activation != ACT_NONE) x = vactivation(activation, stored_sum(x));
                if (e->residual) x = x + load_out(e->residual, at, n, f32);
            }
            if (e->flags & ACCUMULATE) x = load_out(e->out, at, n, f32) + x;
            if (f32) {
                vstoren_f32((float *)e->out + at, x, n);
            } else {
                storen_sum((T *)e->out + at, x, n);
            }
        }
    }
}

INLINE int is_f32(const epilogue *e) {
    return sizeof(T) == sizeof(float) || (e->flags & OUTPUT_F32);
}

static void finish(const epilogue *e, const float *sum, int64_t row, int64_t i, int64_t j, int64_t rows,
                   int64_t cols) {
    const int f32 = is_f32(e);
    if (e->activation == ACT_NONE && f32) {
        finish_rows(e, sum, row, i, j, rows, cols, ACT_NONE, 1);
    } else if (e->activation == ACT_NONE) {
        finish_rows(e, sum, row, i, j, rows, cols, ACT_NONE, 0);
    } else {
        finish_rows(e, sum, row, i, j, rows, cols, e->activation, f32);
    }
}

/* ---- few rows ------------------------------------------------------------------------------------------ */

static void few_rows(const few_product *p, const epilogue *e, int64_t j0, int64_t cols, float *scratch) {
    float *total = scratch;
    scratch += FEW_ROWS * FEW_COLUMNS;
    for (int64_t end = j0 + cols; j0 < end; j0 += FEW_COLUMNS) {
        const int64_t n = min_i64(FEW_COLUMNS, end - j0);
        if (p->rows == 1) {
            few_columns(p, 1, total, j0, n, scratch);
        } else if (p->rows == 2) {
            few_columns(p, 2, total, j0, n, scratch);
        } else if (p->rows <= 4) {
            few_columns(p, 4, total, j0, n, scratch);
        } else {
            few_columns(p, FEW_ROWS, total, j0, n, scratch);
        }
        finish(e, total, FEW_COLUMNS, 0, j0, p->rows, n);
    }
}

/* ---- the product -------------------------------------------------------------------------------------- */

/* Whether the register tile may write its sums, and the bias, into the output itself. */
INLINE int is_plain(const epilogue *e, int64_t K) {
    const int adds = (e->flags & ACCUMULATE) && (!is_f32(e) || e->bias || units(K) > CHAIN);
    return e->activation == ACT_NONE && !e->pre && !e->residual && !adds && e->scale == 1.0f;
}

/* Memory that is wanted soon: rows of `bytes` bytes, of which `done` of the first have been asked for. */
typedef struct {
    const char *row;
    int64_t stride, rows, bytes, done;
} region;

INLINE region region_of(operand o, int64_t lines, int64_t kc) {
    const int64_t along = o.k == 1, stride = along ? o.line : o.k;
    return (region){(const char *)o.at, stride * (int64_t)sizeof(T), along ? lines : kc,
                    (along ? kc : lines) * (int64_t)sizeof(T), 0};
}

INLINE int64_t cache_lines(const region *r) { return r->rows * ceil_div(r->bytes, CACHE_LINE); }

/* Asks for the next n cache lines of it, into the second-level cache. */
INLINE void fetch(region *r, int64_t n) {
    for (; n > 0 && r->rows > 0; n--) {
        __builtin_prefetch(r->row + r->done, 0, 2);
        r->done += CACHE_LINE;
        if (r->done >= r->bytes) {
            r->done = 0;
            r->row += r->stride;
            r->rows--;
        }
    }
}

/* Asks for a tile of C, to be written. */
INLINE void fetch_out(const char *p, int64_t stride, int64_t rows, int64_t bytes) {
    for (int64_t i = 0; i < rows; i++, p += stride) {
        for (int64_t at = 0; at < bytes; at += CACHE_LINE) __builtin_prefetch(p + at, 1);
    }
}

/* A product as its tasks see it. Lines are what is cut: columns of B, or rows of A. */
typedef struct {
    operand a, b;
    const float *shared; /* panels of the other operand, over the whole of K */
    int64_t M, N, K, k_blocks, parts;
    int by_rows, in_place, plain, out_bytes;
    const epilogue *e;
} product;

/* Columns are dealt in units of 32, the widest NR, so that only the last part has a tail. */
INLINE int64_t first_line(const product *p, int64_t part) {
    const int64_t lines = p->by_rows ? p->M : p->N, grain = p->by_rows ? 1 : 32;
    return min_i64(lines, part_start(ceil_div(lines, grain), p->parts, part) * grain);
}

INLINE region block_region(const product *p, int64_t part, int64_t kb) {
    const int64_t line = first_line(p, part), k = k_start(p->K, p->k_blocks, kb);
    const operand own = at_k(at_line(p->by_rows ? p->a : p->b, line), k);
    return region_of(own, first_line(p, part + 1) - line, k_start(p->K, p->k_blocks, kb + 1) - k);
}

/* A tile's sums over a block of K, chain by chain; `sums` is where one waits for the next. */
INLINE void multiply_tile(tile_kernel *kernel, int64_t depth, int64_t chain, const float *a, int64_t a_row,
                          int64_t a_step, const float *b, const float *ahead, float *sums, tile_end end) {
    for (; depth > chain; depth -= chain) {
        const tile_end more = {.from = end.from, .to = sums, .from_row = end.from_row, .to_row = NR};
        kernel(chain, a, a_row, a_step, b, ahead, &more);
        end.from = sums;
        end.from_row = NR;
        a += chain * a_step;
        b += chain * NR;
        ahead += chain * (CACHE_LINE / 4);
    }
    kernel(depth, a, a_row, a_step, b, ahead, &end);
}

/* Adds the products of block kb of K for all tiles of a part. `own` and `tiles` are scratch. */
INLINE void multiply_block(const product *p, const int by_rows, int64_t part, int64_t kb, float *own,
                           float *tiles) {
    const int own_width = by_rows ? MR : NR, shared_width = by_rows ? NR : MR;
    const int64_t k = k_start(p->K, p->k_blocks, kb), kc = k_start(p->K, p->k_blocks, kb + 1) - k;
    const int64_t line = first_line(p, part), lines = first_line(p, part + 1) - line;
    const int64_t across = by_rows ? p->N : p->M, depth = units(kc), chain = chain_length(depth);
    const int64_t own_panels = panels_of(own_width, lines);
    const int64_t shared_panels = panels_of(shared_width, across);
    const int last = kb == p->k_blocks - 1;
    if (!by_rows || !p->in_place) {
        pack(own, depth * own_width, own_width, at_k(at_line(by_rows ? p->a : p->b, line), k), lines, kc);
    }
    region next = {0};
    if (!last) {
        next = block_region(p, part, kb + 1);
    } else if (part + 1 < p->parts) {
        next = block_region(p, part + 1, 0);
    }
    const int64_t fetches = ceil_div(cache_lines(&next), own_panels * shared_panels);
    for (int64_t q = 0; q < shared_panels; q++) {
        const float *shared = p->shared + (q * units(p->K) + k / UNIT) * shared_width;
        /* The panel that follows, if it is not the first of another part. */
        const float *ahead = q + 1 < shared_panels ? shared + units(p->K) * shared_width
                             : last                ? shared
                                                   : p->shared + (k + kc) / UNIT * shared_width;
        const int64_t across_q = panel_start(shared_width, across, q);
        const int64_t n_shared = panel_start(shared_width, across, q + 1) - across_q;
        int64_t line_s = 0, n_own;
        for (int64_t s = 0; s < own_panels; s++, line_s += n_own) {
            n_own = panel_start(own_width, lines, s + 1) - line_s;
            const int64_t i = by_rows ? line + line_s : across_q, j = by_rows ? across_q : line + line_s;
            const int64_t m = by_rows ? n_own : n_shared, n = by_rows ? n_shared : n_own;
            const float *panel = own + s * depth * own_width;
            const float *b = by_rows ? shared : panel;
            const float *a = by_rows ? panel : shared;
            int64_t a_row = 1, a_step = MR;
            if (p->in_place) {
                a = (const float *)(p->a.at + i * p->a.line + k);
                a_row = p->a.line / UNIT;
                a_step = 1;
            }
            tile_kernel *kernel = tile_kernels[m - 1][n > VL];
            float *tile = tiles + (p->k_blocks > 1 ? (q * own_panels + s) * MR * NR : 0);
            tile_end end = {.from = kb ? tile : NULL, .to = tile, .from_row = NR, .to_row = NR};
            const float *ahead_s = ahead + (by_rows ? s % 2 * depth * VL : 0);
            fetch(&next, fetches);
            if (!last) {
                multiply_tile(kernel, depth, chain, a, a_row, a_step, b, ahead_s, tile, end);
                continue;
            }
            const epilogue *e = p->e;
            const int64_t at = i * e->stride + j;
            char *out = (char *)e->out + at * p->out_bytes;
            fetch_out(out, e->stride * p->out_bytes, m, n * p->out_bytes);
            if (p->plain && n % VL == 0) {
                if (e->flags & ACCUMULATE) {
                    end.from = (float *)out;
                    end.from_row = e->stride;
                }
                end.bias = e->bias ? e->bias + j : NULL;
                end.to = out;
                end.to_row = e->stride;
                end.narrow = !is_f32(e);
                multiply_tile(kernel, depth, chain, a, a_row, a_step, b, ahead_s, tile, end);
            } else {
                multiply_tile(kernel, depth, chain, a, a_row, a_step, b, ahead_s, tile, end);
                finish(e, tile, NR, i, j, m, n);
            }
        }
    }
}

/* As many floats as whole cache lines hold: what follows them in scratch is aligned. */
INLINE int64_t whole_lines(int64_t floats) {
    return ceil_div(floats, CACHE_LINE / 4) * (CACHE_LINE / 4);
}

INLINE void multiply(product *p, const int by_rows, int64_t task, int64_t blocks, float *scratch) {
    const int own_width = by_rows ? MR : NR, shared_width = by_rows ? NR : MR;
    if (!p->shared && (by_rows || !p->in_place)) {
        const int64_t across = by_rows ? p->N : p->M;
        p->shared = scratch;
        pack(scratch, units(p->K) * shared_width, shared_width, by_rows ? p->b : p->a, across, p->K);
        scratch += whole_lines(panels_of(shared_width, across) * shared_width * units(p->K));
    }
    for (int64_t part = task * blocks; part < (task + 1) * blocks; part++) {
        const int64_t lines = first_line(p, part + 1) - first_line(p, part);
        const int64_t depth = units(2 * ceil_div(ceil_div(p->K, 2), p->k_blocks));
        float *tiles = scratch + whole_lines(panels_of(own_width, lines) * own_width * depth);
        if (lines == 0) continue;
        for (int64_t kb = 0; kb < p->k_blocks; kb++) {
            multiply_block(p, by_rows, part, kb, scratch, tiles);
        }
    }
}

/* ptr: out [M, N], pre [M, N] or NULL, a, b, bias [N] or NULL, residual [M, N] or NULL, the packed shared
   operand or NULL.
   dim: M, N, K, a's row and column stride, b's row and column stride, the output's row stride, whether
   rows are cut, blocks of a part, K blocks, activation, flags.  num: scale.
   pre = scale a b + bias;  out = (out +) (residual +) f(pre), or f(residual) pre with GATED.  tasks: parts of the rows or columns. */
KERNEL(matmul) {
    const int64_t blocks = c->dim[9];
    const epilogue e = {.out = c->ptr[0], .pre = c->ptr[1], .bias = c->ptr[4],
                        .residual = c->ptr[5], .stride = c->dim[7], .activation = c->dim[11],
                        .flags = c->dim[12], .scale = (float)c->num[0]};
    product p = {.a = {c->ptr[2], c->dim[3], c->dim[4]}, .b = {c->ptr[3], c->dim[6], c->dim[5]},
                 .shared = c->ptr[6], .M = c->dim[0], .N = c->dim[1], .K = c->dim[2],
                 .by_rows = c->dim[8] != 0, .k_blocks = c->dim[10], .parts = c->tasks * blocks,
                 .in_place = in_place((operand){c->ptr[2], c->dim[3], c->dim[4]}, c->dim[2]),
                 .plain = is_plain(&e, c->dim[2]), .out_bytes = is_f32(&e) ? 4 : 2, .e = &e};
    if (p.M <= FEW_ROWS) {
        const few_product few = {.a = p.a, .b = p.b, .rows = p.M, .K = p.K, .k_blocks = p.k_blocks};
        const int64_t j = first_line(&p, task);
        few_rows(&few, &e, j, first_line(&p, task + 1) - j, scratch);
    } else if (p.by_rows) {
        multiply(&p, 1, task, blocks, scratch);
    } else {
        multiply(&p, 0, task, blocks, scratch);
    }
}
