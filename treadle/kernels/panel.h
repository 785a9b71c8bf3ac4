/* The register tile of matrix multiplication, and the packing that feeds it.

   A tile is MR rows of NR = 2 VL columns, held in registers while K runs by. It reads A from a panel
   laid out [k][MR] and B from a panel laid out [k][NR]. What a panel holds for one k is a unit of 32
   bits: a float, widened while packing where tensors are bf16; or, where the processor multiplies
   pairs of bf16, two elements that follow each other along K, the last one a zero where K is odd. */
#ifndef TREADLE_PANEL_H
#define TREADLE_PANEL_H

#include "tile.h"

/* As many rows as leave registers for two vectors of B and one element of A; where VL < MR, a
   multiple of VL, which packing relies on. */
#if VL == 16
#define MR 14
#elif VL == 8
#define MR 6
#elif defined(__SSE2__)
#define MR 4
#else
#define MR 8
#endif
#define NR (2 * VL)
#define CACHE_LINE 64 /* bytes */

/* ---- units ------------------------------------------------------------------------------------------

   This section is all that another kind of product needs to replace, together with MR and NR: what a
   unit is, how it is read from memory, and how two vectors of units meet. Matrix registers (AMX) want
   A by rows in place of panels [k][MR]; their B is the panel of pairs below. */

#if defined(TREADLE_BF16) && defined(__AVX512BF16__)
#define UNIT 2 /* elements of K in a unit */

/* c + a b: fp32 sums of both products of a pair, denormals flushed. */
INLINE vf vdot(vf a, vf b, vf c) { return _mm512_dpbf16_ps(c, (__m512bh)a, (__m512bh)b); }

/* The units of one row (of A, or of B transposed) that hold the first n elements at p. */
INLINE vf load_units(const T *p) { return (vf)_mm512_loadu_si512(p); }
INLINE vf loadn_units(const T *p, int64_t n) {
    return (vf)_mm512_maskz_loadu_epi16((__mmask32)((UINT64_C(1) << n) - 1), p);
}

/* The unit that column j has in the rows p and p + next, for the first n <= VL columns; next is 0 where
   there is no second row. */
INLINE vf join_units(const T *p, int64_t next, int64_t n) {
    __m256i even = _mm256_maskz_loadu_epi16(vm_first(n), p);
    __m256i odd = _mm256_maskz_loadu_epi16(next ? vm_first(n) : 0, p + next);
    return (vf)(_mm512_cvtepu16_epi32(even) | _mm512_slli_epi32(_mm512_cvtepu16_epi32(odd), 16));
}

/* The same for 2 VL columns, all there. */
INLINE void join_units_2(vf x[2], const T *p, int64_t next) {
    const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8,
                                         39, 7, 38, 6, 37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    const __m512i high = low + _mm512_set1_epi16(16);
    __m512i even = _mm512_loadu_si512(p), odd = _mm512_loadu_si512(p + next);
    x[0] = (vf)_mm512_permutex2var_epi16(even, low, odd);
    x[1] = (vf)_mm512_permutex2var_epi16(even, high, odd);
}
#else
#define UNIT 1
INLINE vf vdot(vf a, vf b, vf c) { return vfma(a, b, c); }
INLINE vf load_units(const T *p) { return vload(p); }
INLINE vf loadn_units(const T *p, int64_t n) { return vloadn(p, n); }
INLINE vf join_units(const T *p, int64_t next, int64_t n) { return vloadn(p, n); }
INLINE void join_units_2(vf x[2], const T *p, int64_t next) {
    x[0] = vload(p);
    x[1] = vload(p + VL);
}
#endif

/* Sums in tensors of type T. With pairs the processor's own narrowing is used: it flushes denormals, but
   so did the sums. */
