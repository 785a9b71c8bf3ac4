/* Vectors of VL floats over GCC's and Clang's vector extensions, and the maths that kernels need.

   T is the storage type of this compilation (float, or bf16 held in a uint16_t); all arithmetic is
   fp32. Operators (+ - * / and comparisons through the v** functions below) work lane by lane.
   Multiply-adds are fused only where the text says vfma, so one text gives one result per
   instruction set. NaN passes through every function here, maxima and minima included.

   Largest errors against float64 over the whole range (tests/test_kernels_c.py holds them to it):
       vexp 1.5 ulp, vlog 1.5 ulp, vtanh 3 ulp, vsigmoid 3 ulp (0 below -88.7), verf 2e-7 absolute
       and 3 ulp. Denormal results and arguments are exact to the same bounds, save vsigmoid's. */
#ifndef TREADLE_VEC_H
#define TREADLE_VEC_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__)
#include <immintrin.h>
#define VL 16
#elif defined(__AVX2__)
#include <immintrin.h>
#define VL 8
#elif defined(__SSE2__)
#include <emmintrin.h>
#define VL 4
#elif defined(__aarch64__)
#include <arm_neon.h>
#define VL 4
#else
#define VL 4
#endif

#define INLINE static inline __attribute__((always_inline, unused))
#define ALIGNED(bytes) __attribute__((aligned(bytes)))

typedef uint16_t bf16;
typedef float vf __attribute__((vector_size(VL * 4)));
typedef int32_t vi __attribute__((vector_size(VL * 4)));
typedef uint32_t vu __attribute__((vector_size(VL * 4)));
typedef uint16_t vh __attribute__((vector_size(VL * 2)));

#if defined(TREADLE_BF16)
#define T bf16
#define TREADLE_DTYPE bf16
#else
#define T float
#define TREADLE_DTYPE f32
#endif

/* ---- masks: vm holds one truth value a lane ----------------------------------------------------- */

