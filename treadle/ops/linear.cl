/* Matrix multiplication: y = epilogue(A B). See ops/linear.py for the equations, ops/gpu_tiles.py
   for which kernel runs where, and how it is cut.

   All ways to compute one shape add the products of an element in one order: fused multiply-adds
   with k ascending, in chains whose ends follow from the shape; so a tile's size changes no bit.

   T: dtype of A, B and pre.  U: of y and the residual.  ACT: whether there is an activation. */
enum { ACCUMULATE = 1, GATED = 4 };

/* ---------------------------------------------------------------- the epilogue */

/* An element from its sum, bias included. residual and old: 0 where there is none. f is taken of
   pre as it is stored, so that it can be computed again from there. */
DEVICE float finished(float x, float residual, float old, int kind, int flags) {
#if ACT
    x = STORED(T, x);
    x = flags & GATED ? activation(kind, residual) * x : activation(kind, x) + residual;
#else
    x += residual;
#endif
    return old + x;
}

/* One element, and four in a row, from their sums. at: in y; column: in bias. */
DEVICE void finish(GLOBAL U *y, GLOBAL T *pre, GLOBAL const float *bias, GLOBAL const U *residual,
                   i64 at, i64 column, float x, int kind, int flags) {
    if (bias) x += bias[column];
    if (pre) STORE(T, pre, at, x);
    x = finished(x, residual ? LOAD(U, residual, at) : 0.0f,
                 flags & ACCUMULATE ? LOAD(U, y, at) : 0.0f, kind, flags);
    STORE(U, y, at, x);
}

DEVICE void finish4(GLOBAL U *y, GLOBAL T *pre, GLOBAL const float *bias,
                    GLOBAL const U *residual, i64 at, i64 column, vec4 x, int kind, int flags) {
    vec4 none = vec4_of(0.0f, 0.0f, 0.0f, 0.0f), r = none, old = none;
    if (bias) x = add4(x, load4_f32(bias + column));
    if (pre) STORE4(T, pre, at, x);
    if (residual) r = LOAD4(U, residual, at);
    if (flags & ACCUMULATE) old = LOAD4(U, y, at);
    STORE4(U, y, at,
           vec4_of(finished(x.x, r.x, old.x, kind, flags), finished(x.y, r.y, old.y, kind, flags),
                   finished(x.z, r.z, old.z, kind, flags), finished(x.w, r.w, old.w, kind, flags)));
}

/* ---------------------------------------------------------------- parts of K */

/* y from the sums over each part of K, [parts, M, N], which are added in order. */
#ifdef COMBINE
#define EACH 4
KERNEL matmul_combine(GLOBAL U *y, GLOBAL T *pre, GLOBAL const float *partial,
                      GLOBAL const float *bias, GLOBAL const U *residual, i64 n, i64 N, i64 parts,
                      i64 kind, i64 flags) {
    for (int j = 0; j < EACH; j++) {
        i64 i = (GROUP_X * EACH + j) * GROUP + ITEM;
        if (i >= n) return;
        float x = partial[i];
        for (i64 part = 1; part < parts; part++) x += partial[part * n + i];
        finish(y, pre, bias, residual, i, i % N, x, (int)kind, (int)flags);
    }
}
#endif

/* ---------------------------------------------------------------- tiles in local memory */

/* A work-group computes BM x BN elements, a work-item TM x TN of them in registers: blocks of 4 x 4,
   far apart, so that neighbours read neighbouring local memory. BK deep slices of A and B pass
   through local memory twice buffered: while one is multiplied the next is on its way.

   TA: A lies as [K, M]. TB: B lies as [N, K]. VA, VB: whether four elements of A, B in a row are
   loaded at once (its rows are multiples of four), VC: of y. */
#ifdef BM
#define NX (BN / TN)
#define NY (BM / TM)
#define LINE_A (BM + 4) /* keeps columns of a slice on different banks */
#define LINE_B (BN + 4)
#define HELD_A (BM * BK / 4 / GROUP)
#define HELD_B (BN * BK / 4 / GROUP)
#define BAND 8 /* rows of tiles that run together, because they read the same B */

