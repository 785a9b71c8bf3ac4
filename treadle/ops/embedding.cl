/* Token and position embedding; equations in embedding.py. LANES work-items have a row. */

DEVICE int is_known_(i32 token, i64 vocabulary) { return token >= 0 && token < vocabulary; }

/* y; tokens, wte, wpe|NULL, start|NULL. */
KERNEL embedding_forward(GLOBAL T *y, GLOBAL const i32 *tokens, GLOBAL const T *wte,
                         GLOBAL const T *wpe, GLOBAL const i32 *start, i64 rows, i64 time,
                         i64 channels, i64 vocabulary, i64 positions) {
    const i64 row = ROW;
    const int n = (int)(channels / VEC);
    if (row >= rows) return;
    const i32 token = tokens[row];
    const int known = is_known_(token, vocabulary);
    i64 at = row % time + (start ? start[row / time] : 0);
    at = at < 0 ? 0 : at < positions ? at : positions - 1;
    for (int j = LANE; j < n; j += LANES) {
        vec v = known ? LOADV(T, wte, token * channels + j * VEC) : vec_of(0.0f);
        if (wpe) v = addv(v, LOADV(T, wpe, at * channels + j * VEC));
        STOREV(T, y, row * channels + j * VEC, v);
    }
}

/* ---------------------------------------------------------------- gradient of wte */

/* Positions are sorted by token, equal tokens by position: work-groups sort SORTED of them each, and
   passes merge WAYS sorted runs into one. Unknown tokens become `vocabulary` and come last. */
#define SORTED 1024
#define WAYS 8
#define OWN (SORTED / GROUP)

/* keys and order [rows]: tokens and positions; the rank of a position is how many stand before it. */
KERNEL embedding_sort(GLOBAL i32 *keys, GLOBAL i32 *order, GLOBAL const i32 *tokens, i64 rows,
                      i64 vocabulary) {
    LOCAL i32 key[SORTED];
    const i64 start = GROUP_X * SORTED;
    i32 own[OWN];
    int rank[OWN];
    for (int k = 0; k < OWN; k++) {
        const i64 i = start + k * GROUP + ITEM;
        const i32 token = i < rows ? tokens[i] : 0;
        own[k] = i >= rows ? 0x7fffffff : is_known_(token, vocabulary) ? token : (i32)vocabulary;
        key[k * GROUP + ITEM] = own[k];
    }
    BARRIER();
    for (int k = 0; k < OWN; k++) rank[k] = 0;
    for (int other = 0; other < SORTED; other++) {
        const i32 value = key[other];
        for (int k = 0; k < OWN; k++)
            rank[k] += value < own[k] || (value == own[k] && other < k * GROUP + ITEM);
    }
    for (int k = 0; k < OWN; k++) {
        const i64 i = start + k * GROUP + ITEM;
        if (i < rows) {
            keys[start + rank[k]] = own[k];
            order[start + rank[k]] = (i32)i;
        }
    }
}

