/* The activations and their slopes, shared by the elementwise kernels and by matmul's epilogue. */
#ifndef TREADLE_ACTIVATION_H
#define TREADLE_ACTIVATION_H

#include "vec.h"

#define GELU_SCALE_2 1.5957691216f /* 2 sqrt(2 / pi) */
#define GELU_CUBIC 0.044715f
#define SQRT_HALF 0.70710678119f
#define NORMAL_DENSITY_0 0.39894228040f /* 1 / sqrt(2 pi) */

/* sigmoid(2u) = (1 + tanh u) / 2 with u = sqrt(2 / pi) (x + 0.044715 x^3), in one exponential */
INLINE vf vgelu_gate_(vf x) {
    vf u = x * vset(GELU_SCALE_2);
    return vsigmoid(u * vfma(x * x, vset(GELU_CUBIC), vset(1.0f)));
}

INLINE vf vgelu(vf x) { return x * vgelu_gate_(x); }

INLINE vf vgelu_slope(vf x) {
    vf s = vgelu_gate_(x);
    vf du = vset(GELU_SCALE_2) * vfma(x * x, vset(3.0f * GELU_CUBIC), vset(1.0f));
    return vfma(x * s * (vset(1.0f) - s), du, s);
}

INLINE vf vgelu_erf(vf x) {
    return vset(0.5f) * x * (vset(1.0f) + verf(x * vset(SQRT_HALF)));
}

INLINE vf vgelu_erf_slope(vf x) {
    vf cdf = vset(0.5f) * (vset(1.0f) + verf(x * vset(SQRT_HALF)));
    return vfma(x * vset(NORMAL_DENSITY_0), vexp(vset(-0.5f) * x * x), cdf);
}

INLINE vf vrelu_slope(vf x) {
    return vselect(vlt(vzero(), x), vset(1.0f), vselect(visnan(x), x, vzero()));
}

INLINE vf vsilu(vf x) { return x * vsigmoid(x); }

INLINE vf vsilu_slope(vf x) {
    vf s = vsigmoid(x);
    return vfma(x * s, vset(1.0f) - s, s);
}

/* Soft capping, which keeps x between -cap and cap, and its slope, a function of the result. */
INLINE vf vsoftcap(vf x, vf cap, vf inverse) { return cap * vtanh(x * inverse); }

INLINE vf vsoftcap_slope(vf y, vf inverse) {
    vf t = y * inverse;
    return vfma(-t, t, vset(1.0f));
}

/* An activation chosen at run time: 1 + its position in ACTIVATIONS of ops/elementwise.py. */
enum { ACT_NONE, ACT_GELU, ACT_GELU_ERF, ACT_RELU, ACT_SILU };

INLINE vf vactivation(int64_t kind, vf x) {
    switch (kind) {
    case ACT_GELU: return vgelu(x);
    case ACT_GELU_ERF: return vgelu_erf(x);
    case ACT_RELU: return vrelu(x);
    case ACT_SILU: return vsilu(x);
    default: return x;
    }
}

#endif