/* Where the work-item's element number `e` (with `four`, the first of four) of a slice lies: its
   line and its k. along_k: whether neighbours in memory have neighbouring k. */
#define LINE_OF(e, width, along_k, four)                                                          \
    ((along_k) ? (e) / (BK / ((four) ? 4 : 1))                                                    \
               : (e) % ((width) / ((four) ? 4 : 1)) * ((four) ? 4 : 1))
#define K_OF(e, width, along_k, four)                                                             \
    ((along_k) ? (e) % (BK / ((four) ? 4 : 1)) * ((four) ? 4 : 1)                                 \
               : (e) / ((width) / ((four) ? 4 : 1)))

/* An element of a slice, 0 outside the operand. */
DEVICE float element(GLOBAL const T *x, int stride, int lines, int depth, int e, const int width,
                     const int along_k) {
    int line = LINE_OF(e, width, along_k, 0), k = K_OF(e, width, along_k, 0);
    if (line >= lines || k >= depth) return 0.0f;
    return LOAD(T, x, along_k ? line * stride + k : k * stride + line);
}

/* The work-item's part of a slice, from global memory. x: the slice's first element; lines, depth:
   what is left of the operand from there on. */
DEVICE void fetch(vec4 *held, const int count, GLOBAL const T *x, int stride, int lines, int depth,
                  const int width, const int along_k, const int four) {
    UNROLL for (int j = 0; j < count; j++) {
        if (four) {
            int e = j * GROUP + ITEM;
            int line = LINE_OF(e, width, along_k, 1), k = K_OF(e, width, along_k, 1);
            held[j] = vec4_of(0.0f, 0.0f, 0.0f, 0.0f);
            if (line < lines && k < depth)
                held[j] = LOAD4(T, x, along_k ? line * stride + k : k * stride + line);
        } else {
            int e = 4 * j * GROUP + ITEM;
            held[j] = vec4_of(element(x, stride, lines, depth, e, width, along_k),
                              element(x, stride, lines, depth, e + GROUP, width, along_k),
                              element(x, stride, lines, depth, e + 2 * GROUP, width, along_k),
                              element(x, stride, lines, depth, e + 3 * GROUP, width, along_k));
        }
    }
}

#define PLACE(e) K_OF(e, width, along_k, 0) * (width + 4) + LINE_OF(e, width, along_k, 0)

/* The same part into local memory, [BK][width + 4]. */
DEVICE void place(LOCAL_ARG float *slice, const vec4 *held, const int count, const int width,
                  const int along_k, const int four) {
    UNROLL for (int j = 0; j < count; j++) {
        if (four) {
            int e = j * GROUP + ITEM;
            int line = LINE_OF(e, width, along_k, 1), k = K_OF(e, width, along_k, 1);
            LOCAL_ARG float *to = slice + k * (width + 4) + line;
            if (along_k) {
                to[0] = held[j].x;
                to[width + 4] = held[j].y;
                to[2 * (width + 4)] = held[j].z;
                to[3 * (width + 4)] = held[j].w;
            } else {
                store4_local(to, held[j]);
            }
        } else {
            int e = 4 * j * GROUP + ITEM;
            slice[PLACE(e)] = held[j].x;
            slice[PLACE(e + GROUP)] = held[j].y;
            slice[PLACE(e + 2 * GROUP)] = held[j].z;
            slice[PLACE(e + 3 * GROUP)] = held[j].w;
        }
    }
}

