/* Layer and root mean square normalisation; equations in norm.py. LANES work-items have a row; those
   beyond the last row compute that one and write nothing. */

/* y; mean|NULL, rstd|NULL; x, weight, bias|NULL. */
KERNEL layernorm_forward(GLOBAL T *y, GLOBAL float *mean, GLOBAL float *rstd, GLOBAL const T *x,
                         GLOBAL const U *weight, GLOBAL const U *bias, i64 rows, i64 channels,
                         float eps) {
    LOCAL float scratch[2 * GROUP];
    const i64 row = ROW < rows ? ROW : rows - 1;
    const int n = (int)(channels / VEC);
    x += row * channels;
    y += row * channels;
    vec sum = vec_of(0.0f);
    for (int j = LANE; j < n; j += LANES) sum = addv(sum, LOADV(T, x, j * VEC));
    const float average = lanes_sum(vec_sum(sum), scratch) / (float)channels;
    vec squares = vec_of(0.0f);
    for (int j = LANE; j < n; j += LANES) {
        vec d = subv(LOADV(T, x, j * VEC), vec_of(average));
        squares = fmav(d, d, squares);
    }
    const float variance = lanes_sum(vec_sum(squares), scratch) / (float)channels;
    const float root = 1.0f / sqrt(variance + eps);
    if (ROW >= rows) return;
    for (int j = LANE; j < n; j += LANES) {
        vec d = mulv(subv(LOADV(T, x, j * VEC), vec_of(average)), vec_of(root));
        vec w = LOADV(U, weight, j * VEC);
        STOREV(T, y, j * VEC, bias ? fmav(d, w, LOADV(U, bias, j * VEC)) : mulv(d, w));
    }
    if (LANE == 0) {
        if (mean) mean[row] = average;
        if (rstd) rstd[row] = root;
    }
}

/* y; rstd|NULL; x, weight, residual|NULL. */
KERNEL rmsnorm_forward(GLOBAL T *y, GLOBAL float *rstd, GLOBAL const T *x, GLOBAL const U *weight,
                       GLOBAL const T *residual, i64 rows, i64 channels, float eps, float offset) {
    LOCAL float scratch[2 * GROUP];
    const i64 row = ROW < rows ? ROW : rows - 1;
    const int n = (int)(channels / VEC);
    x += row * channels;
    y += row * channels;
    if (residual) residual += row * channels;
    vec squares = vec_of(0.0f);
    for (int j = LANE; j < n; j += LANES) {
        vec v = LOADV(T, x, j * VEC);
        squares = fmav(v, v, squares);
    }
    const float mean = lanes_sum(vec_sum(squares), scratch) / (float)channels;
    const float root = 1.0f / sqrt(mean + eps);
    if (ROW >= rows) return;
    for (int j = LANE; j < n; j += LANES) {
        vec d = mulv(LOADV(T, x, j * VEC), vec_of(root));
        vec w = addv(LOADV(U, weight, j * VEC), vec_of(offset));
        STOREV(T, y, j * VEC, residual ? fmav(d, w, LOADV(T, residual, j * VEC)) : mulv(d, w));
    }
    if (LANE == 0 && rstd) rstd[row] = root;
}

/* dx = rstd (g - mean(g) - xhat mean(g xhat)) + into; without a mean, the one of g counts as 0. */
DEVICE void backward_(GLOBAL T *dx, GLOBAL const T *dy, GLOBAL const T *x, GLOBAL const U *weight,
                      GLOBAL const float *mean, GLOBAL const float *rstd, GLOBAL const T *into,
                      i64 rows, i64 channels, float offset, LOCAL_ARG float *scratch) {
    const i64 row = ROW < rows ? ROW : rows - 1;
    const int n = (int)(channels / VEC);
    const float root = rstd[row];
    const vec centre = vec_of(mean ? mean[row] : 0.0f);
    dx += row * channels;
    dy += row * channels;
    x += row * channels;
    if (into) into += row * channels;
    vec total = vec_of(0.0f), product = vec_of(0.0f);
    for (int j = LANE; j < n; j += LANES) {
        vec xhat = mulv(subv(LOADV(T, x, j * VEC), centre), vec_of(root));
        vec g = mulv(LOADV(T, dy, j * VEC), addv(LOADV(U, weight, j * VEC), vec_of(offset)));
        total = addv(total, g);
        product = fmav(g, xhat, product);
    }
    const float gx = -lanes_sum(vec_sum(product), scratch) / (float)channels;
    const float g_mean = mean ? -lanes_sum(vec_sum(total), scratch) / (float)channels : 0.0f;
    if (ROW >= rows) return;
    for (int j = LANE; j < n; j += LANES) {
        vec xhat = mulv(subv(LOADV(T, x, j * VEC), centre), vec_of(root));
        vec g = mulv(LOADV(T, dy, j * VEC), addv(LOADV(U, weight, j * VEC), vec_of(offset)));
        vec d = fmav(xhat, vec_of(gx), addv(g, vec_of(g_mean)));
        d = into ? fmav(d, vec_of(root), LOADV(T, into, j * VEC)) : mulv(d, vec_of(root));
        STOREV(T, dx, j * VEC, d);
    }
}

