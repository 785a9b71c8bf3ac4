/* Layer normalisation; equations in norm.py. A row is read from memory once: the later passes over it
   find it in the first-level cache. */
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

INLINE float row_squares(const T *x, int64_t n, vf mean) {
    vf s[CHAINS] = {vzero(), vzero(), vzero(), vzero()};
    int64_t j = 0;
    for (; j + CHAINS * VL <= n; j += CHAINS * VL) {
        for (int k = 0; k < CHAINS; k++) {
            vf d = vload(x + j + k * VL) - mean;
            s[k] = vfma(d, d, s[k]);
        }
    }
    for (; j + VL <= n; j += VL) {
        vf d = vload(x + j) - mean;
        s[0] = vfma(d, d, s[0]);
    }
    if (j < n) {
        vf d = vselect(vm_first(n - j), vloadn(x + j, n - j) - mean, vzero());
        s[1] = vfma(d, d, s[1]);
    }
    return sum_chains(s);
}

/* ---- forward ------------------------------------------------------------------------------------ */

INLINE void normalise(T *y, const T *x, const void *weight, const void *bias, vf mean, vf rstd, int64_t j,
                      int64_t n, int wide) {
    vf xhat = (load_first(x + j, n) - mean) * rstd, w = load_parameter(weight, j, n, wide);
    store_first(y + j, bias ? vfma(xhat, w, load_parameter(bias, j, n, wide)) : xhat * w, n);
}

INLINE void forward_rows(const call *c, int64_t task, int wide, const void *bias) {
    T *y = c->ptr[0];
    float *means = c->ptr[1], *rstds = c->ptr[2];
    const T *x = c->ptr[3];
    const void *weight = c->ptr[4];
    const int64_t rows = c->dim[0], channels = c->dim[1], height = c->dim[2];
    const int64_t end = (task + 1) * height < rows ? (task + 1) * height : rows;
    for (int64_t i = task * height; i < end; i++) {
        const T *xi = x + i * channels;
        float mean = row_sum(xi, channels) / (float)channels;
        float variance = row_squares(xi, channels, vset(mean)) / (float)channels;
        float rstd = 1.0f / sqrtf(variance + (float)c->num[0]);
        vf m = vset(mean), r = vset(rstd);
        int64_t j = 0;
        for (; j + VL <= channels; j += VL) normalise(y + i * channels, xi, weight, bias, m, r, j, VL, wide);
        if (j < channels) normalise(y + i * channels, xi, weight, bias, m, r, j, channels - j, wide);
        if (means) means[i] = mean;
        if (rstds) rstds[i] = rstd;
    }
}

/* y, mean|NULL, rstd|NULL; x, weight, bias|NULL; dims rows, channels, rows of a task, whether weight and
   bias are float32; nums eps. */
KERNEL(layernorm_forward) {
    const void *bias = c->ptr[5];
    if (c->dim[3]) {
        forward_rows(c, task, 1, bias);
    } else {
        forward_rows(c, task, 0, bias);
    }
}

/* ---- backward ----------------------------------------------------------------------------------- */

typedef struct {
    const T *dy, *x;
    const void *weight;
    vf mean;
    int wide;
} row;

/* g = dy * weight, and the centred x. */
INLINE vf weighted(const row *r, int64_t j, int64_t n, vf *centred) {
    *centred = load_first(r->x + j, n) - r->mean;
    return load_first(r->dy + j, n) * load_parameter(r->weight, j, n, r->wide);
}