#if UNIT == 2
INLINE void store_sum(T *p, vf x) {
    __m256i h = (__m256i)_mm512_cvtneps_pbh(x);
    memcpy(p, &h, sizeof h);
}
INLINE void storen_sum(T *p, vf x, int64_t n) {
    _mm256_mask_storeu_epi16(p, vm_first(n), (__m256i)_mm512_cvtneps_pbh(x));
}
INLINE void store_sums(T *p, const vf x[2]) {
    __m512i h = (__m512i)_mm512_cvtne2ps_pbh(x[1], x[0]);
    memcpy(p, &h, sizeof h);
}
#else
INLINE void store_sum(T *p, vf x) { vstore(p, x); }
INLINE void storen_sum(T *p, vf x, int64_t n) { vstoren(p, x, n); }
INLINE void store_sums(T *p, const vf x[2]) {
    vstore(p, x[0]);
    vstore(p + VL, x[1]);
}
#endif

/* x as it would be read again, had it been stored. */
INLINE vf stored_sum(vf x) {
#if UNIT == 2
    return vwiden((vh)_mm512_cvtneps_pbh(x));
#elif defined(TREADLE_BF16)
    return vwiden(vnarrow(x));
#else
    return x;
#endif
}

INLINE int64_t units(int64_t k) { return ceil_div(k, UNIT); }

/* ---- the order of summation --------------------------------------------------------------------------- */

/* K is dealt in pairs, whatever a unit is. */
INLINE int64_t k_start(int64_t K, int64_t parts, int64_t i) {
    return min_i64(K, 2 * part_start(ceil_div(K, 2), parts, i));
}

/* Units of K whose products are added one after another: the rounding errors of a chain grow with its
   length, as all but the first additions are to a sum that is large already. */
#define CHAIN 384

/* The length of the chains, one size but for the last, that a block of `depth` units is cut into. */
INLINE int64_t chain_length(int64_t depth) { return ceil_div(depth, 1 + (depth - 1) / CHAIN); }

/* ---- the microkernel -------------------------------------------------------------------------------- */

/* What becomes of a tile's sums: to = from + sums + bias, where from and bias may be NULL. */
typedef struct {
    const float *from, *bias;
    void *to; /* float, or T if `narrow` */
    int64_t from_row, to_row;
    int narrow;
} tile_end;

/* One tile of A B for kc units, mr rows and nv vectors of columns, where unit k of A's row i is
   a[i a_row + k a_step]. Meanwhile kc cache lines from `ahead` on are brought into the second-level
   cache. */
INLINE void tile_body_(const int mr, const int nv, int64_t kc, const float *a, int64_t a_row,
                       int64_t a_step, const float *b, const float *ahead, const tile_end *end) {
    vf acc[MR][2];
    UNROLL for (int i = 0; i < mr; i++) {
        UNROLL for (int v = 0; v < nv; v++) acc[i][v] = vzero();
    }
    /* Every third row: an address is a register plus 0, 1 or 2 times another. */
    const float *third[(MR + 2) / 3];
    UNROLL for (int i = 0; i < mr; i += 3) third[i / 3] = a + i * a_row;
    for (int64_t k = 0; k < kc; k++) {
        vf bv[2];
        __builtin_prefetch(ahead + k * (CACHE_LINE / 4), 0, 2);
        UNROLL for (int v = 0; v < nv; v++) bv[v] = vload_f32(b + v * VL);
        UNROLL for (int i = 0; i < mr; i++) {
            vf av = vset(third[i / 3][i % 3 * a_row]);
            UNROLL for (int v = 0; v < nv; v++) acc[i][v] = vdot(av, bv[v], acc[i][v]);
        }
        UNROLL for (int i = 0; i < mr; i += 3) third[i / 3] += a_step;
        b += NR;
    }
    const float *from = end->from;
    if (from) {
        UNROLL for (int i = 0; i < mr; i++, from += end->from_row) {
            UNROLL for (int v = 0; v < nv; v++) acc[i][v] = vload_f32(from + v * VL) + acc[i][v];
        }
    }
    vf bias[2] = {vzero(), vzero()};
    if (end->bias) {
        UNROLL for (int v = 0; v < nv; v++) bias[v] = vload_f32(end->bias + v * VL);
    }
    if (end->narrow) {
        T *to = end->to;
        UNROLL for (int i = 0; i < mr; i++, to += end->to_row) {
            UNROLL for (int v = 0; v < nv; v++) acc[i][v] += bias[v];
            if (nv == 2) {
                store_sums(to, acc[i]);
            } else {
                store_sum(to, acc[i][0]);
            }
        }
    } else {
        float *to = end->to;
        UNROLL for (int i = 0; i < mr; i++, to += end->to_row) {
            UNROLL for (int v = 0; v < nv; v++) vstore_f32(to + v * VL, acc[i][v] + bias[v]);
        }
    }
}

