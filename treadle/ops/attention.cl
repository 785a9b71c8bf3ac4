/* Causal attention in flash form, forward and backward. See ops/attention.py for the equations.

   A work-group owns a block of OWN rows of a head, queries or keys, and walks over those of the other
   kind in steps of STEP.

   Defined: FORWARD, DELTA, QUERIES or KEYS, the kernel; what kernels/attention.clh wants; EXTRAS,
   whether there is dropout (then `random` is there) or a softcap (then `cap` is above 0). Sums run over
   the parts of a head, and over blocks of STEP. */
#include "attention.clh"

#define DROPS (EXTRAS && random)
#define CAPS (EXTRAS && cap > 0.0f)

/* ---------------------------------------------------------------- dropout */

/* keep[query][key] = `factor`, or 0 where the probability is dropped, for `queries` x `keys` of a
   tile; the strides are of queries and keys in it. head: which of all heads of all rows of the global
   batch. random: seed, step. Four keys share a block of random words where T is a multiple of 4, else
   they may lie in two. */
DEVICE void fill_keep(LOCAL_ARG float *keep, int queries, int keys, int query_stride, int key_stride,
                      GLOBAL const u32 *random, u64 head, i64 time, int query, int key, u32 stream,
                      u32 threshold, float factor) {
    for (int i = ITEM; i < queries * keys / 4; i += GROUP) {
        int q = i / (keys / 4), k = i % (keys / 4) * 4;
        u64 element = (head * (u64)time + (u64)(query + q)) * (u64)time + (u64)(key + k);
        u64 block = element >> 2;
        int shift = (int)(element & 3);
        u32 x[4] = {(u32)block, (u32)(block >> 32), random[1], 0}, y[4] = {0, 0, 0, 0};
        philox(x, random[0], stream);
        if (shift) {
            block++;
            y[0] = (u32)block, y[1] = (u32)(block >> 32), y[2] = random[1];
            philox(y, random[0], stream);
        }
        u32 w0 = shift == 0 ? x[0] : shift == 1 ? x[1] : shift == 2 ? x[2] : x[3];
        u32 w1 = shift == 0 ? x[1] : shift == 1 ? x[2] : shift == 2 ? x[3] : y[0];
        u32 w2 = shift == 0 ? x[2] : shift == 1 ? x[3] : shift == 2 ? y[0] : y[1];
        u32 w3 = shift == 0 ? x[3] : shift == 1 ? y[0] : shift == 2 ? y[1] : y[2];
        LOCAL_ARG float *to = keep + q * query_stride + k * key_stride;
        to[0] = w0 >> 8 < threshold ? 0.0f : factor;
        to[key_stride] = w1 >> 8 < threshold ? 0.0f : factor;
        to[2 * key_stride] = w2 >> 8 < threshold ? 0.0f : factor;
        to[3 * key_stride] = w3 >> 8 < threshold ? 0.0f : factor;
    }
}

DEVICE u64 head_of(GLOBAL const u32 *random, i64 batch, i64 heads, i64 head) {
    return (((u64)random[3] << 32 | random[2]) + (u64)batch) * (u64)heads + (u64)head;
}

/* ---------------------------------------------------------------- forward */

#ifdef FORWARD
/* y [B,T,H*D], lse [B,H,T] or absent; qkv [B,T,(H+2K)*D], random with dropout; T, H, K, stream,
   p 2^24, window; scale, 1/(1-p), cap. Groups: blocks of queries, the last first, heads, batch. */
