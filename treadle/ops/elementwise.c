/* Elementwise kernels, activations, and the sum over leading dimensions. See elementwise.py. */

#include "activation.h"
#include "share.h"

typedef vf (*unary)(vf);
typedef vf (*binary)(vf, vf);

/* y = f(x) and y = f(a, b): with a constant f these compile to one loop without calls. */
INLINE void map(const call *c, int64_t task, unary f) {
    T *y = c->ptr[0];
    const T *x = c->ptr[1];
    int64_t end, i = share_of(c, task, c->dim[0], &end);
    for (; i + VL <= end; i += VL) vstore(y + i, f(vload(x + i)));
    if (i < end) vstoren(y + i, f(vloadn(x + i, end - i)), end - i);
}

INLINE void zip_span(T *y, const T *a, const T *b, int64_t n, binary f) {
    int64_t i = 0;
    for (; i + VL <= n; i += VL) vstore(y + i, f(vload(a + i), vload(b + i)));
    if (i < n) vstoren(y + i, f(vloadn(a + i, n - i), vloadn(b + i, n - i)), n - i);
}

INLINE void zip(const call *c, int64_t task, binary f) {
    int64_t end, i = share_of(c, task, c->dim[0], &end);
    T *y = c->ptr[0];
    const T *a = c->ptr[1], *b = c->ptr[2];
    zip_span(y + i, a + i, b + i, end - i, f);
}

/* ---- fill, copy, cast --------------------------------------------------------------------------- */

/* y[n] = value */
KERNEL(fill) {
    T *y = c->ptr[0];
    vf value = vset((float)c->num[0]);
    int64_t end, i = share_of(c, task, c->dim[0], &end);
    for (; i + VL <= end; i += VL) vstore(y + i, value);
    if (i < end) vstoren(y + i, value, end - i);
}

/* y[n] = x[n] */
KERNEL(copy) {
    T *y = c->ptr[0];
    const T *x = c->ptr[1];
    int64_t end, i = share_of(c, task, c->dim[0], &end);
    if (y != x && i < end) memcpy(y + i, x + i, (size_t)(end - i) * sizeof(T));
}

/* y[n] = x[n], y of this compilation's dtype */
KERNEL(cast_f32) {
    T *y = c->ptr[0];
    const float *x = c->ptr[1];
    int64_t end, i = share_of(c, task, c->dim[0], &end);
    for (; i + VL <= end; i += VL) vstore(y + i, vload_f32(x + i));
    if (i < end) vstoren(y + i, vloadn_f32(x + i, end - i), end - i);
}

KERNEL(cast_bf16) {
    T *y = c->ptr[0];
    const bf16 *x = c->ptr[1];
    int64_t end, i = share_of(c, task, c->dim[0], &end);
    for (; i + VL <= end; i += VL) vstore(y + i, vload_bf16(x + i));
    if (i < end) vstoren(y + i, vloadn_bf16(x + i, end - i), end - i);
}

/* ---- sum, scale ---------------------------------------------------------------------------------- */

/* y[n] = x1[n] + ... + xk[n], from left to right; dims n, k */
KERNEL(sum) {
    T *y = c->ptr[0];
    const int64_t count = c->dim[1];
    int64_t end, i = share_of(c, task, c->dim[0], &end);
    for (; i + VL <= end; i += VL) {
        vf total = vload((const T *)c->ptr[1] + i);
        for (int64_t k = 2; k <= count; k++) total += vload((const T *)c->ptr[k] + i);
        vstore(y + i, total);
    }
    if (i < end) {
        vf total = vloadn((const T *)c->ptr[1] + i, end - i);
        for (int64_t k = 2; k <= count; k++) total += vloadn((const T *)c->ptr[k] + i, end - i);
        vstoren(y + i, total, end - i);
    }
}

/* y[n] = alpha x[n] */
KERNEL(scale) {
    T *y = c->ptr[0];
    const T *x = c->ptr[1];
    vf alpha = vset((float)c->num[0]);
    int64_t end, i = share_of(c, task, c->dim[0], &end);
    for (; i + VL <= end; i += VL) vstore(y + i, alpha * vload(x + i));
    if (i < end) vstoren(y + i, alpha * vloadn(x + i, end - i), end - i);
}

/* ---- add, mul, broadcast: the last input repeats every `period` elements ------------------------------ */

#define SHORT_PERIOD 256

