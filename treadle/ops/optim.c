/* dtypes: f32 */
/* Global norm, AdamW, SGD and gradient accumulation: one pass over memory each. See optim.py. */

#include "share.h"

/* ---- global norm ---------------------------------------------------------------------------------- */

#define RUN 1024 /* squares that are added up in fp32 before they join a double */

INLINE double sum_of_squares(const float *x, int64_t n) {
    double total = 0.0;
    for (int64_t start = 0; start < n; start += RUN) {
        int64_t end = start + RUN < n ? start + RUN : n, i = start;
        vf s[4] = {vzero(), vzero(), vzero(), vzero()};
        for (; i + 4 * VL <= end; i += 4 * VL) {
            for (int k = 0; k < 4; k++) {
                vf v = vload_f32(x + i + k * VL);
                s[k] = vfma(v, v, s[k]);
            }
        }
        for (int k = 0; i < end; k++, i += VL) {
            vf v = vloadn_f32(x + i, end - i < VL ? end - i : VL);
            s[k] = vfma(v, v, s[k]);
        }
        total += vsum((s[0] + s[1]) + (s[2] + s[3]));
    }
    return total;
}

/* partial[task] = sum of squares of one block of one gradient: tasks go through the gradients in order.
   dims: block length, number of gradients, then their sizes. */
KERNEL(norm_squares) {
    double *partial = c->ptr[0];
    const int64_t block = c->dim[0], *size = c->dim + 2;
    int64_t index = task, k = 0;
    for (; k + 1 < c->dim[1]; k++) {
        int64_t blocks = (size[k] + block - 1) / block;
        if (index < blocks) break;
        index -= blocks;
    }
    int64_t begin = index * block, n = size[k] - begin < block ? size[k] - begin : block;
    partial[task] = sum_of_squares((const float *)c->ptr[1 + k] + begin, n);
}

#define TREE_LEVELS 48

/* norm, scale, ok from partial[parts], added in a binary tree, and apply; loss and its limit, or NULL.
   dims: parts. num: max_norm (0: no clipping), epsilon. */
KERNEL(norm_combine) {
    float *norm = c->ptr[0], *scale = c->ptr[1], *ok = c->ptr[2];
    const double *partial = c->ptr[3];
    const float *apply = c->ptr[4], *loss = c->ptr[5], *limit = c->ptr[6];
    const double max_norm = c->num[0];
    double stack[TREE_LEVELS], total = 0.0;
    const int64_t parts = c->dim[0];
    for (int64_t p = 0; p < parts; p++) {
        double s = partial[p];
        int level = 0;
        for (; (p >> level) & 1; level++) s = stack[level] + s;
        stack[level] = s;
    }
    for (int level = 0; parts >> level; level++) {
        if ((parts >> level) & 1) total = stack[level] + total;
    }
    double root = sqrt(total), ratio = max_norm / (root + c->num[1]);
    *norm = (float)root;
    *scale = (float)(max_norm == 0.0 || ratio >= 1.0 ? 1.0 : ratio);
    int fine = isfinite(*norm) && (!loss || *loss <= *limit);
    *ok = fine ? *apply : 0.0f;
}

/* ---- updates ----------------------------------------------------------------------------------------- */

/* w[n], m[n], v[n] in place from g[n], and w's bf16 copy or NULL; inputs w, g, m, v and scalars lr,
   correction1, correction2, scale, ok. dims n; num beta1, beta2, eps, weight_decay. */
KERNEL(adamw) {
    float *w = c->ptr[0], *m = c->ptr[1], *v = c->ptr[2];
    bf16 *shadow = c->ptr[3];
    const float *g = c->ptr[5];
    const float lr = *(const float *)c->ptr[8], correction1 = *(const float *)c->ptr[9];
    const float correction2 = *(const float *)c->ptr[10], ok = *(const float *)c->ptr[12];
    if (ok == 0.0f) return;
    const vf scale = vset(*(const float *)c->ptr[11]);
    const vf beta2 = vset((float)c->num[1]), eps = vset((float)c->num[2]);
    const vf rest1 = vset((float)(1.0 - c->num[0])), rest2 = vset((float)(1.0 - c->num[1]));
    const vf keep = vset((float)(1.0 - lr * c->num[3]));
    const vf step = vset((float)(-(double)lr / correction1));
    const vf root = vset((float)(1.0 / sqrt(correction2)));
    int64_t end, i = share_of(c, task, c->dim[0], &end);
    for (; i < end; i += VL) {
        int64_t n = end - i < VL ? end - i : VL;
        vf gi = vloadn_f32(g + i, n) * scale, mi = vloadn_f32(m + i, n);
        mi = vfma(rest1, gi - mi, mi);
        vf vi2 = vfma(rest2 * gi, gi, beta2 * vloadn_f32(v + i, n));
        vf change = mi / vfma(vsqrt(vi2), root, eps);
        vf wi = vfma(step, change, keep * vloadn_f32(w + i, n));
        vstoren_f32(w + i, wi, n);
        if (shadow) vstoren_bf16(shadow + i, wi, n);
        vstoren_f32(m + i, mi, n);
        vstoren_f32(v + i, vi2, n);
    }
}

/* w[n], buffer[n] or NULL, and w's bf16 copy or NULL in place from g[n]; inputs w, g, buffer and
   scalars lr, scale, ok. dims n; num momentum, weight_decay. */
KERNEL(sgd) {
    float *w = c->ptr[0], *buffer = c->ptr[1];
    bf16 *shadow = c->ptr[2];
    const float *g = c->ptr[4];
    const float ok = *(const float *)c->ptr[8];
    if (ok == 0.0f) return;
    const vf lr = vset(-*(const float *)c->ptr[6]), scale = vset(*(const float *)c->ptr[7]);
    const vf momentum = vset((float)c->num[0]), decay = vset((float)c->num[1]);
    int64_t end, i = share_of(c, task, c->dim[0], &end);
    for (; i < end; i += VL) {
        int64_t n = end - i < VL ? end - i : VL;
        vf wi = vloadn_f32(w + i, n);
        vf change = vfma(vloadn_f32(g + i, n), scale, decay * wi);
        if (buffer) {
            change = vfma(momentum, vloadn_f32(buffer + i, n), change);
            vstoren_f32(buffer + i, change, n);
        }
        wi = vfma(lr, change, wi);
        vstoren_f32(w + i, wi, n);
        if (shadow) vstoren_bf16(shadow + i, wi, n);
    }
}

/* into[n] += x[n], in place; dims n */
KERNEL(accumulate) {
    float *into = c->ptr[0];
    const float *x = c->ptr[2];
    int64_t end, i = share_of(c, task, c->dim[0], &end);
    for (; i < end; i += VL) {
        int64_t n = end - i < VL ? end - i : VL;
        vstoren_f32(into + i, vloadn_f32(into + i, n) + vloadn_f32(x + i, n), n);
    }
}
