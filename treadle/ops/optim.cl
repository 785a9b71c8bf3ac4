/* Global norm, AdamW, SGD and gradient accumulation: one pass over memory each; equations in
   optim.py. */
#define EACH 4

/* ---------------------------------------------------------------- global norm */

/* A block is what NORM_LANES work-items add up, and the unit of distances between buffers: so the
   blocks of gradients that follow each other in memory are the same, one by one or all at once. */
#define NORM_LANES 8
#define NORM_BLOCK 256

/* partial[first + block] = the sum of squares of each block of g. */
KERNEL norm_squares(GLOBAL float *partial, GLOBAL const float *g, i64 n, i64 first) {
    LOCAL float sums[GROUP];
    const int lane = ITEM % NORM_LANES;
    const i64 block = GROUP_X * (GROUP / NORM_LANES) + ITEM / NORM_LANES;
    const i64 start = block * NORM_BLOCK + 4 * lane;
    vec4 total = vec4_of(0.0f, 0.0f, 0.0f, 0.0f);
    for (int k = 0; k < NORM_BLOCK; k += 4 * NORM_LANES) {
        i64 i = start + k;
        vec4 v = vec4_of(0.0f, 0.0f, 0.0f, 0.0f);
        if (i + 4 <= n) {
            v = load4_f32(g + i);
        } else if (i < n) {
            v = vec4_of(g[i], i + 1 < n ? g[i + 1] : 0.0f, i + 2 < n ? g[i + 2] : 0.0f, 0.0f);
        }
        total = fma4(v, v, total);
    }
    sums[ITEM] = (total.x + total.y) + (total.z + total.w);
    BARRIER();
    if (lane != 0 || block * NORM_BLOCK >= n) return;
    float sum = sums[ITEM];
    for (int k = 1; k < NORM_LANES; k++) sum += sums[ITEM + k];
    partial[first + block] = sum;
}

DEVICE float sum_of_(GLOBAL const float *x, i64 n, LOCAL_ARG float *scratch) {
    float sum = 0.0f;
    for (i64 i = ITEM; i < n; i += GROUP) sum += x[i];
    return group_sum(sum, scratch);
}

/* y[group] = the sum of `height` elements of x [n]. */
KERNEL norm_partials(GLOBAL float *y, GLOBAL const float *x, i64 n, i64 height) {
    LOCAL float scratch[GROUP];
    const i64 start = GROUP_X * height;
    const float sum = sum_of_(x + start, n - start < height ? n - start : height, scratch);
    if (ITEM == 0) y[GROUP_X] = sum;
}

/* norm, scale, ok; partial [parts], apply, loss|NULL, limit|NULL. One work-group. */
KERNEL norm_combine(GLOBAL float *norm, GLOBAL float *scale, GLOBAL float *ok,
                    GLOBAL const float *partial, GLOBAL const float *apply,
                    GLOBAL const float *loss, GLOBAL const float *limit, i64 parts,
                    float max_norm, float epsilon) {
    LOCAL float scratch[GROUP];
    const float root = sqrt(sum_of_(partial, parts, scratch));
    if (ITEM != 0) return;
    const float ratio = max_norm / (root + epsilon);
    const int limited = loss && !(*loss <= *limit);
    *norm = root;
    *scale = max_norm == 0.0f || ratio >= 1.0f ? 1.0f : ratio;
    *ok = root < INF && !limited ? *apply : 0.0f;
}

/* ---------------------------------------------------------------- updates */

/* w, m, v in place from g, and w's bf16 copy or NULL; the inputs that are w, m and v again. */
KERNEL adamw(GLOBAL float *w, GLOBAL float *m, GLOBAL float *v, GLOBAL bf16 *shadow,
             GLOBAL const float *w_in, GLOBAL const float *g, GLOBAL const float *m_in,
             GLOBAL const float *v_in, GLOBAL const float *lr, GLOBAL const float *correction1,
             GLOBAL const float *correction2, GLOBAL const float *scale, GLOBAL const float *ok,
             i64 n, float rest1, float beta2, float rest2, float eps, float weight_decay) {
    if (*ok == 0.0f) return;
    const float rate = *lr, factor = *scale;
    const float keep = fma(-rate, weight_decay, 1.0f), step = -rate / *correction1;
    const float root = 1.0f / sqrt(*correction2);
    for (int k = 0; k < EACH; k++) {
        const i64 i = (GROUP_X * EACH + k) * GROUP + ITEM;
        if (i < n) {
            float gi = g[i] * factor, mi = m[i];
            mi = fma(rest1, gi - mi, mi);
            const float vi = fma(rest2 * gi, gi, beta2 * v[i]);
            const float wi = fma(step, mi / fma(sqrt(vi), root, eps), keep * w[i]);
            w[i] = wi;
            m[i] = mi;
            v[i] = vi;
            if (shadow) store_bf16(shadow + i, wi);
        }
    }
}

/* w, buffer|NULL and w's bf16 copy or NULL in place from g. */
KERNEL sgd(GLOBAL float *w, GLOBAL float *buffer, GLOBAL bf16 *shadow, GLOBAL const float *w_in,
           GLOBAL const float *g, GLOBAL const float *buffer_in, GLOBAL const float *lr,
           GLOBAL const float *scale, GLOBAL const float *ok, i64 n, float momentum,
           float weight_decay) {
    if (*ok == 0.0f) return;
    const float rate = -*lr, factor = *scale;
    for (int k = 0; k < EACH; k++) {
        const i64 i = (GROUP_X * EACH + k) * GROUP + ITEM;
        if (i < n) {
            float wi = w[i], change = fma(g[i], factor, weight_decay * wi);
            if (buffer) {
                change = fma(momentum, buffer[i], change);
                buffer[i] = change;
            }
            wi = fma(rate, change, wi);
            w[i] = wi;
            if (shadow) store_bf16(shadow + i, wi);
        }
    }
}

/* into += x, in place. */
KERNEL accumulate(GLOBAL float *into, GLOBAL const float *into_in, GLOBAL const float *x, i64 n) {
    for (int k = 0; k < EACH; k++) {
        const i64 i = (GROUP_X * EACH + k) * GROUP + ITEM;
        if (i < n) into[i] += x[i];
    }
}
