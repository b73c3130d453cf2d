/* See tensor_heap.h. Blocks and the gaps between them form one list in the order of addresses; first fit.
 *
 * The books count pages of 4 KiB; memory comes in huge pages, of which a step has fewer faults and misses of the TLB, and
 * disks and their drivers fewer pieces to handle. A huge page whose rest could be filled behind the books' back is not
 * asked for: only ones at the end of the heap, which may be resident ahead of the books by one huge page in all, and ones
 * that a block covers. One that is returned in part is split first.
 */
#define _GNU_SOURCE
#include "tensor_heap_nodes.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define HUGE_BYTES (2ull << 20)
/* Areas of memory that differ in it, of which a process may have 65,530 of all kinds (vm.max_map_count). */
#define MAX_EDGES 16384u
#define COMMIT_BYTES (64u << 20) /* address space is made writable in steps */

static void *reserve(uint64_t nbytes, int protection) {
    void *found = mmap(NULL, nbytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return found == MAP_FAILED ? NULL : found;
}

static uint64_t pages_in_huge(const Heap *heap) { return HUGE_BYTES / heap->page_bytes; }

/* As `reserve`, for blocks: begins where a huge page does. */
static char *reserve_aligned(uint64_t nbytes) {
    char *found = reserve(nbytes + HUGE_BYTES, PROT_NONE);
    if (!found) return NULL;
    uint64_t before = -(uintptr_t)found % HUGE_BYTES;
    if (before) munmap(found, before);
    munmap(found + before + nbytes, HUGE_BYTES - before);
    return found + before;
}

Heap *heap_create(uint64_t reserved_bytes, int is_dry) {
    Heap *heap = calloc(1, sizeof(Heap));
    if (!heap) return NULL;
    heap->page_bytes = (uint64_t)sysconf(_SC_PAGESIZE);
    heap->num_reserved = reserved_bytes / heap->page_bytes;
    if (heap->num_reserved > UINT32_MAX) heap->num_reserved = UINT32_MAX;
    heap->is_dry = is_dry;
    /* A dry heap's addresses must only differ from NULL. */
    heap->base = is_dry ? (char *)(uintptr_t)(1ull << 46) : reserve_aligned(heap->num_reserved * heap->page_bytes);
    heap->node_at = reserve(heap->num_reserved * sizeof(Node *), PROT_READ | PROT_WRITE);
    heap->is_resident = reserve(heap->num_reserved, PROT_READ | PROT_WRITE);
    heap->is_cut = reserve(heap->num_reserved / pages_in_huge(heap) + 1, PROT_READ | PROT_WRITE);
    pthread_mutex_init(&heap->lock, NULL);
    if (!heap->num_reserved || !heap->base || !heap->node_at || !heap->is_resident || !heap->is_cut) {
        heap_destroy(heap);
        return NULL;
    }
    /* With larger pages huge ones are larger too: 32 or 512 MiB on arm64. */
    heap->is_all_cut = heap->page_bytes != 4096;
    /* Kernels without huge pages refuse this, here and below, which is fine. */
    if (!is_dry)
        madvise(heap->base, heap->num_reserved * heap->page_bytes, heap->is_all_cut ? MADV_NOHUGEPAGE : MADV_HUGEPAGE);
    return heap;
}

void heap_destroy(Heap *heap) {
    if (heap->base && !heap->is_dry) munmap(heap->base, heap->num_reserved * heap->page_bytes);
    if (heap->node_at) munmap(heap->node_at, heap->num_reserved * sizeof(Node *));
    if (heap->is_resident) munmap(heap->is_resident, heap->num_reserved);
    if (heap->is_cut) munmap(heap->is_cut, heap->num_reserved / pages_in_huge(heap) + 1);
    while (heap->slabs) {
        Slab *next = heap->slabs->next;
        free(heap->slabs);
        heap->slabs = next;
    }
    pthread_mutex_destroy(&heap->lock);
    free(heap);
}

/* -- residency --------------------------------------------------------------------------------------------------- */

static char *address_of(const Heap *heap, uint64_t page) { return heap->base + page * heap->page_bytes; }

/* From now on the huge pages [first, end) come as such, or page by page. */
static void set_cut(Heap *heap, uint64_t first, uint64_t end, int is_cut) {
    uint64_t step = pages_in_huge(heap);
    if (heap->is_all_cut) return;
    while (first < end) {
        uint64_t last = first; /* one call for each run that is not as it should be */
        while (last < end && heap->is_cut[last] != is_cut) heap->is_cut[last++] = (uint8_t)is_cut;
        if (last > first && first && heap->is_cut[first - 1] == is_cut) heap->num_edges--;
        else if (last > first && first) heap->num_edges++;
        if (last > first && heap->is_cut[last] == is_cut) heap->num_edges--;
        else if (last > first) heap->num_edges++;
        if (last > first && !heap->is_dry) {
            uint64_t stop = last * step < heap->num_reserved ? last * step : heap->num_reserved;
            madvise(address_of(heap, first * step), (stop - first * step) * heap->page_bytes,
                    is_cut ? MADV_NOHUGEPAGE : MADV_HUGEPAGE);
        }
        first = last + 1;
    }
    if (heap->num_edges <= MAX_EDGES) return;
    heap->is_all_cut = 1;
    if (!heap->is_dry) madvise(heap->base, heap->num_reserved * heap->page_bytes, MADV_NOHUGEPAGE);
}

static int may_be_huge(const Heap *heap, uint64_t huge) { return heap->is_all_cut || !heap->is_cut[huge]; }

/* Gives the memory of pages [begin, end) back; -1 where the system refuses (mlockall). Of a huge page that is mapped in
 * part the system would keep all, so it is split first, which MADV_FREE does (mm/madvise.c, madvise_free_huge_pmd). Of one
 * that a disk reads just then, or that a forked child shares, the kernel keeps the rest until memory is short. What came
 * ahead of the books at the end of the heap goes too. */
static int return_pages(Heap *heap, uint64_t begin, uint64_t end) {
    uint64_t step = pages_in_huge(heap), first = begin / step, last = (end - 1) / step;
    if (end == heap->top) end = (last + 1) * step < heap->num_reserved ? (last + 1) * step : heap->num_reserved;
    int has_part = (begin % step && may_be_huge(heap, first)) || (end % step && may_be_huge(heap, last));
    set_cut(heap, first, last + 1, 1);
    if (heap->is_dry) return 0;
    uint64_t nbytes = (end - begin) * heap->page_bytes;
    if (has_part) madvise(address_of(heap, begin), nbytes, MADV_FREE);
    return madvise(address_of(heap, begin), nbytes, MADV_DONTNEED);
}

/* Returns up to `wanted` resident pages of a free node, from its end; as many as were returned. */
static uint64_t give_back(Heap *heap, Node *node, uint64_t wanted) {
    uint64_t given = 0;
    uint32_t end = node->page + node->num_pages;
    while (end > node->page && given < wanted) {
        if (!heap->is_resident[end - 1]) {
            end--;
            continue;
        }
        uint32_t begin = end - 1;
        while (begin > node->page && heap->is_resident[begin - 1] && given + (end - begin) < wanted) begin--;
        uint32_t count = end - begin;
        if (return_pages(heap, begin, end)) break;
        memset(heap->is_resident + begin, 0, count);
        given += count;
        end = begin;
    }
    node->num_resident -= (uint32_t)given;
    heap->num_resident -= given;
    heap->num_returned += given;
    return given;
}

/* A free node at the end of which nothing is resident goes: what lies there is as if it had never been used. */
static void shorten(Heap *heap) {
    Node *last = heap->last;
    if (!last || !last->is_free || last->num_resident) return;
    uint64_t step = pages_in_huge(heap);
    unlink_free(heap, last);
    heap->last = last->before;
    if (heap->last) heap->last->after = NULL;
    set_cut(heap, (last->page + step - 1) / step, (heap->top + step - 1) / step, 0);
    heap->top = last->page;
    last->free_after = heap->unused_nodes;
    heap->unused_nodes = last;
}

/* Returns free pages, those at the highest addresses first: first fit needs them last. `num_used` are in blocks. */
static void make_room(Heap *heap, uint64_t wanted, uint64_t num_used) {
    uint32_t below = UINT32_MAX;
    while (wanted && heap->num_resident > num_used) {
        Node *highest = NULL;
        for (Node *node = heap->free_list; node; node = node->free_after)
            if (node->num_resident && node->page < below && (!highest || node->page > highest->page)) highest = node;
        if (!highest) break;
        below = highest->page;
        wanted -= give_back(heap, highest, wanted);
    }
    shorten(heap);
}

/* Huge pages that a block covers, and of which nothing is resident, come as such again. */
static void mend_cut(Heap *heap, const Node *node) {
    uint64_t step = pages_in_huge(heap), end = ((uint64_t)node->page + node->num_pages) / step;
    if (heap->is_all_cut) return;
    for (uint64_t huge = (node->page + step - 1) / step; huge < end; huge++)
        if (heap->is_cut[huge] && !count_resident(heap, (uint32_t)(huge * step), (uint32_t)step))
            set_cut(heap, huge, huge + 1, 0);
}

static void become_resident(Heap *heap, Node *node) {
    uint64_t fresh = node->num_pages - node->num_resident;
    if (heap->ceiling && heap->num_resident + fresh > heap->ceiling)
        make_room(heap, heap->num_resident + fresh - heap->ceiling, heap->num_live + node->num_resident);
    if (fresh) {
        mend_cut(heap, node);
        memset(heap->is_resident + node->page, 1, node->num_pages);
    }
    node->num_resident = node->num_pages;
    heap->num_resident += fresh;
    heap->num_fresh += fresh;
    if (heap->num_resident > heap->peak_resident) heap->peak_resident = heap->num_resident;
}

/* -- blocks ------------------------------------------------------------------------------------------------------ */

static int commit(Heap *heap, uint64_t end) {
    if (end > heap->num_reserved) return -1;
    if (heap->is_dry || end <= heap->num_committed) return 0;
    uint64_t step = COMMIT_BYTES / heap->page_bytes;
    uint64_t until = (end + step - 1) / step * step;
    if (until > heap->num_reserved) until = heap->num_reserved;
    char *address = heap->base + heap->num_committed * heap->page_bytes;
    if (mprotect(address, (until - heap->num_committed) * heap->page_bytes, PROT_READ | PROT_WRITE)) return -1;
    heap->num_committed = until;
    return 0;
}

/* A node of exactly `num_pages` behind all others, or the last free one made longer. */
static Node *grow(Heap *heap, uint32_t num_pages) {
    Node *last = heap->last;
    int is_extended = last && last->is_free;
    uint64_t begin = is_extended ? last->page : heap->top;
    if (commit(heap, begin + num_pages)) return NULL;
    if (is_extended) {
        unlink_free(heap, last); /* what is added to it was never touched */
        last->num_pages = num_pages;
    } else {
        Node *node = new_node(heap);
        if (!node) return NULL;
        node->page = heap->top;
        node->num_pages = num_pages;
        node->before = last;
        if (last) last->after = node;
        heap->last = last = node;
    }
    heap->top = (uint32_t)(begin + num_pages);
    return last;
}

void *heap_allocate(Heap *heap, uint64_t nbytes) {
    uint64_t pages = (nbytes + heap->page_bytes - 1) / heap->page_bytes;
    if (!pages || pages > heap->num_reserved) return NULL;
    void *address = NULL;
    pthread_mutex_lock(&heap->lock);
    Node *found = NULL;
    for (Node *node = heap->free_list; node; node = node->free_after)
        if (node->num_pages >= pages && (!found || node->page < found->page)) found = node;
    if (found) {
        unlink_free(heap, found);
        if (found->num_pages > pages && split_node(heap, found, (uint32_t)pages)) {
            link_free(heap, found);
            found = NULL;
        }
    } else {
        found = grow(heap, (uint32_t)pages);
    }
    if (found) {
        become_resident(heap, found);
        heap->num_live += pages;
        heap->num_blocks++;
        if (heap->num_live > heap->peak_live) heap->peak_live = heap->num_live;
        heap->node_at[found->page] = found;
        address = heap->base + (uint64_t)found->page * heap->page_bytes;
    }
    pthread_mutex_unlock(&heap->lock);
    return address;
}

int heap_contains(const Heap *heap, const void *address) {
    uintptr_t begin = (uintptr_t)heap->base, at = (uintptr_t)address;
    return at >= begin && at - begin < heap->num_reserved * heap->page_bytes;
}

int heap_free(Heap *heap, void *address) {
    if (!heap_contains(heap, address)) return -1;
    uint64_t page = (uint64_t)((char *)address - heap->base) / heap->page_bytes;
    pthread_mutex_lock(&heap->lock);
    Node *node = heap->node_at[page];
    if (node) {
        heap->node_at[page] = NULL;
        heap->num_live -= node->num_pages;
        heap->num_blocks--;
        link_free(heap, node);
        if (node->after && node->after->is_free) merge_with_after(heap, node);
        if (node->before && node->before->is_free) merge_with_after(heap, node->before);
    }
    pthread_mutex_unlock(&heap->lock);
    return node ? 0 : -1;
}

void heap_lock(Heap *heap) { pthread_mutex_lock(&heap->lock); }
void heap_unlock(Heap *heap) { pthread_mutex_unlock(&heap->lock); }

void heap_set_ceiling(Heap *heap, uint64_t ceiling_bytes) {
    pthread_mutex_lock(&heap->lock);
    heap->ceiling = ceiling_bytes / heap->page_bytes;
    if (ceiling_bytes && !heap->ceiling) heap->ceiling = 1;
    if (heap->ceiling && heap->num_resident > heap->ceiling)
        make_room(heap, heap->num_resident - heap->ceiling, heap->num_live);
    pthread_mutex_unlock(&heap->lock);
}

void heap_trim(Heap *heap) {
    pthread_mutex_lock(&heap->lock);
    make_room(heap, UINT64_MAX, heap->num_live);
    pthread_mutex_unlock(&heap->lock);
}

void heap_figures(Heap *heap, HeapFigures *figures) {
    pthread_mutex_lock(&heap->lock);
    figures->live_bytes = heap->num_live * heap->page_bytes;
    figures->resident_bytes = heap->num_resident * heap->page_bytes;
    figures->peak_live_bytes = heap->peak_live * heap->page_bytes;
    figures->peak_resident_bytes = heap->peak_resident * heap->page_bytes;
    figures->fresh_bytes = heap->num_fresh * heap->page_bytes;
    figures->returned_bytes = heap->num_returned * heap->page_bytes;
    figures->num_blocks = heap->num_blocks;
    pthread_mutex_unlock(&heap->lock);
}