#if VL == 16
typedef __mmask16 vm;
INLINE vm vlt(vf a, vf b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
INLINE vm vle(vf a, vf b) { return _mm512_cmp_ps_mask(a, b, _CMP_LE_OQ); }
INLINE vm veq(vf a, vf b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
INLINE vm visnan(vf a) { return _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q); }
INLINE vm vlt_i(vi a, vi b) { return _mm512_cmplt_epi32_mask((__m512i)a, (__m512i)b); }
INLINE vm vm_and(vm a, vm b) { return (vm)(a & b); }
INLINE vm vm_or(vm a, vm b) { return (vm)(a | b); }
INLINE vm vm_not(vm a) { return (vm)~a; }
INLINE int vm_any(vm a) { return a != 0; }
INLINE vm vm_first(int64_t n) { return (vm)((1u << n) - 1u); }
INLINE vf vselect(vm m, vf yes, vf no) { return _mm512_mask_blend_ps(m, no, yes); }
#else
typedef vi vm;
INLINE vm vlt(vf a, vf b) { return a < b; }
INLINE vm vle(vf a, vf b) { return a <= b; }
INLINE vm veq(vf a, vf b) { return a == b; }
INLINE vm visnan(vf a) { return a != a; }
INLINE vm vlt_i(vi a, vi b) { return a < b; }
INLINE vm vm_and(vm a, vm b) { return a & b; }
INLINE vm vm_or(vm a, vm b) { return a | b; }
INLINE vm vm_not(vm a) { return ~a; }
INLINE int vm_any(vm a) {
#if VL == 8
    return _mm256_movemask_ps((__m256)a) != 0;
#elif defined(__SSE2__)
    return _mm_movemask_ps((__m128)a) != 0;
#else
    return (a[0] | a[1] | a[2] | a[3]) != 0;
#endif
}
INLINE vm vm_first(int64_t n) {
#if VL == 8
    const vi lane = {0, 1, 2, 3, 4, 5, 6, 7};
#else
    const vi lane = {0, 1, 2, 3};
#endif
    return lane < (int32_t)n;
}
INLINE vf vselect(vm m, vf yes, vf no) {
#if VL == 8
    return _mm256_blendv_ps(no, yes, (__m256)m);
#else
    return (vf)((m & (vi)yes) | (~m & (vi)no));
#endif
}
#endif

INLINE vm vgt(vf a, vf b) { return vlt(b, a); }
INLINE vm vge(vf a, vf b) { return vle(b, a); }

/* ---- constants and lanes ------------------------------------------------------------------------ */

INLINE vf vset(float x) {
#if VL == 16
    return _mm512_set1_ps(x);
#elif VL == 8
    return _mm256_set1_ps(x);
#else
    return (vf){x, x, x, x};
#endif
}

INLINE vi vset_i(int32_t x) { return x - (vi){0}; }

INLINE vi viota(void) {
#if VL == 16
    return (vi){0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#elif VL == 8
    return (vi){0, 1, 2, 3, 4, 5, 6, 7};
#else
    return (vi){0, 1, 2, 3};
#endif
}

INLINE vf vzero(void) { return (vf){0}; }
INLINE vf vfrom_i(vi x) { return __builtin_convertvector(x, vf); }
INLINE vf vbits_f(vi x) { return (vf)x; } /* reinterpretations, not conversions */
INLINE vi vbits_i(vf x) { return (vi)x; }

/* ---- fp32 in memory ------------------------------------------------------------------------------
   The n forms touch the first n lanes only, 0 <= n <= VL. Below AVX-512 a masked store costs several
   plain ones, so whole vectors take the plain form. */

INLINE vf vload_f32(const float *p) {
    vf x;
    memcpy(&x, p, sizeof x);
    return x;
}

INLINE void vstore_f32(float *p, vf x) { memcpy(p, &x, sizeof x); }

INLINE vf vloadn_f32(const float *p, int64_t n) {
#if VL == 16
    return _mm512_maskz_loadu_ps(vm_first(n), p);
#elif VL == 8
    if (n == VL) return vload_f32(p);
    return _mm256_maskload_ps(p, (__m256i)vm_first(n));
#else
    vf x = {0};
    if (n == VL) return vload_f32(p);
    if (n > 0) x[0] = p[0];
    if (n > 1) x[1] = p[1];
    if (n > 2) x[2] = p[2];
    return x;
#endif
}

INLINE void vstoren_f32(float *p, vf x, int64_t n) {
#if VL == 16
    _mm512_mask_storeu_ps(p, vm_first(n), x);
#else
    if (n == VL) {
        vstore_f32(p, x);
        return;
    }
#if VL == 8
    _mm256_maskstore_ps(p, (__m256i)vm_first(n), x);
#else
    if (n > 0) p[0] = x[0];
    if (n > 1) p[1] = x[1];
    if (n > 2) p[2] = x[2];
#endif
#endif
}

/* ---- bf16 in memory ------------------------------------------------------------------------------
   Narrowing rounds to nearest even, keeps denormals and makes every NaN quiet. The processor's own
   vcvtneps2bf16 flushes denormals, so its bits would differ from the other instruction sets'. */

INLINE float bf16_to_f32(bf16 x) {
    uint32_t u = (uint32_t)x << 16;
    float f;
    memcpy(&f, &u, sizeof f);
    return f;
}

INLINE bf16 bf16_from_f32(float x) {
    uint32_t u;
    memcpy(&u, &x, sizeof u);
    if (x != x) return (bf16)((u >> 16) | 0x40u);
    return (bf16)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

/* GCC splits __builtin_convertvector into halves here, so the one instruction is named. */
INLINE vf vwiden(vh x) {
#if VL == 16
    return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)x), 16);
#elif VL == 8
    return (vf)_mm256_slli_epi32(_mm256_cvtepu16_epi32((__m128i)x), 16);
#else
    return (vf)(__builtin_convertvector(x, vu) << 16);
#endif
}

