/* Layer and root mean square normalisation; equations in norm.py. A row is read from memory once: the
   later passes over it find it in the first-level cache.

   The second is the first with a mean of 0, which is neither computed nor subtracted (`centred` is 0),
   and with a constant that is added to the weight. */
#include "call.h"
#include "vec.h"

/* Independent sums that hide the latency of addition. */
#define CHAINS 4

INLINE vf load_first(const T *p, int64_t n) { return n == VL ? vload(p) : vloadn(p, n); }
INLINE vf load_first_f32(const float *p, int64_t n) { return n == VL ? vload_f32(p) : vloadn_f32(p, n); }
INLINE void store_first(T *p, vf x, int64_t n) {
    if (n == VL) {
        vstore(p, x);
    } else {
        vstoren(p, x, n);
    }
}

/* p[i .. i+n) of a weight or bias, which is float32 (wide) or T. */
INLINE vf load_parameter(const void *p, int64_t i, int64_t n, int wide) {
    return wide ? load_first_f32((const float *)p + i, n) : load_first((const T *)p + i, n);
}

INLINE vf centre(vf x, vf mean, const int centred) { return centred ? x - mean : x; }

INLINE float sum_chains(const vf s[CHAINS]) { return vsum((s[0] + s[1]) + (s[2] + s[3])); }

INLINE float row_sum(const T *x, int64_t n) {
    vf s[CHAINS] = {vzero(), vzero(), vzero(), vzero()};
    int64_t j = 0;
    for (; j + CHAINS * VL <= n; j += CHAINS * VL) {
        for (int k = 0; k < CHAINS; k++) s[k] += vload(x + j + k * VL);
    }
    for (; j + VL <= n; j += VL) s[0] += vload(x + j);
    if (j < n) s[1] += vloadn(x + j, n - j);
    return sum_chains(s);
}

INLINE float row_squares(const T *x, int64_t n, vf mean, const int centred) {
    vf s[CHAINS] = {vzero(), vzero(), vzero(), vzero()};
    int64_t j = 0;
    for (; j + CHAINS * VL <= n; j += CHAINS * VL) {
        for (int k = 0; k < CHAINS; k++) {
            vf d = centre(vload(x + j + k * VL), mean, centred);
            s[k] = vfma(d, d, s[k]);
        }
    }
    for (; j + VL <= n; j += VL) {
        vf d = centre(vload(x + j), mean, centred);
        s[0] = vfma(d, d, s[0]);
    }
    if (j < n) {
        vf d = vselect(vm_first(n - j), centre(vloadn(x + j, n - j), mean, centred), vzero());
        s[1] = vfma(d, d, s[1]);
    }
    return sum_chains(s);
}

/* ---- forward ------------------------------------------------------------------------------------ */

/* What a row is scaled and shifted by. `after`: the bias, or a row of T that is added. */
typedef struct {
    const void *weight, *after;
    vf offset, mean, rstd;
} scaling;

INLINE void normalise(T *y, const T *x, const scaling *s, int64_t j, int64_t n, const int centred,
                      const int wide) {
    vf xhat = centre(load_first(x + j, n), s->mean, centred) * s->rstd;
    vf w = load_parameter(s->weight, j, n, wide);
    if (!centred) w += s->offset;
    store_first(y + j, s->after ? vfma(xhat, w, load_parameter(s->after, j, n, centred && wide)) : xhat * w, n);
}

INLINE void forward_rows(const call *c, int64_t task, const int centred, const int wide, const void *bias,
                         const T *residual, float *means, float *rstds, const T *x, const void *weight) {
    T *y = c->ptr[0];
    const int64_t rows = c->dim[0], channels = c->dim[1], height = c->dim[2];
    const int64_t end = (task + 1) * height < rows ? (task + 1) * height : rows;
    for (int64_t i = task * height; i < end; i++) {
        const T *xi = x + i * channels;
        float mean = centred ? row_sum(xi, channels) / (float)channels : 0.0f;
        float variance = row_squares(xi, channels, vset(mean), centred) / (float)channels;
        float rstd = 1.0f / sqrtf(variance + (float)c->num[0]);
        const scaling s = {weight, residual ? residual + i * channels : bias,
                           centred ? vzero() : vset((float)c->num[1]), vset(mean), vset(rstd)};
        int64_t j = 0;
        for (; j + VL <= channels; j += VL) normalise(y + i * channels, xi, &s, j, VL, centred, wide);
        if (j < channels) normalise(y + i * channels, xi, &s, j, channels - j, centred, wide);
        if (means) means[i] = mean;
        if (rstds) rstds[i] = rstd;
    }
}

