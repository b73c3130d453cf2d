/* Sends torch's allocations of CPU tensors to a tensor heap, in a running process.
 *
 * torch allocates the data of CPU tensors in one library, libc10, through posix_memalign and free
 * (c10/core/impl/alloc_cpu.cpp). Both are reached through slots of that library's global offset table, which are set to
 * the functions below: the technique of memory profilers such as memray. Nothing else in the process is touched.
 */
#define _GNU_SOURCE
#include "tensor_heap.h"

#include <dlfcn.h>
#include <elf.h>
#include <errno.h>
#include <link.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#if defined(__x86_64__)
#define IS_SLOT(type) ((type) == R_X86_64_JUMP_SLOT || (type) == R_X86_64_GLOB_DAT)
#elif defined(__aarch64__)
#define IS_SLOT(type) ((type) == R_AARCH64_JUMP_SLOT || (type) == R_AARCH64_GLOB_DAT)
#else
#define IS_SLOT(type) 0
#endif

static Heap *hooked_heap;        /* never destroyed: tensors outlive whoever asked for it */
static uint64_t hooked_min_bytes; /* smaller tensors stay with malloc; UINT64_MAX: all do */
static int (*next_posix_memalign)(void **, size_t, size_t);
static void (*next_free)(void *);

static int heap_posix_memalign(void **out, size_t alignment, size_t nbytes) {
    if (nbytes >= __atomic_load_n(&hooked_min_bytes, __ATOMIC_RELAXED) && alignment <= 4096) {
        void *block = heap_allocate(hooked_heap, nbytes);
        if (block) {
            *out = block;
            return 0;
        }
    }
    return next_posix_memalign(out, alignment, nbytes);
}

static void heap_free_or_next(void *address) {
    if (heap_free(hooked_heap, address)) next_free(address);
}

/* -- the global offset table ------------------------------------------------------------------------------------- */

typedef struct {
    const char *library; /* how its file's name begins */
    int is_dry;          /* only count the slots */
    int num_memalign, num_free, error;
} Patch;

static int write_slot(void **slot, void *value) {
    uintptr_t page_bytes = (uintptr_t)sysconf(_SC_PAGESIZE);
    void *page = (void *)((uintptr_t)slot & ~(page_bytes - 1));
    /* Stays writable: the dynamic linker still binds other slots on the page, and whether it was is not known here. */
    if (mprotect(page, page_bytes, PROT_READ | PROT_WRITE)) return errno;
    __atomic_store_n(slot, value, __ATOMIC_RELEASE);
    return 0;
}

static void patch_table(Patch *patch, ElfW(Addr) base, const ElfW(Rela) *relocations, size_t nbytes,
                        const ElfW(Sym) *symbols, const char *names) {
    for (size_t i = 0; relocations && i < nbytes / sizeof(ElfW(Rela)); i++) {
        if (!IS_SLOT(ELF64_R_TYPE(relocations[i].r_info))) continue;
        const char *name = names + symbols[ELF64_R_SYM(relocations[i].r_info)].st_name;
        void **slot = (void **)(base + relocations[i].r_offset);
        int error = 0;
        if (!strcmp(name, "posix_memalign")) {
            error = patch->is_dry ? 0 : write_slot(slot, (void *)heap_posix_memalign);
            patch->num_memalign += !error;
        } else if (!strcmp(name, "free")) {
            error = patch->is_dry ? 0 : write_slot(slot, (void *)heap_free_or_next);
            patch->num_free += !error;
        }
        if (error) patch->error = error;
    }
}

