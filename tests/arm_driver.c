/* Runs plans on the kernels of another processor: reads one plan and its memory at a time from standard
   input, hands it to the walker of the library named on the command line, and writes the memory back.

   A message is eight int64 (bytes of memory, kernels, calls, phases, pointers, dims, nums, bytes of
   scratch for a thread), then the memory, the kernels' names in 64 bytes each, the calls as five int64
   (kernel, tasks, and where its pointers, dims and nums begin), the first call of each phase and the
   number of calls, the pointers as offsets into the memory (-1 for none), the dims, and the nums. */

#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "call.h"

enum { NAME = 64, THREADS = 2 };

static void *receive(size_t bytes) {
    char *data = aligned_alloc(64, (bytes + 127) / 64 * 64);
    for (size_t got = 0; got < bytes;) {
        ssize_t n = read(0, data + got, bytes - got);
        if (n <= 0) exit(got == 0 ? 0 : 1);
        got += (size_t)n;
    }
    return data;
}

int main(int argc, char **argv) {
    void *library = dlopen(argv[argc - 1], RTLD_NOW);
    if (!library) {
        fprintf(stderr, "%s\n", dlerror());
        return 1;
    }
    int (*run)(const call *, const int64_t *, int64_t, int, void *, int64_t) =
        dlsym(library, "treadle_run");
    for (;;) {
        int64_t *head = receive(8 * sizeof(int64_t));
        int64_t bytes = head[0], n_calls = head[2], n_phases = head[3], stride = head[7];
        char *memory = receive(bytes), *names = receive(head[1] * NAME);
        int64_t(*rows)[5] = receive(n_calls * sizeof(*rows));
        int64_t *first = receive((n_phases + 1) * sizeof(int64_t));
        int64_t *offsets = receive(head[4] * sizeof(int64_t));
        int64_t *dims = receive(head[5] * sizeof(int64_t));
        double *nums = receive(head[6] * sizeof(double));
        void **pointers = malloc((head[4] + 1) * sizeof(void *));
        call *calls = malloc((n_calls + 1) * sizeof(call));
        for (int64_t i = 0; i < head[4]; i++) pointers[i] = offsets[i] < 0 ? NULL : memory + offsets[i];
        for (int64_t i = 0; i < n_calls; i++) {
            int64_t *row = rows[i];
            call made = {dlsym(library, names + row[0] * NAME), row[1], pointers + row[2],
                         dims + row[3], nums + row[4]};
            if (!made.kernel) {
                fprintf(stderr, "no kernel %s\n", names + row[0] * NAME);
                return 1;
            }
            calls[i] = made;
        }
        void *scratch = aligned_alloc(64, THREADS * stride + 64);
        if (run(calls, first, n_phases, THREADS, scratch, stride)) return 1;
        for (int64_t sent = 0; sent < bytes;) {
            ssize_t n = write(1, memory + sent, bytes - sent);
            if (n <= 0) return 1;
            sent += n;
        }
        void *all[] = {head,   memory, names,    rows,  first,
                       offsets, dims,   nums, pointers, calls, scratch};
        for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++) free(all[i]);
    }
}