/* y, mean|NULL, rstd|NULL; x, weight, bias|NULL; dims rows, channels, rows of a task, whether weight and
   bias are float32; nums eps. */
KERNEL(layernorm_forward) {
    float *mean = c->ptr[1], *rstd = c->ptr[2];
    if (c->dim[3]) {
        forward_rows(c, task, 1, 1, c->ptr[5], NULL, mean, rstd, c->ptr[3], c->ptr[4]);
    } else {
        forward_rows(c, task, 1, 0, c->ptr[5], NULL, mean, rstd, c->ptr[3], c->ptr[4]);
    }
}

/* y, rstd|NULL; x, weight, residual|NULL; dims as above; nums eps, offset. y may be x or residual. */
KERNEL(rmsnorm_forward) {
    if (c->dim[3]) {
        forward_rows(c, task, 0, 1, NULL, c->ptr[4], NULL, c->ptr[1], c->ptr[2], c->ptr[3]);
    } else {
        forward_rows(c, task, 0, 0, NULL, c->ptr[4], NULL, c->ptr[1], c->ptr[2], c->ptr[3]);
    }
}

/* ---- backward ----------------------------------------------------------------------------------- */

typedef struct {
    const T *dy, *x;
    const void *weight;
    vf mean, offset;
} row;

/* g = dy * weight, and the centred x. */
INLINE vf weighted(const row *r, int64_t j, int64_t n, const int centred, const int wide, vf *x) {
    vf w = load_parameter(r->weight, j, n, wide);
    *x = centre(load_first(r->x + j, n), r->mean, centred);
    return load_first(r->dy + j, n) * (centred ? w : w + r->offset);
}

INLINE void backward_sums(const row *r, int64_t n, const int centred, const int wide, float *g_sum,
                          float *gx_sum) {
    vf s[CHAINS] = {vzero(), vzero(), vzero(), vzero()}, t[CHAINS] = {vzero(), vzero(), vzero(), vzero()};
    vf x, g;
    int64_t j = 0;
    for (; j + CHAINS * VL <= n; j += CHAINS * VL) {
        for (int k = 0; k < CHAINS; k++) {
            g = weighted(r, j + k * VL, VL, centred, wide, &x);
            if (centred) s[k] += g;
            t[k] = vfma(g, x, t[k]);
        }
    }
    for (; j + VL <= n; j += VL) {
        g = weighted(r, j, VL, centred, wide, &x);
        if (centred) s[0] += g;
        t[0] = vfma(g, x, t[0]);
    }
    if (j < n) {
        g = weighted(r, j, n - j, centred, wide, &x);
        if (centred) s[1] += g;
        t[1] = vfma(g, x, t[1]);
    }
    *g_sum = sum_chains(s);
    *gx_sum = sum_chains(t);
}

INLINE void backward_store(T *dx, const T *into, const row *r, vf g_mean, vf slope, vf rstd, int64_t j,
                           int64_t n, const int centred, const int wide) {
    vf x, g = weighted(r, j, n, centred, wide, &x);
    vf change = rstd * vfma(-x, slope, centred ? g - g_mean : g);
    store_first(dx + j, into ? load_first(into + j, n) + change : change, n);
}

INLINE void backward_rows(const call *c, int64_t task, const int centred, const int wide,
                          const float *means, const float *rstds, const T *all) {
    T *dx = c->ptr[0];
    const T *dy = c->ptr[1], *x = c->ptr[2];
    const int64_t rows = c->dim[0], channels = c->dim[1], height = c->dim[2];
    const int64_t end = (task + 1) * height < rows ? (task + 1) * height : rows;
    for (int64_t i = task * height; i < end; i++) {
        const int64_t at = i * channels;
        const T *into = all ? all + at : NULL;
        const row r = {dy + at, x + at, c->ptr[3], centred ? vset(means[i]) : vzero(),
                       centred ? vzero() : vset((float)c->num[0])};
        float g_sum, gx_sum;
        backward_sums(&r, channels, centred, wide, &g_sum, &gx_sum);
        /* slope * centred = xhat * mean(g * xhat). */
        vf g_mean = vset(g_sum / (float)channels), rstd = vset(rstds[i]);
        vf slope = rstd * rstd * vset(gx_sum / (float)channels);
        int64_t j = 0;
        for (; j + VL <= channels; j += VL) {
            backward_store(dx + at, into, &r, g_mean, slope, rstd, j, VL, centred, wide);
        }
        if (j < channels) {
            backward_store(dx + at, into, &r, g_mean, slope, rstd, j, channels - j, centred, wide);
        }
    }
}

