/* dtypes: f32 */
/* The walker: runs a plan's list of calls on a pool of threads.

   Nobody ever waits for a thread that holds no task. A thread claims a task of the open phase, runs it,
   and whoever finishes the phase's last task opens the next one; the caller takes part and returns as
   soon as the last phase is done. A thread that comes late, or that the system has put aside, therefore
   costs nothing, however busy the machine is; that is why the threads are the pool's own and not those
   of an OpenMP region, whose end waits for every one of them. */

#include "call.h"
#include "vec.h"

#include <stdatomic.h>

#if !defined(TREADLE_ONE_THREAD)
#if defined(_WIN32)
#include <windows.h>
#else
#include <pthread.h>
#include <signal.h>
#endif
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

#define CACHE_LINE 64
/* Some tens of microseconds of spinning: longer than most phases of a small model. */
#define SPINS 2000

/* ---- one thread ------------------------------------------------------------------------------------- */

typedef struct {
    const call *calls;
    const int64_t *first;
    int64_t n_phases;
    char *scratch;
    int64_t stride;
} walk;

static void run_alone(const walk *w, int64_t phase, void *scratch) {
    for (int64_t i = w->first[phase]; i < w->first[phase + 1]; i++) {
        const call *c = &w->calls[i];
        for (int64_t task = 0; task < c->tasks; task++) c->kernel(c, task, scratch);
    }
}

static int walk_alone(const walk *w) {
    for (int64_t p = 0; p < w->n_phases; p++) run_alone(w, p, w->scratch);
    return 0;
}

/* ---- the pool --------------------------------------------------------------------------------------- */

#if !defined(TREADLE_ONE_THREAD)

#define LEFT(word) ((int64_t)((word) & 0xffffffffu))
#define THREADS(word) ((int64_t)((word) >> 32))

static struct {
    /* Written before a phase opens, and read only by threads that hold one of its tasks. */
    walk w;
    int64_t phase, tasks;
    int threads;
    /* threads of the walk << 32 | tasks of the open phase that nobody has claimed */
    _Atomic uint64_t word ALIGNED(CACHE_LINE);
    _Atomic int64_t unfinished ALIGNED(CACHE_LINE);
    _Atomic uint32_t bell ALIGNED(CACHE_LINE); /* rung when a phase opens, and at the end of a walk */
    _Atomic int sleepers, over;
    atomic_flag busy;
    int helpers; /* threads started so far, of numbers 1 .. helpers */
} pool = {.busy = ATOMIC_FLAG_INIT};

