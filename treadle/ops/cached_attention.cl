/* Attention over a cache of keys and values. See ops/cached_attention.py.

   The queries of a row of the batch that share a head of keys are numbered by position, then by head;
   a work-group owns OWN of them. Keys are cut into blocks at fixed positions. For each block a query
   gets its largest score, its sum of exponentials and its weighted sum of values, and these are merged
   in order: here, or by another kernel where the blocks of a query are dealt out among groups (then
   `partial` is there).
   Masked keys and skipped blocks add exact zeros, so that a query has the same bits whichever queries
   are computed beside it.

   Defined: what kernels/attention.clh wants; FLAT for the kernels without tiles. */
#include "attention.clh"

#define RECORD 4                  /* floats before the values of a block's result */
#define PADDED (CHUNKS * CHUNK)   /* values of a block's result */

/* Where a query stands. */
DEVICE int position_of(i64 start, i64 query, i64 group, i64 cache) {
    return least((start > 0 ? start : 0) + query / group, cache - 1);
}
DEVICE int first_seen(int position, i64 window) {
    return position < window ? 0 : (int)(position - window + 1);
}

#ifdef FLAT
/* keys, values [B,K,S,D]; qkv [B,T,(H+2K)*D], start [B]; B K T D, then as below. */
KERNEL cache_write(GLOBAL T *keys, GLOBAL T *values, GLOBAL const T *qkv, GLOBAL const i32 *start,
                   i64 n, i64 time, i64 heads, i64 kv_heads, i64 cache, i64 block, i64 window) {
    const i64 i = GROUP_X * GROUP + ITEM, d = i % D, t = i / D % time, head = i / D / time;
    if (i >= n) return;
    const i64 batch = head / kv_heads, at = (start[batch] > 0 ? start[batch] : 0) + t;
    if (at >= cache) return;
    const i64 from = ((batch * time + t) * (heads + 2 * kv_heads) + heads + head % kv_heads) * D + d;
    keys[(head * cache + at) * D + d] = qkv[from];
    values[(head * cache + at) * D + d] = qkv[from + kv_heads * D];
}

#else
/* y [B,T,H*D], or partial [B,K,query,block] records of a maximum, a sum and D values; qkv, keys, values,
   start as above; T, H, K, S, keys of a block, window; scale, cap. Groups: parts of the queries, each
   times all blocks where these are dealt out, heads of keys, batch. */
