/* Elementwise kernels: a work-item handles EACH elements, `n` is how many there are in all. See
   ops/elementwise.py for the equations. */
/* Four elements are one vector, of which a work-item has QUADS, where it is defined, as on a GPU,
   whose loads should be wide; else neighbours have neighbouring elements, as a processor's vectors
   want it. map1 and map2 are functions of one and two elements. */
#ifdef QUADS
#define EACH (4 * QUADS)
#define MAP_(i, whole, single)                                                                    \
    for (int q_ = 0; q_ < QUADS; q_++) {                                                          \
        const i64 i = ((GROUP_X * QUADS + q_) * GROUP + ITEM) * 4;                                \
        if (i + 4 <= n) {                                                                         \
            whole;                                                                                \
        } else {                                                                                  \
            for (i64 j = i; j < n; j++) single;                                                   \
        }                                                                                         \
    }
#define MAP1(out, f, a)                                                                           \
    MAP_(i, {                                                                                     \
        vec4 u = LOAD4(T, a, i);                                                                  \
        STORE4(T, out, i, vec4_of(f(u.x), f(u.y), f(u.z), f(u.w)));                               \
    }, STORE(T, out, j, f(LOAD(T, a, j))))
#define MAP2(out, f, a, b)                                                                        \
    MAP_(i, {                                                                                     \
        vec4 u = LOAD4(T, a, i);                                                                  \
        vec4 v = LOAD4(T, b, i);                                                                  \
        STORE4(T, out, i, vec4_of(f(u.x, v.x), f(u.y, v.y), f(u.z, v.z), f(u.w, v.w)));           \
    }, STORE(T, out, j, f(LOAD(T, a, j), LOAD(T, b, j))))
#else
#define EACH 4
#define MAP1(out, f, a) FOR_EACH(i, STORE(T, out, i, f(LOAD(T, a, i))))
#define MAP2(out, f, a, b) FOR_EACH(i, STORE(T, out, i, f(LOAD(T, a, i), LOAD(T, b, i))))
#endif

/* The body, for each element i of a work-item: neighbours have neighbouring elements. */
#define FOR_EACH(i, body)                                                                         \
    for (int j_ = 0; j_ < EACH; j_++) {                                                           \
        i64 i = (GROUP_X * EACH + j_) * GROUP + ITEM;                                             \
        if (i < n) { body; }                                                                      \
    }

KERNEL fill(GLOBAL T *y, i64 n, float value) { FOR_EACH(i, STORE(T, y, i, value)) }

KERNEL copy(GLOBAL T *y, GLOBAL const T *x, i64 n) { FOR_EACH(i, y[i] = x[i]) }

KERNEL scale(GLOBAL T *y, GLOBAL const T *x, i64 n, float alpha) {
    FOR_EACH(i, STORE(T, y, i, alpha * LOAD(T, x, i)))
}

/* Terms beyond the first may be absent. */
KERNEL sum(GLOBAL T *y, GLOBAL const T *a, GLOBAL const T *b, GLOBAL const T *c,
           GLOBAL const T *d, GLOBAL const T *e, GLOBAL const T *f, GLOBAL const T *g,
           GLOBAL const T *h, i64 n) {
    FOR_EACH(i, {
        float total = LOAD(T, a, i);
        if (b) total += LOAD(T, b, i);
        if (c) total += LOAD(T, c, i);
        if (d) total += LOAD(T, d, i);
        if (e) total += LOAD(T, e, i);
        if (f) total += LOAD(T, f, i);
        if (g) total += LOAD(T, g, i);
        if (h) total += LOAD(T, h, i);
        STORE(T, y, i, total);
    })
}

/* b has nb elements and repeats. */
KERNEL add(GLOBAL T *y, GLOBAL const T *a, GLOBAL const T *b, i64 n, i64 nb) {
    FOR_EACH(i, STORE(T, y, i, LOAD(T, a, i) + LOAD(T, b, i % nb)))
}

KERNEL mul(GLOBAL T *y, GLOBAL const T *a, GLOBAL const T *b, i64 n, i64 nb) {
    FOR_EACH(i, STORE(T, y, i, LOAD(T, a, i) * LOAD(T, b, i % nb)))
}

KERNEL broadcast(GLOBAL T *y, GLOBAL const T *x, i64 n, i64 nx) { FOR_EACH(i, y[i] = x[i % nx]) }

#define ACTIVATION(name)                                                                          \
    DEVICE float name##_times_slope_(float dy, float x) { return dy * name##_slope(x); }          \
    DEVICE float name##_gated_(float gate, float x) { return name(gate) * x; }                    \
    KERNEL name##_forward(GLOBAL T *y, GLOBAL const T *x, i64 n) { MAP1(y, name, x) }             \
    KERNEL name##_backward(GLOBAL T *dx, GLOBAL const T *dy, GLOBAL const T *x, i64 n) {          \
        MAP2(dx, name##_times_slope_, dy, x)                                                      \
    }                                                                                             \
    KERNEL gated_##name##_forward(GLOBAL T *y, GLOBAL const T *gate, GLOBAL const T *x, i64 n) {  \
        MAP2(y, name##_gated_, gate, x)                                                           \
    }                                                                                             \
    KERNEL gated_##name##_backward(GLOBAL T *dgate, GLOBAL T *dx, GLOBAL const T *dy,             \
                                   GLOBAL const T *gate, GLOBAL const T *x, i64 n) {              \
        FOR_EACH(i, {                                                                             \
            float d = LOAD(T, dy, i);                                                             \
            float g = LOAD(T, gate, i);                                                           \
            float v = LOAD(T, x, i);                                                              \
            STORE(T, dgate, i, d * v * name##_slope(g));                                          \
            STORE(T, dx, i, d * name(g));                                                         \
        })                                                                                        \
    }

ACTIVATION(gelu)
ACTIVATION(gelu_erf)
ACTIVATION(relu)
ACTIVATION(silu)

KERNEL softcap_forward(GLOBAL T *y, GLOBAL const T *x, i64 n, float cap) {
    FOR_EACH(i, STORE(T, y, i, cap * tanh(LOAD(T, x, i) / cap)))
}

KERNEL softcap_backward(GLOBAL T *dx, GLOBAL const T *dy, GLOBAL const T *y, i64 n, float cap) {
    FOR_EACH(i, {
        float t = LOAD(T, y, i) / cap;
        STORE(T, dx, i, LOAD(T, dy, i) * fma(-t, t, 1.0f));
    })
}

/* ---------------------------------------------------------------- two dtypes */

#ifdef U
#ifndef VEC
KERNEL cast(GLOBAL U *y, GLOBAL const T *x, i64 n) { FOR_EACH(i, STORE(U, y, i, LOAD(T, x, i))) }

#else
/* y[part, column] = the sum over `height` rows of x [rows, columns], one after another. A
   work-item has a column, or with VEC four. */
KERNEL sum_rows(GLOBAL U *y, GLOBAL const T *x, i64 rows, i64 columns, i64 height) {
    i64 column = (GROUP_X * GROUP + ITEM) * VEC, start = GROUP_Y * height;
    i64 end = start + height < rows ? start + height : rows;
    if (column >= columns) return;
    vec total = vec_of(0.0f);
    for (i64 row = start; row < end; row++)
        total = addv(total, LOADV(T, x, row * columns + column));
    STOREV(U, y, GROUP_Y * columns + column, total);
}
#endif
#endif
