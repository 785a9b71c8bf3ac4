/* Token and position embedding; equations in embedding.py. */
#include "call.h"
#include "vec.h"

INLINE vf load_first(const T *p, int64_t n) { return n == VL ? vload(p) : vloadn(p, n); }

/* A negative token is a large number here, so one comparison finds every token out of range. */
INLINE int is_known(int32_t token, int64_t vocabulary) { return (uint32_t)token < (uint64_t)vocabulary; }

/* ---- forward ------------------------------------------------------------------------------------ */

INLINE void sum_rows(T *y, const T *a, const T *b, int64_t n) {
    int64_t j = 0;
    for (; j + VL <= n; j += VL) vstore(y + j, vload(a + j) + vload(b + j));
    if (j < n) vstoren(y + j, vloadn(a + j, n - j) + vloadn(b + j, n - j), n - j);
}

/* y; tokens, wte, wpe|NULL, start|NULL; dims rows (B*T), T, channels, vocabulary, rows of a task,
   positions. */
KERNEL(embedding_forward) {
    T *y = c->ptr[0];
    const int32_t *tokens = c->ptr[1];
    const T *wte = c->ptr[2], *wpe = c->ptr[3];
    const int32_t *start = c->ptr[4];
    const int64_t rows = c->dim[0], time = c->dim[1], channels = c->dim[2], vocabulary = c->dim[3];
    const int64_t height = c->dim[4], end = (task + 1) * height < rows ? (task + 1) * height : rows;
    const size_t bytes = (size_t)channels * sizeof(T);
    for (int64_t i = task * height; i < end; i++) {
        T *yi = y + i * channels;
        const T *token = is_known(tokens[i], vocabulary) ? wte + tokens[i] * channels : NULL;
        const int64_t at = i % time + (start ? start[i / time] : 0), last = c->dim[5] - 1;
        const T *position = wpe ? wpe + (at < 0 ? 0 : at < last ? at : last) * channels : NULL;
        if (token && position) {
            sum_rows(yi, token, position, channels);
        } else if (token || position) {
            memcpy(yi, token ? token : position, bytes);
        } else {
            memset(yi, 0, bytes);
        }
    }
}

/* ---- gradient of wte ---------------------------------------------------------------------------- */

#define DIGIT_BITS 11
#define DIGITS (1 << DIGIT_BITS)

/* order[0 .. known) = positions sorted by token, equal tokens by position; order[rows] = known, the
   number of tokens in the vocabulary. Radix sort from the low digit up; unknown tokens sort last.
   order; tokens; dims rows, channels, vocabulary; scratch: rows ints. One task. */
KERNEL(embedding_sort) {
    int32_t *order = c->ptr[0], *other = scratch;
    const int32_t *tokens = c->ptr[1];
    const int64_t rows = c->dim[0], vocabulary = c->dim[2];
    int passes = 1;
    while (vocabulary >> (passes * DIGIT_BITS)) passes++;
    int32_t known = 0;
    for (int64_t i = 0; i < rows; i++) known += is_known(tokens[i], vocabulary);
    for (int pass = 0; pass < passes; pass++) {
        const int last = (passes - pass) & 1; /* the passes alternate so that the final one fills order */
        const int32_t *from = last ? other : order;
        int32_t *to = last ? order : other;
        int32_t start[DIGITS + 1] = {0};
        for (int64_t i = 0; i < rows; i++) {
            int64_t key = is_known(tokens[i], vocabulary) ? tokens[i] : vocabulary;
            start[((key >> (pass * DIGIT_BITS)) & (DIGITS - 1)) + 1]++;
        }
        for (int d = 0; d < DIGITS; d++) start[d + 1] += start[d];
        for (int64_t i = 0; i < rows; i++) {
            int32_t at = pass ? from[i] : (int32_t)i;
            int64_t key = is_known(tokens[at], vocabulary) ? tokens[at] : vocabulary;
            to[start[(key >> (pass * DIGIT_BITS)) & (DIGITS - 1)]++] = at;
        }
    }
    order[rows] = known;
}

/* dwte = into, which may be the same memory, or zeros where into is absent.
   dwte; into|NULL; dims elements, elements of a task. */
KERNEL(embedding_clear) {
    float *dwte = c->ptr[0];
    const float *into = c->ptr[1];
    const int64_t n = c->dim[0], block = c->dim[1], begin = task * block;
    const size_t bytes = (size_t)(n - begin < block ? n - begin : block) * sizeof(float);
    if (!into) {
        memset(dwte + begin, 0, bytes);
    } else if (into != dwte) {
        memcpy(dwte + begin, into + begin, bytes);
    }
}

/* Vectors of columns that are added at a time, and positions that make up one partial sum: long runs of
   one token keep their precision. */