KERNEL cached_attention(GLOBAL T *y, GLOBAL float *partial, GLOBAL const T *qkv, GLOBAL const T *keys,
                        GLOBAL const T *values, GLOBAL const i32 *start, i64 time, i64 heads,
                        i64 kv_heads, i64 cache, i64 block, i64 window, float scale, float cap) {
    LOCAL vec4 q_[OWN * STRIDE / 4], x_[STEP * STRIDE / 4], p_[OWN * P_STRIDE / 4];
    LOCAL float top[OWN * ACROSS];
    LOCAL_ARG float *q = (LOCAL_ARG float *)q_, *x = (LOCAL_ARG float *)x_, *p = (LOCAL_ARG float *)p_;
    const int across = ITEM % ACROSS, down = ITEM / ACROSS;
    const i64 head = GROUP_Y, batch = GROUP_Z, row = (heads + 2 * kv_heads) * D, group = heads / kv_heads;
    const i64 rows = time * group, blocks = (cache + block - 1) / block;
    const i64 first = GROUP_X / (partial ? blocks : 1) * OWN;
    const i64 last = first + OWN < rows ? first + OWN - 1 : rows - 1;
    const int low = first_seen(position_of(start[batch], first, group, cache), window);
    const int high = position_of(start[batch], last, group, cache) + 1;
    i64 from = low / block, to = (high - 1) / block + 1;
    if (partial) {
        const i64 mine = GROUP_X % blocks;
        to = mine >= from && mine < to ? mine + 1 : mine;
        from = mine;
    }
    keys += (batch * kv_heads + head) * cache * D;
    values += (batch * kv_heads + head) * cache * D;
    float maximum[ROWS], sum[ROWS], factor[ROWS], all_maximum[ROWS], all_sum[ROWS];
    int position[ROWS];
    vec4 total[CHUNKS][ROWS][WIDTH], all[CHUNKS][ROWS][WIDTH];
    UNROLL for (int i = 0; i < ROWS; i++) {
        position[i] = position_of(start[batch], first + down + i * DOWN, group, cache);
        all_maximum[i] = LOWEST;
        all_sum[i] = 0.0f;
    }
    UNROLL for (int c = 0; c < CHUNKS; c++) empty(all[c]);
    for (i64 b = from; b < to; b++) {
        const int end = least(high, (b + 1) * block);
        const int begin = low > b * block ? low / STEP * STEP : (int)(b * block);
        UNROLL for (int i = 0; i < ROWS; i++) maximum[i] = LOWEST, sum[i] = 0.0f;
        UNROLL for (int c = 0; c < CHUNKS; c++) empty(total[c]);
        for (int key = begin; key < end; key += STEP) {
            float s[ROWS][COLUMNS];
            clear(s);
            UNROLL for (int c = 0; c < CHUNKS; c++) {
                for (int i = ITEM; i < OWN * (CHUNK / 4); i += GROUP) {
                    const int r = i / (CHUNK / 4), d = i % (CHUNK / 4) * 4;
                    const i64 query = first + r < rows ? first + r : rows - 1;
                    GLOBAL const T *at = qkv + (batch * time + query / group) * row;
                    at += (head * group + query % group) * D;
                    store4_local(q + r * STRIDE + d, scaled(load_part(at, c * CHUNK + d), scale));
                }
                load_tile(x, STEP, keys, D, key, end, c, 1.0f);
                BARRIER();
                dots(s, q, x);
                if (CHUNKS > 1) BARRIER();
            }
            UNROLL for (int i = 0; i < ROWS; i++) {
                float most = LOWEST;
                UNROLL for (int j = 0; j < COLUMNS; j++) {
                    if (cap > 0.0f) s[i][j] = cap * tanh(s[i][j] / cap);
                    if (!sees(position[i], key + across + j * ACROSS, (int)window)) s[i][j] = -INF;
                    most = fmax(most, s[i][j]);
                }
                top[(down + i * DOWN) * ACROSS + across] = most;
            }
            BARRIER();
            load_tile(x, STEP, values, D, key, end, 0, 1.0f);
            /* As in attention_forward. */
            UNROLL for (int i = 0; i < ROWS; i++) {
                float most = maximum[i], part = 0.0f;
                UNROLL for (int a = 0; a < ACROSS; a++)
                    most = fmax(most, top[(down + i * DOWN) * ACROSS + a]);
                factor[i] = exp(maximum[i] - most);
                maximum[i] = most;
                UNROLL for (int j = 0; j < COLUMNS; j++) {
                    s[i][j] = exp(s[i][j] - most);
                    part += s[i][j];
                }
                sum[i] = fma(sum[i], factor[i], part);
            }
            store_scores(p, s);
            UNROLL for (int c = 0; c < CHUNKS; c++) {
                if (c > 0) load_tile(x, STEP, values, D, key, end, c, 1.0f);
                BARRIER();
                add_product(total[c], factor, p, x);
                BARRIER();
            }
        }
        UNROLL for (int i = 0; i < ROWS; i++) top[(down + i * DOWN) * ACROSS + across] = sum[i];
        BARRIER();
        UNROLL for (int i = 0; i < ROWS; i++) {
            const i64 query = first + down + i * DOWN;
            float block_sum = 0.0f;
            UNROLL for (int a = 0; a < ACROSS; a++) block_sum += top[(down + i * DOWN) * ACROSS + a];
            if (partial) {
                i64 record = ((batch * kv_heads + head) * rows + query) * blocks + b;
                GLOBAL float *out = partial + record * (RECORD + PADDED);
                if (query < rows && across == 0) out[0] = maximum[i], out[1] = block_sum;
                UNROLL for (int c = 0; c < CHUNKS; c++) {
                    UNROLL for (int w = 0; w < WIDTH; w++) {
                        int d = (across + w * ACROSS) * 4;
                        if (query < rows && d < CHUNK)
                            store4_f32(out + RECORD + c * CHUNK + d, total[c][i][w]);
                    }
                }
                continue;
            }
            const float most = fmax(all_maximum[i], maximum[i]);
            const float old = exp(all_maximum[i] - most), now = exp(maximum[i] - most);
            all_maximum[i] = most;
            all_sum[i] = fma(all_sum[i], old, block_sum * now);
            UNROLL for (int c = 0; c < CHUNKS; c++)
                UNROLL for (int w = 0; w < WIDTH; w++)
                    all[c][i][w] = add_scaled(scaled(total[c][i][w], now), old, all[c][i][w]);
        }
        BARRIER();
    }
    if (partial) return;
    UNROLL for (int i = 0; i < ROWS; i++) {
        const i64 query = first + down + i * DOWN;
        GLOBAL T *out = y + ((batch * time + query / group) * heads + head * group + query % group) * D;
        UNROLL for (int c = 0; c < CHUNKS; c++) {
            UNROLL for (int w = 0; w < WIDTH; w++) {
                int d = (across + w * ACROSS) * 4;
                if (query < rows && d < CHUNK)
                    store_part(out, c * CHUNK + d, scaled(all[c][i][w], 1.0f / all_sum[i]));
            }
        }
    }
}

#endif

#ifdef FLAT
/* y from partial, block after block. A work-item has four values of a query. */
KERNEL cached_attention_combine(GLOBAL T *y, GLOBAL const float *partial, GLOBAL const i32 *start, i64 n,
                                i64 time, i64 heads, i64 kv_heads, i64 cache, i64 block, i64 window) {
    const i64 i = GROUP_X * GROUP + ITEM, group = heads / kv_heads, rows = time * group;
    const i64 blocks = (cache + block - 1) / block, all = i / (PADDED / 4), query = all % rows;
    const int d = (int)(i % (PADDED / 4)) * 4;
    if (i >= n) return;
    const i64 batch = all / rows / kv_heads, head = all / rows % kv_heads;
    const int position = position_of(start[batch], query, group, cache);
    float maximum = LOWEST, sum = 0.0f;
    vec4 total = vec4_of(0.0f, 0.0f, 0.0f, 0.0f);
    for (i64 b = first_seen(position, window) / block; b <= position / block; b++) {
        GLOBAL const float *in = partial + (all * blocks + b) * (RECORD + PADDED);
        const float most = fmax(maximum, in[0]), old = exp(maximum - most), now = exp(in[0] - most);
        maximum = most;
        sum = fma(sum, old, in[1] * now);
        total = add_scaled(scaled(load4_f32(in + RECORD + d), now), old, total);
    }
    GLOBAL T *out = y + ((batch * time + query / group) * heads + head * group + query % group) * D;
    store_part(out, d, scaled(total, 1.0f / sum));
}
#endif