/* Groups: x tiles of y, y parts of K of `depth` each; with more than one, y is [parts, M, N]. */
KERNEL matmul(GLOBAL U *y, GLOBAL T *pre, GLOBAL const T *a, GLOBAL const T *b,
              GLOBAL const float *bias, GLOBAL const U *residual, i64 M, i64 N, i64 K, i64 lda,
              i64 ldb, i64 depth, i64 kind, i64 flags) {
    LOCAL float slice_a[2 * BK * LINE_A];
    LOCAL float slice_b[2 * BK * LINE_B];
    vec4 held_a[HELD_A], held_b[HELD_B];
    float sum[TM][TN];

    const int tiles_m = (int)((M + BM - 1) / BM), tiles_n = (int)((N + BN - 1) / BN);
    const int tile = (int)GROUP_X, band = tile / (BAND * tiles_n);
    const int high = tiles_m - band * BAND < BAND ? tiles_m - band * BAND : BAND;
    const int in_band = tile - band * BAND * tiles_n;
    const i64 row = (i64)(band * BAND + in_band % high) * BM, column = (i64)(in_band / high) * BN;

    /* A warp of 32 work-items is 4 rows of 8. */
    const int tx = NX < 8 ? ITEM % NX : ITEM % 8 + ITEM / 32 % (NX / 8) * 8;
    const int ty = NX < 8 ? ITEM / NX : ITEM / 8 % 4 + ITEM / (4 * NX) * 4;

    const i64 k0 = GROUP_Y * depth;
    int left = (int)(K - k0 < depth ? K - k0 : depth);
    const int rows = (int)(M - row < BM ? M - row : BM);
    const int columns = (int)(N - column < BN ? N - column : BN);
    a += TA ? k0 * lda + row : row * lda + k0;
    b += TB ? column * ldb + k0 : k0 * ldb + column;
    const i64 step_a = TA ? BK * lda : BK, step_b = TB ? BK : BK * ldb;

    UNROLL for (int i = 0; i < TM; i++) {
        UNROLL for (int j = 0; j < TN; j++) sum[i][j] = 0.0f;
    }
    fetch(held_a, HELD_A, a, (int)lda, rows, left, BM, !TA, VA);
    fetch(held_b, HELD_B, b, (int)ldb, columns, left, BN, TB, VB);
    place(slice_a, held_a, HELD_A, BM, !TA, VA);
    place(slice_b, held_b, HELD_B, BN, TB, VB);
    BARRIER();
    for (int buffer = 0; left > 0; left -= BK, buffer ^= 1) {
        const int more = left > BK;
        if (more) {
            a += step_a;
            b += step_b;
            fetch(held_a, HELD_A, a, (int)lda, rows, left - BK, BM, !TA, VA);
            fetch(held_b, HELD_B, b, (int)ldb, columns, left - BK, BN, TB, VB);
        }
        LOCAL_ARG const float *from_a = slice_a + buffer * BK * LINE_A + 4 * ty;
        LOCAL_ARG const float *from_b = slice_b + buffer * BK * LINE_B + 4 * tx;
        UNROLL for (int k = 0; k < BK; k++) {
            float of_a[TM], of_b[TN];
            UNROLL for (int i = 0; i < TM; i += 4) {
                vec4 four = load4_local(from_a + k * LINE_A + i * NY);
                of_a[i] = four.x;
                of_a[i + 1] = four.y;
                of_a[i + 2] = four.z;
                of_a[i + 3] = four.w;
            }
            UNROLL for (int j = 0; j < TN; j += 4) {
                vec4 four = load4_local(from_b + k * LINE_B + j * NX);
                of_b[j] = four.x;
                of_b[j + 1] = four.y;
                of_b[j + 2] = four.z;
                of_b[j + 3] = four.w;
            }
            UNROLL for (int i = 0; i < TM; i++) {
                UNROLL for (int j = 0; j < TN; j++) sum[i][j] = fma(of_a[i], of_b[j], sum[i][j]);
            }
        }
        if (more) {
            place(slice_a + (buffer ^ 1) * BK * LINE_A, held_a, HELD_A, BM, !TA, VA);
            place(slice_b + (buffer ^ 1) * BK * LINE_B, held_b, HELD_B, BN, TB, VB);
        }
        BARRIER();
    }

    y += GROUP_Y * M * N;
    UNROLL for (int i = 0; i < TM; i++) {
        const i64 r = row + i / 4 * 4 * NY + 4 * ty + i % 4;
        if (r >= M) continue;
        UNROLL for (int j = 0; j < TN; j += 4) {
            const i64 c = column + j * NX + 4 * tx, at = r * N + c;
            if (VC) {
                if (c < N)
                    finish4(y, pre, bias, residual, at, c,
                            vec4_of(sum[i][j], sum[i][j + 1], sum[i][j + 2], sum[i][j + 3]),
                            (int)kind, (int)flags);
            } else {
                UNROLL for (int l = 0; l < 4; l++) {
                    if (c + l < N)
                        finish(y, pre, bias, residual, at + l, c + l, sum[i][j + l], (int)kind,
                               (int)flags);
                }
            }
        }
    }
}
#endif

