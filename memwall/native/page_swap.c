/* Pages swapped between frames of memory and a file, many in one call: each with its crc32, none with the caller's
 * interpreter in between. What does not go as it should is left to the caller, who has the words for it.
 */
#define _GNU_SOURCE
#include <stdint.h>
#include <unistd.h>

uint32_t crc32_of(const uint8_t *bytes, uint64_t num_bytes);

/* For each of `count` frames: its page goes to byte `out[i]` of the file, if that is not negative, and its checksum to
 * `checksums[i]`; then the page at byte `in[i]` comes, if that is not negative, and must have the checksum
 * `expected[i]`. Returns how many halves of swaps are done, two for each frame: the first that is not ends the call.
 */
int64_t swap_pages(int fd, uint8_t *memory, uint64_t page_bytes, uint64_t count, const int64_t *frames,
                   const int64_t *out, const int64_t *in, int64_t *checksums, const int64_t *expected) {
    for (uint64_t i = 0; i < count; i++) {
        uint8_t *frame = memory + (uint64_t)frames[i] * page_bytes;
        if (out[i] >= 0) {
            checksums[i] = crc32_of(frame, page_bytes);
            if (pwrite(fd, frame, page_bytes, out[i]) != (int64_t)page_bytes) return (int64_t)(2 * i);
        }
        if (in[i] >= 0) {
            if (pread(fd, frame, page_bytes, in[i]) != (int64_t)page_bytes) return (int64_t)(2 * i + 1);
            if (crc32_of(frame, page_bytes) != (uint32_t)expected[i]) return (int64_t)(2 * i + 1);
        }
    }
    return (int64_t)(2 * count);
}