/* dx; dy, x, weight, mean, rstd, into|NULL. */
KERNEL layernorm_backward(GLOBAL T *dx, GLOBAL const T *dy, GLOBAL const T *x,
                          GLOBAL const U *weight, GLOBAL const float *mean,
                          GLOBAL const float *rstd, GLOBAL const T *into, i64 rows, i64 channels) {
    LOCAL float scratch[2 * GROUP];
    backward_(dx, dy, x, weight, mean, rstd, into, rows, channels, 0.0f, scratch);
}

/* dx; dy, x, weight, rstd, into|NULL. */
KERNEL rmsnorm_backward(GLOBAL T *dx, GLOBAL const T *dy, GLOBAL const T *x,
                        GLOBAL const U *weight, GLOBAL const float *rstd, GLOBAL const T *into,
                        i64 rows, i64 channels, float offset) {
    LOCAL float scratch[2 * GROUP];
    backward_(dx, dy, x, weight, 0, rstd, into, rows, channels, offset, scratch);
}

/* ---------------------------------------------------------------- gradients of weights

   A work-group has LANES vectors of columns, and takes GROUP / LANES rows at a time. */
#define ROW_LANES (GROUP / LANES)
#define ROW_LANE (ITEM / LANES)
#define COLUMN ((int)(GROUP_X * LANES + LANE))

/* out[part, column] = the sum over the row lanes of what each of them left in scratch. */
DEVICE void store_sum_(GLOBAL float *out, i64 channels, LOCAL_ARG const float *scratch) {
    vec sum = LOAD_LOCAL(scratch, LANE * VEC);
    for (int k = 1; k < ROW_LANES; k++)
        sum = addv(sum, LOAD_LOCAL(scratch, (k * LANES + LANE) * VEC));
    STOREV(f32, out, GROUP_Y * channels + COLUMN * VEC, sum);
}

/* dweight, dbias|NULL [parts, channels], part GROUP_Y being `height` rows; dy, x, mean|NULL, rstd. */
KERNEL norm_weight_backward(GLOBAL float *dweight, GLOBAL float *dbias, GLOBAL const T *dy,
                            GLOBAL const T *x, GLOBAL const float *mean, GLOBAL const float *rstd,
                            i64 rows, i64 channels, i64 height) {
    LOCAL float weight_sums[GROUP * VEC];
    LOCAL float bias_sums[GROUP * VEC];
    const i64 start = GROUP_Y * height;
    const i64 end = start + height < rows ? start + height : rows;
    vec weights = vec_of(0.0f), biases = vec_of(0.0f);
    if (COLUMN < channels / VEC) {
        for (i64 row = start + ROW_LANE; row < end; row += ROW_LANES) {
            const vec centre = vec_of(mean ? mean[row] : 0.0f);
            vec g = LOADV(T, dy, row * channels + COLUMN * VEC);
            vec xhat = mulv(subv(LOADV(T, x, row * channels + COLUMN * VEC), centre),
                            vec_of(rstd[row]));
            weights = fmav(g, xhat, weights);
            biases = addv(biases, g);
        }
    }
    STORE_LOCAL(weight_sums, ITEM * VEC, weights);
    STORE_LOCAL(bias_sums, ITEM * VEC, biases);
    BARRIER();
    if (ROW_LANE != 0 || COLUMN >= channels / VEC) return;
    store_sum_(dweight, channels, weight_sums);
    if (dbias) store_sum_(dbias, channels, bias_sums);
}

/* a[channels] = the sum of from_a [parts, channels], for GROUP_Z 1 b of from_b. */
KERNEL norm_weight_combine(GLOBAL float *a, GLOBAL float *b, GLOBAL const float *from_a,
                           GLOBAL const float *from_b, i64 parts, i64 channels) {
    LOCAL float sums[GROUP * VEC];
    GLOBAL const float *from = GROUP_Z ? from_b : from_a;
    vec sum = vec_of(0.0f);
    if (COLUMN < channels / VEC) {
        for (int part = ROW_LANE; part < parts; part += ROW_LANES)
            sum = addv(sum, LOADV(f32, from, part * channels + COLUMN * VEC));
    }
    STORE_LOCAL(sums, ITEM * VEC, sum);
    BARRIER();
    if (ROW_LANE != 0 || COLUMN >= channels / VEC) return;
    store_sum_(GROUP_Z ? b : a, channels, sums);
}
