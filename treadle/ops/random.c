/* Dropout on counter-based random numbers. See random.py. */

#include "philox.h"
#include "share.h"

/* Within each 128 bits: the lower 64 of a and of b, and the upper ones. */
INLINE vu pair_low(vu a, vu b) {
#if VL == 16
    return (vu)_mm512_unpacklo_epi64((__m512i)a, (__m512i)b);
#elif VL == 8
    return (vu)_mm256_unpacklo_epi64((__m256i)a, (__m256i)b);
#else
    return (vu){a[0], a[1], b[0], b[1]};
#endif
}

INLINE vu pair_high(vu a, vu b) {
#if VL == 16
    return (vu)_mm512_unpackhi_epi64((__m512i)a, (__m512i)b);
#elif VL == 8
    return (vu)_mm256_unpackhi_epi64((__m256i)a, (__m256i)b);
#else
    return (vu){a[2], a[3], b[2], b[3]};
#endif
}

/* Lanes 0, 2, ... of a, each followed by the same of b; and lanes 1, 3, ... */
INLINE vu even_pairs(vu a, vu b) {
    return (vu)(((vu64)a & 0xffffffffu) | ((vu64)b << 32));
}
INLINE vu odd_pairs(vu a, vu b) {
    return (vu)(((vu64)a >> 32) | ((vu64)b & 0xffffffff00000000u));
}

/* The 4 VL words of blocks block .. block + VL - 1, in order. */
INLINE void random_words(uint32_t *words, uint64_t block, uint32_t step, uint32_t seed,
                         uint32_t stream) {
    /* Lane 4q + r takes block (VL/4) r + q: transposing each group of four lanes then puts all words
       in order without any exchange between groups. */
    vu lane = (vu)viota(), ahead = (lane & 3) * (VL / 4) + (lane >> 2);
    vu low = (uint32_t)block + ahead, carry = (vu)(low < ahead);
    vu x[4] = {low, (uint32_t)(block >> 32) - carry, step - (vu){0}, {0}};
    vphilox(x, seed, stream);
    vu even01 = even_pairs(x[0], x[1]), odd01 = odd_pairs(x[0], x[1]);
    vu even23 = even_pairs(x[2], x[3]), odd23 = odd_pairs(x[2], x[3]);
    vu ordered[4] = {pair_low(even01, even23), pair_low(odd01, odd23), pair_high(even01, even23),
                     pair_high(odd01, odd23)};
    memcpy(words, ordered, sizeof ordered);
}

#define CHUNK 1024 /* elements whose random words are kept at a time */

/* y[n] = x[n] scale where the element's uniform number is at least p, else x[n] 0.
   random = seed, step, first row (64 bits); dims n, elements of a row, stream, p 2^24; num scale. */
KERNEL(dropout) {
    T *y = c->ptr[0];
    const T *x = c->ptr[1];
    const uint32_t *random = c->ptr[2];
    const uint64_t row = (uint64_t)random[3] << 32 | random[2];
    const uint64_t base = row * (uint64_t)c->dim[1];
    const vi threshold = vset_i((int32_t)c->dim[3]);
    const vf scale = vset((float)c->num[0]);
    uint32_t words[CHUNK + 8 * VL] ALIGNED(64);
    int64_t end, i = share_of(c, task, c->dim[0], &end);
    for (int64_t n; i < end; i += n) {
        uint64_t first = base + (uint64_t)i, skip = first & 3;
        n = end - i < CHUNK ? end - i : CHUNK;
        for (int64_t w = 0; w < (int64_t)skip + n; w += 4 * VL) {
            random_words(words + w, (first + (uint64_t)w) >> 2, random[1], random[0],
                         (uint32_t)c->dim[2]);
        }
        for (int64_t j = 0; j < n; j += VL) {
            int64_t m = n - j < VL ? n - j : VL;
            vu bits;
            memcpy(&bits, words + skip + j, sizeof bits);
            vf factor = vselect(vlt_i((vi)(bits >> 8), threshold), vzero(), scale);
            vstoren(y + i + j, vloadn(x + i + j, m) * factor, m);
        }
    }
}
