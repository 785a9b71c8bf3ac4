/* Causal attention in flash form, forward and backward. See attention.py.

   Scores are kept transposed, [key][query]: softmax then runs down the columns of a tile, maxima and
   sums are vectors over queries, and no lane ever meets another. K and V enter every product as they
   lie in memory, a row a key, and only a block of queries is transposed, once.

   A task owns a batch element, a key/value head, and every splits-th block of queries of all query
   heads that share it. It packs K and V as fp32 once and adds in a fixed order: heads, then blocks of
   queries, then blocks of keys. */

#include "activation.h"
#include "call.h"
#include "philox.h"
#include "product.h"

#define STRIP (16 / VL) /* vectors of queries on the diagonal that share one limit of keys */
#define LOWEST (-3.0e38f) /* finite: exp(-inf - LOWEST) is 0 where exp(-inf + inf) is NaN */

/* ---- sizes and scratch ---------------------------------------------------------------------------- */

typedef struct {
    int64_t time, heads, kv_heads, size;
    int64_t rows, padded, block; /* time and size rounded up, in scratch; queries and keys of a tile */
    int64_t splits, window; /* a query sees so many keys at most, its own the last of them */
    int64_t group, row;            /* query heads of a key head; numbers in a row of qkv */
    int64_t batch, kv_head, split; /* the task's own */
    float scale, cap; /* of scores; no cap where it is 0 */
} sizes;

INLINE sizes sizes_of(const call *c, int64_t task) {
    sizes s = {.time = c->dim[0], .heads = c->dim[1], .kv_heads = c->dim[2], .size = c->dim[3],
               .rows = c->dim[4], .padded = c->dim[5], .block = c->dim[6], .splits = c->dim[7],
               .window = c->dim[10], .scale = (float)c->num[0], .cap = (float)c->num[2]};
    s.group = s.heads / s.kv_heads;
    s.row = (s.heads + 2 * s.kv_heads) * s.size;
    s.split = task % s.splits;
    s.kv_head = task / s.splits % s.kv_heads;
    s.batch = task / s.splits / s.kv_heads;
    return s;
}

/* Keys that the split's last block of queries sees. */
INLINE int64_t keys_of(const sizes *s) {
    int64_t blocks = ceil_div(s->time, s->block);
    int64_t last = s->split + (blocks - 1 - s->split) / s->splits * s->splits;
    return min_i64(s->time, (last + 1) * s->block);
}

/* The first block of keys that the block of queries from i sees. */
INLINE int64_t first_keys(const sizes *s, int64_t i) {
    const int64_t key = i - s->window + 1;
    return key > 0 ? key / s->block * s->block : 0;
}

INLINE float *take(float **free, int64_t n) {
    float *p = *free;
    *free += n;
    return p;
}

/* ---- packing and storing -------------------------------------------------------------------------- */

/* to[i][padded] = scale * from[i][size] as fp32, filled up with zeros, rows to a multiple of ROWS. */
static void pack(float *to, const T *from, int64_t row, int64_t rows, const sizes *s, float scale) {
    for (int64_t i = 0; i < rows; i++) {
        for (int64_t d = 0; d < s->padded; d += VL) {
            int64_t n = s->size - d;
            vf x = n >= VL ? vload(from + i * row + d) : vloadn(from + i * row + d, n > 0 ? n : 0);
            vstore_f32(to + i * s->padded + d, x * vset(scale));
        }
    }
    int64_t rest = round_up(rows, ROWS) - rows;
    memset(to + rows * s->padded, 0, (size_t)(rest * s->padded) * sizeof(float));
}

/* to[d][block] = scale * from[i][size] transposed, filled up with zeros to whole vectors. */
static void pack_transposed(float *to, const T *from, int64_t row, int64_t rows, const sizes *s,
                            float scale) {
    for (int64_t d = 0; d < s->size; d += VL) {
        for (int64_t i = 0; i < rows; i += VL) {
            vf x[VL];
            load_rows_(x, from + i * row + d, row, min_i64(VL, rows - i), min_i64(VL, s->size - d));
            transpose(x);
            UNROLL for (int j = 0; j < VL; j++) {
                vstore_f32(to + (d + j) * s->block + i, x[j] * vset(scale));
            }
        }
    }
}