KERNEL attention_forward(GLOBAL T *y, GLOBAL float *lse, GLOBAL const T *qkv, GLOBAL const u32 *random,
                         i64 time, i64 heads, i64 kv_heads, i64 stream, i64 threshold, i64 window,
                         float scale, float keep, float cap) {
    LOCAL vec4 q_[OWN * STRIDE / 4], x_[STEP * STRIDE / 4], p_[OWN * P_STRIDE / 4];
    LOCAL float top[OWN * ACROSS];
    LOCAL_ARG float *q = (LOCAL_ARG float *)q_, *x = (LOCAL_ARG float *)x_, *p = (LOCAL_ARG float *)p_;
    const int across = ITEM % ACROSS, down = ITEM / ACROSS;
    const i64 head = GROUP_Y, batch = GROUP_Z, row = (heads + 2 * kv_heads) * D;
    const i64 kv_head = heads + head / (heads / kv_heads);
    const int first = (int)((time - 1) / OWN - GROUP_X) * OWN, end = least(time, first + OWN);
    GLOBAL const T *queries = qkv + batch * time * row + head * D;
    GLOBAL const T *keys = qkv + batch * time * row + kv_head * D, *values = keys + kv_heads * D;
    float maximum[ROWS], sum[ROWS], factor[ROWS];
    vec4 total[CHUNKS][ROWS][WIDTH];
    UNROLL for (int i = 0; i < ROWS; i++) maximum[i] = LOWEST, sum[i] = 0.0f;
    UNROLL for (int c = 0; c < CHUNKS; c++) empty(total[c]);
    if (CHUNKS == 1) load_tile(q, OWN, queries, row, first, end, 0, scale);
    for (int key = first < window ? 0 : (int)(first - window + 1) / STEP * STEP; key < end; key += STEP) {
        float s[ROWS][COLUMNS];
        clear(s);
        UNROLL for (int c = 0; c < CHUNKS; c++) {
            if (CHUNKS > 1) load_tile(q, OWN, queries, row, first, end, c, scale);
            load_tile(x, STEP, keys, row, key, end, c, 1.0f);
            if (DROPS && c == 0)
                fill_keep(p, OWN, STEP, P_STRIDE, 1, random, head_of(random, batch, heads, head), time,
                          first, key, (u32)stream, (u32)threshold, keep);
            BARRIER();
            dots(s, q, x);
            if (CHUNKS > 1) BARRIER();
        }
        UNROLL for (int i = 0; i < ROWS; i++) {
            float most = LOWEST;
            UNROLL for (int j = 0; j < COLUMNS; j++) {
                if (CAPS) s[i][j] = cap * tanh(s[i][j] / cap);
                if (!sees(first + down + i * DOWN, key + across + j * ACROSS, (int)window))
                    s[i][j] = -INF;
                most = fmax(most, s[i][j]);
            }
            top[(down + i * DOWN) * ACROSS + across] = most;
        }
        BARRIER();
        load_tile(x, STEP, values, row, key, end, 0, 1.0f);
        /* A step of the online softmax. A NaN is passed over by the maximum and stays visible through
           the exponential; each work-item sums its own columns until the end. */
        UNROLL for (int i = 0; i < ROWS; i++) {
            float most = maximum[i], part = 0.0f;
            UNROLL for (int a = 0; a < ACROSS; a++) most = fmax(most, top[(down + i * DOWN) * ACROSS + a]);
            factor[i] = exp(maximum[i] - most);
            maximum[i] = most;
            UNROLL for (int j = 0; j < COLUMNS; j++) {
                float e = exp(s[i][j] - most);
                part += e;
                s[i][j] = DROPS ? e * p[(down + i * DOWN) * P_STRIDE + across + j * ACROSS] : e;
            }
            sum[i] = fma(sum[i], factor[i], part);
        }
        store_scores(p, s);
        UNROLL for (int c = 0; c < CHUNKS; c++) {
            if (c > 0) load_tile(x, STEP, values, row, key, end, c, 1.0f);
            BARRIER();
            add_product(total[c], factor, p, x);
            BARRIER();
        }
    }
    UNROLL for (int i = 0; i < ROWS; i++) top[(down + i * DOWN) * ACROSS + across] = sum[i];
    BARRIER();
    UNROLL for (int i = 0; i < ROWS; i++) {
        int r = down + i * DOWN;
        float all = 0.0f;
        UNROLL for (int a = 0; a < ACROSS; a++) all += top[r * ACROSS + a];
        factor[i] = 1.0f / all;
        if (lse && across == 0 && first + r < end)
            lse[(batch * heads + head) * time + first + r] = maximum[i] + log(all);
    }
    UNROLL for (int c = 0; c < CHUNKS; c++)
        store_rows(y + (batch * time * heads + head) * D, heads * D, first, end, c, total[c], factor);
}

