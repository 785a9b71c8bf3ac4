/* Attention over a cache of keys and values. See cached_attention.py.

   The queries of one row of the batch that share a key and value head are numbered by position, then by
   head. Keys are cut into blocks at fixed positions. For each block a query gets its largest score, its sum
   of exponentials and its weighted sum of values, and merges them into those of the blocks before, in order.
   Masked keys and skipped blocks add exact zeros, so that a query has the same bits whichever queries are
   computed beside it, and whichever task computed a block. */

#include "call.h"
#include "tile.h"

#define ROWS 4 /* queries of a register tile */
#if VL == 16 || defined(__aarch64__)
#define WIDE 4 /* vectors of a row that a register tile holds, by the number of registers */
#else
#define WIDE 2
#endif
#define STRIP (WIDE * VL) /* keys that are transposed at a time; blocks are multiples of it */
#define LOWEST (-3.0e38f) /* finite: exp(-inf - LOWEST) is 0 where exp(-inf + inf) is NaN */
#define RECORD 16 /* floats before the values of a block's result */

INLINE int64_t max_i64(int64_t a, int64_t b) { return a > b ? a : b; }

typedef struct {
    int64_t time, heads, kv_heads, size, padded, cache; /* T, H, K, D, D in whole vectors, S */
    int64_t block, window, queries, splits;             /* keys of a block; queries of a task */
    int64_t group, rows, row, width, blocks; /* rows: queries of a key head; row: numbers in one of qkv */
    const int32_t *start;
    float scale, softcap;
} sizes;

INLINE sizes sizes_of(const call *c, const void *start) {
    sizes s = {.time = c->dim[0], .heads = c->dim[1], .kv_heads = c->dim[2], .size = c->dim[3],
               .padded = c->dim[4], .cache = c->dim[5], .block = c->dim[6], .window = c->dim[7],
               .queries = c->dim[8], .splits = c->dim[9], .start = start,
               .scale = (float)c->num[0], .softcap = (float)c->num[1]};
    s.group = s.heads / s.kv_heads;
    s.rows = s.time * s.group;
    s.row = (s.heads + 2 * s.kv_heads) * s.size;
    s.width = s.heads * s.size;
    s.blocks = ceil_div(s.cache, s.block);
    return s;
}

/* The position that a query stands at, and the first one that it sees. */
INLINE int64_t position_of(const sizes *s, int64_t batch, int64_t query) {
    return min_i64(max_i64(s->start[batch], 0) + query / s->group, s->cache - 1);
}
INLINE int64_t first_seen(const sizes *s, int64_t position) {
    return s->window ? max_i64(0, position - s->window + 1) : 0;
}

/* ---- writing the cache ------------------------------------------------------------------------------ */

/* ptr: keys and values [B,K,S,D]; qkv [B,T,(H+2K)*D], start [B].  dim: as below, and B.
   tasks: parts of the B x K heads. */
KERNEL(cache_write) {
    const sizes s = sizes_of(c, c->ptr[3]);
    const int64_t heads = c->dim[10] * s.kv_heads;
    const size_t bytes = (size_t)s.size * sizeof(T);
    for (int64_t i = part_start(heads, c->tasks, task); i < part_start(heads, c->tasks, task + 1); i++) {
        const int64_t b = i / s.kv_heads, k = i % s.kv_heads, first = max_i64(s.start[b], 0);
        const T *from = (const T *)c->ptr[2] + b * s.time * s.row + (s.heads + k) * s.size;
        for (int64_t t = 0; t < s.time && first + t < s.cache; t++, from += s.row) {
            const int64_t to = (i * s.cache + first + t) * s.size;
            memcpy((T *)c->ptr[0] + to, from, bytes);
            memcpy((T *)c->ptr[1] + to, from + s.kv_heads * s.size, bytes);
        }
    }
}

/* ---- one block of keys ------------------------------------------------------------------------------ */

