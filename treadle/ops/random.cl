/* Dropout; the equation is in random.py. */

/* A work-item has the four elements of one Philox block, those of them that x [n] holds. `width`
   elements a row; random: seed, step, and the first row in the global batch, low word first. */
KERNEL dropout(GLOBAL T *y, GLOBAL const T *x, GLOBAL const u32 *random, i64 n, i64 width,
               i64 stream, i64 threshold, float scale) {
    const u64 start = (random[2] | (u64)random[3] << 32) * (u64)width;
    const u64 block = start / 4 + (u64)(GROUP_X * GROUP + ITEM);
    const i64 first = (i64)(block * 4 - start);
    if (first >= n) return;
    u32 words[4];
    words[0] = (u32)block;
    words[1] = (u32)(block >> 32);
    words[2] = random[1];
    words[3] = 0;
    philox(words, random[0], (u32)stream);
    if (first % 4 == 0 && first + 4 <= n) {
        vec4 v = LOAD4(T, x, first);
        STORE4(T, y, first,
               vec4_of(v.x * (words[0] >> 8 >= threshold ? scale : 0.0f),
                       v.y * (words[1] >> 8 >= threshold ? scale : 0.0f),
                       v.z * (words[2] >> 8 >= threshold ? scale : 0.0f),
                       v.w * (words[3] >> 8 >= threshold ? scale : 0.0f)));
        return;
    }
    for (int k = 0; k < 4; k++) {
        i64 i = first + k;
        if (i >= 0 && i < n)
            STORE(T, y, i, LOAD(T, x, i) * (words[k] >> 8 >= threshold ? scale : 0.0f));
    }
}