/* ---------------------------------------------------------------- few rows */

/* Up to FEW rows of A, as when text is written: every element of B is read once, and the work-items
   of a group divide K among them. LANES work-items have the same columns: one of B [N, K], or four
   neighbours of B [K, N]. VA, VB: as below; A is [M, K]. */
#if defined(FEW) && !defined(VL)
#define OWNERS (GROUP / LANES)
#define FEW_ARGS                                                                                  \
    GLOBAL U *y, GLOBAL T *pre, GLOBAL const T *a, GLOBAL const T *b, GLOBAL const float *bias,   \
        GLOBAL const U *residual, i64 M, i64 N, i64 K, i64 lda, i64 ldb, i64 kind, i64 flags

#if TB
KERNEL matmul_few(FEW_ARGS) {
    LOCAL float scratch[FEW * GROUP];
    const int lane = ITEM % LANES;
    const i64 column = GROUP_X * OWNERS + ITEM / LANES;
    vec4 sum[FEW];
    UNROLL for (int r = 0; r < FEW; r++) sum[r] = vec4_of(0.0f, 0.0f, 0.0f, 0.0f);
    if (column < N) {
        b += column * ldb;
        if (VA && VB) {
            for (i64 k = 4 * lane; k < K; k += 4 * LANES) {
                const vec4 bk = LOAD4(T, b, k);
                UNROLL for (int r = 0; r < FEW; r++)
                    sum[r] = fma4(LOAD4(T, a, (r < M ? r : M - 1) * lda + k), bk, sum[r]);
            }
        } else {
            for (i64 k = lane; k < K; k += LANES) {
                const float bk = LOAD(T, b, k);
                UNROLL for (int r = 0; r < FEW; r++)
                    sum[r].x = fma(LOAD(T, a, (r < M ? r : M - 1) * lda + k), bk, sum[r].x);
            }
        }
    }
    UNROLL for (int r = 0; r < FEW; r++)
        scratch[r * GROUP + ITEM] = (sum[r].x + sum[r].y) + (sum[r].z + sum[r].w);
    BARRIER();
    for (int i = ITEM; i < FEW * OWNERS; i += GROUP) {
        const i64 r = i / OWNERS, c = GROUP_X * OWNERS + i % OWNERS;
        float x = 0.0f;
        for (int l = 0; l < LANES; l++) x += scratch[r * GROUP + i % OWNERS * LANES + l];
        if (r < M && c < N)
            finish(y, pre, bias, residual, r * N + c, c, x, (int)kind, (int)flags);
    }
}
#else
KERNEL matmul_few(FEW_ARGS) {
    LOCAL float scratch[4 * GROUP];
    const int lane = ITEM / OWNERS;
    const i64 first = GROUP_X * OWNERS * 4, column = first + ITEM % OWNERS * 4;
    vec4 sum[FEW];
    UNROLL for (int r = 0; r < FEW; r++) sum[r] = vec4_of(0.0f, 0.0f, 0.0f, 0.0f);
    if (column < N) {
        b += column;
        for (i64 k = lane; k < K; k += LANES) {
            GLOBAL const T *row = b + k * ldb;
            const vec4 bk = VB ? LOAD4(T, row, 0)
                               : vec4_of(LOAD(T, row, 0), column + 1 < N ? LOAD(T, row, 1) : 0.0f,
                                         column + 2 < N ? LOAD(T, row, 2) : 0.0f,
                                         column + 3 < N ? LOAD(T, row, 3) : 0.0f);
            UNROLL for (int r = 0; r < FEW; r++) {
                const float ak = LOAD(T, a, (r < M ? r : M - 1) * lda + k);
                sum[r] = fma4(vec4_of(ak, ak, ak, ak), bk, sum[r]);
            }
        }
    }
    UNROLL for (int r = 0; r < FEW; r++) {
        BARRIER();
        store4_local(scratch + 4 * ITEM, sum[r]);
        BARRIER();
        for (int i = ITEM; i < 4 * OWNERS; i += GROUP) {
            float x = 0.0f;
            for (int l = 0; l < LANES; l++) x += scratch[l * 4 * OWNERS + i];
            if (r < M && first + i < N)
                finish(y, pre, bias, residual, r * N + first + i, first + i, x, (int)kind,
                       (int)flags);
        }
    }
}
#endif
#endif