/* score[i][key] = q[i] . k[key] for a strip of keys, which kt holds as [D][key]. */
INLINE void score_tile(const int rows, float *score, const float *q, const float *kt, const sizes *s) {
    vf acc[ROWS][WIDE] = {{{0}}};
    for (int64_t d = 0; d < s->size; d++, kt += STRIP) {
        vf k[WIDE];
        UNROLL for (int v = 0; v < WIDE; v++) k[v] = vload_f32(kt + v * VL);
        UNROLL for (int i = 0; i < rows; i++) {
            const vf x = vset(q[i * s->padded + d]);
            UNROLL for (int v = 0; v < WIDE; v++) acc[i][v] = vfma(x, k[v], acc[i][v]);
        }
    }
    UNROLL for (int i = 0; i < rows; i++) {
        UNROLL for (int v = 0; v < WIDE; v++) vstore_f32(score + i * s->block + v * VL, acc[i][v]);
    }
}

/* kt[D][key] = a strip of keys, transposed; zeros for those that are not there. */
static void transpose_keys(float *kt, const T *k, int64_t keys, const sizes *s) {
    for (int64_t j = 0; j < STRIP; j += VL) {
        const int64_t there = max_i64(0, min_i64(VL, keys - j));
        for (int64_t d = 0; d < s->size; d += VL) {
            vf x[VL];
            load_rows_(x, k + j * s->size + d, s->size, there, min_i64(VL, s->size - d));
            transpose(x);
            UNROLL for (int i = 0; i < VL; i++) vstore_f32(kt + (d + i) * STRIP + j, x[i]);
        }
    }
}

/* score[key] becomes exp(score - maximum) for the keys low <= key < high, and 0 elsewhere from `from`, a
   multiple of VL, up to `to`. */
static void softmax_row(float *score, int64_t from, int64_t to, int64_t low, int64_t high, const sizes *s,
                        float *maximum, float *sum) {
    vf m = vset(LOWEST), total = vzero();
    const vi first = vset_i((int32_t)low), end = vset_i((int32_t)high);
    for (int64_t j = from; j < to; j += VL) {
        vf x = vload_f32(score + j);
        if (s->softcap > 0) x = vset(s->softcap) * vtanh(x * vset(1.0f / s->softcap));
        const vi key = vset_i((int32_t)j) + viota();
        x = vselect(vlt_i(key, first), vset(-INFINITY), x);
        x = vselect(vlt_i(key, end), x, vset(-INFINITY));
        vstore_f32(score + j, x);
        m = vmax_b(x, m); /* passes over a NaN, which stays visible through the exponential */
    }
    const float top = vhmax(m);
    for (int64_t j = from; j < to; j += VL) {
        const vf e = vexp(vload_f32(score + j) - vset(top));
        vstore_f32(score + j, e);
        total += e;
    }
    *maximum = top;
    *sum = vsum(total);
}

/* y[i] = sum over the keys of p[i][key] v[key], for `vectors` vectors of columns, the last one n wide. */
INLINE void value_tile(const int rows, const int vectors, float *y, const float *p, const T *v,
                       int64_t keys, int64_t n, const sizes *s) {
    vf acc[ROWS][WIDE] = {{{0}}};
    for (int64_t j = 0; j < keys; j++, v += s->size) {
        vf x[WIDE];
        UNROLL for (int u = 0; u < vectors; u++) {
            x[u] = u < vectors - 1 || n == VL ? vload(v + u * VL) : vloadn(v + u * VL, n);
        }
        UNROLL for (int i = 0; i < rows; i++) {
            const vf w = vset(p[i * s->block + j]);
            UNROLL for (int u = 0; u < vectors; u++) acc[i][u] = vfma(w, x[u], acc[i][u]);
        }
    }
    UNROLL for (int i = 0; i < rows; i++) {
        UNROLL for (int u = 0; u < vectors; u++) vstore_f32(y + i * s->padded + u * VL, acc[i][u]);
    }
}

INLINE void value_rows(const int rows, float *y, const float *p, const T *v, int64_t keys, const sizes *s) {
    int64_t d = 0;
    for (; d + WIDE * VL <= s->size; d += WIDE * VL) {
        value_tile(rows, WIDE, y + d, p, v + d, keys, VL, s);
    }
    for (; d < s->size; d += VL) {
        value_tile(rows, 1, y + d, p, v + d, keys, min_i64(VL, s->size - d), s);
    }
}

