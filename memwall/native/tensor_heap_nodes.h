/* The books of a tensor heap: blocks and the gaps between them, one list in the order of addresses. */
#ifndef MEMWALL_TENSOR_HEAP_NODES_H
#define MEMWALL_TENSOR_HEAP_NODES_H

#include "tensor_heap.h"

#include <pthread.h>

#define NODES_PER_SLAB 1024u

typedef struct Node {
    struct Node *before, *after;         /* neighbours by address */
    struct Node *free_before, *free_after; /* the free list, in no order; free_after also chains unused nodes */
    uint32_t page, num_pages;
    uint32_t num_resident; /* of a free node; a block counts as resident whole */
    int is_free;
} Node;

typedef struct Slab {
    struct Slab *next;
    Node nodes[NODES_PER_SLAB];
} Slab;

struct Heap {
    pthread_mutex_t lock;
    char *base;
    uint64_t page_bytes;
    uint64_t num_reserved, num_committed; /* pages */
    uint64_t ceiling;                     /* pages; 0: none */
    int is_dry;
    Node *last;         /* by address */
    Node *free_list;
    Node *unused_nodes;
    Slab *slabs;
    uint32_t top;          /* pages in use by nodes: where the heap grows */
    Node **node_at;        /* by the first page of a block */
    uint8_t *is_resident;  /* by page */
    uint8_t *is_cut;       /* by huge page: faults bring in single pages */
    uint64_t num_edges;    /* between cut ones and others */
    int is_all_cut;        /* for good: huge pages are of another size, or there were too many edges */
    uint64_t num_resident, num_live, peak_resident, peak_live, num_fresh, num_returned, num_blocks;
};

#pragma GCC visibility push(hidden) /* of these names other libraries may have some, too */
Node *new_node(Heap *heap);
void link_free(Heap *heap, Node *node);
void unlink_free(Heap *heap, Node *node);
/* Joins a free node with the free node behind it, which goes. */
void merge_with_after(Heap *heap, Node *node);
uint32_t count_resident(const Heap *heap, uint32_t page, uint32_t num_pages);
/* Cuts a node that is in no list, so that its first `num_pages` are left; the rest becomes free. */
int split_node(Heap *heap, Node *node, uint32_t num_pages);
#pragma GCC visibility pop

#endif