/* ---------------------------------------------------------------- processors */

/* On a processor a work-item is a thread of a loop, and registers are vectors of VL floats: it
   computes ROWS x (2 vectors) at a time, from panels, which hold for each k the ROWS elements of A
   or the 2 VL of B. There is one to a work-group, since barriers and local memory gain nothing. */
#ifdef VL
#define WIDE (2 * VL)
#define CHAIN 256 /* products that are added one after another */

/* panels[panel][K][width] from lines of K elements each, zeros after the last line. Groups: x
   panels, y blocks of PACK_BLOCK of K. */
#define PACK_BLOCK 256
#ifdef WIDTH
KERNEL matmul_pack(GLOBAL float *panels, GLOBAL const T *x, i64 lines, i64 K, i64 line_stride,
                   i64 k_stride) {
    const i64 first = GROUP_X * WIDTH, k0 = GROUP_Y * PACK_BLOCK;
    const int depth = (int)(K - k0 < PACK_BLOCK ? K - k0 : PACK_BLOCK);
    const int width = (int)(lines - first < WIDTH ? lines - first : WIDTH);
    x += first * line_stride + k0 * k_stride;
    panels += (GROUP_X * K + k0) * WIDTH;
    if (width == WIDTH && line_stride == 1) {
        for (int k = 0; k < depth; k++, x += k_stride, panels += WIDTH) {
            UNROLL for (int i = 0; i < WIDTH; i++) panels[i] = LOAD(T, x, i);
        }
        return;
    }
    for (int i = 0; i < width; i++, x += line_stride) {
        for (int k = 0; k < depth; k++) panels[k * WIDTH + i] = LOAD(T, x, k * k_stride);
    }
    for (int i = width; i < WIDTH; i++) {
        for (int k = 0; k < depth; k++) panels[k * WIDTH + i] = 0.0f;
    }
}
#endif

/* f of each element, as `activation`. */
DEVICE vecv activation_vec(int kind, vecv x) {
    if (kind == ACT_SILU) return mul_vec(x, sigmoid_vec(x));
    if (kind == ACT_GELU) {
        vecv cubic = fma_vec(mul_vec(x, x), splat(GELU_CUBIC), splat(1.0f));
        return mul_vec(x, sigmoid_vec(mul_vec(mul_vec(x, splat(GELU_SCALE_2)), cubic)));
    }
    float each[VL];
    spread(each, x);
    for (int j = 0; j < VL; j++) each[j] = activation(kind, each[j]);
    return gathered(each);
}

/* VL elements from their sums, as `finish`. */
DEVICE void finish_vec(GLOBAL U *y, GLOBAL T *pre, GLOBAL const float *bias,
                       GLOBAL const U *residual, i64 at, i64 column, vecv x, int kind, int flags) {
    if (bias) x = add_vec(x, loadv_f32(bias + column));
#if ACT
    float each[VL];
    if (pre) STORE_VL(T, pre, at, x);
    spread(each, x);
    for (int j = 0; j < VL; j++) each[j] = STORED(T, each[j]);
    x = gathered(each);
    if (flags & GATED) {
        x = mul_vec(activation_vec(kind, LOAD_VL(U, residual, at)), x);
        residual = 0;
    } else {
        x = activation_vec(kind, x);
    }
#endif
    if (residual) x = add_vec(x, LOAD_VL(U, residual, at));
    if (flags & ACCUMULATE) x = add_vec(LOAD_VL(U, y, at), x);
    STORE_VL(U, y, at, x);
}

#ifdef ROWS
/* PACKED: whether A lies in panels; else it has rows of `lda` floats. Groups: x panels of B, y
   strips of `strip` panels of A, z parts of K of `depth` each; with more than one, y is
   [parts, M, N]. */