#endif

/* ---------------------------------------------------------------- backward */

/* A tile of probabilities P in place of the scores s, multiplied by drop; and dS in place of
   da = dy V^T. rows_are_keys: which way the tile lies, from (query, key) on. keep: the factors of
   drop, where `random` is there. statistics: lse and rowsum(dy * y), of the work-item's rows, or its
   columns. */
DEVICE void score_gradients(float (*s)[COLUMNS], float (*da)[COLUMNS], int rows_are_keys, int query,
                            int key, int window, GLOBAL const u32 *random,
                            LOCAL_ARG const float *keep, const float *lse, const float *delta, float cap) {
    const int across = ITEM % ACROSS, down = ITEM / ACROSS;
    UNROLL for (int i = 0; i < ROWS; i++) {
        UNROLL for (int j = 0; j < COLUMNS; j++) {
            int r = down + i * DOWN, c = across + j * ACROSS, at = rows_are_keys ? j : i;
            float x = s[i][j], slope = 1.0f;
            if (CAPS) {
                float t = tanh(x / cap);
                x = cap * t;
                slope = fma(-t, t, 1.0f);
            }
            int seen = rows_are_keys ? sees(query + c, key + r, window) : sees(query + r, key + c, window);
            float p = seen ? exp(x - lse[at]) : 0.0f, drop = DROPS ? keep[r * P_STRIDE + c] : 1.0f;
            float ds = p * fma(da[i][j], drop, -delta[at]) * slope;
            da[i][j] = seen ? ds : 0.0f;
            s[i][j] = p * drop;
        }
    }
}

#ifdef DELTA
/* delta [B,H,T] = rowsum(dy * y), dy and y [B,T,H*D]; B T H, T, H. ACROSS work-items have a row. */
KERNEL attention_delta(GLOBAL float *delta, GLOBAL const T *dy, GLOBAL const T *y, i64 rows, i64 time,
                       i64 heads) {
    LOCAL float part[GROUP];
    const i64 row = GROUP_X * DOWN + ITEM / ACROSS;
    float sum = 0.0f;
    if (row < rows) {
        for (int d = ITEM % ACROSS * 4; d < D; d += 4 * ACROSS) {
            vec4 a = load_part(dy + row * D, d), b = load_part(y + row * D, d);
            sum += fma(a.w, b.w, fma(a.z, b.z, fma(a.y, b.y, a.x * b.x)));
        }
    }
    part[ITEM] = sum;
    BARRIER();
    if (ITEM % ACROSS == 0 && row < rows) {
        for (int a = 1; a < ACROSS; a++) sum += part[ITEM + a];
        delta[(row / heads / time * heads + row % heads) * time + row / heads % time] = sum;
    }
}

#endif

#ifdef QUERIES
/* The queries' part of dqkv; dy, qkv, lse, delta, random with dropout; the rest as in the forward
   kernel. Groups: blocks of queries, the last first, heads, batch. */