/* to[i][size] = factor[i] * from[d][block] transposed. */
static void store_transposed(T *to, int64_t row, int64_t rows, const float *from, const sizes *s,
                             const float *factor) {
    for (int64_t i = 0; i < rows; i += VL) {
        const int64_t n = min_i64(VL, rows - i);
        const vf f = vload_f32(factor + i);
        for (int64_t d = 0; d < s->size; d += VL) {
            const int64_t nd = min_i64(VL, s->size - d);
            vf x[VL];
            UNROLL for (int j = 0; j < VL; j++) {
                x[j] = j < nd ? vload_f32(from + (d + j) * s->block + i) * f : vzero();
            }
            transpose(x);
            UNROLL for (int j = 0; j < VL; j++) {
                if (j < n) vstoren(to + (i + j) * row + d, x[j], nd);
            }
        }
    }
}

/* dot[i] = a[i] . b[i], rows of n floats; 0 for rows up to a whole number of vectors. */
static void row_dots(float *dot, const T *a, const T *b, int64_t row, int64_t rows, int64_t n) {
    for (int64_t i = 0; i < rows; i += VL) {
        vf x[VL];
        UNROLL for (int j = 0; j < VL; j++) {
            x[j] = vzero();
            for (int64_t d = 0; i + j < rows && d < n; d += VL) {
                int64_t at = (i + j) * row + d, m = min_i64(VL, n - d);
                x[j] = vfma(vloadn(a + at, m), vloadn(b + at, m), x[j]);
            }
        }
        transpose(x);
        vf sum = x[0];
        UNROLL for (int j = 1; j < VL; j++) sum += x[j];
        vstore_f32(dot + i, sum);
    }
}

/* ---- dropout -------------------------------------------------------------------------------------- */

typedef struct {
    uint32_t seed, stream, step;
    int32_t threshold; /* p 2^24 */
    uint64_t row;      /* of the batch element in the global batch */
    float scale;       /* 1 / (1 - p) */
} dropping;

INLINE dropping dropping_of(const call *c, const uint32_t *random, int64_t batch) {
    return (dropping){.seed = random[0], .step = random[1], .stream = (uint32_t)c->dim[8],
                      .threshold = (int32_t)c->dim[9], .scale = (float)c->num[1],
                      .row = ((uint64_t)random[3] << 32 | random[2]) + (uint64_t)batch};
}

/* keep[key][query] = 1/(1-p) or 0 for one vector of queries from i and `rows` keys from j, j a multiple
   of 4. Four keys share a block of random words; where T is not a multiple of 4, each query starts at
   its own word of it. */
static void keep_factors(float *keep, const dropping *p, const sizes *s, int64_t head, int64_t i,
                         int64_t j, int64_t rows) {
    const uint64_t time = (uint64_t)s->time;
    const uint64_t first = (p->row * (uint64_t)s->heads + (uint64_t)head) * time;
    const int ragged = time % 4 != 0;
    vu low, high;
    vf shift;
    for (int lane = 0; lane < VL; lane++) {
        uint64_t element = (first + (uint64_t)(i + lane)) * time + (uint64_t)j;
        low[lane] = (uint32_t)(element >> 2);
        high[lane] = (uint32_t)(element >> 34);
        shift[lane] = (float)(element & 3);
    }
    vu word[8] = {{0}};
    for (int64_t k = ragged ? -4 : 0; k < rows; k += 4) {
        const vu ahead = low + (uint32_t)(k / 4 + ragged);
        vu next[4] = {ahead, high - (vu)(ahead < low), p->step - (vu){0}, {0}};
        vphilox(next, p->seed, p->stream);
        for (int w = 0; w < 4; w++) {
            word[w] = ragged ? word[w + 4] : next[w];
            word[w + 4] = next[w];
        }
        for (int w = 0; w < 4 && k >= 0; w++) {
            vf bits = (vf)word[w];
            for (int r = 1; r < 4 && ragged; r++) {
                bits = vselect(veq(shift, vset((float)r)), (vf)word[w + r], bits);
            }
            vm drop = vlt_i((vi)((vu)bits >> 8), vset_i(p->threshold));
            vstore_f32(keep + (k + w) * s->block, vselect(drop, vzero(), vset(p->scale)));
        }
    }
}

/* ---- scores --------------------------------------------------------------------------------------- */

/* A strip of queries against a block of keys: `keys` of them count, and `rows` are computed. */
typedef struct {
    int64_t first, vectors, keys, rows;
    int diagonal;
} strip;

/* The strip that begins at a vector of queries. Below the diagonal one strip spans the block; on it
   strips are narrow, so that most keys that no query of the strip may see are left out. */