/* A short period is repeated in `tile`, so that runs of whole vectors appear. */
INLINE const T *lengthen(const T *x, int64_t *period, T tile[2 * SHORT_PERIOD]) {
    if (*period >= SHORT_PERIOD) return x;
    int64_t length = (SHORT_PERIOD + *period - 1) / *period * *period;
    for (int64_t i = 0; i < length; i++) tile[i] = i < *period ? x[i] : tile[i - *period];
    *period = length;
    return tile;
}

INLINE void zip_periodic(const call *c, int64_t task, binary f) {
    T *y = c->ptr[0], tile[2 * SHORT_PERIOD];
    const T *a = c->ptr[1];
    int64_t period = c->dim[1], end, i = share_of(c, task, c->dim[0], &end);
    if (period == c->dim[0]) {
        zip(c, task, f);
        return;
    }
    const T *b = lengthen(c->ptr[2], &period, tile);
    for (int64_t j = i % period; i < end; j = 0) {
        int64_t n = end - i < period - j ? end - i : period - j;
        zip_span(y + i, a + i, b + j, n, f);
        i += n;
    }
}

INLINE vf vadd(vf a, vf b) { return a + b; }
INLINE vf vmul(vf a, vf b) { return a * b; }

/* y[n] = a[n] + b[n % period]; dims n, period */
KERNEL(add) { zip_periodic(c, task, vadd); }

/* y[n] = a[n] b[n % period]; dims n, period */
KERNEL(mul) { zip_periodic(c, task, vmul); }

/* y[n] = x[n % period]; dims n, period */
KERNEL(broadcast) {
    T *y = c->ptr[0], tile[2 * SHORT_PERIOD];
    int64_t period = c->dim[1], end, i = share_of(c, task, c->dim[0], &end);
    const T *x = lengthen(c->ptr[1], &period, tile);
    for (int64_t j = i % period; i < end; j = 0) {
        int64_t n = end - i < period - j ? end - i : period - j;
        memcpy(y + i, x + j, (size_t)n * sizeof(T));
        i += n;
    }
}

/* ---- activations: y[n] = f(x[n]), and dx[n] = dy[n] f'(x[n]) ------------------------------------------- */