KERNEL attention_backward_queries(GLOBAL T *dqkv, GLOBAL const T *dy, GLOBAL const T *qkv,
                                  GLOBAL const float *lse, GLOBAL const float *delta,
                                  GLOBAL const u32 *random, i64 time, i64 heads, i64 kv_heads, i64 stream,
                                  i64 threshold, i64 window, float scale, float keep, float cap) {
    LOCAL vec4 q_[OWN * STRIDE / 4], g_[OWN * STRIDE / 4], k_[STEP * STRIDE / 4], v_[STEP * STRIDE / 4];
    LOCAL vec4 p_[OWN * P_STRIDE / 4];
    LOCAL_ARG float *q = (LOCAL_ARG float *)q_, *g = (LOCAL_ARG float *)g_, *p = (LOCAL_ARG float *)p_;
    LOCAL_ARG float *k = (LOCAL_ARG float *)k_, *v = (LOCAL_ARG float *)v_;
    const i64 head = GROUP_Y, batch = GROUP_Z, row = (heads + 2 * kv_heads) * D;
    const i64 kv_head = heads + head / (heads / kv_heads);
    const int first = (int)((time - 1) / OWN - GROUP_X) * OWN, end = least(time, first + OWN);
    GLOBAL const T *queries = qkv + batch * time * row + head * D;
    GLOBAL const T *keys = qkv + batch * time * row + kv_head * D, *values = keys + kv_heads * D;
    dy += (batch * time * heads + head) * D;
    float row_lse[ROWS], row_delta[ROWS], one[ROWS], factor[ROWS];
    vec4 total[CHUNKS][ROWS][WIDTH];
    UNROLL for (int i = 0; i < ROWS; i++) {
        int r = first + ITEM / ACROSS + i * DOWN;
        i64 at = (batch * heads + head) * time + (r < end ? r : end - 1);
        row_lse[i] = lse[at];
        row_delta[i] = delta[at];
        one[i] = 1.0f;
        factor[i] = scale;
    }
    UNROLL for (int c = 0; c < CHUNKS; c++) empty(total[c]);
    if (CHUNKS == 1) {
        load_tile(q, OWN, queries, row, first, end, 0, scale);
        load_tile(g, OWN, dy, heads * D, first, end, 0, 1.0f);
    }
    for (int key = first < window ? 0 : (int)(first - window + 1) / STEP * STEP; key < end; key += STEP) {
        float s[ROWS][COLUMNS], da[ROWS][COLUMNS];
        clear(s);
        clear(da);
        UNROLL for (int c = 0; c < CHUNKS; c++) {
            if (CHUNKS > 1) {
                load_tile(q, OWN, queries, row, first, end, c, scale);
                load_tile(g, OWN, dy, heads * D, first, end, c, 1.0f);
            }
            load_tile(k, STEP, keys, row, key, end, c, 1.0f);
            load_tile(v, STEP, values, row, key, end, c, 1.0f);
            if (DROPS && c == 0)
                fill_keep(p, OWN, STEP, P_STRIDE, 1, random, head_of(random, batch, heads, head), time,
                          first, key, (u32)stream, (u32)threshold, keep);
            BARRIER();
            dots(s, q, k);
            dots(da, g, v);
            if (CHUNKS > 1) BARRIER();
        }
        score_gradients(s, da, 0, first, key, (int)window, random, p, row_lse, row_delta, cap);
        store_scores(p, da);
        UNROLL for (int c = 0; c < CHUNKS; c++) {
            if (CHUNKS > 1) {
                BARRIER();
                load_tile(k, STEP, keys, row, key, end, c, 1.0f);
            }
            BARRIER();
            add_product(total[c], one, p, k);
        }
        BARRIER();
    }
    UNROLL for (int c = 0; c < CHUNKS; c++)
        store_rows(dqkv + batch * time * row + head * D, row, first, end, c, total[c], factor);
}

#endif

#ifdef KEYS
/* The keys' and values' parts of dqkv. Groups: blocks of keys, their heads, batch. The query heads that
   share the keys follow each other. */