INLINE strip strip_at(int64_t first, int64_t queries, int64_t keys, int diagonal) {
    const int64_t left = ceil_div(queries, VL) - first;
    strip s = {.first = first, .vectors = diagonal ? min_i64(STRIP, left) : left, .keys = keys};
    if (diagonal) s.keys = min_i64(keys, (first + s.vectors) * VL);
    s.rows = round_up(s.keys, ROWS);
    s.diagonal = diagonal;
    return s;
}

/* -inf for the keys that come after a query of the strip: keys and queries of one block. */
static void mask_later(float *score, strip p, const sizes *s) {
    for (int64_t v = p.first; v < p.first + p.vectors; v++) {
        const vi query = vset_i((int32_t)(v * VL)) + viota();
        for (int64_t key = v * VL + 1; key < p.rows; key++) {
            float *x = score + key * s->block + v * VL;
            vm later = vlt_i(query, vset_i((int32_t)key));
            vstore_f32(x, vselect(later, vset(-INFINITY), vload_f32(x)));
        }
    }
}

/* -inf for the keys that lie before the window of a query; `ahead`: how far the queries' block lies
   behind that of the keys. */
static void mask_earlier(float *score, strip p, int64_t ahead, const sizes *s) {
    for (int64_t v = p.first; v < p.first + p.vectors; v++) {
        const int64_t start = v * VL + ahead - s->window + 1; /* of the first query's window */
        const vi first = vset_i((int32_t)start) + viota();
        for (int64_t key = 0; key < min_i64(p.rows, start + VL - 1); key++) {
            float *x = score + key * s->block + v * VL;
            vm earlier = vlt_i(vset_i((int32_t)key), first);
            vstore_f32(x, vselect(earlier, vset(-INFINITY), vload_f32(x)));
        }
    }
}

/* score[key][query] = K Q^T with Q scaled beforehand, capped, and -inf where the query does not see the
   key; `ahead`: how far the queries' block lies behind that of the keys. */
static void scores(float *score, const float *k, const float *qt, strip p, int64_t ahead, const sizes *s) {
    const int64_t at = p.first * VL;
    multiply(k, s->padded, qt + at, s->block, score + at, s->block, p.rows, p.vectors, s->size);
    if (s->cap > 0.0f) {
        const vf cap = vset(s->cap), inverse = vset(1.0f / s->cap);
        for (int64_t r = 0; r < p.rows * s->block; r += s->block) {
            for (float *x = score + r + at; x < score + r + at + p.vectors * VL; x += VL) {
                vstore_f32(x, vsoftcap(vload_f32(x), cap, inverse));
            }
        }
    }
    if (p.diagonal) mask_later(score, p, s);
    if ((p.first + p.vectors) * VL + ahead > s->window) mask_earlier(score, p, ahead, s);
}

/* ---- forward -------------------------------------------------------------------------------------- */

/* One step of the online softmax (Milakov & Gimelshein 2018) for a vector of queries: scores become
   exp(score - maximum), and what was summed before is to be multiplied by `factor`. A NaN is passed over
   by the maximum and stays visible through the exponential. */
static void softmax_step(float *score, int64_t rows, int64_t block, float *maximum, float *sum,
                         float *factor) {
    vf m[4], total[4];
    UNROLL for (int i = 0; i < 4; i++) {
        m[i] = vload_f32(maximum);
        total[i] = vzero();
    }
    for (int64_t j = 0; j < rows; j += 4) {
        UNROLL for (int i = 0; i < 4; i++) m[i] = vmax_b(vload_f32(score + (j + i) * block), m[i]);
    }
    const vf top = vmax_b(vmax_b(m[0], m[1]), vmax_b(m[2], m[3]));
    for (int64_t j = 0; j < rows; j += 4) {
        UNROLL for (int i = 0; i < 4; i++) {
            vf e = vexp(vload_f32(score + (j + i) * block) - top);
            vstore_f32(score + (j + i) * block, e);
            total[i] += e;
        }
    }
    const vf f = vexp(vload_f32(maximum) - top);
    vstore_f32(factor, f);
    vstore_f32(maximum, top);
    vstore_f32(sum, vfma(vload_f32(sum), f, (total[0] + total[1]) + (total[2] + total[3])));
}

/* What a block of queries of one head has gathered: y transposed [d][query], not yet divided by `sum`;
   the largest score, the sum of exponentials; and room for a tile. */