INLINE void backward_sums(const row *r, int64_t n, float *g_sum, float *gx_sum) {
    vf s[CHAINS] = {vzero(), vzero(), vzero(), vzero()}, t[CHAINS] = {vzero(), vzero(), vzero(), vzero()};
    vf centred, g;
    int64_t j = 0;
    for (; j + CHAINS * VL <= n; j += CHAINS * VL) {
        for (int k = 0; k < CHAINS; k++) {
            g = weighted(r, j + k * VL, VL, &centred);
            s[k] += g;
            t[k] = vfma(g, centred, t[k]);
        }
    }
    for (; j + VL <= n; j += VL) {
        g = weighted(r, j, VL, &centred);
        s[0] += g;
        t[0] = vfma(g, centred, t[0]);
    }
    if (j < n) {
        g = weighted(r, j, n - j, &centred);
        s[1] += g;
        t[1] = vfma(g, centred, t[1]);
    }
    *g_sum = sum_chains(s);
    *gx_sum = sum_chains(t);
}

INLINE void backward_store(T *dx, const T *into, const row *r, vf g_mean, vf slope, vf rstd, int64_t j,
                           int64_t n) {
    vf centred, g = weighted(r, j, n, &centred);
    vf change = rstd * vfma(-centred, slope, g - g_mean);
    store_first(dx + j, into ? load_first(into + j, n) + change : change, n);
}

INLINE void backward_rows(const call *c, int64_t task, int wide) {
    T *dx = c->ptr[0];
    const T *dy = c->ptr[1], *x = c->ptr[2];
    const float *means = c->ptr[4], *rstds = c->ptr[5];
    const T *all = c->ptr[6];
    const int64_t rows = c->dim[0], channels = c->dim[1], height = c->dim[2];
    const int64_t end = (task + 1) * height < rows ? (task + 1) * height : rows;
    for (int64_t i = task * height; i < end; i++) {
        const int64_t at = i * channels;
        const T *into = all ? all + at : NULL;
        const row r = {dy + at, x + at, c->ptr[3], vset(means[i]), wide};
        float g_sum, gx_sum;
        backward_sums(&r, channels, &g_sum, &gx_sum);
        /* slope * centred = xhat * mean(g * xhat). */
        vf g_mean = vset(g_sum / (float)channels), rstd = vset(rstds[i]);
        vf slope = rstd * rstd * vset(gx_sum / (float)channels);
        int64_t j = 0;
        for (; j + VL <= channels; j += VL) {
            backward_store(dx + at, into, &r, g_mean, slope, rstd, j, VL);
        }
        if (j < channels) {
            backward_store(dx + at, into, &r, g_mean, slope, rstd, j, channels - j);
        }
    }
}

/* dx; dy, x, weight, mean, rstd, into or NULL; dims as in forward. dx may be dy, x or into. */
KERNEL(layernorm_backward) {
    if (c->dim[3]) {
        backward_rows(c, task, 1);
    } else {
        backward_rows(c, task, 0);
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
        vf xhat = (load_first(x + k * channels + j, n) - vset(mean[k])) * vset(rstd[k]);
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

/* Sums over one block of rows: weight [blocks, channels], bias [blocks, channels]|NULL; dy, x, mean, rstd;
   dims rows, channels, rows of a block. Task = block. */
KERNEL(layernorm_weight_backward) {
    const int64_t rows = c->dim[0], channels = c->dim[1], height = c->dim[2];
    float *weight_sum = (float *)c->ptr[0] + task * channels;
    float *bias_sum = c->ptr[1] ? (float *)c->ptr[1] + task * channels : NULL;
    const T *dy = c->ptr[2], *x = c->ptr[3];
    const float *mean = c->ptr[4], *rstd = c->ptr[5];
    const int64_t begin = task * height, end = begin + height < rows ? begin + height : rows;
    int64_t i = begin;
    for (; i + GROUP <= end; i += GROUP) {
        const int64_t at = i * channels;
        add_rows(weight_sum, bias_sum, dy + at, x + at, mean + i, rstd + i, channels, GROUP, i == begin);
    }
    for (; i < end; i++) {
        const int64_t at = i * channels;
        add_rows(weight_sum, bias_sum, dy + at, x + at, mean + i, rstd + i, channels, 1, i == begin);
    }
}