/* How many of the sorted keys [begin, end) are below `key`, or also equal to it. */
DEVICE i64 count_below_(GLOBAL const i32 *keys, i64 begin, i64 end, i32 key, int or_equal) {
    i64 low = begin, high = end;
    while (low < high) {
        const i64 middle = (low + high) / 2;
        if (keys[middle] < key || (or_equal && keys[middle] == key)) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low - begin;
}

/* keys, order; the same where `width` of them are sorted. A work-item places one. */
KERNEL embedding_merge(GLOBAL i32 *keys, GLOBAL i32 *order, GLOBAL const i32 *keys_in,
                       GLOBAL const i32 *order_in, i64 rows, i64 width) {
    const i64 i = GROUP_X * GROUP + ITEM;
    if (i >= rows) return;
    const i64 run = i / width, first = run / WAYS * WAYS;
    const i32 key = keys_in[i];
    i64 at = first * width + (i - run * width);
    for (i64 other = first; other < first + WAYS && other * width < rows; other++) {
        const i64 begin = other * width, end = begin + width < rows ? begin + width : rows;
        if (other != run) at += count_below_(keys_in, begin, end, key, other < run);
    }
    keys[at] = key;
    order[at] = order_in[i];
}

/* y = into, or zeros. Nothing is left to do where y has the memory of into. */
KERNEL embedding_clear(GLOBAL float *y, GLOBAL const float *into, i64 n) {
    if (y == into) return;
    for (int k = 0; k < 4; k++) {
        const i64 i = (GROUP_X * 4 + k) * GROUP + ITEM;
        if (i < n) y[i] = into ? into[i] : 0.0f;
    }
}

/* SEGMENT sorted positions are added up in order. What belongs to a token of which no other segment
   has a position is added to dwte; the sum of one that the segment before has as well goes to heads,
   and of one that begins here and goes on to tails [segments, channels]. */
#define SEGMENT 32

KERNEL embedding_segments(GLOBAL float *dwte, GLOBAL float *heads, GLOBAL float *tails,
                          GLOBAL const i32 *keys, GLOBAL const i32 *order, GLOBAL const T *dy,
                          i64 rows, i64 channels, i64 vocabulary) {
    const i64 segment = ROW, start = segment * SEGMENT;
    const i64 end = start + SEGMENT < rows ? start + SEGMENT : rows;
    const int n = (int)(channels / VEC), j = (int)(GROUP_Y * LANES + LANE);
    if (start >= rows || j >= n) return;
    i64 i = start;
    while (i < end && keys[i] < vocabulary) {
        const i32 token = keys[i];
        const int continued = i == start && i > 0 && keys[i - 1] == token;
        vec sum = vec_of(0.0f);
        for (; i < end && keys[i] == token; i++)
            sum = addv(sum, LOADV(T, dy, order[i] * channels + j * VEC));
        if (continued) {
            STOREV(f32, heads, segment * channels + j * VEC, sum);
        } else if (i == end && i < rows && keys[i] == token) {
            STOREV(f32, tails, segment * channels + j * VEC, sum);
        } else {
            GLOBAL float *y = dwte + token * channels + j * VEC;
            STOREV(f32, y, 0, addv(LOADV(f32, y, 0), sum));
        }
    }
}

/* dwte += the sums of a token that begins in segment GROUP_X and goes on in others. GROUP / LANES
   work-items add up every so manieth segment of a vector of columns, then one of them all. */
KERNEL embedding_runs(GLOBAL float *dwte, GLOBAL const float *heads, GLOBAL const float *tails,
                      GLOBAL const i32 *keys, i64 rows, i64 channels, i64 vocabulary) {
    LOCAL float sums[GROUP * VEC];
    const i64 segment = GROUP_X, start = segment * SEGMENT, end = start + SEGMENT;
    if (end >= rows) return;
    const i32 token = keys[end];
    if (token >= vocabulary || keys[end - 1] != token) return;
    if (start > 0 && keys[start - 1] == token) return;
    const i64 last = (end + count_below_(keys, end, rows, token, 1) - 1) / SEGMENT;
    const int n = (int)(channels / VEC), j = (int)(GROUP_Y * LANES + LANE), lane = ITEM / LANES;
    vec sum = vec_of(0.0f);
    if (j < n) {
        if (lane == 0) sum = LOADV(f32, tails, segment * channels + j * VEC);
        for (i64 s = segment + 1 + lane; s <= last; s += GROUP / LANES)
            sum = addv(sum, LOADV(f32, heads, s * channels + j * VEC));
    }
    STORE_LOCAL(sums, ITEM * VEC, sum);
    BARRIER();
    if (lane != 0 || j >= n) return;
    for (int k = 1; k < GROUP / LANES; k++)
        sum = addv(sum, LOAD_LOCAL(sums, (k * LANES + LANE) * VEC));
    GLOBAL float *y = dwte + token * channels + j * VEC;
    STOREV(f32, y, 0, addv(LOADV(f32, y, 0), sum));
}

/* ---------------------------------------------------------------- positions */

/* dwpe [positions, channels]; dy [batch, time, channels]. `block` rows of the batch at a time. */
KERNEL position_backward(GLOBAL float *dwpe, GLOBAL const T *dy, i64 batch, i64 time, i64 channels,
                         i64 positions, i64 block) {
    const i64 row = ROW;
    const int n = (int)(channels / VEC);
    if (row >= positions) return;
    for (int j = LANE; j < n; j += LANES) {
        vec total = vec_of(0.0f);
        for (i64 first = 0; row < time && first < batch; first += block) {
            const i64 end = first + block < batch ? first + block : batch;
            vec sum = vec_of(0.0f);
            for (i64 b = first; b < end; b++)
                sum = addv(sum, LOADV(T, dy, (b * time + row) * channels + j * VEC));
            total = addv(total, sum);
        }
        STOREV(f32, dwpe, row * channels + j * VEC, total);
    }
}

/* y [batch, channels]; x [batch, time, channels], index [batch] or, without `each`, one. */
KERNEL select_row(GLOBAL T *y, GLOBAL const T *x, GLOBAL const i32 *index, i64 batch, i64 time,
                  i64 channels, i64 each) {
    const i64 row = ROW;
    const int n = (int)(channels / VEC);
    if (row >= batch) return;
    const i32 asked = index[each ? row : 0], last = (i32)time - 1;
    const i64 at = asked < 0 ? 0 : asked < last ? asked : last;
    for (int j = LANE; j < n; j += LANES)
        STOREV(T, y, row * channels + j * VEC,
               LOADV(T, x, (row * time + at) * channels + j * VEC));
}
