/* Philox 4x32-10, the counter-based generator of Salmon, Moraes, Dror and Shaw, "Parallel random
   numbers: as easy as 1, 2, 3" (SC11), with the rounds and constants of Random123. A block of four
   32-bit words is a pure function of a 128-bit counter and a 64-bit key. */
#ifndef TREADLE_PHILOX_H
#define TREADLE_PHILOX_H

#include "vec.h"

#define PHILOX_ROUNDS 10
#define PHILOX_M0 0xD2511F53u
#define PHILOX_M1 0xCD9E8D57u
#define PHILOX_W0 0x9E3779B9u
#define PHILOX_W1 0xBB67AE85u

/* x holds the counter on entry and the four random words on return. */
INLINE void philox(uint32_t x[4], uint32_t key0, uint32_t key1) {
    for (int round = 0; round < PHILOX_ROUNDS; round++) {
        uint64_t a = (uint64_t)PHILOX_M0 * x[0], b = (uint64_t)PHILOX_M1 * x[2];
        uint32_t x1 = x[1], x3 = x[3];
        x[0] = (uint32_t)(b >> 32) ^ x1 ^ key0;
        x[1] = (uint32_t)b;
        x[2] = (uint32_t)(a >> 32) ^ x3 ^ key1;
        x[3] = (uint32_t)a;
        key0 += PHILOX_W0;
        key1 += PHILOX_W1;
    }
}

typedef uint64_t vu64 __attribute__((vector_size(VL * 4)));

/* The low halves of the 64-bit lanes, multiplied to 64 bits. */
INLINE vu64 vmul_low_(vu64 a, uint32_t m) {
#if VL == 16
    return (vu64)_mm512_mul_epu32((__m512i)a, _mm512_set1_epi32((int)m));
#elif VL == 8
    return (vu64)_mm256_mul_epu32((__m256i)a, _mm256_set1_epi32((int)m));
#elif defined(__SSE2__)
    return (vu64)_mm_mul_epu32((__m128i)a, _mm_set1_epi32((int)m));
#else
    return (a & 0xffffffffu) * (uint64_t)m;
#endif
}

/* Lane by lane m * a: the low words are returned, the high words stored. */
INLINE vu vmul_wide_(vu a, uint32_t m, vu *high) {
    const vu64 upper = (vu64){0} + 0xffffffff00000000u;
    vu64 even = vmul_low_((vu64)a, m), odd = vmul_low_((vu64)a >> 32, m);
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
#error "kernels are written for little-endian processors"
#endif
    *high = (vu)((even >> 32) | (odd & upper));
    return (vu)((even & ~upper) | (odd << 32));
}

/* VL counters at once: lane i of x[0..3] is one counter, and then its four words. */
INLINE void vphilox(vu x[4], uint32_t key0, uint32_t key1) {
    for (int round = 0; round < PHILOX_ROUNDS; round++) {
        vu a_high, b_high;
        vu a = vmul_wide_(x[0], PHILOX_M0, &a_high), b = vmul_wide_(x[2], PHILOX_M1, &b_high);
        x[0] = b_high ^ x[1] ^ key0;
        x[1] = b;
        x[2] = a_high ^ x[3] ^ key1;
        x[3] = a;
        key0 += PHILOX_W0;
        key1 += PHILOX_W1;
    }
}

/* Uniform on [0, 1): the upper 24 bits of a word, exact in fp32. */
INLINE float uniform_from_bits(uint32_t bits) { return (float)(bits >> 8) * 0x1p-24f; }
INLINE vf vuniform_from_bits(vu bits) { return vfrom_i((vi)(bits >> 8)) * vset(0x1p-24f); }

#endif