INLINE vh vnarrow(vf x) {
    vu u = (vu)x;
    vu even = u + 0x7fffu + ((u >> 16) & 1u);
    vu quiet = u | 0x400000u;
    vu r = (vu)vselect(visnan(x), (vf)quiet, (vf)even) >> 16;
#if VL == 16
    return (vh)_mm512_cvtepi32_epi16((__m512i)r);
#else
    return __builtin_convertvector(r, vh);
#endif
}

INLINE vf vload_bf16(const bf16 *p) {
    vh x;
    memcpy(&x, p, sizeof x);
    return vwiden(x);
}

INLINE void vstore_bf16(bf16 *p, vf x) {
    vh h = vnarrow(x);
    memcpy(p, &h, sizeof h);
}

INLINE vf vloadn_bf16(const bf16 *p, int64_t n) {
#if VL == 16
    return vwiden((vh)_mm256_maskz_loadu_epi16(vm_first(n), p));
#else
    if (n == VL) return vload_bf16(p);
    vh x = {0};
    for (int64_t i = 0; i < n; i++) x[i] = p[i];
    return vwiden(x);
#endif
}

INLINE void vstoren_bf16(bf16 *p, vf x, int64_t n) {
    vh h = vnarrow(x);
#if VL == 16
    _mm256_mask_storeu_epi16(p, vm_first(n), (__m256i)h);
#else
    if (n == VL) {
        memcpy(p, &h, sizeof h);
        return;
    }
    for (int64_t i = 0; i < n; i++) p[i] = h[i];
#endif
}

/* ---- T in memory --------------------------------------------------------------------------------- */

#if defined(TREADLE_BF16)
INLINE float to_f32(T x) { return bf16_to_f32(x); }
INLINE T from_f32(float x) { return bf16_from_f32(x); }
INLINE vf vload(const T *p) { return vload_bf16(p); }
INLINE vf vloadn(const T *p, int64_t n) { return vloadn_bf16(p, n); }
INLINE void vstore(T *p, vf x) { vstore_bf16(p, x); }
INLINE void vstoren(T *p, vf x, int64_t n) { vstoren_bf16(p, x, n); }
#else
INLINE float to_f32(T x) { return x; }
INLINE T from_f32(float x) { return x; }
INLINE vf vload(const T *p) { return vload_f32(p); }
INLINE vf vloadn(const T *p, int64_t n) { return vloadn_f32(p, n); }
INLINE void vstore(T *p, vf x) { vstore_f32(p, x); }
INLINE void vstoren(T *p, vf x, int64_t n) { vstoren_f32(p, x, n); }
#endif

/* ---- arithmetic ---------------------------------------------------------------------------------- */

INLINE vf vfma(vf a, vf b, vf c) { /* a * b + c */
#if VL == 16
    return _mm512_fmadd_ps(a, b, c);
#elif VL == 8
    return _mm256_fmadd_ps(a, b, c);
#elif defined(__aarch64__)
    return vfmaq_f32(c, a, b);
#else
    return a * b + c;
#endif
}

/* a > b ? a : b, and a < b ? a : b: a NaN in b stays, a NaN in a is lost. */
INLINE vf vmax_b(vf a, vf b) {
#if VL == 16
    return _mm512_max_ps(a, b);
#elif VL == 8
    return _mm256_max_ps(a, b);
#elif defined(__SSE2__)
    return _mm_max_ps(a, b);
#else
    return vselect(vlt(b, a), a, b);
#endif
}

INLINE vf vmin_b(vf a, vf b) {
#if VL == 16
    return _mm512_min_ps(a, b);
#elif VL == 8
    return _mm256_min_ps(a, b);
#elif defined(__SSE2__)
    return _mm_min_ps(a, b);
#else
    return vselect(vlt(a, b), a, b);
#endif
}

INLINE vf vmax(vf a, vf b) { return vselect(visnan(a), a, vmax_b(a, b)); }
INLINE vf vmin(vf a, vf b) { return vselect(visnan(a), a, vmin_b(a, b)); }
INLINE vf vclamp(vf x, float lo, float hi) { return vmax_b(vset(lo), vmin_b(vset(hi), x)); }
INLINE vf vrelu(vf x) { return vmax_b(vzero(), x); }
INLINE vf vabs(vf x) { return (vf)((vi)x & 0x7fffffff); }
INLINE vf vcopysign(vf x, vf sign) {
    return (vf)(((vi)x & 0x7fffffff) | ((vi)sign & (int32_t)0x80000000u));
}