typedef struct {
    float *qt, *yt, *score, *keep, *maximum, *sum, *factor;
} gathering;

/* One tile: the keys from j, and the block of queries from i. */
static void forward_tile(const gathering *g, const float *k, const float *v, const sizes *s,
                         const dropping *drop, int64_t head, int64_t i, int64_t j) {
    const int64_t queries = min_i64(s->block, s->time - i), keys = min_i64(s->block, s->time - j);
    const int64_t depth = round_up(s->size, ROWS);
    k += j * s->padded;
    v += j * s->padded;
    strip p = strip_at(0, queries, keys, i == j);
    for (; p.vectors > 0; p = strip_at(p.first + p.vectors, queries, keys, i == j)) {
        const int64_t first = p.first * VL;
        scores(g->score, k, g->qt, p, i - j, s);
        for (int64_t n = first; n < first + p.vectors * VL; n += VL) {
            float *score = g->score + n, *keep = g->keep + n;
            softmax_step(score, p.rows, s->block, g->maximum + n, g->sum + n, g->factor + n);
            if (!drop) continue;
            keep_factors(keep, drop, s, head, i + n, j, p.rows);
            for (int64_t r = 0; r < p.rows * s->block; r += s->block) {
                vstore_f32(score + r, vload_f32(score + r) * vload_f32(keep + r));
            }
        }
        rescale_add_transposed(v, s->padded, g->score + first, s->block, g->yt + first, s->block, depth,
                               p.vectors, p.keys, g->factor + first);
    }
}

/* y, lse = attention(qkv); lse may be absent, random is absent without dropout.
   ptr: y [B,T,H*D], lse [B,H,T] fp32, qkv [B,T,(H+2K)*D], random.
   dim: T, H, K, D, T and D rounded up to whole vectors, block, splits, stream, p 2^24, window.
   num: scale, 1/(1-p), cap or 0.  tasks: B x K x splits. */
KERNEL(attention_forward) {
    T *y = c->ptr[0];
    float *lse = c->ptr[1];
    const T *qkv = c->ptr[2];
    const uint32_t *random = c->ptr[3];
    const sizes s = sizes_of(c, task);
    dropping drop;
    if (random) drop = dropping_of(c, random, s.batch);

    float *at = scratch;
    const int64_t whole = s.rows * s.padded, wide = s.block * s.padded, tile = s.block * s.block;
    float *k = take(&at, whole), *v = take(&at, whole);
    gathering g;
    g.qt = take(&at, wide);
    g.yt = take(&at, wide);
    g.score = take(&at, tile);
    g.keep = take(&at, tile);
    g.maximum = take(&at, s.block);
    g.sum = take(&at, s.block);
    g.factor = take(&at, s.block);

    const int64_t width = s.heads * s.size, seen = keys_of(&s);
    qkv += s.batch * s.time * s.row;
    y += s.batch * s.time * width;
    const T *first = qkv + (s.heads + s.kv_head) * s.size;
    pack(k, first, s.row, seen, &s, 1.0f);
    pack(v, first + s.kv_heads * s.size, s.row, seen, &s, 1.0f);
    for (int64_t h = s.kv_head * s.group; h < (s.kv_head + 1) * s.group; h++) {
        for (int64_t i = s.split * s.block; i < s.time; i += s.splits * s.block) {
            const int64_t queries = min_i64(s.block, s.time - i);
            pack_transposed(g.qt, qkv + i * s.row + h * s.size, s.row, queries, &s, s.scale);
            memset(g.yt, 0, (size_t)wide * sizeof(float));
            for (int64_t n = 0; n < s.block; n++) g.maximum[n] = LOWEST, g.sum[n] = 0.0f;
            for (int64_t j = first_keys(&s, i); j <= i; j += s.block) {
                forward_tile(&g, k, v, &s, random ? &drop : NULL, h, i, j);
            }
            for (int64_t n = 0; n < queries; n += VL) {
                const vf sum = vload_f32(g.sum + n);
                vstore_f32(g.factor + n, vset(1.0f) / sum);
                if (!lse) continue;
                vstoren_f32(lse + (s.batch * s.heads + h) * s.time + i + n,
                            vload_f32(g.maximum + n) + vlog(sum), min_i64(VL, queries - n));
            }
            store_transposed(y + i * width + h * s.size, width, queries, g.yt, &s, g.factor);
        }
    }
}

