/* How the tasks of a call divide n elements among them. */
#ifndef TREADLE_SHARE_H
#define TREADLE_SHARE_H

#include "call.h"
#include "vec.h"

#define SHARE_STEP 64 /* elements: shares begin at cache lines in every dtype */

/* Task t of the call's equal ones: returns the first of its elements of [0, n), and where they end.
   A share may be empty. */
INLINE int64_t share_of(const call *c, int64_t task, int64_t n, int64_t *end) {
    int64_t share = ((n + c->tasks - 1) / c->tasks + SHARE_STEP - 1) / SHARE_STEP * SHARE_STEP;
    int64_t begin = task * share < n ? task * share : n;
    *end = begin + share < n ? begin + share : n;
    return begin;
}

#endif
