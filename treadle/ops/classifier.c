/* Gradient of the logits inside linear + cross-entropy; equations in classifier.py. */
#include "activation.h"
#include "call.h"

/* exp(x - lse) dloss, times the slope of the cap. */
INLINE vf slope(vf x, vf shift, vf scale, vf inverse, const int capped) {
    const vf d = vexp(x - shift) * scale;
    return capped ? d * vsoftcap_slope(x, inverse) : d;
}

INLINE void backward_rows(const call *c, int64_t task, const int capped) {
    const float dloss = *(const float *)c->ptr[1], *lse = c->ptr[3];
    const int32_t *targets = c->ptr[2];
    const int64_t rows = c->dim[0], vocabulary = c->dim[1], ignore_index = c->dim[2], height = c->dim[3];
    const int64_t end = (task + 1) * height < rows ? (task + 1) * height : rows;
    const vf inverse = vset(capped ? (float)(1.0 / c->num[0]) : 0.0f);
    for (int64_t i = task * height; i < end; i++) {
        const float *x = (const float *)c->ptr[0] + i * vocabulary;
        T *dx = (T *)x;
        const int32_t target = targets[i];
        if (target == ignore_index || (uint32_t)target >= (uint64_t)vocabulary) {
            memset(dx, 0, (size_t)vocabulary * sizeof(T));
            continue;
        }
        float logit; /* by memcpy, which may read memory that is written as T */
        memcpy(&logit, x + target, sizeof logit);
        const vf shift = vset(lse[i]), scale = vset(dloss), chosen = vexp(vset(logit) - shift);
        const float steep = capped ? vsoftcap_slope(vset(logit), inverse)[0] : 1.0f;
        int64_t j = 0;
        /* Writing narrower numbers from the left never overtakes reading. */
        for (; j + VL <= vocabulary; j += VL) {
            vstore(dx + j, slope(vload_f32(x + j), shift, scale, inverse, capped));
        }
        if (j < vocabulary) {
            const int64_t n = vocabulary - j;
            vstoren(dx + j, slope(vloadn_f32(x + j, n), shift, scale, inverse, capped), n);
        }
        dx[target] = from_f32((chosen[0] - 1.0f) * dloss * steep);
    }
}

/* dlogits, which take the place of the float32 logits row by row; dloss, targets, lse; dims rows,
   vocabulary, ignore_index, rows of a task; nums the cap of the logits, 0 for none. A row of T begins
   where the row of logits began. */
KERNEL(classifier_backward) {
    if (c->num[0] > 0.0) {
        backward_rows(c, task, 1);
    } else {
        backward_rows(c, task, 0);
    }
}
