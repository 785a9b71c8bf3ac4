/* Rotary position embeddings; equations in rope.py. */
#include "call.h"
#include "vec.h"

/* ---- angles --------------------------------------------------------------------------------------- */

#define TURN_BITS 48 /* as in rope.py */
#define EIGHTH 0x20000000u /* of 2^32 units to a turn */
#define UNIT_ANGLE 1.4629180792671596e-9f /* 2 pi / 2^32 */

/* cos and sin of the angles that pairs have at a position. They are found in whole units of a turn: a
   product with the position is exact modulo a turn, however large, and two bits of it are the quadrant. */
INLINE void angles(float *cosine, float *sine, const int64_t *turns, int64_t half, int64_t position) {
    for (int64_t d = 0; d < half; d += VL) {
        const int64_t n = half - d < VL ? half - d : VL;
        vu phase = {0};
        for (int64_t lane = 0; lane < n; lane++) {
            uint64_t turn = (uint64_t)turns[d + lane] * (uint64_t)position;
            phase[lane] = (uint32_t)(turn >> (TURN_BITS - 32));
        }
        const vu quadrant = (phase + EIGHTH) >> 30;
        const vf x = vfrom_i((vi)(phase - (quadrant << 30))) * vset(UNIT_ANGLE); /* |x| <= pi / 4 */
        const vf z = x * x;
        /* Minimax fits on this range, error below 1e-10 before rounding. */
        vf s = vset(2.7183115261e-06f);
        s = vfma(s, z, vset(-1.9839334839e-04f));
        s = vfma(s, z, vset(8.3333293859e-03f));
        s = vfma(s, z, vset(-1.6666666642e-01f));
        s = vfma(s, x * z, x);
        vf k = vset(2.4438450208e-05f);
        k = vfma(k, z, vset(-1.3887367504e-03f));
        k = vfma(k, z, vset(4.1666646866e-02f));
        k = vfma(k, z * z, vfma(vset(-0.5f), z, vset(1.0f)));
        /* Each quadrant further (c, s) becomes (-s, c). */
        const vm odd = vlt_i(vset_i(0), (vi)(quadrant & 1));
        const vf c = vselect(odd, s, k), t = vselect(odd, k, s);
        const vu flip = ((quadrant + 1) & 2) << 30, flop = (quadrant & 2) << 30;
        vstoren_f32(cosine + d, (vf)((vu)c ^ flip), n);
        vstoren_f32(sine + d, (vf)((vu)t ^ flop), n);
    }
}

/* ---- rotation ------------------------------------------------------------------------------------- */

INLINE void rotate(T *y, const T *x, const float *cosine, const float *sine, int64_t half) {
    int64_t d = 0;
    for (; d + VL <= half; d += VL) {
        const vf a = vload(x + d), b = vload(x + half + d);
        const vf c = vload_f32(cosine + d), s = vload_f32(sine + d);
        vstore(y + d, vfma(a, c, -(b * s)));
        vstore(y + half + d, vfma(b, c, a * s));
    }
    if (d < half) {
        const int64_t n = half - d;
        const vf a = vloadn(x + d, n), b = vloadn(x + half + d, n);
        const vf c = vloadn_f32(cosine + d, n), s = vloadn_f32(sine + d, n);
        vstoren(y + d, vfma(a, c, -(b * s)), n);
        vstoren(y + half + d, vfma(b, c, a * s), n);
    }
}

/* y; qkv, start|NULL; dims B, T, heads to rotate, heads to copy, D/2, positions of a task, and for each
   pair the turn from one position to the next, in 2^-48 of a circle. y may be qkv. Task = block of
   positions. */
KERNEL(rope) {
    T *y = c->ptr[0];
    const T *qkv = c->ptr[1];
    const int32_t *start = c->ptr[2];
    const int64_t batch = c->dim[0], time = c->dim[1], rotated = c->dim[2], copied = c->dim[3];
    const int64_t half = c->dim[4], height = c->dim[5], size = 2 * half, row = (rotated + copied) * size;
    const int64_t end = (task + 1) * height < time ? (task + 1) * height : time;
    float *cosine = scratch, *sine = cosine + half;
    for (int64_t t = task * height; t < end; t++) {
        if (!start) angles(cosine, sine, c->dim + 6, half, t);
        for (int64_t b = 0; b < batch; b++) {
            const int64_t at = (b * time + t) * row;
            if (start) angles(cosine, sine, c->dim + 6, half, start[b] + t);
            for (int64_t h = 0; h < rotated; h++) {
                rotate(y + at + h * size, qkv + at + h * size, cosine, sine, half);
            }
            if (y == qkv) continue;
            memcpy(y + at + rotated * size, qkv + at + rotated * size, (size_t)(copied * size) * sizeof(T));
        }
    }
}
