/* dtypes: f32 */
/* The walker: one parallel region runs a whole list of calls. */

#include "call.h"
#include "vec.h"

#include <stdatomic.h>

#if defined(_OPENMP)
#include <omp.h>
#endif

#if defined(_WIN32)
#include <windows.h>
#elif defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <sched.h>
#endif

#define CACHE_LINE 64
/* Some tens of microseconds of spinning: longer than most phases of a small model. */
#define SPINS 2000

INLINE void pause_processor(void) {
#if defined(__SSE2__)
    _mm_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* The state of a walk is one word, phase << 32 | next task, and a count of tasks done. Adding one to the
   word claims a task of whichever phase is open; the thread that finishes the last task of a phase opens
   the next. Nobody waits for a thread that holds no task, so one that comes late, or that the system has
   put aside, costs nothing. */
typedef struct {
    const call *calls;
    const int64_t *first;
    int64_t n_phases;
    char *scratch;
    int64_t scratch_stride;
    _Atomic uint64_t word ALIGNED(CACHE_LINE);
    _Atomic int64_t done ALIGNED(CACHE_LINE);
    _Atomic uint32_t opened ALIGNED(CACHE_LINE); /* the phase again, for those who sleep until it changes */
    _Atomic int sleepers;
} walk;

#define PHASE(word) ((int64_t)((word) >> 32))
#define TASK(word) ((int64_t)((word) & 0xffffffffu))

/* A waiting thread sleeps, where the system can wake it at once, so that its processor is free for a
   thread that holds a task: with other programs about, two threads may share the other processor. */
static void sleep_until_opened(walk *w, uint32_t phase) {
#if defined(__linux__)
    atomic_fetch_add(&w->sleepers, 1);
    syscall(SYS_futex, &w->opened, FUTEX_WAIT_PRIVATE, phase, NULL, NULL, 0);
    atomic_fetch_sub(&w->sleepers, 1);
#elif defined(_WIN32)
    SwitchToThread();
#else
    sched_yield();
#endif
}

static void wake_sleepers(walk *w, uint32_t phase) {
    atomic_store(&w->opened, phase);
#if defined(__linux__)
    if (atomic_load(&w->sleepers)) {
        syscall(SYS_futex, &w->opened, FUTEX_WAKE_PRIVATE, INT32_MAX, NULL, NULL, 0);
    }
#endif
}

static int64_t tasks_of_phase(const walk *w, int64_t phase) {
    int64_t n = 0;
    for (int64_t i = w->first[phase]; i < w->first[phase + 1]; i++) n += w->calls[i].tasks;
    return n;
}

static void run_alone(const walk *w, int64_t phase, void *scratch) {
    for (int64_t i = w->first[phase]; i < w->first[phase + 1]; i++) {
        const call *c = &w->calls[i];
        for (int64_t task = 0; task < c->tasks; task++) c->kernel(c, task, scratch);
    }
}

/* Runs phases of one task from `phase` on, which cost no exchange between threads, and opens the first
   one that is worth sharing. */
static void open_phase(walk *w, int64_t phase, void *scratch) {
    while (phase < w->n_phases && tasks_of_phase(w, phase) <= 1) run_alone(w, phase++, scratch);
    atomic_store_explicit(&w->done, 0, memory_order_relaxed);
    atomic_store_explicit(&w->word, (uint64_t)phase << 32, memory_order_release);
    wake_sleepers(w, (uint32_t)phase);
}

static void run_task(const walk *w, int64_t phase, int64_t task, void *scratch) {
    const call *c = &w->calls[w->first[phase]];
    while (task >= c->tasks) task -= c++->tasks;
    c->kernel(c, task, scratch);
}

/* Waits until another phase than `phase` is open. */
static void await_phase(walk *w, int64_t phase) {
    for (int spins = 0; PHASE(atomic_load_explicit(&w->word, memory_order_acquire)) == phase;) {
        if (spins < SPINS) {
            spins++;
            pause_processor();
        } else {
            sleep_until_opened(w, (uint32_t)phase);
        }
    }
}

static void walk_as(walk *w, int thread) {
    void *scratch = w->scratch + thread * w->scratch_stride;
    int64_t phase = -1, tasks = 0;
    for (;;) {
        uint64_t claim = atomic_fetch_add_explicit(&w->word, 1, memory_order_acq_rel);
        if (PHASE(claim) != phase) {
            phase = PHASE(claim);
            if (phase == w->n_phases) return;
            tasks = tasks_of_phase(w, phase);
        }
        if (TASK(claim) >= tasks) {
            await_phase(w, phase);
            continue;
        }
        run_task(w, phase, TASK(claim), scratch);
        if (atomic_fetch_add_explicit(&w->done, 1, memory_order_acq_rel) == tasks - 1) {
            open_phase(w, phase + 1, scratch);
        }
    }
}

INLINE int thread_number(void) {
#if defined(_OPENMP)
    return omp_get_thread_num();
#else
    return 0;
#endif
}

/* Whether calls can be shared between threads. */
EXPORT int treadle_openmp(void) {
#if defined(_OPENMP)
    return 1;
#else
    return 0;
#endif
}

/* Runs phases 0 .. n_phases-1 on up to `threads` threads, one without OpenMP. Phase p holds the calls
   first[p] .. first[p+1]-1, which do not depend on each other; all of its tasks are done before phase
   p+1 begins. Thread i uses the memory at scratch + i * scratch_stride; both are multiples of 64 bytes.
   Returns 0, or -1 for a thread count below 1. */
EXPORT int treadle_run(const call *calls, const int64_t *first, int64_t n_phases, int threads,
                       void *scratch, int64_t scratch_stride) {
    walk w = {.calls = calls, .first = first, .n_phases = n_phases, .scratch = scratch,
              .scratch_stride = scratch_stride};
    if (threads < 1) return -1;
    if (threads == 1 || !treadle_openmp()) {
        for (int64_t p = 0; p < n_phases; p++) run_alone(&w, p, scratch);
        return 0;
    }
    open_phase(&w, 0, scratch);
    if (PHASE(w.word) == n_phases) return 0;
#if defined(_OPENMP)
#pragma omp parallel num_threads(threads)
#endif
    walk_as(&w, thread_number());
    return 0;
}

/* ---- what this library is --------------------------------------------------------------------------- */

#define QUOTE_(x) #x
#define QUOTE(x) QUOTE_(x)
#if defined(__clang__)
#define COMPILER "clang " __clang_version__
#else
#define COMPILER "gcc " __VERSION__
#endif

/* "key=value" pairs separated by "; ". */
EXPORT const char *treadle_info(void) {
    return "isa=" QUOTE(TREADLE_ISA) "; vector=" QUOTE(VL) "; compiler=" COMPILER
#if defined(_OPENMP)
           "; openmp=yes";
#else
           "; openmp=no";
#endif
}

/* Whether this processor and its system run the library of an instruction set. Ask the baseline's
   library: it runs everywhere. */
EXPORT int treadle_supports(const char *isa) {
    if (strcmp(isa, "baseline") == 0) return 1;
#if defined(__x86_64__)
    __builtin_cpu_init();
    int avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    int avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                 __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    if (strcmp(isa, "avx2") == 0) return avx2;
    if (strcmp(isa, "avx512") == 0) return avx512;
    return strcmp(isa, "avx512bf16") == 0 && avx512 && __builtin_cpu_supports("avx512bf16");
#elif defined(__aarch64__)
    return strcmp(isa, "neon") == 0;
#else
    return 0;
#endif
}