KERNEL matmul_panels(GLOBAL U *y, GLOBAL T *pre, GLOBAL const float *a, GLOBAL const float *b,
                     GLOBAL const float *bias, GLOBAL const U *residual, i64 M, i64 N, i64 K,
                     i64 lda, i64 strip, i64 depth, i64 kind, i64 flags) {
    const i64 column = GROUP_X * WIDE, k0 = GROUP_Z * depth, k1 = K - k0 < depth ? K : k0 + depth;
    const int columns = (int)(N - column < WIDE ? N - column : WIDE);
    b += GROUP_X * K * WIDE;
    y += GROUP_Z * M * N;
    for (i64 panel = GROUP_Y * strip; panel < (GROUP_Y + 1) * strip && panel * ROWS < M; panel++) {
        const i64 row = panel * ROWS;
        const int rows = (int)(M - row < ROWS ? M - row : ROWS);
        GLOBAL const float *lines[ROWS]; /* of A; those after the last repeat it */
        UNROLL for (int i = 0; i < ROWS; i++)
            lines[i] = a + (PACKED ? row * K + i : (row + (i < rows ? i : rows - 1)) * lda);
        vecv total[ROWS][2];
        for (i64 k = k0; k < k1;) {
            const int chain = (int)(k1 - k < CHAIN ? k1 - k : CHAIN);
            GLOBAL const float *from_b = b + k * WIDE;
            vecv sum[ROWS][2];
            UNROLL for (int i = 0; i < ROWS; i++) sum[i][0] = sum[i][1] = splat(0.0f);
            for (i64 l = k; l < k + chain; l++, from_b += WIDE) {
                const vecv b0 = loadv_f32(from_b), b1 = loadv_f32(from_b + VL);
                UNROLL for (int i = 0; i < ROWS; i++) {
                    const vecv ai = splat(lines[i][PACKED ? l * ROWS : l]);
                    sum[i][0] = fma_vec(ai, b0, sum[i][0]);
                    sum[i][1] = fma_vec(ai, b1, sum[i][1]);
                }
            }
            UNROLL for (int i = 0; i < ROWS; i++) {
                total[i][0] = k == k0 ? sum[i][0] : add_vec(total[i][0], sum[i][0]);
                total[i][1] = k == k0 ? sum[i][1] : add_vec(total[i][1], sum[i][1]);
            }
            k += chain;
        }
        float sums[ROWS * WIDE];
        UNROLL for (int i = 0; i < ROWS; i++) {
            const i64 at = (row + i) * N + column;
            if (i < rows && columns == WIDE) {
                finish_vec(y, pre, bias, residual, at, column, total[i][0], (int)kind, (int)flags);
                finish_vec(y, pre, bias, residual, at + VL, column + VL, total[i][1], (int)kind,
                           (int)flags);
            }
            spread(sums + i * WIDE, total[i][0]);
            spread(sums + i * WIDE + VL, total[i][1]);
        }
        if (columns == WIDE) continue;
        for (int i = 0; i < rows; i++) {
            for (int j = 0; j < columns; j++)
                finish(y, pre, bias, residual, (row + i) * N + column + j, column + j,
                       sums[i * WIDE + j], (int)kind, (int)flags);
        }
    }
}
#endif

/* Few rows: B is read where it lies, a work-group has FEW_COLUMNS columns. */
#ifdef FEW
#define FEW_COLUMNS 64
#if TB
/* Columns at a time: so many sums are under way at once. */
#define TOGETHER (FEW == 1 ? 4 : FEW < 8 ? 2 : 1)
#else
#define VECTORS (8 / FEW)
#endif

/* One element by itself. */
DEVICE float product(GLOBAL const T *a, GLOBAL const T *b, i64 K, i64 step) {
    float total = 0.0f;
    for (i64 k = 0; k < K;) {
        float sum = 0.0f;
        for (const i64 end = K - k < CHAIN ? K : k + CHAIN; k < end; k++)
            sum = fma(LOAD(T, a, k), LOAD(T, b, k * step), sum);
        total += sum;
    }
    return total;
}