INLINE void pause_processor(void) {
#if defined(__SSE2__)
    _mm_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

#if defined(_WIN32)
static SRWLOCK lock = SRWLOCK_INIT;
static CONDITION_VARIABLE rung = CONDITION_VARIABLE_INIT;
#elif !defined(__linux__)
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t rung = PTHREAD_COND_INITIALIZER;
#endif

static void sleep_until_rung(uint32_t seen) {
    atomic_fetch_add(&pool.sleepers, 1);
#if defined(__linux__)
    syscall(SYS_futex, &pool.bell, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
#elif defined(_WIN32)
    AcquireSRWLockExclusive(&lock);
    while (atomic_load(&pool.bell) == seen) SleepConditionVariableSRW(&rung, &lock, INFINITE, 0);
    ReleaseSRWLockExclusive(&lock);
#else
    pthread_mutex_lock(&lock);
    while (atomic_load(&pool.bell) == seen) pthread_cond_wait(&rung, &lock);
    pthread_mutex_unlock(&lock);
#endif
    atomic_fetch_sub(&pool.sleepers, 1);
}

static void ring(void) {
    atomic_fetch_add(&pool.bell, 1);
    if (!atomic_load(&pool.sleepers)) return;
#if defined(__linux__)
    syscall(SYS_futex, &pool.bell, FUTEX_WAKE_PRIVATE, INT32_MAX, NULL, NULL, 0);
#elif defined(_WIN32)
    AcquireSRWLockExclusive(&lock);
    ReleaseSRWLockExclusive(&lock);
    WakeAllConditionVariable(&rung);
#else
    pthread_mutex_lock(&lock);
    pthread_cond_broadcast(&rung);
    pthread_mutex_unlock(&lock);
#endif
}

/* Waits until the bell is rung after `seen` was read from it. */
static void await_bell(uint32_t seen) {
    for (int spins = 0; atomic_load_explicit(&pool.bell, memory_order_acquire) == seen; spins++) {
        if (spins >= SPINS) {
            sleep_until_rung(seen);
            spins = 0;
        }
        pause_processor();
    }
}

/* The next task of the open phase, or -1 when there is none for this thread. */
static int64_t claim(int thread) {
    uint64_t word = atomic_load_explicit(&pool.word, memory_order_acquire);
    while (LEFT(word) && thread < THREADS(word)) {
        if (atomic_compare_exchange_weak_explicit(&pool.word, &word, word - 1, memory_order_acq_rel,
                                                  memory_order_acquire)) {
            return pool.tasks - LEFT(word);
        }
    }
    return -1;
}

static int64_t tasks_of_phase(const walk *w, int64_t phase) {
    int64_t n = 0;
    for (int64_t i = w->first[phase]; i < w->first[phase + 1]; i++) n += w->calls[i].tasks;
    return n;
}

/* Runs phases of one task from `phase` on, which cost no exchange between threads, and opens the first
   one that is worth sharing; or ends the walk. */
static void open_phase(int64_t phase, void *scratch) {
    const walk *w = &pool.w;
    int64_t tasks = 0;
    for (; phase < w->n_phases; phase++) {
        tasks = tasks_of_phase(w, phase);
        if (tasks > 1) break;
        run_alone(w, phase, scratch);
    }
    if (phase == w->n_phases) {
        atomic_store(&pool.over, 1);
    } else {
        pool.phase = phase;
        pool.tasks = tasks;
        atomic_store_explicit(&pool.unfinished, tasks, memory_order_relaxed);
        atomic_store_explicit(&pool.word, (uint64_t)pool.threads << 32 | (uint64_t)tasks,
                              memory_order_release);
    }
    ring();
}

static void run_task(int64_t task, void *scratch) {
    const call *c = &pool.w.calls[pool.w.first[pool.phase]];
    while (task >= c->tasks) task -= c++->tasks;
    c->kernel(c, task, scratch);
}

/* Runs tasks until there is none to claim. */
static void work(int thread) {
    for (int64_t task; (task = claim(thread)) >= 0;) {
        void *scratch = pool.w.scratch + thread * pool.w.stride;
        run_task(task, scratch);
        if (atomic_fetch_sub_explicit(&pool.unfinished, 1, memory_order_acq_rel) == 1) {
            open_phase(pool.phase + 1, scratch);
        }
    }
}

#if defined(_WIN32)
static DWORD WINAPI help(void *number) {
#else
static void *help(void *number) {
#endif
    for (;;) {
        uint32_t seen = atomic_load(&pool.bell);
        work((int)(intptr_t)number);
        await_bell(seen);
    }
    return 0;
}

/* Starts helpers up to number `wanted`; fewer when the system refuses. Signals stay with the threads
   that the program made itself. */
static void start_helpers(int wanted) {
#if !defined(_WIN32)
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
#endif
    while (pool.helpers < wanted) {
        void *number = (void *)(intptr_t)(pool.helpers + 1);
#if defined(_WIN32)
        HANDLE thread = CreateThread(NULL, 0, help, number, 0, NULL);
        if (!thread) break;
        CloseHandle(thread);
#else
        pthread_t thread;
        if (pthread_create(&thread, NULL, help, number)) break;
        pthread_detach(thread);
#endif
        pool.helpers++;
    }
#if !defined(_WIN32)
    pthread_sigmask(SIG_SETMASK, &before, NULL);
#endif
}

static int walk_together(const walk *w, int threads) {
    /* A second walk at the same time finds the pool taken and runs by itself, to the same bits. */
    if (threads == 1 || atomic_flag_test_and_set(&pool.busy)) return walk_alone(w);
    start_helpers(threads - 1);
    pool.w = *w;
    pool.threads = threads;
    atomic_store(&pool.over, 0);
    open_phase(0, w->scratch);
    for (;;) {
        uint32_t seen = atomic_load(&pool.bell);
        work(0);
        if (atomic_load(&pool.over)) break;
        await_bell(seen);
    }
    atomic_flag_clear(&pool.busy);
    return 0;
}

#endif

/* ---- what is called from outside ---------------------------------------------------------------------- */

/* Whether calls can be shared between threads. */
EXPORT int treadle_threaded(void) {
#if defined(TREADLE_ONE_THREAD)
    return 0;
#else
    return 1;
#endif
}

/* Runs phases 0 .. n_phases-1 on up to `threads` threads. Phase p holds the calls
   first[p] .. first[p+1]-1, which do not depend on each other; all of its tasks are done before phase
   p+1 begins. Thread i uses the memory at scratch + i * stride; both are multiples of 64 bytes.
   Returns 0, or -1 for a thread count below 1. */
EXPORT int treadle_run(const call *calls, const int64_t *first, int64_t n_phases, int threads,
                       void *scratch, int64_t stride) {
    const walk w = {calls, first, n_phases, scratch, stride};
    if (threads < 1) return -1;
#if defined(TREADLE_ONE_THREAD)
    return walk_alone(&w);
#else
    return walk_together(&w, threads);
#endif
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
           "; sources=" QUOTE(TREADLE_SOURCES)
#if defined(TREADLE_ONE_THREAD)
           "; threads=no";
#else
           "; threads=yes";
#endif
}

/* Whether this processor and its system run the library of an instruction set: 0, 1, or 2 where they do
   and the set that it extends is faster. Intel's processors multiply pairs of bf16 in AVX-512 at less than
   half the rate of AMD's: a step of GPT-2 124M took 1.9 times as long as with plain AVX-512. Ask the
   baseline's library: it runs everywhere. */
EXPORT int treadle_supports(const char *isa) {
    if (strcmp(isa, "baseline") == 0) return 1;
#if defined(__x86_64__)
    __builtin_cpu_init();
    int avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    int avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                 __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    if (strcmp(isa, "avx2") == 0) return avx2;
    if (strcmp(isa, "avx512") == 0) return avx512;
    const int pairs = avx512 && __builtin_cpu_supports("avx512bf16");
    return strcmp(isa, "avx512bf16") == 0 && pairs ? 1 + (__builtin_cpu_is("intel") != 0) : 0;
#elif defined(__aarch64__)
    return strcmp(isa, "neon") == 0;
#else
    return 0;
#endif
}
