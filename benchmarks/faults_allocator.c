/* Has chosen allocations of CPU tensors fail, in a process that is started with this library in LD_PRELOAD.
 *
 * torch allocates them by posix_memalign, in libc10 alone; calls of other libraries pass.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

static int (*real)(void **, size_t, size_t);
static long number, first = -1, second = -1;

/* Counts from 0 on again; the allocations with these numbers fail, -1 for none. */
void faults_arm(long one, long other) {
    __atomic_store_n(&number, 0, __ATOMIC_SEQ_CST);
    first = one;
    second = other;
}

long faults_count(void) { return __atomic_load_n(&number, __ATOMIC_SEQ_CST); }

int posix_memalign(void **out, size_t alignment, size_t nbytes) {
    if (!real) real = (int (*)(void **, size_t, size_t))dlsym(RTLD_NEXT, "posix_memalign");
    Dl_info caller;
    if (dladdr(__builtin_return_address(0), &caller) && caller.dli_fname && strstr(caller.dli_fname, "libc10.so")) {
        long own = __atomic_fetch_add(&number, 1, __ATOMIC_SEQ_CST);
        if (own == first || own == second) return ENOMEM;
    }
    return real(out, alignment, nbytes);
}
