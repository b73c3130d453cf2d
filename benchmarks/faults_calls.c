/* Has chosen allocations of CPU tensors fail, or calls that write to a folder, in a process that is started with this
 * library in LD_PRELOAD.
 *
 * torch allocates them by posix_memalign, in libc10 alone; memwall's tensor heap takes that call over, gives the large
 * ones memory of its own (heap_allocate) and passes on the rest. Calls of other libraries pass.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

static int (*real)(void **, size_t, size_t);
static long number, first = -1, second = -1;

/* Counts from 0 on again; the allocations with these numbers fail, -1 for none. */
void faults_arm(long one, long other) {
    __atomic_store_n(&number, 0, __ATOMIC_SEQ_CST);
    first = one;
    second = other;
}

long faults_count(void) { return __atomic_load_n(&number, __ATOMIC_SEQ_CST); }

static const char *caller_of(const void *address, const char *name) {
    Dl_info caller;
    return dladdr(address, &caller) && caller.dli_fname && strstr(caller.dli_fname, name) ? caller.dli_fname : NULL;
}

int posix_memalign(void **out, size_t alignment, size_t nbytes) {
    if (!real) real = (int (*)(void **, size_t, size_t))dlsym(RTLD_NEXT, "posix_memalign");
    const void *from = __builtin_return_address(0);
    if (caller_of(from, "libc10.so") || caller_of(from, "/tensor_heap")) {
        long own = __atomic_fetch_add(&number, 1, __ATOMIC_SEQ_CST);
        if (own == first || own == second) return ENOMEM;
    }
    return real(out, alignment, nbytes);
}

/* A heap without room: the call that follows, to the function above, is the one that fails and is counted. */
void *heap_allocate(void *heap, unsigned long nbytes) {
    static void *(*own)(void *, unsigned long);
    const char *library = caller_of(__builtin_return_address(0), "/tensor_heap");
    if (!own) {
        void *loaded = library ? dlopen(library, RTLD_LAZY | RTLD_NOLOAD) : NULL;
        own = loaded ? (void *(*)(void *, unsigned long))dlsym(loaded, "heap_allocate") : NULL;
        if (!own) return NULL;
    }
    long next = faults_count();
    if (next == first || next == second) return NULL;
    void *found = own(heap, nbytes);
    if (found) __atomic_fetch_add(&number, 1, __ATOMIC_SEQ_CST);
    return found;
}

/* -- writes ------------------------------------------------------------------------------------------------------ */

static long num_writes, first_failing = -1;
static char written_folder[4096];

/* Counts calls that write to files in a folder from 0 on again; from this number on they fail with EIO, -1 for never. */
void faults_arm_writes(long from, const char *folder) {
    __atomic_store_n(&num_writes, 0, __ATOMIC_SEQ_CST);
    first_failing = from;
    snprintf(written_folder, sizeof written_folder, "%s", folder);
}

long faults_count_writes(void) { return __atomic_load_n(&num_writes, __ATOMIC_SEQ_CST); }

static int fails(int file) {
    char link[64], path[4096];
    if (!written_folder[0]) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t nbytes = readlink(link, path, sizeof path - 1);
    if (nbytes < 0) return 0;
    path[nbytes] = 0;
    if (strncmp(path, written_folder, strlen(written_folder))) return 0;
    long own = __atomic_fetch_add(&num_writes, 1, __ATOMIC_SEQ_CST);
    return first_failing >= 0 && own >= first_failing;
}

#define OR_FAIL(type, name, parameters, ...)                                                                           \
    type name parameters {                                                                                             \
        static type(*own) parameters;                                                                                  \
        if (!own) own = (type(*) parameters)dlsym(RTLD_NEXT, #name);                                                   \
        if (fails(file)) {                                                                                             \
            errno = EIO;                                                                                               \
            return -1;                                                                                                 \
        }                                                                                                              \
        return own(__VA_ARGS__);                                                                                       \
    }

OR_FAIL(ssize_t, write, (int file, const void *bytes, size_t nbytes), file, bytes, nbytes)
OR_FAIL(ssize_t, pwrite, (int file, const void *bytes, size_t nbytes, off_t at), file, bytes, nbytes, at)
OR_FAIL(ssize_t, pwrite64, (int file, const void *bytes, size_t nbytes, off64_t at), file, bytes, nbytes, at)
OR_FAIL(ssize_t, pwritev, (int file, const struct iovec *parts, int count, off_t at), file, parts, count, at)
OR_FAIL(ssize_t, pwritev64, (int file, const struct iovec *parts, int count, off64_t at), file, parts, count, at)
OR_FAIL(ssize_t, pwritev2, (int file, const struct iovec *parts, int count, off_t at, int flags), file, parts, count, at,
        flags)
OR_FAIL(ssize_t, pwritev64v2, (int file, const struct iovec *parts, int count, off64_t at, int flags), file, parts,
        count, at, flags)
OR_FAIL(int, ftruncate, (int file, off_t nbytes), file, nbytes)
OR_FAIL(int, ftruncate64, (int file, off64_t nbytes), file, nbytes)
OR_FAIL(int, fsync, (int file), file)
OR_FAIL(int, fdatasync, (int file), file)

int posix_fallocate64(int file, off64_t at, off64_t nbytes) {
    static int (*own)(int, off64_t, off64_t);
    if (!own) own = (int (*)(int, off64_t, off64_t))dlsym(RTLD_NEXT, "posix_fallocate64");
    return fails(file) ? EIO : own(file, at, nbytes);
}