typedef void tile_kernel(int64_t kc, const float *a, int64_t a_row, int64_t a_step, const float *b,
                         const float *ahead, const tile_end *end);

#define TILE_KERNEL_(mr, nv) \
    static __attribute__((noinline)) void tile_##mr##x##nv( \
        int64_t kc, const float *a, int64_t a_row, int64_t a_step, const float *b, \
        const float *ahead, const tile_end *end) { \
        tile_body_(mr, nv, kc, a, a_row, a_step, b, ahead, end); \
    }
#define TILE_ROW_(mr) TILE_KERNEL_(mr, 1) TILE_KERNEL_(mr, 2)
#define TILE_ENTRY_(mr) {tile_##mr##x1, tile_##mr##x2}

TILE_ROW_(1) TILE_ROW_(2) TILE_ROW_(3) TILE_ROW_(4)
#if MR >= 6
TILE_ROW_(5) TILE_ROW_(6)
#endif
#if MR >= 8
TILE_ROW_(7) TILE_ROW_(8)
#endif
#if MR >= 14
TILE_ROW_(9) TILE_ROW_(10) TILE_ROW_(11) TILE_ROW_(12) TILE_ROW_(13) TILE_ROW_(14)
#endif

/* By number of rows less one, and by number of vectors less one. */
static tile_kernel *const tile_kernels[MR][2] = {
    TILE_ENTRY_(1), TILE_ENTRY_(2), TILE_ENTRY_(3), TILE_ENTRY_(4),
#if MR >= 6
    TILE_ENTRY_(5), TILE_ENTRY_(6),
#endif
#if MR >= 8
    TILE_ENTRY_(7), TILE_ENTRY_(8),
#endif
#if MR >= 14
    TILE_ENTRY_(9), TILE_ENTRY_(10), TILE_ENTRY_(11), TILE_ENTRY_(12), TILE_ENTRY_(13),
    TILE_ENTRY_(14),
#endif
};

/* ---- packing ---------------------------------------------------------------------------------------- */

/* What is packed: lines (rows of A or columns of B) that run along K; one of the strides is 1. */
typedef struct {
    const T *at;
    int64_t line, k;
} operand;

INLINE operand at_line(operand o, int64_t line) {
    o.at += line * o.line;
    return o;
}
INLINE operand at_k(operand o, int64_t k) {
    o.at += k * o.k;
    return o;
}

#define AHEAD_ALONG (4 * CACHE_LINE / (int)sizeof(T)) /* elements of a line that are fetched ahead */

/* x[i] = the units of line i that hold its first n elements, for up to VL lines; anything elsewhere.
   What lies `ahead` elements further is fetched. */
INLINE void load_lines(vf x[VL], operand o, const int most, int64_t lines, int64_t n, int64_t ahead) {
    UNROLL for (int i = 0; i < VL; i++) {
        if (i >= most) {
            x[i] = vzero();
            continue;
        }
        /* A line that is not there is another's double, which costs less than a branch. */
        const T *from = o.at + min_i64(i, lines - 1) * o.line;
        __builtin_prefetch(from + ahead);
        x[i] = n == UNIT * VL ? load_units(from) : loadn_units(from, n);
    }
}

/* to[unit][width] for up to VL lines, of which the first `lanes` lanes are written. */
INLINE void pack_along_(float *to, const int width, const int lanes, operand o, int64_t lines,
                        int64_t kc) {
    int64_t k = 0;
    vf x[VL];
    for (; k + UNIT * VL <= kc; k += UNIT * VL, to += VL * width) {
        load_lines(x, at_k(o, k), lanes, lines, UNIT * VL, AHEAD_ALONG);
        transpose(x);
        UNROLL for (int j = 0; j < VL; j++) vstoren_f32(to + j * width, x[j], lanes);
    }
    if (k == kc) return;
    load_lines(x, at_k(o, k), lanes, lines, kc - k, 0);
    transpose(x);
    for (int64_t j = 0; j < units(kc - k); j++) vstoren_f32(to + j * width, x[j], lanes);
}