/* ---- backward ------------------------------------------------------------------------------------- */

/* score becomes the kept probability P, dp becomes dS = P (dP - delta), times the slope of the cap; one
   vector of queries. */
INLINE void backward_step(float *score, float *dp, const float *keep, int64_t rows, const sizes *s, vf lse,
                          vf delta, const int dropout, const int capped) {
    const int64_t block = s->block;
    const vf lowest = vset(-s->cap), inverse = vset(1.0f / s->cap);
    for (int64_t r = 0; r < rows * block; r += block) {
        const vf x = vload_f32(score + r), p = vexp(x - lse);
        vf d = vload_f32(dp + r), kept = p;
        if (dropout) {
            vf factor = vload_f32(keep + r);
            d *= factor;
            kept *= factor;
        }
        d = p * (d - delta);
        /* The slope is 0 at -cap, and so where a score is -inf. */
        if (capped) d *= vsoftcap_slope(vmax_b(lowest, x), inverse);
        vstore_f32(score + r, kept);
        vstore_f32(dp + r, d);
    }
}

/* to[i][size] = from[i][padded] */
static void unpack(T *to, int64_t row, int64_t rows, const float *from, const sizes *s) {
    for (int64_t i = 0; i < rows; i++) {
        for (int64_t d = 0; d < s->size; d += VL) {
            vf x = vload_f32(from + i * s->padded + d);
            vstoren(to + i * row + d, x, min_i64(VL, s->size - d));
        }
    }
}

/* A block of queries of one head: Q and dy as they lie and transposed, dQ transposed, lse and
   rowsum(dy y) for each query; and room for a tile. */
typedef struct {
    float *q, *qt, *dqt, *dy, *dyt, *lse, *delta, *score, *dp, *keep;
} querying;

/* One tile: the keys from j and the block of queries from i add to dQ, and to dK and dV of the keys. */
static void backward_tile(const querying *q, const float *k, const float *v, float *dk, float *dv,
                          const sizes *s, const dropping *drop, int64_t head, int64_t i, int64_t j) {
    const int64_t queries = min_i64(s->block, s->time - i), keys = min_i64(s->block, s->time - j);
    const int64_t depth = round_up(s->size, ROWS), across = ceil_div(s->size, VL);
    const int64_t rows = round_up(keys, ROWS), block = j * s->padded;
    const int diagonal = i == j;
    k += block;
    v += block;
    strip p = strip_at(0, queries, keys, diagonal);
    for (; p.vectors > 0; p = strip_at(p.first + p.vectors, queries, keys, diagonal)) {
        const int64_t first = p.first * VL;
        scores(q->score, k, q->qt, p, i - j, s);
        multiply(v, s->padded, q->dyt + first, s->block, q->dp + first, s->block, p.rows, p.vectors,
                 s->size);
        for (int64_t n = first; n < first + p.vectors * VL; n += VL) {
            const vf lse = vload_f32(q->lse + n), delta = vload_f32(q->delta + n);
            float *score = q->score + n, *dp = q->dp + n, *keep = q->keep + n;
            if (drop) {
                keep_factors(keep, drop, s, head, i + n, j, p.rows);
                backward_step(score, dp, keep, p.rows, s, lse, delta, 1, s->cap > 0.0f);
            } else if (s->cap > 0.0f) {
                backward_step(score, dp, keep, p.rows, s, lse, delta, 0, 1);
            } else {
                backward_step(score, dp, keep, p.rows, s, lse, delta, 0, 0);
            }
        }
        multiply_add_transposed(k, s->padded, q->dp + first, s->block, q->dqt + first, s->block, depth,
                                p.vectors, p.keys);
    }
    multiply_add(q->score, s->block, q->dy, s->padded, dv + block, s->padded, rows, across, queries,
                 diagonal);
    multiply_add(q->dp, s->block, q->q, s->padded, dk + block, s->padded, rows, across, queries,
                 diagonal);
}

/* dqkv = gradient of attention. Without `partial` there is one split, and dK and dV are summed in
   scratch and written here; otherwise a task leaves its part in partial [task][2][rows][padded].
   ptr: dqkv, partial, dy, qkv, y, lse, random.  dim, num, tasks: as in the forward kernel. */