KERNEL matmul_few(GLOBAL U *y, GLOBAL T *pre, GLOBAL const T *a, GLOBAL const T *b,
                  GLOBAL const float *bias, GLOBAL const U *residual, i64 M, i64 N, i64 K, i64 lda,
                  i64 ldb, i64 kind, i64 flags) {
    const i64 end = (GROUP_X + 1) * FEW_COLUMNS < N ? (GROUP_X + 1) * FEW_COLUMNS : N;
    i64 column = GROUP_X * FEW_COLUMNS;
    GLOBAL const T *lines[FEW]; /* of A; those after the last repeat it */
    UNROLL for (int r = 0; r < FEW; r++) lines[r] = a + (r < M ? r : M - 1) * lda;
#if TB
    for (; column + TOGETHER <= end; column += TOGETHER) {
        vecv sum[FEW][TOGETHER];
        UNROLL for (int r = 0; r < FEW; r++) {
            UNROLL for (int j = 0; j < TOGETHER; j++) sum[r][j] = splat(0.0f);
        }
        i64 k = 0;
        for (; k + VL <= K; k += VL) {
            vecv bk[TOGETHER];
            UNROLL for (int j = 0; j < TOGETHER; j++) bk[j] = LOAD_VL(T, b, (column + j) * ldb + k);
            UNROLL for (int r = 0; r < FEW; r++) {
                const vecv ak = LOAD_VL(T, lines[r], k);
                UNROLL for (int j = 0; j < TOGETHER; j++)
                    sum[r][j] = fma_vec(ak, bk[j], sum[r][j]);
            }
        }
        UNROLL for (int r = 0; r < FEW; r++) {
            UNROLL for (int j = 0; j < TOGETHER; j++) {
                float sums[VL], x = 0.0f;
                spread(sums, sum[r][j]);
                for (int l = 0; l < VL; l++) x += sums[l];
                x += product(lines[r] + k, b + (column + j) * ldb + k, K - k, 1);
                if (r < M)
                    finish(y, pre, bias, residual, r * N + column + j, column + j, x, (int)kind,
                           (int)flags);
            }
        }
    }
#else
    for (; column + VECTORS * VL <= end; column += VECTORS * VL) {
        vecv total[FEW][VECTORS];
        UNROLL for (int r = 0; r < FEW; r++) {
            UNROLL for (int j = 0; j < VECTORS; j++) total[r][j] = splat(0.0f);
        }
        for (i64 k = 0; k < K;) {
            vecv sum[FEW][VECTORS];
            UNROLL for (int r = 0; r < FEW; r++) {
                UNROLL for (int j = 0; j < VECTORS; j++) sum[r][j] = splat(0.0f);
            }
            for (const i64 stop = K - k < CHAIN ? K : k + CHAIN; k < stop; k++) {
                vecv bk[VECTORS];
                UNROLL for (int j = 0; j < VECTORS; j++)
                    bk[j] = LOAD_VL(T, b, k * ldb + column + j * VL);
                UNROLL for (int r = 0; r < FEW; r++) {
                    const vecv ak = splat(LOAD(T, lines[r], k));
                    UNROLL for (int j = 0; j < VECTORS; j++)
                        sum[r][j] = fma_vec(ak, bk[j], sum[r][j]);
                }
            }
            UNROLL for (int r = 0; r < FEW; r++) {
                UNROLL for (int j = 0; j < VECTORS; j++)
                    total[r][j] = add_vec(total[r][j], sum[r][j]);
            }
        }
        UNROLL for (int r = 0; r < FEW; r++) {
            if (r >= M) continue;
            UNROLL for (int j = 0; j < VECTORS; j++)
                finish_vec(y, pre, bias, residual, r * N + column + j * VL, column + j * VL,
                           total[r][j], (int)kind, (int)flags);
        }
    }
#endif
    for (; column < end; column++) {
        for (int r = 0; r < M; r++)
            finish(y, pre, bias, residual, r * N + column, column,
                   product(a + r * lda, b + (TB ? column * ldb : column), K, TB ? 1 : ldb),
                   (int)kind, (int)flags);
    }
}
#endif
#endif
