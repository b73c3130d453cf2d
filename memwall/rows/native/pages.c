/* Threads that swap pages of a table's rows between frames of memory and a file, and never meet the caller's interpreter:
 * each page with its crc32. What does not go as it should is left to the caller, who has the words for it.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

uint32_t crc32_of(const uint8_t *bytes, uint64_t num_bytes);
struct uring *uring_open(uint32_t depth, int *error);
void uring_close(struct uring *ring);
int uring_queue(struct uring *ring, int is_write, int fd, void *data, uint64_t num_bytes, uint64_t offset, uint64_t tag);
int64_t uring_take(struct uring *ring, uint64_t *tag);

/* What the caller keeps in memory until it is done, all arrays included, which have `count` entries. */
struct task {
    int64_t fd;
    uint8_t *memory;
    uint64_t page_bytes, count;
    const int64_t *frames, *out, *in;
    int64_t *checksums;
    const int64_t *expected;
    uint8_t *done;
    uint64_t num_left, is_done;
    struct task *next;
};

/* Of a swap, what is done. */
enum { HAS_LEFT = 1, HAS_COME = 2, IS_WHOLE = HAS_LEFT | HAS_COME };

struct pool {
    pthread_mutex_t lock;
    pthread_cond_t has_work, has_result;
    struct task *first, *last;
    int is_closing, is_watched;
    uint64_t num_threads;
    pthread_t threads[];
};

/* To wake a thread takes the caller tens of microseconds on a virtual machine. So after work one thread goes on looking
 * for more for a while, and wakes the others where there is enough. */
enum { LOOK_NANOSECONDS = 50 * 1000, NUM_LOOKS = 500 };

/* Pages under way at once, of each thread. */
enum { RING_DEPTH = 32 };

static uint8_t *frame_of(const struct task *task, uint64_t i) {
    return task->memory + (uint64_t)task->frames[i] * task->page_bytes;
}

/* Writes or reads pages of a task from one on, many at once: a disk's interrupts, and what the system does for a page, are
 * several times less then (benchmarks/row_pages.py). Those that went as they should have a 1 in `went`. Returns the number
 * looked at. */
static uint64_t move_some(const struct task *task, struct uring *ring, uint64_t first, int is_write, uint8_t *went) {
    const int64_t *places = is_write ? task->out : task->in;
    uint64_t under_way = 0, i = first;
    for (; i < task->count && under_way < RING_DEPTH; i++) {
        if (places[i] < 0 || (!is_write && !(task->done[i] & HAS_LEFT))) continue;
        uint8_t *frame = frame_of(task, i);
        if (is_write) task->checksums[i] = crc32_of(frame, task->page_bytes);
        if (!uring_queue(ring, is_write, (int)task->fd, frame, task->page_bytes, (uint64_t)places[i], i)) under_way++;
    }
    while (under_way--) {
        uint64_t tag;
        int64_t moved = uring_take(ring, &tag);
        went[tag] = moved == (int64_t)task->page_bytes;
    }
    return i - first;
}

/* The same, one after another. */
static uint64_t move_one(const struct task *task, uint64_t i, int is_write, uint8_t *went) {
    int64_t num_bytes = (int64_t)task->page_bytes, place = (is_write ? task->out : task->in)[i];
    uint8_t *frame = frame_of(task, i);
    if (place < 0 || (!is_write && !(task->done[i] & HAS_LEFT))) return 1;
    if (is_write) task->checksums[i] = crc32_of(frame, task->page_bytes);
    went[i] = num_bytes == (is_write ? pwrite((int)task->fd, frame, task->page_bytes, place)
                                     : pread((int)task->fd, frame, task->page_bytes, place));
    return 1;
}

static void move_all(const struct task *task, struct uring *ring, int is_write, uint8_t *went) {
    for (uint64_t i = 0; i < task->count;)
        i += ring ? move_some(task, ring, i, is_write, went) : move_one(task, i, is_write, went);
}

/* For each frame: its page goes to byte `out[i]` of the file, if that is not negative, and its checksum to
 * `checksums[i]`; then the page at byte `in[i]` comes, if that is not negative, and must have the checksum
 * `expected[i]`. What is done of each is in `done`, all zero before; `num_left` counts those of which something is not. */
static void swap_pages(struct task *task, struct uring *ring) {
    uint8_t *went = calloc(task->count + 1, 1);
    task->num_left = task->count;
    if (!went) return;
    move_all(task, ring, 1, went);
    for (uint64_t i = 0; i < task->count; i++)
        if (task->out[i] < 0 || went[i]) task->done[i] |= HAS_LEFT, went[i] = 0;
    move_all(task, ring, 0, went);
    for (uint64_t i = 0; i < task->count; i++) {
        int is_right = went[i] && crc32_of(frame_of(task, i), task->page_bytes) == (uint32_t)task->expected[i];
        if (task->done[i] & HAS_LEFT && (task->in[i] < 0 || is_right)) task->done[i] |= HAS_COME;
        if (task->done[i] == IS_WHOLE) task->num_left--;
    }
    free(went);
}