KERNEL(attention_backward) {
    T *dqkv = c->ptr[0];
    float *partial = c->ptr[1];
    const T *dy = c->ptr[2], *qkv = c->ptr[3], *y = c->ptr[4];
    const float *lse = c->ptr[5];
    const uint32_t *random = c->ptr[6];
    const sizes s = sizes_of(c, task);
    dropping drop;
    if (random) drop = dropping_of(c, random, s.batch);

    float *at = scratch;
    const int64_t whole = s.rows * s.padded, wide = s.block * s.padded, tile = s.block * s.block;
    float *k = take(&at, whole), *v = take(&at, whole);
    querying q;
    q.q = take(&at, wide);
    q.qt = take(&at, wide);
    q.dqt = take(&at, wide);
    q.dy = take(&at, wide);
    q.dyt = take(&at, wide);
    q.score = take(&at, tile);
    q.dp = take(&at, tile);
    q.keep = take(&at, tile);
    q.lse = take(&at, s.block);
    q.delta = take(&at, s.block);
    float *scale = take(&at, s.block);
    float *dk = partial ? partial + 2 * task * whole : take(&at, 2 * whole), *dv = dk + whole;

    const int64_t first = (s.heads + s.kv_head) * s.size, second = first + s.kv_heads * s.size;
    const int64_t width = s.heads * s.size, seen = keys_of(&s);
    dqkv += s.batch * s.time * s.row;
    qkv += s.batch * s.time * s.row;
    dy += s.batch * s.time * width;
    y += s.batch * s.time * width;
    pack(k, qkv + first, s.row, seen, &s, 1.0f);
    pack(v, qkv + second, s.row, seen, &s, 1.0f);
    memset(dk, 0, (size_t)(2 * whole) * sizeof(float));
    for (int64_t n = 0; n < s.block; n++) scale[n] = s.scale;
    for (int64_t h = s.kv_head * s.group; h < (s.kv_head + 1) * s.group; h++) {
        for (int64_t i = s.split * s.block; i < s.time; i += s.splits * s.block) {
            const int64_t queries = min_i64(s.block, s.time - i);
            const int64_t in = i * s.row + h * s.size, out = i * width + h * s.size;
            pack(q.q, qkv + in, s.row, queries, &s, s.scale);
            pack_transposed(q.qt, qkv + in, s.row, queries, &s, s.scale);
            pack(q.dy, dy + out, width, queries, &s, 1.0f);
            pack_transposed(q.dyt, dy + out, width, queries, &s, 1.0f);
            row_dots(q.delta, dy + out, y + out, width, queries, s.size);
            const float *saved = lse + (s.batch * s.heads + h) * s.time + i;
            for (int64_t n = 0; n < queries; n += VL) {
                vstore_f32(q.lse + n, vloadn_f32(saved + n, min_i64(VL, queries - n)));
            }
            memset(q.dqt, 0, (size_t)wide * sizeof(float));
            for (int64_t j = first_keys(&s, i); j <= i; j += s.block) {
                backward_tile(&q, k, v, dk, dv, &s, random ? &drop : NULL, h, i, j);
            }
            store_transposed(dqkv + in, s.row, queries, q.dqt, &s, scale);
        }
    }
    if (partial) return;
    unpack(dqkv + first, s.row, s.time, dk, &s);
    unpack(dqkv + second, s.row, s.time, dv, &s);
}

/* dK and dV of dqkv = sum over the splits of `partial`, in order.
   ptr: dqkv, partial.  dim: as in the forward kernel.  tasks: B x K x blocks of rows. */
KERNEL(attention_backward_combine) {
    const int64_t blocks = ceil_div(c->dim[0], c->dim[6]);
    const sizes s = sizes_of(c, task / blocks * c->dim[7]);
    const int64_t i = task % blocks * s.block, rows = min_i64(s.block, s.time - i);
    const int64_t whole = s.rows * s.padded;
    const float *partial = (const float *)c->ptr[1] + task / blocks * s.splits * 2 * whole;
    T *to = (T *)c->ptr[0] + (s.batch * s.time + i) * s.row + (s.heads + s.kv_head) * s.size;
    float *sum = scratch;
    for (int half = 0; half < 2; half++, partial += whole, to += s.kv_heads * s.size) {
        const float *from = partial + i * s.padded;
        for (int64_t n = 0; n < rows * s.padded; n += VL) {
            vf total = vload_f32(from + n);
            for (int64_t p = 1; p < s.splits; p++) total += vload_f32(from + p * 2 * whole + n);
            vstore_f32(sum + n, total);
        }
        unpack(to, s.row, rows, sum, &s);
    }
}