#define BY_ROWS(rows, i, DO) \
    for (int64_t i = 0, left_; (left_ = (rows) - i) > 0; i += left_ >= ROWS ? ROWS : left_ >= 2 ? 2 : 1) { \
        if (left_ >= ROWS) { DO(ROWS); } \
        else if (left_ >= 2) { DO(2); } \
        else { DO(1); } \
    }

/* What a task works on: `rows` queries from `query` on, packed and scaled, of a batch row and key head. */
typedef struct {
    int64_t batch, kv_head, query, rows;
    const T *keys, *values; /* of the head, [S][D] */
    float *q, *kt, *score, *y, *maximum, *sum;
} work;

/* Keys that the work's queries see: from *low up to the returned one. */
INLINE int64_t seen_by(const work *w, const sizes *s, int64_t *low) {
    *low = first_seen(s, position_of(s, w->batch, w->query));
    return position_of(s, w->batch, w->query + w->rows - 1) + 1;
}

/* maximum, sum and y [rows][padded] of block `at` of the keys. */
static void attend_block(const work *w, const sizes *s, int64_t at) {
    const int64_t base = at * s->block;
    int64_t low;
    const int64_t high = seen_by(w, s, &low);
    const int64_t from = max_i64(0, low - base) / STRIP * STRIP, to = min_i64(s->block, high - base);
    for (int64_t j = from; j < to; j += STRIP) {
        transpose_keys(w->kt, w->keys + (base + j) * s->size, to - j, s);
#define SCORE(n) score_tile(n, w->score + i * s->block + j, w->q + i * s->padded, w->kt, s)
        BY_ROWS(w->rows, i, SCORE)
    }
    for (int64_t i = 0; i < w->rows; i++) {
        const int64_t position = position_of(s, w->batch, w->query + i);
        softmax_row(w->score + i * s->block, from, to, first_seen(s, position) - base, position + 1 - base, s,
                    w->maximum + i, w->sum + i);
    }
    const T *v = w->values + (base + from) * s->size;
#define VALUE(n) value_rows(n, w->y + i * s->padded, w->score + i * s->block + from, v, to - from, s)
    BY_ROWS(w->rows, i, VALUE)
}

/* Adds a block's result to what was gathered before it (Milakov & Gimelshein 2018). */
INLINE void merge(float *maximum, float *sum, float *y, float block_maximum, float block_sum,
                  const float *block_y, const sizes *s) {
    const vf before = vset(*maximum), now = vset(block_maximum);
    const vf top = vmax_b(now, before), old = vexp(before - top), new = vexp(now - top);
    for (int64_t d = 0; d < s->padded; d += VL) {
        vstore_f32(y + d, vfma(vload_f32(y + d), old, vload_f32(block_y + d) * new));
    }
    *maximum = top[0];
    *sum = vfma(vset(*sum), old, vset(block_sum) * new)[0];
}

INLINE void write_query(T *y, int64_t batch, int64_t kv_head, int64_t query, const float *from, float sum,
                        const sizes *s) {
    const int64_t head = kv_head * s->group + query % s->group;
    T *to = y + (batch * s->time + query / s->group) * s->width + head * s->size;
    const vf factor = vset(1.0f / sum);
    for (int64_t d = 0; d < s->size; d += VL) {
        vstoren(to + d, vload_f32(from + d) * factor, min_i64(VL, s->size - d));
    }
}

/* ---- the task --------------------------------------------------------------------------------------- */

INLINE float *take(float **free, int64_t n) {
    float *p = *free;
    *free += ceil_div(n, RECORD) * RECORD;
    return p;
}

static void pack_queries(const work *w, const T *qkv, const sizes *s) {
    for (int64_t i = 0; i < w->rows; i++) {
        const int64_t query = w->query + i, head = w->kv_head * s->group + query % s->group;
        const T *from = qkv + (w->batch * s->time + query / s->group) * s->row + head * s->size;
        for (int64_t d = 0; d < s->size; d += VL) {
            const vf x = vloadn(from + d, min_i64(VL, s->size - d));
            vstore_f32(w->q + i * s->padded + d, x * vset(s->scale));
        }
    }
}

