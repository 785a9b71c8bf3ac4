/* Softmax cross-entropy and squared error; equations in loss.py. */
#include "call.h"
#include "vec.h"

/* Independent sums that hide the latency of exponentials and additions. */
#define CHAINS 4

INLINE vf load_first(const T *p, int64_t n) { return n == VL ? vload(p) : vloadn(p, n); }

/* What one task adds to a loss. */
typedef struct {
    double sum, count;
} partial;

/* ---- cross-entropy, forward --------------------------------------------------------------------- */

/* Logits whose maximum is taken before their exponentials: they stay in the first-level cache, so a row
   is read from memory once. */
#define CHUNK 2048

/* The maximum of x[0 .. n), NaN left out: it comes back with the exponentials. */
INLINE float row_max(const T *x, int64_t n) {
    vf m[CHAINS];
    int64_t j = 0;
    for (int k = 0; k < CHAINS; k++) m[k] = vset(-INFINITY);
    for (; j + CHAINS * VL <= n; j += CHAINS * VL) {
        for (int k = 0; k < CHAINS; k++) m[k] = vmax_b(vload(x + j + k * VL), m[k]);
    }
    for (; j + VL <= n; j += VL) m[0] = vmax_b(vload(x + j), m[0]);
    if (j < n) m[1] = vmax_b(vselect(vm_first(n - j), vloadn(x + j, n - j), m[1]), m[1]);
    return vhmax(vmax_b(vmax_b(m[0], m[1]), vmax_b(m[2], m[3])));
}

INLINE void add_exponentials(vf s[CHAINS], const T *x, int64_t n, vf shift) {
    int64_t j = 0;
    for (; j + CHAINS * VL <= n; j += CHAINS * VL) {
        for (int k = 0; k < CHAINS; k++) s[k] += vexp(vload(x + j + k * VL) - shift);
    }
    for (; j + VL <= n; j += VL) s[0] += vexp(vload(x + j) - shift);
    if (j < n) s[1] += vselect(vm_first(n - j), vexp(vloadn(x + j, n - j) - shift), vzero());
}

/* log of the sum of exp(x - top), top being the maximum. */
INLINE float row_log_sum(const T *x, int64_t n, float *top) {
    vf s[CHAINS] = {vzero(), vzero(), vzero(), vzero()};
    *top = -INFINITY;
    for (int64_t j = 0; j < n; j += CHUNK) {
        const int64_t length = n - j < CHUNK ? n - j : CHUNK;
        const float high = row_max(x + j, length);
        if (high > *top) {
            const vf shrink = vexp(vset(*top - high));
            for (int k = 0; k < CHAINS; k++) s[k] *= shrink;
            *top = high;
        }
        /* A row that begins with -inf alone: subtracting that would make NaN of what follows. */
        add_exponentials(s, x + j, length, vset(*top == -INFINITY ? 0.0f : *top));
    }
    return vlog(vset(vsum((s[0] + s[1]) + (s[2] + s[3]))))[0];
}

INLINE int is_counted(int32_t target, int64_t vocabulary, int64_t ignore_index) {
    return target != ignore_index && (uint32_t)target < (uint64_t)vocabulary;
}

/* partial [tasks], lse|NULL; logits, targets; dims rows, vocabulary, ignore_index, rows of a task. */
KERNEL(cross_entropy_forward) {
    partial *out = (partial *)c->ptr[0] + task;
    float *lse = c->ptr[1];
    const T *logits = c->ptr[2];
    const int32_t *targets = c->ptr[3];
    const int64_t rows = c->dim[0], vocabulary = c->dim[1], ignore_index = c->dim[2], height = c->dim[3];
    const int64_t end = (task + 1) * height < rows ? (task + 1) * height : rows;
    partial p = {0.0, 0.0};
    for (int64_t i = task * height; i < end; i++) {
        float row_lse = 0.0f;
        if (is_counted(targets[i], vocabulary, ignore_index)) {
            const T *x = logits + i * vocabulary;
            float top, log_sum = row_log_sum(x, vocabulary, &top);
            row_lse = top + log_sum;
            p.sum += log_sum + (top - to_f32(x[targets[i]]));
            p.count += 1.0;
        }
        if (lse) lse[i] = row_lse;
    }
    *out = p;
}