KERNEL attention_backward_keys(GLOBAL T *dqkv, GLOBAL const T *dy, GLOBAL const T *qkv,
                               GLOBAL const float *lse, GLOBAL const float *delta,
                               GLOBAL const u32 *random, i64 time, i64 heads, i64 kv_heads, i64 stream,
                               i64 threshold, i64 window, float scale, float keep, float cap) {
    LOCAL vec4 k_[OWN * STRIDE / 4], v_[OWN * STRIDE / 4], q_[STEP * STRIDE / 4], g_[STEP * STRIDE / 4];
    LOCAL vec4 p_[OWN * P_STRIDE / 4], ds_[OWN * P_STRIDE / 4];
    LOCAL float lse_[STEP], delta_[STEP];
    LOCAL_ARG float *q = (LOCAL_ARG float *)q_, *g = (LOCAL_ARG float *)g_, *p = (LOCAL_ARG float *)p_;
    LOCAL_ARG float *k = (LOCAL_ARG float *)k_, *v = (LOCAL_ARG float *)v_, *ds = (LOCAL_ARG float *)ds_;
    const i64 kv_head = heads + GROUP_Y, batch = GROUP_Z, row = (heads + 2 * kv_heads) * D;
    const int first = (int)GROUP_X * OWN, end = least(time, first + OWN), group = (int)(heads / kv_heads);
    const int last = least(time, first + OWN - 1 + window);
    GLOBAL const T *keys = qkv + batch * time * row + kv_head * D, *values = keys + kv_heads * D;
    float one[ROWS];
    vec4 dk[CHUNKS][ROWS][WIDTH], dv[CHUNKS][ROWS][WIDTH];
    UNROLL for (int i = 0; i < ROWS; i++) one[i] = 1.0f;
    UNROLL for (int c = 0; c < CHUNKS; c++) {
        empty(dk[c]);
        empty(dv[c]);
    }
    if (CHUNKS == 1) {
        load_tile(k, OWN, keys, row, first, end, 0, 1.0f);
        load_tile(v, OWN, values, row, first, end, 0, 1.0f);
    }
    /* One loop, not one in another: the barriers in it then lie one loop deep. */
    const int start = first / STEP, blocks = (last + STEP - 1) / STEP - start;
    for (int step = 0; step < group * blocks; step++) {
        const i64 head = GROUP_Y * group + step / blocks;
        const int query = (start + step % blocks) * STEP;
        GLOBAL const T *queries = qkv + batch * time * row + head * D;
        GLOBAL const T *dy_head = dy + (batch * time * heads + head) * D;
        float s[ROWS][COLUMNS], da[ROWS][COLUMNS], column_lse[COLUMNS], column_delta[COLUMNS];
        clear(s);
        clear(da);
        UNROLL for (int c = 0; c < CHUNKS; c++) {
            if (CHUNKS > 1) {
                load_tile(k, OWN, keys, row, first, end, c, 1.0f);
                load_tile(v, OWN, values, row, first, end, c, 1.0f);
            }
            load_tile(q, STEP, queries, row, query, last, c, scale);
            load_tile(g, STEP, dy_head, heads * D, query, last, c, 1.0f);
            if (c == 0) {
                /* A query that is not there has P = 0. */
                for (int i = ITEM; i < STEP; i += GROUP) {
                    i64 at = (batch * heads + head) * time + query + i;
                    lse_[i] = query + i < last ? lse[at] : INF;
                    delta_[i] = query + i < last ? delta[at] : 0.0f;
                }
                if (DROPS)
                    fill_keep(p, STEP, OWN, 1, P_STRIDE, random, head_of(random, batch, heads, head),
                              time, query, first, (u32)stream, (u32)threshold, keep);
            }
            BARRIER();
            dots(s, k, q);
            dots(da, v, g);
            if (CHUNKS > 1) BARRIER();
        }
        UNROLL for (int j = 0; j < COLUMNS; j++) {
            column_lse[j] = lse_[ITEM % ACROSS + j * ACROSS];
            column_delta[j] = delta_[ITEM % ACROSS + j * ACROSS];
        }
        score_gradients(s, da, 1, query, first, (int)window, random, p, column_lse, column_delta, cap);
        store_scores(p, s);
        store_scores(ds, da);
        UNROLL for (int c = 0; c < CHUNKS; c++) {
            if (CHUNKS > 1) {
                BARRIER();
                load_tile(q, STEP, queries, row, query, last, c, scale);
                load_tile(g, STEP, dy_head, heads * D, query, last, c, 1.0f);
            }
            BARRIER();
            add_product(dv[c], one, p, g);
            add_product(dk[c], one, ds, q);
        }
        BARRIER();
    }
    dqkv += batch * time * row + kv_head * D;
    UNROLL for (int c = 0; c < CHUNKS; c++) {
        store_rows(dqkv, row, first, end, c, dk[c], one);
        store_rows(dqkv + kv_heads * D, row, first, end, c, dv[c], one);
    }
}
#endif