#define VECTORS 4
#define GROUP 32

/* Adds the sum of dy's rows order[0 .. count) to out: `vectors` vectors of columns, the last one n wide. */
INLINE void add_run(float *out, const T *dy, const int32_t *order, int64_t count, int64_t channels,
                    int vectors, int64_t n) {
    vf total[VECTORS];
    for (int k = 0; k < vectors; k++) {
        total[k] = n == VL || k < vectors - 1 ? vload_f32(out + k * VL) : vloadn_f32(out + k * VL, n);
    }
    for (int64_t i = 0; i < count; i += GROUP) {
        const int64_t end = i + GROUP < count ? i + GROUP : count;
        vf sum[VECTORS];
        for (int k = 0; k < vectors; k++) sum[k] = vzero();
        for (int64_t r = i; r < end; r++) {
            const T *row = dy + order[r] * channels;
            for (int k = 0; k < vectors; k++) sum[k] += load_first(row + k * VL, k < vectors - 1 ? VL : n);
        }
        for (int k = 0; k < vectors; k++) total[k] += sum[k];
    }
    for (int k = 0; k < vectors; k++) {
        if (n == VL || k < vectors - 1) {
            vstore_f32(out + k * VL, total[k]);
        } else {
            vstoren_f32(out + k * VL, total[k], n);
        }
    }
}

/* dwte, to which is added; order, tokens, dy; dims rows, channels, vocabulary, columns of a task. */
KERNEL(embedding_backward) {
    float *dwte = c->ptr[0];
    const int32_t *order = c->ptr[1], *tokens = c->ptr[2];
    const T *dy = c->ptr[3];
    const int64_t rows = c->dim[0], channels = c->dim[1], width = c->dim[3], known = order[rows];
    const int64_t begin = task * width, end = begin + width < channels ? begin + width : channels;
    for (int64_t i = 0, next; i < known; i = next) {
        const int32_t token = tokens[order[i]];
        for (next = i + 1; next < known && tokens[order[next]] == token; next++) {}
        float *out = dwte + token * channels;
        int64_t j = begin;
        for (; j + VECTORS * VL <= end; j += VECTORS * VL) {
            add_run(out + j, dy + j, order + i, next - i, channels, VECTORS, VL);
        }
        for (; j + VL <= end; j += VL) add_run(out + j, dy + j, order + i, next - i, channels, 1, VL);
        if (j < end) add_run(out + j, dy + j, order + i, next - i, channels, 1, end - j);
    }
}

/* ---- gradient of wpe ---------------------------------------------------------------------------- */

/* dwpe; dy; dims batch, T, channels, positions, positions of a task. */
KERNEL(position_backward) {
    float *dwpe = c->ptr[0];
    const T *dy = c->ptr[1];
    const int64_t batch = c->dim[0], time = c->dim[1], channels = c->dim[2], positions = c->dim[3];
    const int64_t height = c->dim[4];
    const int64_t end = (task + 1) * height < positions ? (task + 1) * height : positions;
    const int64_t stride = time * channels;
    for (int64_t t = task * height; t < end; t++) {
        float *out = dwpe + t * channels;
        if (t >= time) {
            memset(out, 0, (size_t)channels * sizeof *out);
            continue;
        }
        const T *in = dy + t * channels;
        int64_t j = 0;
        for (; j + VECTORS * VL <= channels; j += VECTORS * VL) {
            vf sum[VECTORS];
            for (int k = 0; k < VECTORS; k++) sum[k] = vzero();
            for (int64_t b = 0; b < batch; b++) {
                for (int k = 0; k < VECTORS; k++) sum[k] += vload(in + b * stride + j + k * VL);
            }
            for (int k = 0; k < VECTORS; k++) vstore_f32(out + j + k * VL, sum[k]);
        }
        for (; j < channels; j += VL) {
            const int64_t n = channels - j < VL ? channels - j : VL;
            vf sum = vzero();
            for (int64_t b = 0; b < batch; b++) sum += load_first(in + b * stride + j, n);
            vstoren_f32(out + j, sum, n);
        }
    }
}

/* ---- one position ------------------------------------------------------------------------------- */

/* y; x, index; dims T, channels, whether rows have an index each. Task = batch row. */
KERNEL(select_row) {
    const int64_t time = c->dim[0], channels = c->dim[1];
    int64_t t = ((const int32_t *)c->ptr[2])[c->dim[2] ? task : 0];
    t = t < 0 ? 0 : t < time ? t : time - 1;
    const T *x = (const T *)c->ptr[1] + (task * time + t) * channels;
    memcpy((T *)c->ptr[0] + task * channels, x, (size_t)channels * sizeof(T));
}
