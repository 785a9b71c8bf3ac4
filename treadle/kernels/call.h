/* The contract between a plan and a kernel.

   A kernel computes one task of one call. The number of tasks follows from shapes alone, the tasks of
   a call are independent of each other, and a kernel cannot tell which thread runs it: that is why the
   results have the same bits for any number of threads. */
#ifndef TREADLE_CALL_H
#define TREADLE_CALL_H

#include <stdint.h>

#if defined(_WIN32)
#define EXPORT __declspec(dllexport)
#else
#define EXPORT __attribute__((visibility("default")))
#endif

typedef struct call {
    void (*kernel)(const struct call *c, int64_t task, void *scratch);
    int64_t tasks;
    void *const *ptr;   /* tensors in the launch's order: outputs, then inputs; NULL where one is absent */
    const int64_t *dim; /* run-time sizes and integer attributes */
    const double *num;  /* real attributes */
} call;

/* KERNEL(name) { ... } defines the symbol name_f32 or name_bf16, whichever this compilation is for.
   Its body sees `c`, `task` and `scratch`; scratch is private to the thread and 64-byte aligned. */
#define TREADLE_JOIN_(name, dtype) name##_##dtype
#define TREADLE_JOIN(name, dtype) TREADLE_JOIN_(name, dtype)
#define NAME(name) TREADLE_JOIN(name, TREADLE_DTYPE)
#define KERNEL(name) EXPORT void NAME(name)(const call *c, int64_t task, void *scratch)

#endif