/* The same for lines side by side. */
INLINE void pack_across_(float *to, const int width, int64_t lanes, operand o, int64_t lines,
                         int64_t kc) {
    lines = min_i64(lines, VL);
    for (int64_t k = 0; k < kc; k += UNIT, to += width, o.at += UNIT * o.k) {
        vstoren_f32(to, join_units(o.at, k + 1 < kc ? o.k : 0, lines), lanes);
    }
}

/* to[unit][width] = a panel of up to `width` lines and kc elements of K. Lanes beyond the lines hold
   anything: no result depends on them. */
INLINE void pack_panel(float *to, const int width, operand o, int64_t lines, int64_t kc) {
    if (o.k == 1) {
        UNROLL for (int i = 0; i < width; i += VL) {
            const int lanes = width - i < VL ? width - i : VL;
            if (i < lines) pack_along_(to + i, width, lanes, at_line(o, i), lines - i, kc);
        }
        return;
    }
    if (width == NR && lines == NR) {
        int64_t k = 0;
        vf x[2];
        for (; k + UNIT <= kc; k += UNIT, to += NR) {
            join_units_2(x, o.at + k * o.k, o.k);
            vstore_f32(to, x[0]);
            vstore_f32(to + VL, x[1]);
        }
        if (k == kc) return;
        o = at_k(o, k);
        kc -= k;
    }
    for (int i = 0; i < width && i < lines; i += VL) {
        pack_across_(to + i, width, min_i64(VL, width - i), at_line(o, i), lines - i, kc);
    }
}

/* Whether rows of A can be read where they lie: their units are there already. Rows that fall on the same
   sets of the caches are better packed. */
INLINE int in_place(operand a, int64_t kc) {
    return a.k == 1 && UNIT * sizeof(T) == 4 && kc % UNIT == 0 && a.line % UNIT == 0 &&
           a.line * (int64_t)sizeof(T) % 4096 != 0;
}

/* Rows are dealt to panels as evenly as possible; columns fill panel after panel. */
INLINE int64_t panels_of(const int width, int64_t lines) { return ceil_div(lines, width); }
INLINE int64_t panel_start(const int width, int64_t lines, int64_t p) {
    return width == NR ? min_i64(p * NR, lines) : part_start(lines, panels_of(width, lines), p);
}

/* Panels of `width` lines each, `stride` floats apart, for all lines of o. Where lines lie side by side,
   K goes by in steps that keep the rows in the first-level cache, even where they fall on the same sets;
   the hardware does not foresee such steps, so what comes two steps later is fetched. */
#define PACK_STEP 8
INLINE void pack(float *to, int64_t stride, const int width, operand o, int64_t lines, int64_t kc) {
    const int64_t panels = panels_of(width, lines), step = o.k == 1 ? kc : PACK_STEP;
    for (int64_t k = 0; k < kc; k += step) {
        for (int64_t p = 0; p < panels; p++) {
            const int64_t i = panel_start(width, lines, p);
            const operand from = at_k(at_line(o, i), k);
            float *panel = to + p * stride + k / UNIT * width;
            if (o.k != 1) {
                for (int64_t r = 2 * PACK_STEP; r < 3 * PACK_STEP; r++) {
                    __builtin_prefetch(at_k(from, r).at);
                }
                float *ahead = panel + 2 * PACK_STEP / UNIT * width;
                for (int64_t r = 0; r < PACK_STEP / UNIT * width; r += CACHE_LINE / 4) {
                    __builtin_prefetch(ahead + r, 1);
                }
            }
            pack_panel(panel, width, from, panel_start(width, lines, p + 1) - i, min_i64(step, kc - k));
        }
    }
}

#endif
