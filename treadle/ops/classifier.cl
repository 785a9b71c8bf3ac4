/* The loss of a chunk of rows and, in place of its logits, their gradient. LANES work-items have a
   row; equations in classifier.py. */
#include "loss.clh"

/* Element k of a vector from column `i` on, or `beyond` the last column. */
#define WITHIN(x, k, beyond) (i + (k) < columns ? (x) : (beyond))
#define CAPPED(x, k) WITHIN(capped_(x, cap), k, -INF)
#define SLOPE(x, k) WITHIN(slope_(x, lse, scale, cap, i + (k) == target), k, 0.0f)

/* The largest element of a vector of logits, and its exponentials' sum. */
#if VEC == 4
#define MOST(v) fmax(fmax(CAPPED(v.x, 0), CAPPED(v.y, 1)), fmax(CAPPED(v.z, 2), CAPPED(v.w, 3)))
#define SUM(v, base)                                                                              \
    ((exp(CAPPED(v.x, 0) - base) + exp(CAPPED(v.y, 1) - base)) +                                  \
     (exp(CAPPED(v.z, 2) - base) + exp(CAPPED(v.w, 3) - base)))
#define SLOPES(v) vec4_of(SLOPE(v.x, 0), SLOPE(v.y, 1), SLOPE(v.z, 2), SLOPE(v.w, 3))
#else
#define MOST(v) CAPPED(v, 0)
#define SUM(v, base) exp(CAPPED(v, 0) - base)
#define SLOPES(v) SLOPE(v, 0)
#endif

/* dlogits [rows, stride], which may be the logits, of which `columns` count; 0 beyond them. losses,
   counts [rows]. dloss: NULL where no gradient is wanted. A work-item writes where it alone has
   read, after all have read the target's logit. */
KERNEL classifier(GLOBAL U *dlogits, GLOBAL float *losses, GLOBAL float *counts,
                  GLOBAL const float *logits, GLOBAL const float *dloss,
                  GLOBAL const i32 *targets, i64 rows, i64 columns, i64 stride, i64 ignore_index,
                  float cap) {
    LOCAL float scratch[2 * GROUP];
    const i64 row = ROW < rows ? ROW : rows - 1;
    const i32 target = targets[row];
    const int counted = target != ignore_index && target >= 0 && target < columns;
    GLOBAL const float *x = logits + row * stride;
    GLOBAL U *dx = dlogits + row * stride;
    const int n = (int)stride;
    float top = -INF, sum = 0.0f;
    for (int i = VEC * LANE; i < n; i += VEC * LANES) {
        vec v = LOADV(f32, x, i);
        const int plain = i + VEC <= columns && cap == 0.0f;
        float most = plain ? vec_max(v) : MOST(v);
        if (most > top) { /* fmax leaves NaN out; the exponentials bring it back */
            sum = top == -INF ? sum : sum * exp(top - most);
            top = most;
        }
        float base = top == -INF ? 0.0f : top;
        sum += plain ? vec_sum(vec_exp(subv(v, vec_of(base)))) : SUM(v, base);
    }
    const float most = lanes_max(top, scratch);
    const float scaled = top == -INF ? sum : sum * exp(top - most);
    const float lse = most + log(lanes_sum(scaled, scratch));
    if (LANE == 0 && ROW < rows) {
        losses[row] = counted ? lse - capped_(x[target], cap) : 0.0f;
        counts[row] = counted ? 1.0f : 0.0f;
    }
    BARRIER();
    if (!dloss || ROW >= rows) return;
    const float scale = *dloss;
    for (int i = VEC * LANE; i < n; i += VEC * LANES) {
        if (counted) {
            vec v = LOADV(f32, x, i);
            const int plain = i + VEC <= columns && cap == 0.0f && (target < i || target >= i + VEC);
            STOREV(U, dx, i,
                   plain ? mulv(vec_exp(subv(v, vec_of(lse))), vec_of(scale)) : SLOPES(v));
        } else {
            STOREV(U, dx, i, vec_of(0.0f));
        }
    }
}
