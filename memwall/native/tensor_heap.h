/* A heap for the data of large tensors, apart from malloc's, that keeps its resident bytes under a ceiling.
 *
 * Why: malloc puts graph nodes and slivers of aligned blocks between tensors, and the gaps they hold open took 20 % of
 * a GPT's memory (benchmarks/heap.py). Here blocks are whole pages, bookkeeping lies elsewhere, and what fits nowhere
 * resident is paid for by returning free pages, exactly as many as are needed. Memory comes in huge pages where the
 * kernel gives them on request (transparent_hugepage/enabled: madvise or always).
 */
#ifndef MEMWALL_TENSOR_HEAP_H
#define MEMWALL_TENSOR_HEAP_H

#include <stddef.h>
#include <stdint.h>

typedef struct Heap Heap;

typedef struct {
    uint64_t live_bytes;          /* in blocks, rounded to pages */
    uint64_t resident_bytes;      /* live, and free but not returned */
    uint64_t peak_live_bytes;     /* since the heap was made, as all that follow */
    uint64_t peak_resident_bytes;
    uint64_t fresh_bytes;         /* that blocks made resident */
    uint64_t returned_bytes;      /* free pages given back to the system */
    uint64_t num_blocks;
} HeapFigures;

/* Reserves address space for at most `reserved_bytes`. A dry heap only keeps books: its addresses are no memory.
 * NULL where the system refuses. */
Heap *heap_create(uint64_t reserved_bytes, int is_dry);
/* All blocks of a heap that is destroyed become invalid. */
void heap_destroy(Heap *heap);
/* A block of at least `nbytes` > 0, aligned to 64; its content is undefined. NULL when the reservation is used up. */
void *heap_allocate(Heap *heap, uint64_t nbytes);
/* 0; -1 if `address` is no block of this heap, which is left as it is. */
int heap_free(Heap *heap, void *address);
/* Whether an address lies in the heap's reservation. */
int heap_contains(const Heap *heap, const void *address);
/* From now on free pages are returned before resident bytes exceed the ceiling; 0: no ceiling. */
void heap_set_ceiling(Heap *heap, uint64_t ceiling_bytes);
/* Returns all free pages. */
void heap_trim(Heap *heap);
void heap_figures(Heap *heap, HeapFigures *figures);
/* For fork(). */
void heap_lock(Heap *heap);
void heap_unlock(Heap *heap);

#endif
