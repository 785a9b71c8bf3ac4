/* Softmax cross-entropy and squared error; equations in loss.py. LANES work-items have a row. */
#include "loss.clh"

DEVICE int is_counted_(i32 target, i64 vocabulary, i64 ignore_index) {
    return target != ignore_index && target >= 0 && target < vocabulary;
}

/* ---------------------------------------------------------------- cross-entropy */

/* A sum of exponentials of x - top, top being the largest x so far. A row that begins with -inf
   alone: subtracting that would make NaN of what follows. */
typedef struct {
    float top, sum;
} exponentials;

DEVICE exponentials raised_(exponentials e, float top) {
    if (top > e.top) {
        e.sum = e.top == -INF ? e.sum : e.sum * exp(e.top - top);
        e.top = top;
    }
    return e;
}

DEVICE float exp_below_(float x, float top) { return exp(x - (top == -INF ? 0.0f : top)); }

/* losses [rows] and counts [rows], lse|NULL [rows]; logits, targets. cap: of the logits, 0 for
   none. The maximum leaves NaN out: it comes back with the exponentials. */
KERNEL cross_entropy_forward(GLOBAL float *losses, GLOBAL float *counts, GLOBAL float *lse,
                             GLOBAL const T *logits, GLOBAL const i32 *targets, i64 rows,
                             i64 vocabulary, i64 ignore_index, float cap) {
    LOCAL float scratch[2 * GROUP];
    const i64 row = ROW < rows ? ROW : rows - 1;
    const int n = (int)(vocabulary / VEC);
    const i32 target = targets[row];
    const int counted = is_counted_(target, vocabulary, ignore_index);
    GLOBAL const T *x = logits + row * vocabulary;
    exponentials e;
    e.top = -INF;
    e.sum = 0.0f;
    if (counted) {
        for (int j = LANE; j < n; j += LANES) {
#if VEC == 4
            vec v = LOAD4(T, x, 4 * j);
            float a = capped_(v.x, cap), b = capped_(v.y, cap);
            float c = capped_(v.z, cap), d = capped_(v.w, cap);
            e = raised_(e, fmax(fmax(a, b), fmax(c, d)));
            e.sum += (exp_below_(a, e.top) + exp_below_(b, e.top)) +
                     (exp_below_(c, e.top) + exp_below_(d, e.top));
#else
            float v = capped_(LOAD(T, x, j), cap);
            e = raised_(e, v);
            e.sum += exp_below_(v, e.top);
#endif
        }
    }
    const float top = lanes_max(e.top, scratch);
    const float log_sum = log(lanes_sum(raised_(e, top).sum, scratch));
    if (LANE != 0 || ROW >= rows) return;
    losses[row] = counted ? log_sum + (top - capped_(LOAD(T, x, target), cap)) : 0.0f;
    counts[row] = counted ? 1.0f : 0.0f;
    if (lse) lse[row] = counted ? top + log_sum : 0.0f;
}

/* sum and count of each group of `height` partial ones. */
KERNEL loss_combine(GLOBAL float *sum, GLOBAL float *count, GLOBAL const float *sums,
                    GLOBAL const float *counts, i64 parts, i64 height) {
    LOCAL float scratch[GROUP];
    const i64 start = GROUP_X * height, end = start + height < parts ? start + height : parts;
    float loss = 0.0f, number = 0.0f;
    for (i64 i = start + ITEM; i < end; i += GROUP) {
        loss += sums[i];
        number += counts[i];
    }
    loss = group_sum(loss, scratch);
    number = group_sum(number, scratch);
    if (ITEM == 0) {
        sum[GROUP_X] = loss;
        count[GROUP_X] = number;
    }
}

#ifdef U
/* dlogits, which may be the logits; dloss, logits, targets, lse. */
KERNEL cross_entropy_backward(GLOBAL U *dlogits, GLOBAL const float *dloss,
                              GLOBAL const T *logits, GLOBAL const i32 *targets,
                              GLOBAL const float *lse, i64 rows, i64 vocabulary, i64 ignore_index,
                              float cap) {
    const i64 row = ROW;
    const int n = (int)(vocabulary / VEC);
    if (row >= rows) return;
    const i32 target = targets[row];
    const int counted = is_counted_(target, vocabulary, ignore_index);
    const float shift = lse[row], scale = *dloss;
    GLOBAL const T *x = logits + row * vocabulary;
    GLOBAL U *dx = dlogits + row * vocabulary;
    for (int j = LANE; j < n; j += LANES) {
        if (!counted) {
            STOREV(U, dx, j * VEC, vec_of(0.0f));
            continue;
        }
#if VEC == 4
        vec v = LOAD4(T, x, 4 * j);
        STORE4(U, dx, 4 * j,
               vec4_of(slope_(v.x, shift, scale, cap, 4 * j == target),
                       slope_(v.y, shift, scale, cap, 4 * j + 1 == target),
                       slope_(v.z, shift, scale, cap, 4 * j + 2 == target),
                       slope_(v.w, shift, scale, cap, 4 * j + 3 == target)));
#else
        STORE(U, dx, j, slope_(LOAD(T, x, j), shift, scale, cap, j == target));
#endif
    }
}
#endif

/* ---------------------------------------------------------------- squared error */

/* sums and counts of each work-group's EACH elements a work-item; y, target. */
#define EACH 16
KERNEL squared_error_forward(GLOBAL float *sums, GLOBAL float *counts, GLOBAL const T *y,
                             GLOBAL const T *target, i64 n) {
    LOCAL float scratch[GROUP];
    float sum = 0.0f, count = 0.0f;
    for (int k = 0; k < EACH; k++) {
        const i64 i = (GROUP_X * EACH + k) * GROUP + ITEM;
        if (i < n) {
            float d = LOAD(T, y, i) - LOAD(T, target, i);
            sum = fma(d, d, sum);
            count += 1.0f;
        }
    }
    sum = group_sum(sum, scratch);
    count = group_sum(count, scratch);
    if (ITEM == 0) {
        sums[GROUP_X] = sum;
        counts[GROUP_X] = count;
    }
}

/* dy, which may be y or target; dloss, y, target. */
KERNEL squared_error_backward(GLOBAL T *dy, GLOBAL const float *dloss, GLOBAL const T *y,
                              GLOBAL const T *target, i64 n) {
    const float slope = 2.0f * *dloss;
    for (int k = 0; k < 4; k++) {
        const i64 i = (GROUP_X * 4 + k) * GROUP + ITEM;
        if (i < n) STORE(T, dy, i, (LOAD(T, y, i) - LOAD(T, target, i)) * slope);
    }
}

/* y = sum / max(count, 1), scalars. */
KERNEL mean(GLOBAL T *y, GLOBAL const T *sum, GLOBAL const T *count) {
    if (ITEM == 0) STORE(T, y, 0, LOAD(T, sum, 0) / fmax(LOAD(T, count, 0), 1.0f));
}
