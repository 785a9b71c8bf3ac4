/* Rotary position embeddings; equations in ops/rope.py.

   Defined: T; HALF, pairs of a head; TURNS, for each of them the turn from one position to the next in
   2^-48 of a circle; W, pairs that a work-item takes: 4 where that divides HALF. */
#define HEADS_EACH 4 /* heads that a work-item turns by one set of angles */
#define EIGHTH 0x20000000u /* of 2^32 units to a turn */
#define UNIT_ANGLE 1.4629180792671596e-9f /* 2 pi / 2^32 */

CONSTANT u64 turns[HALF] = TURNS;

/* cos and sin of the angle that a pair has at a position. It is found in whole units of a turn: a
   product with the position is exact modulo a turn, however large, and two bits of it are the
   quadrant. */
DEVICE void angle(float *cosine, float *sine, u64 turn, i64 position) {
    const u32 phase = (u32)((turn * (u64)position) >> 16);
    const u32 quadrant = (phase + EIGHTH) >> 30;
    const float x = (float)(i32)(phase - (quadrant << 30)) * UNIT_ANGLE; /* |x| <= pi / 4 */
    const float z = x * x;
    /* Minimax fits on this range, error below 1e-10 before rounding. */
    float s = fma(2.7183115261e-06f, z, -1.9839334839e-04f);
    s = fma(fma(s, z, 8.3333293859e-03f), z, -1.6666666642e-01f);
    s = fma(s, x * z, x);
    float c = fma(2.4438450208e-05f, z, -1.3887367504e-03f);
    c = fma(fma(c, z, 4.1666646866e-02f), z * z, fma(-0.5f, z, 1.0f));
    /* Each quadrant further (c, s) becomes (-s, c). */
    const float a = quadrant & 1 ? s : c, b = quadrant & 1 ? c : s;
    *cosine = (quadrant + 1) & 2 ? -a : a;
    *sine = quadrant & 2 ? -b : b;
}

/* y, qkv [B,T,(rotated+copied)*2*HALF], which may be the same, start [B] or absent; B T, T, heads to
   rotate, heads to copy, -1 for the inverse and else 1. A work-item has W pairs of a position. Groups:
   of these, then of heads. */
KERNEL rope(GLOBAL T *y, GLOBAL const T *qkv, GLOBAL const i32 *start, i64 rows, i64 time, i64 rotated,
            i64 copied, i64 sign) {
    const i64 item = GROUP_X * GROUP + ITEM, row = item / (HALF / W);
    const int d = (int)(item % (HALF / W)) * W;
    const i64 first = GROUP_Y * HEADS_EACH, heads = rotated + copied;
    const int alike = (GLOBAL const T *)y == qkv;
    if (row >= rows || (alike && first >= rotated)) return;
    float c[W], s[W];
    if (first < rotated) {
        const i64 position = row % time + (start ? start[row / time] : 0);
        UNROLL for (int w = 0; w < W; w++) angle(&c[w], &s[w], turns[d + w], sign * position);
    }
    for (int h = 0; h < HEADS_EACH && first + h < heads; h++) {
        const i64 at = (row * heads + first + h) * (2 * HALF) + d;
        if (first + h >= rotated && alike) continue;
#if W == 4
        vec4 a = LOAD4(T, qkv, at), b = LOAD4(T, qkv, at + HALF);
        if (first + h < rotated) {
            const vec4 cosine = vec4_of(c[0], c[1], c[2], c[3]), sine = vec4_of(s[0], s[1], s[2], s[3]);
            const vec4 opposite = vec4_of(-s[0], -s[1], -s[2], -s[3]), x = a;
            a = fma4(x, cosine, mul4(b, opposite));
            b = fma4(b, cosine, mul4(x, sine));
        }
        STORE4(T, y, at, a);
        STORE4(T, y, at + HALF, b);
#else
        float a = LOAD(T, qkv, at), b = LOAD(T, qkv, at + HALF);
        if (first + h < rotated) {
            const float x = a;
            a = fma(x, c[0], -(b * s[0]));
            b = fma(b, c[0], x * s[0]);
        }
        STORE(T, y, at, a);
        STORE(T, y, at + HALF, b);
#endif
    }
}