#define ACTIVATION(kind) \
    INLINE vf kind##_gradient(vf dy, vf x) { return dy * v##kind##_slope(x); } \
    KERNEL(kind##_forward) { map(c, task, v##kind); } \
    KERNEL(kind##_backward) { zip(c, task, kind##_gradient); }

ACTIVATION(gelu)
ACTIVATION(gelu_erf)
ACTIVATION(relu)
ACTIVATION(silu)

/* ---- gated activations: y[n] = f(gate[n]) x[n] ------------------------------------------------------- */

/* dgate, dx; dy, gate, x; dims n. Either output may be any of the inputs. */
INLINE void gated_backward(const call *c, int64_t task, unary f, unary slope) {
    T *dgate = c->ptr[0], *dx = c->ptr[1];
    const T *dy = c->ptr[2], *gate = c->ptr[3], *x = c->ptr[4];
    int64_t end, i = share_of(c, task, c->dim[0], &end);
    for (; i + VL <= end; i += VL) {
        const vf d = vload(dy + i), g = vload(gate + i), v = vload(x + i);
        vstore(dgate + i, d * v * slope(g));
        vstore(dx + i, d * f(g));
    }
    if (i < end) {
        const int64_t n = end - i;
        const vf d = vloadn(dy + i, n), g = vloadn(gate + i, n), v = vloadn(x + i, n);
        vstoren(dgate + i, d * v * slope(g), n);
        vstoren(dx + i, d * f(g), n);
    }
}

#define GATED(kind) \
    INLINE vf gated_##kind(vf gate, vf x) { return v##kind(gate) * x; } \
    KERNEL(gated_##kind##_forward) { zip(c, task, gated_##kind); } \
    KERNEL(gated_##kind##_backward) { gated_backward(c, task, v##kind, v##kind##_slope); }

GATED(gelu)
GATED(gelu_erf)
GATED(relu)
GATED(silu)

/* ---- soft capping -------------------------------------------------------------------------------------- */

/* y[n] = cap tanh(x[n] / cap); nums cap */
KERNEL(softcap_forward) {
    T *y = c->ptr[0];
    const T *x = c->ptr[1];
    const vf cap = vset((float)c->num[0]), inverse = vset((float)(1.0 / c->num[0]));
    int64_t end, i = share_of(c, task, c->dim[0], &end);
    for (; i + VL <= end; i += VL) vstore(y + i, vsoftcap(vload(x + i), cap, inverse));
    if (i < end) vstoren(y + i, vsoftcap(vloadn(x + i, end - i), cap, inverse), end - i);
}

/* dx[n] = dy[n] (1 - (y[n] / cap)^2); nums cap */
KERNEL(softcap_backward) {
    T *dx = c->ptr[0];
    const T *dy = c->ptr[1], *y = c->ptr[2];
    const vf inverse = vset((float)(1.0 / c->num[0]));
    int64_t end, i = share_of(c, task, c->dim[0], &end);
    for (; i + VL <= end; i += VL) {
        vstore(dx + i, vload(dy + i) * vsoftcap_slope(vload(y + i), inverse));
    }
    if (i < end) {
        const int64_t n = end - i;
        vstoren(dx + i, vloadn(dy + i, n) * vsoftcap_slope(vloadn(y + i, n), inverse), n);
    }
}

/* ---- sum over leading dimensions ------------------------------------------------------------------------ */

/* Accumulators of one pass over the rows of a part: as wide as the registers hold. */
#define SUM_VECTORS (VL == 16 ? 16 : 8)

/* The sum of n contiguous numbers: four lanes-wide sums side by side, then across. */
INLINE float sum_contiguous(const T *x, int64_t n) {
    vf s[4] = {vzero(), vzero(), vzero(), vzero()};
    int64_t i = 0;
    for (; i + 4 * VL <= n; i += 4 * VL) {
        for (int k = 0; k < 4; k++) s[k] += vload(x + i + k * VL);
    }
    for (int k = 0; i < n; k++, i += VL) s[k] += vloadn(x + i, n - i < VL ? n - i : VL);
    return vsum((s[0] + s[1]) + (s[2] + s[3]));
}

/* partial[part, columns] = sum of a part's rows of x[rows, columns]; dims rows, columns, parts.
   Task = (part, block of columns). */
KERNEL(sum_leading) {
    float *partial = c->ptr[0];
    const T *x = c->ptr[1];
    const int64_t rows = c->dim[0], columns = c->dim[1], parts = c->dim[2];
    const int64_t across = c->tasks / parts, part = task / across, block = task % across;
    const int64_t height = (rows + parts - 1) / parts, width = (columns + across - 1) / across;
    const int64_t row = part * height, row_end = row + height < rows ? row + height : rows;
    const int64_t end = block * width + width < columns ? block * width + width : columns;
    partial += part * columns;
    if (columns == 1) {
        partial[0] = sum_contiguous(x + row, row_end - row);
        return;
    }
    int64_t j = block * width;
    for (; j + SUM_VECTORS * VL <= end; j += SUM_VECTORS * VL) {
        vf s[SUM_VECTORS];
        for (int k = 0; k < SUM_VECTORS; k++) s[k] = vzero();
        for (int64_t i = row; i < row_end; i++) {
            for (int k = 0; k < SUM_VECTORS; k++) s[k] += vload(x + i * columns + j + k * VL);
        }
        for (int k = 0; k < SUM_VECTORS; k++) vstore_f32(partial + j + k * VL, s[k]);
    }
    for (; j < end; j += VL) {
        int64_t n = end - j < VL ? end - j : VL;
        vf s = vzero();
        for (int64_t i = row; i < row_end; i++) s += vloadn(x + i * columns + j, n);
        vstoren_f32(partial + j, s, n);
    }
}

#define TREE_LEVELS 48

/* y[columns] = sum of partial[parts, columns] in a binary tree; dims rows, columns, parts.
   Level l of the stack holds the sum of 2^l parts, as in a binary counter. Task = block of columns. */
KERNEL(sum_leading_combine) {
    T *y = c->ptr[0];
    const float *partial = c->ptr[1];
    const int64_t columns = c->dim[1], parts = c->dim[2];
    const int64_t width = (columns + c->tasks - 1) / c->tasks;
    const int64_t end = task * width + width < columns ? task * width + width : columns;
    for (int64_t j = task * width; j < end; j += VL) {
        vf stack[TREE_LEVELS];
        int64_t n = end - j < VL ? end - j : VL;
        for (int64_t p = 0; p < parts; p++) {
            vf s = vloadn_f32(partial + p * columns + j, n);
            int level = 0;
            for (; (p >> level) & 1; level++) s = stack[level] + s;
            stack[level] = s;
        }
        vf total = vzero();
        int64_t left = parts;
        for (int level = 0, first = 1; left; level++, left >>= 1) {
            if (left & 1) total = first ? stack[level] : stack[level] + total, first = 0;
        }
        vstoren(y + j, total, n);
    }
}