INLINE vf vsqrt(vf x) {
#if VL == 16
    return _mm512_sqrt_ps(x);
#elif VL == 8
    return _mm256_sqrt_ps(x);
#elif defined(__SSE2__)
    return _mm_sqrt_ps(x);
#elif defined(__aarch64__)
    return vsqrtq_f32(x);
#else
    return (vf){sqrtf(x[0]), sqrtf(x[1]), sqrtf(x[2]), sqrtf(x[3])};
#endif
}

INLINE vf vrsqrt(vf x) { return vset(1.0f) / vsqrt(x); }

/* ---- across lanes: lane i meets lane i + VL/2, then i + VL/4, and so on ------------------------------ */

#if defined(__SSE2__)
INLINE float vsum4_(__m128 x) {
    x = _mm_add_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_add_ss(x, _mm_shuffle_ps(x, x, 1)));
}
INLINE float vhmax4_(__m128 x) {
    x = _mm_max_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_max_ss(x, _mm_shuffle_ps(x, x, 1)));
}
#endif

#if VL == 16
INLINE __m256 vlow_(vf x) { return _mm512_castps512_ps256(x); }
INLINE __m256 vhigh_(vf x) { return _mm512_extractf32x8_ps(x, 1); }
#endif

INLINE float vsum(vf x) {
#if VL >= 8
#if VL == 16
    __m256 y = _mm256_add_ps(vlow_(x), vhigh_(x));
#else
    __m256 y = x;
#endif
    return vsum4_(_mm_add_ps(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1)));
#elif defined(__SSE2__)
    return vsum4_(x);
#else
    return (x[0] + x[2]) + (x[1] + x[3]);
#endif
}

INLINE float vhmax(vf x) {
    if (vm_any(visnan(x))) return NAN;
#if VL >= 8
#if VL == 16
    __m256 y = _mm256_max_ps(vlow_(x), vhigh_(x));
#else
    __m256 y = x;
#endif
    return vhmax4_(_mm_max_ps(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1)));
#elif defined(__SSE2__)
    return vhmax4_(x);
#else
    float a = x[0] > x[2] ? x[0] : x[2], b = x[1] > x[3] ? x[1] : x[3];
    return a > b ? a : b;
#endif
}

/* ---- elementary functions --------------------------------------------------------------------------
   Polynomials are minimax fits (relative error below 4e-9 before rounding) made for these ranges. */

/* ln 2 in two parts: n * LN2_HIGH is exact for |n| < 2^14, with or without a fused multiply-add. */
#define LN2_HIGH 0.693359375f
#define LN2_LOW (-2.12194440e-4f)
#define LOG2_E 1.44269504f

/* x = n ln 2 + r with |r| <= ln 2 / 2; returns expm1(r) and n as a float. */
INLINE vf vexp_reduce_(vf x, vf *n) {
    const vf magic = vset(12582912.0f); /* 1.5 * 2^23: adding it rounds to an integer */
    *n = vfma(x, vset(LOG2_E), magic) - magic;
    vf r = vfma(*n, vset(-LN2_HIGH), x);
    r = vfma(*n, vset(-LN2_LOW), r);
    vf p = vset(1.9919921601e-04f);
    p = vfma(p, r, vset(1.3947211975e-03f));
    p = vfma(p, r, vset(8.3332615811e-03f));
    p = vfma(p, r, vset(4.1666254002e-02f));
    p = vfma(p, r, vset(1.6666666873e-01f));
    p = vfma(p, r, vset(5.0000000826e-01f));
    return vfma(p, r * r, r);
}

INLINE vf vpow2_(vi n) { return (vf)((n + 127) << 23); } /* 2^n for -127 < n < 128 */

