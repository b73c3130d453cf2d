/* Loops over the rows of a table, each of which would be many small operations on tensors. No address follows from what
 * was not compared with the size of its array first.
 */
#include <stdint.h>
#include <string.h>

/* Of rows_index.py's `mixed`: the output function of SplitMix64. */
static uint64_t mixed(uint64_t bits) {
    bits *= 0x9E3779B97F4A7C15u;
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9u;
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EBu;
    return bits ^ (bits >> 31);
}

/* Of each of `count` wanted ids its position, -1 where there is none. `num_cells` is a power of two. Cells and ids of a
 * large table are in no cache: those of the wanted ids that come next are on their way meanwhile. */
void find_rows(const int32_t *cells, uint64_t num_cells, const int64_t *ids, uint64_t num_rows, const int64_t *wanted,
               uint64_t count, int64_t *found) {
    enum { AHEAD = 8 };
    const uint64_t mask = num_cells - 1;
    for (uint64_t i = 0; i < count; i++) {
        uint64_t cell = mixed((uint64_t)wanted[i]), passed = 0;
        if (i + 2 * AHEAD < count) __builtin_prefetch(&cells[mixed((uint64_t)wanted[i + 2 * AHEAD]) & mask]);
        if (i + AHEAD < count) {
            uint32_t coming = (uint32_t)cells[mixed((uint64_t)wanted[i + AHEAD]) & mask];
            if (coming < num_rows) __builtin_prefetch(&ids[coming]);
        }
        found[i] = -1;
        for (; passed < num_cells; passed++, cell++) {
            uint32_t position = (uint32_t)cells[cell & mask]; /* an empty cell's is beyond all rows */
            if (position >= num_rows) break;
            if (ids[position] == wanted[i]) {
                found[i] = position;
                break;
            }
        }
    }
}

/* Puts the positions [first, end) into cells, some of which are empty. */
void place_rows(int32_t *cells, uint64_t num_cells, const int64_t *ids, uint64_t first, uint64_t end) {
    for (uint64_t position = first; position < end; position++) {
        uint64_t cell = mixed((uint64_t)ids[position]), passed = 0;
        while (passed++ < num_cells && cells[cell & (num_cells - 1)] >= 0) cell++;
        cells[cell & (num_cells - 1)] = (int32_t)position;
    }
}

/* Draws rows: of each element the level, of 65536, that 16 bits of a hash of its id and its column pick. */
void draw_rows(const int64_t *ids, uint64_t count, uint64_t start, uint64_t num_columns, const float *levels,
               float *rows) {
    const uint64_t num_words = (num_columns + 3) / 4;
    for (uint64_t i = 0; i < count; i++, rows += num_columns) {
        uint64_t bits = 0, first = start + (uint64_t)ids[i] * num_words;
        for (uint64_t column = 0; column < num_columns; column++, bits >>= 16) {
            if (column % 4 == 0) bits = mixed(first + column / 4);
            rows[column] = levels[bits & 0xffff];
        }
    }
}

/* Where rows lie: `count` of them, row i in frame `frames[i]`, at the place in the page that its position has. */
typedef struct {
    uint8_t *memory;
    uint64_t num_frames, page_bytes, rows_per_page, row_bytes;
} arena;

static uint8_t *row_of(const arena *at, int64_t frame, int64_t position) {
    if ((uint64_t)frame >= at->num_frames || position < 0) return 0;
    return at->memory + (uint64_t)frame * at->page_bytes + (uint64_t)position % at->rows_per_page * at->row_bytes;
}

/* Copies the first `num_bytes` of each row out of the arena, or into it. Returns how many rows were copied: the first
 * that is not in the arena ends the call. */
uint64_t copy_rows(const arena *at, const int64_t *frames, const int64_t *positions, uint64_t count, uint8_t *rows,
                   uint64_t num_bytes, int is_into_arena) {
    enum { AHEAD = 8, LINE = 64 };
    if (num_bytes > at->row_bytes) return 0;
    for (uint64_t i = 0; i < count; i++) {
        uint8_t *row = row_of(at, frames[i], positions[i]), *other = rows + i * num_bytes;
        uint8_t *coming = i + AHEAD < count ? row_of(at, frames[i + AHEAD], positions[i + AHEAD]) : 0;
        if (!row) return i;
        for (uint64_t byte = 0; coming && byte < num_bytes; byte += LINE) __builtin_prefetch(coming + byte);
        if (is_into_arena) memcpy(row, other, num_bytes);
        else memcpy(other, row, num_bytes);
    }
    return count;
}

enum { COLD, RECENT, HELD };
enum { IS_MISSING = 1, IS_MOVING = 2 };

/* Of each position the frame of its page, negative without one; frames are marked as recently used. Returns whether a
 * page has no frame, and whether one is moving. */
int locate_rows(const int64_t *positions, uint64_t count, uint64_t rows_per_page, const int32_t *frame_of,
                uint64_t num_pages, uint8_t *use, const uint8_t *is_moving, uint64_t num_frames, int64_t *frames) {
    int found = 0;
    for (uint64_t i = 0; i < count; i++) {
        uint64_t page = (uint64_t)positions[i] / rows_per_page;
        frames[i] = page < num_pages ? frame_of[page] : -1;
        if ((uint64_t)frames[i] >= num_frames) {
            found |= IS_MISSING;
            continue;
        }
        use[frames[i]] = RECENT;
        if (is_moving[frames[i]]) found |= IS_MOVING;
    }
    return found;
}

/* The clock: takes up to `count` frames that are cold and not moving, marks them as held, and cools those that the hand
 * passes. Ends after two rounds. Returns how many were taken. */
uint64_t take_frames(uint8_t *use, const uint8_t *is_moving, uint64_t num_frames, int64_t *hand, uint64_t count,
                     int64_t *taken) {
    uint64_t num_taken = 0, frame = (uint64_t)*hand % num_frames;
    for (uint64_t passed = 0; passed < 2 * num_frames && num_taken < count; passed++) {
        if (use[frame] == RECENT) {
            use[frame] = COLD;
        } else if (use[frame] == COLD && !is_moving[frame]) {
            use[frame] = HELD;
            taken[num_taken++] = (int64_t)frame;
        }
        frame = frame + 1 == num_frames ? 0 : frame + 1;
    }
    *hand = (int64_t)frame;
    return num_taken;
}
