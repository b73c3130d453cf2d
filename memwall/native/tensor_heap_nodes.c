/* See tensor_heap_nodes.h. */
#include "tensor_heap_nodes.h"

#include <stdlib.h>
#include <string.h>

Node *new_node(Heap *heap) {
    if (!heap->unused_nodes) {
        Slab *slab = calloc(1, sizeof(Slab));
        if (!slab) return NULL;
        slab->next = heap->slabs;
        heap->slabs = slab;
        for (unsigned i = 0; i < NODES_PER_SLAB; i++) {
            slab->nodes[i].free_after = heap->unused_nodes;
            heap->unused_nodes = &slab->nodes[i];
        }
    }
    Node *node = heap->unused_nodes;
    heap->unused_nodes = node->free_after;
    memset(node, 0, sizeof(Node));
    return node;
}

void link_free(Heap *heap, Node *node) {
    node->is_free = 1;
    node->free_before = NULL;
    node->free_after = heap->free_list;
    if (heap->free_list) heap->free_list->free_before = node;
    heap->free_list = node;
}

void unlink_free(Heap *heap, Node *node) {
    node->is_free = 0;
    if (node->free_before) node->free_before->free_after = node->free_after;
    else heap->free_list = node->free_after;
    if (node->free_after) node->free_after->free_before = node->free_before;
}

void merge_with_after(Heap *heap, Node *node) {
    Node *gone = node->after;
    unlink_free(heap, gone);
    node->num_pages += gone->num_pages;
    node->num_resident += gone->num_resident;
    node->after = gone->after;
    if (gone->after) gone->after->before = node;
    else heap->last = node;
    gone->free_after = heap->unused_nodes;
    heap->unused_nodes = gone;
}

uint32_t count_resident(const Heap *heap, uint32_t page, uint32_t num_pages) {
    uint32_t sum = 0;
    for (uint32_t i = 0; i < num_pages; i++) sum += heap->is_resident[page + i];
    return sum;
}

int split_node(Heap *heap, Node *node, uint32_t num_pages) {
    Node *rest = new_node(heap);
    if (!rest) return -1;
    uint32_t all_resident = node->num_resident;
    rest->page = node->page + num_pages;
    rest->num_pages = node->num_pages - num_pages;
    if (node->num_resident == node->num_pages) {
        node->num_resident = num_pages;
    } else if (node->num_resident) {
        node->num_resident = count_resident(heap, node->page, num_pages);
    }
    rest->num_resident = all_resident - node->num_resident;
    node->num_pages = num_pages;
    rest->before = node;
    rest->after = node->after;
    if (node->after) node->after->before = rest;
    else heap->last = rest;
    node->after = rest;
    link_free(heap, rest);
    return 0;
}