static int patch_library(struct dl_phdr_info *info, size_t size, void *data) {
    (void)size;
    Patch *patch = data;
    const char *file = strrchr(info->dlpi_name, '/');
    if (strncmp(file ? file + 1 : info->dlpi_name, patch->library, strlen(patch->library))) return 0;
    const ElfW(Dyn) *dynamic = NULL;
    for (int i = 0; i < info->dlpi_phnum; i++)
        if (info->dlpi_phdr[i].p_type == PT_DYNAMIC)
            dynamic = (const ElfW(Dyn) *)(info->dlpi_addr + info->dlpi_phdr[i].p_vaddr);
    const ElfW(Sym) *symbols = NULL;
    const char *names = NULL;
    const ElfW(Rela) *lazy = NULL, *eager = NULL;
    size_t lazy_bytes = 0, eager_bytes = 0;
    for (; dynamic && dynamic->d_tag != DT_NULL; dynamic++) {
        if (dynamic->d_tag == DT_SYMTAB) symbols = (const ElfW(Sym) *)dynamic->d_un.d_ptr;
        if (dynamic->d_tag == DT_STRTAB) names = (const char *)dynamic->d_un.d_ptr;
        if (dynamic->d_tag == DT_JMPREL) lazy = (const ElfW(Rela) *)dynamic->d_un.d_ptr;
        if (dynamic->d_tag == DT_PLTRELSZ) lazy_bytes = dynamic->d_un.d_val;
        if (dynamic->d_tag == DT_RELA) eager = (const ElfW(Rela) *)dynamic->d_un.d_ptr;
        if (dynamic->d_tag == DT_RELASZ) eager_bytes = dynamic->d_un.d_val;
    }
    if (symbols && names) {
        patch_table(patch, info->dlpi_addr, eager, eager_bytes, symbols, names);
        patch_table(patch, info->dlpi_addr, lazy, lazy_bytes, symbols, names);
    }
    return 0;
}

/* -- for Python -------------------------------------------------------------------------------------------------- */

/* Whether a loaded library of this name calls both functions through slots. */
int heap_can_hook(const char *library) {
    Patch patch = {library, 1, 0, 0, 0};
    dl_iterate_phdr(patch_library, &patch);
    return patch.num_memalign && patch.num_free;
}

/* A child must not inherit a lock that another thread of its parent held. */
static void before_fork(void) { heap_lock(hooked_heap); }
static void after_fork(void) { heap_unlock(hooked_heap); }

/* The heap that tensors of `min_bytes` and more go to from now on; NULL with `*error` set: an errno, or ENOSYS where no
 * library with this name calls both functions. */
Heap *heap_hook(const char *library, uint64_t reserved_bytes, uint64_t min_bytes, int *error) {
    *error = 0;
    if (!hooked_heap) {
        next_posix_memalign = (int (*)(void **, size_t, size_t))dlsym(RTLD_DEFAULT, "posix_memalign");
        next_free = (void (*)(void *))dlsym(RTLD_DEFAULT, "free");
        Heap *heap = heap_create(reserved_bytes, 0);
        if (!heap || !next_posix_memalign || !next_free) {
            if (heap) heap_destroy(heap);
            *error = ENOMEM;
            return NULL;
        }
        hooked_min_bytes = UINT64_MAX;
        hooked_heap = heap;
        Patch patch = {library, 0, 0, 0, 0};
        dl_iterate_phdr(patch_library, &patch);
        if (patch.error || !patch.num_memalign || !patch.num_free) {
            /* Slots that were set pass everything on. */
            *error = patch.error ? patch.error : ENOSYS;
            if (!patch.num_memalign && !patch.num_free) {
                hooked_heap = NULL;
                heap_destroy(heap);
            }
            return NULL;
        }
        pthread_atfork(before_fork, after_fork, after_fork);
    }
    __atomic_store_n(&hooked_min_bytes, min_bytes, __ATOMIC_RELAXED);
    return hooked_heap;
}

/* New tensors go to malloc again; those in the heap stay there until they are freed. */
void heap_unhook(void) {
    __atomic_store_n(&hooked_min_bytes, UINT64_MAX, __ATOMIC_RELAXED);
    if (hooked_heap) {
        heap_set_ceiling(hooked_heap, 0);
        heap_trim(hooked_heap);
    }
}