/* loss_sum, count; partial; dims number of partials. One task. */
KERNEL(loss_combine) {
    const partial *p = c->ptr[2];
    partial total = {0.0, 0.0};
    for (int64_t i = 0; i < c->dim[0]; i++) {
        total.sum += p[i].sum;
        total.count += p[i].count;
    }
    *(float *)c->ptr[0] = (float)total.sum;
    *(float *)c->ptr[1] = (float)total.count;
}

/* ---- cross-entropy, backward -------------------------------------------------------------------- */

/* dlogits; dloss, logits, targets, lse; dims as in forward. dlogits may be logits. */
KERNEL(cross_entropy_backward) {
    T *dlogits = c->ptr[0];
    const float dloss = *(const float *)c->ptr[1], *lse = c->ptr[4];
    const T *logits = c->ptr[2];
    const int32_t *targets = c->ptr[3];
    const int64_t rows = c->dim[0], vocabulary = c->dim[1], ignore_index = c->dim[2], height = c->dim[3];
    const int64_t end = (task + 1) * height < rows ? (task + 1) * height : rows;
    for (int64_t i = task * height; i < end; i++) {
        T *dx = dlogits + i * vocabulary;
        if (!is_counted(targets[i], vocabulary, ignore_index)) {
            memset(dx, 0, (size_t)vocabulary * sizeof(T));
            continue;
        }
        const T *x = logits + i * vocabulary;
        const vf shift = vset(lse[i]), scale = vset(dloss);
        const vf chosen = vexp(vset(to_f32(x[targets[i]])) - shift);
        int64_t j = 0;
        for (; j + VL <= vocabulary; j += VL) vstore(dx + j, vexp(vload(x + j) - shift) * scale);
        if (j < vocabulary) {
            const int64_t n = vocabulary - j;
            vstoren(dx + j, vexp(vloadn(x + j, n) - shift) * scale, n);
        }
        dx[targets[i]] = from_f32((chosen[0] - 1.0f) * dloss);
    }
}

/* ---- squared error ------------------------------------------------------------------------------ */

/* partial [tasks]; y, target; dims elements, elements of a task. */
KERNEL(squared_error_forward) {
    const int64_t n = c->dim[0], block = c->dim[1], begin = task * block;
    const int64_t length = n - begin < block ? n - begin : block;
    const T *y = (const T *)c->ptr[1] + begin, *target = (const T *)c->ptr[2] + begin;
    vf s[CHAINS] = {vzero(), vzero(), vzero(), vzero()};
    int64_t j = 0;
    for (; j + CHAINS * VL <= length; j += CHAINS * VL) {
        for (int k = 0; k < CHAINS; k++) {
            vf d = vload(y + j + k * VL) - vload(target + j + k * VL);
            s[k] = vfma(d, d, s[k]);
        }
    }
    for (; j < length; j += VL) {
        const int64_t rest = length - j < VL ? length - j : VL;
        vf d = load_first(y + j, rest) - load_first(target + j, rest);
        s[0] = vfma(d, d, s[0]);
    }
    partial *out = (partial *)c->ptr[0] + task;
    out->sum = vsum((s[0] + s[1]) + (s[2] + s[3]));
    out->count = (double)length;
}

/* dy; dloss, y, target; dims elements, elements of a task. dy may be y or target. */
KERNEL(squared_error_backward) {
    const int64_t n = c->dim[0], block = c->dim[1], begin = task * block;
    const int64_t end = begin + block < n ? begin + block : n;
    T *dy = c->ptr[0];
    const T *y = c->ptr[2], *target = c->ptr[3];
    const vf slope = vset(2.0f * *(const float *)c->ptr[1]);
    for (int64_t j = begin; j < end; j += VL) {
        const int64_t rest = end - j < VL ? end - j : VL;
        vf d = load_first(y + j, rest) - load_first(target + j, rest);
        vstoren(dy + j, d * slope, rest);
    }
}

/* ptr: y, loss sum, count; all scalars. */
KERNEL(mean) {
    const float count = to_f32(((const T *)c->ptr[2])[0]);
    ((T *)c->ptr[0])[0] = from_f32(to_f32(((const T *)c->ptr[1])[0]) / (count > 1.0f ? count : 1.0f));
}
