/* Reads and writes through io_uring, by system calls alone.
 *
 * Source: io_uring_setup(2), io_uring_enter(2); Linux, include/uapi/linux/io_uring.h. A ring is of the thread that opened
 * it, and takes several requests at once. As long as a request is under way, its memory is the kernel's.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <linux/io_uring.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Linux 6.0 and 6.1, which headers may not know: completions cost their own thread alone, and only when it asks. */
#define ONE_THREAD_THAT_ASKS (1u << 12 | 1u << 13)
/* Linux 5.6: the first release with plain reads and writes; it has one mapping for both queues, and loses nothing. */
#define NEEDED_FEATURES (IORING_FEAT_SINGLE_MMAP | IORING_FEAT_NODROP | IORING_FEAT_RW_CUR_POS)
/* What read(2) and write(2) move at most. */
#define MOST_BYTES 0x7ffff000u

struct uring {
    int fd;
    void *queues;
    size_t queues_bytes;
    struct io_uring_sqe *requests;
    size_t requests_bytes;
    uint32_t num_requests;
    uint32_t *sq_head, *sq_tail, *sq_slots, *cq_head, *cq_tail;
    struct io_uring_cqe *results;
    uint32_t sq_mask, cq_mask;
};

void uring_close(struct uring *ring) {
    if (ring->requests != MAP_FAILED) munmap(ring->requests, ring->requests_bytes);
    if (ring->queues != MAP_FAILED) munmap(ring->queues, ring->queues_bytes);
    close(ring->fd);
    free(ring);
}

static void *map(int fd, size_t num_bytes, off_t what) {
    return mmap(NULL, num_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, what);
}

static int set_up(uint32_t depth, struct io_uring_params *found) {
    memset(found, 0, sizeof *found);
    found->flags = ONE_THREAD_THAT_ASKS;
    int fd = (int)syscall(__NR_io_uring_setup, depth, found);
    if (fd >= 0 || errno != EINVAL) return fd;
    memset(found, 0, sizeof *found);
    return (int)syscall(__NR_io_uring_setup, depth, found);
}

/* A ring for up to `depth` requests at once; NULL and an errno where there is none to be had. */
struct uring *uring_open(uint32_t depth, int *error) {
    struct io_uring_params found;
    struct uring *ring = calloc(1, sizeof *ring);
    if (ring == NULL) return *error = ENOMEM, NULL;
    ring->queues = ring->requests = MAP_FAILED;
    ring->fd = set_up(depth, &found);
    if (ring->fd < 0) return *error = errno, free(ring), NULL;
    if ((found.features & NEEDED_FEATURES) != NEEDED_FEATURES) return *error = ENOSYS, uring_close(ring), NULL;
    size_t sq_bytes = found.sq_off.array + found.sq_entries * sizeof(uint32_t);
    size_t cq_bytes = found.cq_off.cqes + found.cq_entries * sizeof(struct io_uring_cqe);
    ring->queues_bytes = sq_bytes > cq_bytes ? sq_bytes : cq_bytes;
    ring->requests_bytes = found.sq_entries * sizeof(struct io_uring_sqe);
    ring->queues = map(ring->fd, ring->queues_bytes, IORING_OFF_SQ_RING);
    if (ring->queues != MAP_FAILED) ring->requests = map(ring->fd, ring->requests_bytes, IORING_OFF_SQES);
    if (ring->requests == MAP_FAILED) return *error = errno, uring_close(ring), NULL;
    char *queues = ring->queues;
    ring->num_requests = found.sq_entries;
    ring->sq_head = (uint32_t *)(queues + found.sq_off.head);
    ring->sq_tail = (uint32_t *)(queues + found.sq_off.tail);
    ring->sq_slots = (uint32_t *)(queues + found.sq_off.array);
    ring->sq_mask = *(uint32_t *)(queues + found.sq_off.ring_mask);
    ring->cq_head = (uint32_t *)(queues + found.cq_off.head);
    ring->cq_tail = (uint32_t *)(queues + found.cq_off.tail);
    ring->cq_mask = *(uint32_t *)(queues + found.cq_off.ring_mask);
    ring->results = (struct io_uring_cqe *)(queues + found.cq_off.cqes);
    return ring;
}

static uint32_t num_unsubmitted(const struct uring *ring) {
    return *ring->sq_tail - __atomic_load_n(ring->sq_head, __ATOMIC_ACQUIRE);
}

/* Puts a request in the queue, from which the next `uring_take` submits it. EBUSY if the queue is full. */
int uring_queue(struct uring *ring, int is_write, int fd, void *data, uint64_t num_bytes, uint64_t offset,
                uint64_t tag) {
    uint32_t tail = *ring->sq_tail, slot = tail & ring->sq_mask;
    if (num_unsubmitted(ring) == ring->num_requests) return EBUSY;
    struct io_uring_sqe *request = &ring->requests[slot];
    memset(request, 0, sizeof *request);
    request->opcode = is_write ? IORING_OP_WRITE : IORING_OP_READ;
    request->fd = fd;
    request->off = offset;
    request->addr = (uint64_t)(uintptr_t)data;
    request->len = num_bytes < MOST_BYTES ? (uint32_t)num_bytes : MOST_BYTES;
    request->user_data = tag;
    ring->sq_slots[slot] = slot;
    __atomic_store_n(ring->sq_tail, tail + 1, __ATOMIC_RELEASE);
    return 0;
}

/* Submits what is queued and waits for a result: the bytes moved or a negative errno, of the request with that tag.
 * There must be a request. One that the kernel does not even take fails here; those behind it are tried at the next. */
int64_t uring_take(struct uring *ring, uint64_t *tag) {
    for (;;) {
        uint32_t head = *ring->cq_head, unsubmitted = num_unsubmitted(ring);
        int is_empty = head == __atomic_load_n(ring->cq_tail, __ATOMIC_ACQUIRE);
        if (!is_empty && !unsubmitted) {
            struct io_uring_cqe *result = &ring->results[head & ring->cq_mask];
            int64_t moved = result->res;
            *tag = result->user_data;
            __atomic_store_n(ring->cq_head, head + 1, __ATOMIC_RELEASE);
            return moved;
        }
        long taken = syscall(__NR_io_uring_enter, ring->fd, unsubmitted, is_empty, IORING_ENTER_GETEVENTS, NULL, 0);
        if (taken >= 0 || errno == EINTR) continue;
        if (unsubmitted) {
            int64_t failure = -errno;
            uint32_t first = *ring->sq_head, last = *ring->sq_tail - 1;
            *tag = ring->requests[first & ring->sq_mask].user_data;
            for (uint32_t i = first; i != last; i++)
                ring->requests[i & ring->sq_mask] = ring->requests[(i + 1) & ring->sq_mask];
            __atomic_store_n(ring->sq_tail, last, __ATOMIC_RELEASE);
            return failure;
        }
        usleep(1000); /* under way, and not to be waited for: its memory is the kernel's until there is a result */
    }
}