/* y = attention of the queries over the cache. With `partial`, which holds [B][K][query][block] records of
   a maximum, a sum and D values, each task leaves the results of its blocks of keys there.
   ptr: y [B,T,H*D], partial or NULL, qkv [B,T,(H+2K)*D], keys and values [B,K,S,D], start [B].
   dim: T, H, K, D, D in whole vectors, S, keys of a block, window or 0, queries of a task, splits.
   num: scale, softcap or 0.  tasks: B x K x parts of the queries x splits of the blocks. */
KERNEL(cached_attention) {
    const sizes s = sizes_of(c, c->ptr[5]);
    const int64_t parts = ceil_div(s.rows, s.queries), head = task / s.splits / parts;
    float *partial = c->ptr[1], *at = scratch;
    work w = {.batch = head / s.kv_heads, .kv_head = head % s.kv_heads,
              .keys = (const T *)c->ptr[3] + head * s.cache * s.size,
              .values = (const T *)c->ptr[4] + head * s.cache * s.size};
    w.query = (parts - 1 - task / s.splits % parts) * s.queries; /* those with the most keys first */
    w.rows = min_i64(s.queries, s.rows - w.query);
    w.q = take(&at, s.queries * s.padded);
    w.kt = take(&at, s.padded * STRIP);
    w.score = take(&at, s.queries * s.block);
    w.y = take(&at, s.queries * s.padded);
    w.maximum = take(&at, s.queries);
    w.sum = take(&at, s.queries);
    int64_t low;
    const int64_t high = seen_by(&w, &s, &low), end = ceil_div(high, s.block);
    if (partial) {
        const int64_t record = RECORD + s.padded, split = task % s.splits;
        int64_t block = low / s.block;
        block += (split - block % s.splits + s.splits) % s.splits;
        if (block >= end) return;
        pack_queries(&w, c->ptr[2], &s);
        for (; block < end; block += s.splits) {
            attend_block(&w, &s, block);
            for (int64_t i = 0; i < w.rows; i++) {
                float *to = partial + ((head * s.rows + w.query + i) * s.blocks + block) * record;
                to[0] = w.maximum[i];
                to[1] = w.sum[i];
                memcpy(to + RECORD, w.y + i * s.padded, (size_t)s.padded * sizeof(float));
            }
        }
        return;
    }
    float *maximum = take(&at, s.queries), *sum = take(&at, s.queries);
    float *y = take(&at, s.queries * s.padded);
    pack_queries(&w, c->ptr[2], &s);
    memset(y, 0, (size_t)(w.rows * s.padded) * sizeof(float));
    for (int64_t i = 0; i < w.rows; i++) maximum[i] = LOWEST, sum[i] = 0.0f;
    for (int64_t block = low / s.block; block < end; block++) {
        attend_block(&w, &s, block);
        for (int64_t i = 0; i < w.rows; i++) {
            merge(maximum + i, sum + i, y + i * s.padded, w.maximum[i], w.sum[i], w.y + i * s.padded, &s);
        }
    }
    for (int64_t i = 0; i < w.rows; i++) {
        write_query(c->ptr[0], w.batch, w.kv_head, w.query + i, y + i * s.padded, sum[i], &s);
    }
}

/* y from `partial`, block after block.  ptr: y, partial, start.  dim, num: as above, and B.
   tasks: parts of the B x K x queries. */
KERNEL(cached_attention_combine) {
    const sizes s = sizes_of(c, c->ptr[2]);
    const int64_t record = RECORD + s.padded, all = c->dim[10] * s.kv_heads * s.rows;
    float *y = scratch;
    for (int64_t i = part_start(all, c->tasks, task); i < part_start(all, c->tasks, task + 1); i++) {
        const int64_t head = i / s.rows, batch = head / s.kv_heads, query = i % s.rows;
        const int64_t position = position_of(&s, batch, query);
        const float *from = (const float *)c->ptr[1] + i * s.blocks * record;
        float maximum = LOWEST, sum = 0.0f;
        memset(y, 0, (size_t)s.padded * sizeof(float));
        for (int64_t b = first_seen(&s, position) / s.block; b <= position / s.block; b++) {
            const float *at = from + b * record;
            merge(&maximum, &sum, y, at[0], at[1], at + RECORD, &s);
        }
        write_query(c->ptr[0], batch, head % s.kv_heads, query, y, sum, &s);
    }
}