/* Returns when there may be work; the lock is held before and after. */
static void wait_for_work(struct pool *pool) {
    const struct timespec a_look = {0, LOOK_NANOSECONDS};
    if (!pool->is_watched) {
        pool->is_watched = 1;
        for (int i = 0; i < NUM_LOOKS && !pool->first && !pool->is_closing; i++) {
            pthread_mutex_unlock(&pool->lock);
            nanosleep(&a_look, 0);
            pthread_mutex_lock(&pool->lock);
        }
        pool->is_watched = 0;
    }
    if (pool->first || pool->is_closing) return;
    pthread_cond_wait(&pool->has_work, &pool->lock);
}

static void *work(void *argument) {
    struct pool *pool = argument;
    const struct sched_param no_priority = {0};
    if (sched_getscheduler(0) == SCHED_OTHER) sched_setscheduler(0, SCHED_BATCH, &no_priority); /* see scheduling.py */
    int error;
    struct uring *ring = uring_open(RING_DEPTH, &error); /* null where the system or its container has none for us */
    pthread_mutex_lock(&pool->lock);
    for (;;) {
        struct task *task = pool->first;
        if (pool->is_closing) break;
        if (!task) {
            wait_for_work(pool);
            continue;
        }
        pool->first = task->next;
        if (pool->first) pthread_cond_signal(&pool->has_work);
        pthread_mutex_unlock(&pool->lock);
        swap_pages(task, ring);
        pthread_mutex_lock(&pool->lock);
        __atomic_store_n(&task->is_done, 1, __ATOMIC_RELEASE);
        pthread_cond_broadcast(&pool->has_result);
    }
    pthread_mutex_unlock(&pool->lock);
    if (ring) uring_close(ring);
    return 0;
}

/* Ends the threads, after the tasks that they are at; those that wait are not done any more. */
void close_pool(struct pool *pool) {
    pthread_mutex_lock(&pool->lock);
    pool->is_closing = 1;
    pthread_cond_broadcast(&pool->has_work);
    pthread_mutex_unlock(&pool->lock);
    for (uint64_t i = 0; i < pool->num_threads; i++) pthread_join(pool->threads[i], 0);
    free(pool);
}

/* Threads for tasks; null where the system gives none. They take no signals, which are the interpreter's. */
struct pool *open_pool(uint64_t num_threads) {
    struct pool *pool = calloc(1, sizeof *pool + num_threads * sizeof(pthread_t));
    sigset_t all, before;
    if (!pool) return 0;
    pthread_mutex_init(&pool->lock, 0);
    pthread_cond_init(&pool->has_work, 0);
    pthread_cond_init(&pool->has_result, 0);
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, &before);
    while (pool->num_threads < num_threads && !pthread_create(&pool->threads[pool->num_threads], 0, work, pool))
        pool->num_threads++;
    pthread_sigmask(SIG_SETMASK, &before, 0);
    if (pool->num_threads) return pool;
    close_pool(pool);
    return 0;
}

/* Begins the swaps of `whole` as tasks of `size` swaps each, the last of as many as are left, for which there is room at
 * `tasks`. Returns how many there are; or -1, with nothing begun, where a frame lies outside `num_frames`. */
int64_t begin_tasks(struct pool *pool, const struct task *whole, uint64_t num_frames, struct task *tasks,
                    uint64_t size) {
    uint64_t count = 0;
    for (uint64_t i = 0; i < whole->count; i++)
        if ((uint64_t)whole->frames[i] >= num_frames) return -1;
    for (uint64_t first = 0; first < whole->count; first += size, count++) {
        struct task *task = &tasks[count];
        *task = *whole;
        task->count = whole->count - first < size ? whole->count - first : size;
        task->frames += first, task->out += first, task->in += first;
        task->checksums += first, task->expected += first, task->done += first;
    }
    pthread_mutex_lock(&pool->lock);
    for (uint64_t i = 0; i < count; i++) {
        tasks[i].next = 0;
        if (pool->first) pool->last->next = &tasks[i];
        else pool->first = &tasks[i];
        pool->last = &tasks[i];
    }
    if (!pool->is_watched && count) pthread_cond_signal(&pool->has_work);
    pthread_mutex_unlock(&pool->lock);
    return (int64_t)count;
}

/* Returns how many of so many tasks are done, when all are, or after a tenth of a second: the caller has signals to look
 * at meanwhile. */
uint64_t await_tasks(struct pool *pool, struct task *tasks, uint64_t count) {
    uint64_t num_done = 0;
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_nsec += 100 * 1000 * 1000;
    until.tv_sec += until.tv_nsec / 1000000000;
    until.tv_nsec %= 1000000000;
    pthread_mutex_lock(&pool->lock);
    for (int is_late = 0;;) {
        num_done = 0;
        for (uint64_t i = 0; i < count; i++) num_done += tasks[i].is_done;
        if (num_done == count || is_late) break;
        is_late = pthread_cond_timedwait(&pool->has_result, &pool->lock, &until) == ETIMEDOUT;
    }
    pthread_mutex_unlock(&pool->lock);
    return num_done;
}
