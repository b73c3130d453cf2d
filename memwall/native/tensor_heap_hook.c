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
static int is_ready;             /* every slot is set */
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
    const char *function; /* whose slots */
    void *value;
    int num_slots, error;
    uintptr_t sealed_begin, sealed_end; /* what the dynamic linker made read-only after relocation */
} Patch;

static int write_slot(const Patch *patch, void **slot) {
    uintptr_t page_bytes = (uintptr_t)sysconf(_SC_PAGESIZE), at = (uintptr_t)slot;
    void *page = (void *)(at & ~(page_bytes - 1));
    if (mprotect(page, page_bytes, PROT_READ | PROT_WRITE)) return errno;
    __atomic_store_n(slot, patch->value, __ATOMIC_RELEASE);
    if (at >= patch->sealed_begin && at < patch->sealed_end && mprotect(page, page_bytes, PROT_READ)) return errno;
    return 0;
}

static void patch_table(Patch *patch, ElfW(Addr) base, const ElfW(Rela) *relocations, size_t nbytes,
                        const ElfW(Sym) *symbols, const char *names) {
    for (size_t i = 0; relocations && i < nbytes / sizeof(ElfW(Rela)); i++) {
        if (!IS_SLOT(ELF64_R_TYPE(relocations[i].r_info))) continue;
        const char *name = names + symbols[ELF64_R_SYM(relocations[i].r_info)].st_name;
        if (strcmp(name, patch->function)) continue;
        int error = patch->is_dry ? 0 : write_slot(patch, (void **)(base + relocations[i].r_offset));
        if (error) patch->error = error;
        else patch->num_slots++;
    }
}

static int patch_library(struct dl_phdr_info *info, size_t size, void *data) {
    (void)size;
    Patch *patch = data;
    const char *file = strrchr(info->dlpi_name, '/');
    if (strncmp(file ? file + 1 : info->dlpi_name, patch->library, strlen(patch->library))) return 0;
    const ElfW(Dyn) *dynamic = NULL;
    for (int i = 0; i < info->dlpi_phnum; i++) {
        uintptr_t begin = info->dlpi_addr + info->dlpi_phdr[i].p_vaddr;
        if (info->dlpi_phdr[i].p_type == PT_DYNAMIC) dynamic = (const ElfW(Dyn) *)begin;
        if (info->dlpi_phdr[i].p_type == PT_GNU_RELRO) {
            uintptr_t page_bytes = (uintptr_t)sysconf(_SC_PAGESIZE);
            patch->sealed_begin = begin & ~(page_bytes - 1);
            patch->sealed_end = (begin + info->dlpi_phdr[i].p_memsz) & ~(page_bytes - 1);
        }
    }
    const ElfW(Sym) *symbols = NULL;
    const char *names = NULL;
    const ElfW(Rela) *lazy = NULL, *eager = NULL;
    size_t lazy_bytes = 0, eager_bytes = 0;
    for (; dynamic && dynamic->d_tag != DT_NULL; dynamic++) {
        /* glibc has added the load address to these already, musl has not. */
        uintptr_t at = dynamic->d_un.d_ptr < info->dlpi_addr ? info->dlpi_addr + dynamic->d_un.d_ptr
                                                             : dynamic->d_un.d_ptr;
        if (dynamic->d_tag == DT_SYMTAB) symbols = (const ElfW(Sym) *)at;
        if (dynamic->d_tag == DT_STRTAB) names = (const char *)at;
        if (dynamic->d_tag == DT_JMPREL) lazy = (const ElfW(Rela) *)at;
        if (dynamic->d_tag == DT_PLTRELSZ) lazy_bytes = dynamic->d_un.d_val;
        if (dynamic->d_tag == DT_RELA) eager = (const ElfW(Rela) *)at;
        if (dynamic->d_tag == DT_RELASZ) eager_bytes = dynamic->d_un.d_val;
    }
    if (symbols && names) {
        patch_table(patch, info->dlpi_addr, eager, eager_bytes, symbols, names);
        patch_table(patch, info->dlpi_addr, lazy, lazy_bytes, symbols, names);
    }
    return 0;
}

/* -- for Python -------------------------------------------------------------------------------------------------- */

static Patch patched(const char *library, const char *function, void *value) {
    Patch patch = {.library = library, .function = function, .value = value, .is_dry = !value};
    dl_iterate_phdr(patch_library, &patch);
    return patch;
}

/* Whether a loaded library of this name calls both functions through slots. */
int heap_can_hook(const char *library) {
    return patched(library, "posix_memalign", NULL).num_slots && patched(library, "free", NULL).num_slots;
}

/* A child must not inherit a lock that another thread of its parent held. */
static void before_fork(void) { heap_lock(hooked_heap); }
static void after_fork(void) { heap_unlock(hooked_heap); }

/* The heap that tensors of `min_bytes` and more go to from now on; NULL with `*error` set: an errno, or ENOSYS where no
 * library with this name calls both functions. */
Heap *heap_hook(const char *library, uint64_t reserved_bytes, uint64_t min_bytes, int *error) {
    *error = 0;
    if (!is_ready) {
        /* Not what the slots hold: an unbound slot leads to the dynamic linker, which would write it anew. */
        next_posix_memalign = (int (*)(void **, size_t, size_t))dlsym(RTLD_DEFAULT, "posix_memalign");
        next_free = (void (*)(void *))dlsym(RTLD_DEFAULT, "free");
        hooked_min_bytes = UINT64_MAX;
        if (!hooked_heap) hooked_heap = heap_create(reserved_bytes, 0);
        if (!hooked_heap || !next_posix_memalign || !next_free) {
            *error = ENOMEM;
            return NULL;
        }
        /* `free` first, which passes on what is not the heap's: no block is allocated before all of it is in place. */
        Patch free_patch = patched(library, "free", (void *)heap_free_or_next);
        *error = free_patch.error ? free_patch.error : free_patch.num_slots ? 0 : ENOSYS;
        if (*error) return NULL;
        Patch memalign_patch = patched(library, "posix_memalign", (void *)heap_posix_memalign);
        *error = memalign_patch.error ? memalign_patch.error : memalign_patch.num_slots ? 0 : ENOSYS;
        if (*error) return NULL;
        pthread_atfork(before_fork, after_fork, after_fork);
        is_ready = 1;
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