INLINE vi vround_i_(vf n) { /* for integers |n| < 2^22; a NaN gives some integer */
    return (vi)(n + vset(12582912.0f)) - 0x4b400000;
}

INLINE vf vexp(vf x) {
    vf n;
    vf q = vexp_reduce_(vclamp(x, -105.0f, 89.0f), &n) + vset(1.0f);
#if VL == 16
    return _mm512_scalef_ps(q, n);
#else
    /* Two factors, because 2^n itself overflows at 128 and is denormal below -126. */
    vi k = vround_i_(n), half = k >> 1;
    return q * vpow2_(half) * vpow2_(k - half);
#endif
}

/* tanh|x| = t / (t + 2) with t = expm1(2|x|), accurate to the last bits for small x as well. */
INLINE vf vtanh(vf x) {
    vf n, y = vmin_b(vset(10.0f), vabs(x));
    vf q = vexp_reduce_(y + y, &n);
    vf s = vpow2_(vround_i_(n));
    vf t = vfma(s, q, s - vset(1.0f));
    return vcopysign(t / (t + vset(2.0f)), x);
}

INLINE vf vsigmoid(vf x) { return vset(1.0f) / (vset(1.0f) + vexp(-x)); }

/* erf x = x P(x^2) below 1, and 1 - exp(-Q(|x|)) above. */
INLINE vf verf(vf x) {
    vf a = vmin_b(vset(4.05f), vabs(x)), z = a * a;
    vf p = vset(7.8538609445e-05f);
    p = vfma(p, z, vset(-8.0101935012e-04f));
    p = vfma(p, z, vset(5.1883276716e-03f));
    p = vfma(p, z, vset(-2.6853811928e-02f));
    p = vfma(p, z, vset(1.1283585148e-01f));
    p = vfma(p, z, vset(-3.7612625824e-01f));
    p = vfma(p, z, vset(1.1283791657e+00f));
    vf q = vset(-2.1686761323e-05f);
    q = vfma(q, a, vset(4.4133527553e-04f));
    q = vfma(q, a, vset(-4.2045561230e-03f));
    q = vfma(q, a, vset(2.5208240383e-02f));
    q = vfma(q, a, vset(-1.0841854996e-01f));
    q = vfma(q, a, vset(-6.3321992007e-01f));
    q = vfma(q, a, vset(-1.1295784098e+00f));
    q = vfma(q, a, vset(1.8803694382e-04f));
    vf high = vset(1.0f) - vexp(q);
    return vcopysign(vselect(vlt(a, vset(1.0f)), a * p, high), x);
}

INLINE vf vlog(vf x) {
    vm tiny = vlt(x, vset(1.17549435e-38f));
    vf y = vselect(tiny, x * vset(8388608.0f), x);
    const int32_t root_half = 0x3f3504f3;
    vi bits = (vi)y - root_half;
    vf e = vfrom_i(bits >> 23) - vselect(tiny, vset(23.0f), vzero());
    vf f = (vf)((bits & 0x7fffff) + root_half) - vset(1.0f);
    vf p = vset(6.7685529962e-02f);
    p = vfma(p, f, vset(-1.1713113277e-01f));
    p = vfma(p, f, vset(1.1898876280e-01f));
    p = vfma(p, f, vset(-1.2400541425e-01f));
    p = vfma(p, f, vset(1.4217544969e-01f));
    p = vfma(p, f, vset(-1.6668187494e-01f));
    p = vfma(p, f, vset(2.0002216402e-01f));
    p = vfma(p, f, vset(-2.5000007778e-01f));
    p = vfma(p, f, vset(3.3333311312e-01f));
    vf f2 = f * f;
    vf r = vfma(p, f * f2, e * vset(LN2_LOW));
    r = vfma(vset(-0.5f), f2, r) + f;
    r = vfma(e, vset(LN2_HIGH), r);
    r = vselect(veq(x, vset(INFINITY)), x, r);
    r = vselect(veq(x, vzero()), vset(-INFINITY), r);
    r = vselect(vlt(x, vzero()), vset(NAN), r);
    return vselect(visnan(x), x, r);
}

#endif