/* dx; dy, x, weight, mean, rstd, into or NULL; dims as in forward. dx may be dy, x or into. */
KERNEL(layernorm_backward) {
    if (c->dim[3]) {
        backward_rows(c, task, 1, 1, c->ptr[4], c->ptr[5], c->ptr[6]);
    } else {
        backward_rows(c, task, 1, 0, c->ptr[4], c->ptr[5], c->ptr[6]);
    }
}

/* dx; dy, x, weight, rstd, into or NULL; dims as in forward; nums offset. dx may be dy, x or into. */
KERNEL(rmsnorm_backward) {
    if (c->dim[3]) {
        backward_rows(c, task, 0, 1, NULL, c->ptr[4], c->ptr[5]);
    } else {
        backward_rows(c, task, 0, 0, NULL, c->ptr[4], c->ptr[5]);
    }
}

/* ---- weight gradients --------------------------------------------------------------------------- */

/* Rows that are added in registers between two visits to the partial sums. */
#define GROUP 4

/* Adds `count` rows, from top to bottom, to n columns of the sums; the first rows start them. */
INLINE void add_columns(float *weight_sum, float *bias_sum, const T *dy, const T *x, const float *mean,
                        const float *rstd, int64_t channels, int64_t j, int64_t n, int count, int first) {
    vf w = first ? vzero() : load_first_f32(weight_sum + j, n);
    vf b = first || !bias_sum ? vzero() : load_first_f32(bias_sum + j, n);
    for (int k = 0; k < count; k++) {
        vf g = load_first(dy + k * channels + j, n);
        vf xhat = load_first(x + k * channels + j, n);
        if (mean) xhat -= vset(mean[k]);
        xhat *= vset(rstd[k]);
        w = vfma(g, xhat, w);
        b += g;
    }
    vstoren_f32(weight_sum + j, w, n);
    if (bias_sum) vstoren_f32(bias_sum + j, b, n);
}

INLINE void add_rows(float *weight_sum, float *bias_sum, const T *dy, const T *x, const float *mean,
                     const float *rstd, int64_t channels, int count, int first) {
    int64_t j = 0;
    for (; j + VL <= channels; j += VL) {
        add_columns(weight_sum, bias_sum, dy, x, mean, rstd, channels, j, VL, count, first);
    }
    if (j < channels) {
        add_columns(weight_sum, bias_sum, dy, x, mean, rstd, channels, j, channels - j, count, first);
    }
}

/* Sums over one block of rows: weight [blocks, channels], bias [blocks, channels]|NULL; dy, x, mean|NULL,
   rstd; dims rows, channels, rows of a block. Task = block. */
KERNEL(norm_weight_backward) {
    const int64_t rows = c->dim[0], channels = c->dim[1], height = c->dim[2];
    float *weight_sum = (float *)c->ptr[0] + task * channels;
    float *bias_sum = c->ptr[1] ? (float *)c->ptr[1] + task * channels : NULL;
    const T *dy = c->ptr[2], *x = c->ptr[3];
    const float *mean = c->ptr[4], *rstd = c->ptr[5];
    const int64_t begin = task * height, end = begin + height < rows ? begin + height : rows;
    int64_t i = begin;
    for (; i + GROUP <= end; i += GROUP) {
        const int64_t at = i * channels;
        add_rows(weight_sum, bias_sum, dy + at, x + at, mean ? mean + i : NULL, rstd + i, channels, GROUP,
                 i == begin);
    }
    for (; i < end; i++) {
        const int64_t at = i * channels;
        add_rows(weight_sum, bias_sum, dy + at, x + at, mean ? mean + i : NULL, rstd + i, channels, 1,
                 i == begin);
    }
}
