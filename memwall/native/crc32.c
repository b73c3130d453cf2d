/* The crc32 of zlib, folded 64 or 128 bytes at a time: 128-bit remainders are multiplied by powers of x without carries.
 *
 * Method: V. Gopal et al., "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ Instruction", Intel, 2009. The
 * powers are x^n mod P, bits reflected, P = 0x104c11db7; `tests/store/test_checksum.py` compares with zlib.
 */
#include <stddef.h>
#include <stdint.h>

#if defined(__x86_64__)
#include <immintrin.h>

#define LANE_BYTES 16
#define NUM_LANES 4
#define UNROLLED _Pragma("GCC unroll 4") /* else the registers lie in memory */
#define HALF_BYTES 128 /* four registers of two lanes each */

int crc32_is_fast(void) { return __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1"); }

/* A remainder moved on by as many bits as the powers stand for, and what lies there added. */
__attribute__((target("pclmul,sse4.1"))) static __m128i fold(__m128i remainder, __m128i powers, __m128i next) {
    __m128i low = _mm_clmulepi64_si128(remainder, powers, 0x00), high = _mm_clmulepi64_si128(remainder, powers, 0x11);
    return _mm_xor_si128(_mm_xor_si128(low, high), next);
}

static uint32_t bit_by_bit(uint32_t crc, const uint8_t *bytes, uint64_t num_bytes) {
    for (uint64_t i = 0; i < num_bytes; i++) {
        crc ^= bytes[i];
        for (int bit = 0; bit < 8; bit++) crc = (crc >> 1) ^ (0xedb88320u & (0u - (crc & 1)));
    }
    return crc;
}

/* What whole blocks of 64 bytes leave, as a lane; `*bytes` and `*num_bytes`, at least 64, move on to what follows them. */
__attribute__((target("pclmul,sse4.1"))) static __m128i fold_blocks(const uint8_t **bytes, uint64_t *num_bytes) {
    const __m128i by_64_bytes = _mm_set_epi64x(0x1c6e41596, 0x154442bd4); /* x^(512-32), x^(512+32) */
    const __m128i by_16_bytes = _mm_set_epi64x(0x0ccaa009e, 0x1751997d0); /* x^(128-32), x^(128+32) */
    const uint64_t step_bytes = NUM_LANES * LANE_BYTES;
    __m128i lanes[NUM_LANES];
    UNROLLED
    for (int i = 0; i < NUM_LANES; i++) lanes[i] = _mm_loadu_si128((const __m128i *)*bytes + i);
    lanes[0] = _mm_xor_si128(lanes[0], _mm_cvtsi32_si128(-1));
    for (*bytes += step_bytes, *num_bytes -= step_bytes; *num_bytes >= step_bytes;
         *bytes += step_bytes, *num_bytes -= step_bytes)
        UNROLLED
        for (int i = 0; i < NUM_LANES; i++)
            lanes[i] = fold(lanes[i], by_64_bytes, _mm_loadu_si128((const __m128i *)*bytes + i));
    __m128i one = lanes[0];
    for (int i = 1; i < NUM_LANES; i++) one = fold(one, by_16_bytes, lanes[i]);
    return one;
}

#if defined(__clang__) || __GNUC__ >= 10
/* The same for blocks of 128 bytes. */
__attribute__((target("avx2,vpclmulqdq,pclmul,sse4.1"))) static __m128i fold_half_blocks(const uint8_t **bytes,
                                                                                         uint64_t *num_bytes) {
    const __m256i by_128_bytes =
        _mm256_broadcastsi128_si256(_mm_set_epi64x(0x14a7fe880, 0x1e88ef372)); /* x^(1024-32), x^(1024+32) */
    const __m128i by_16_bytes = _mm_set_epi64x(0x0ccaa009e, 0x1751997d0);
    __m256i half[4];
    UNROLLED
    for (int i = 0; i < 4; i++) half[i] = _mm256_loadu_si256((const __m256i *)*bytes + i);
    half[0] = _mm256_xor_si256(half[0], _mm256_inserti128_si256(_mm256_setzero_si256(), _mm_cvtsi32_si128(-1), 0));
    for (*bytes += HALF_BYTES, *num_bytes -= HALF_BYTES; *num_bytes >= HALF_BYTES;
         *bytes += HALF_BYTES, *num_bytes -= HALF_BYTES)
        UNROLLED
        for (int i = 0; i < 4; i++) {
            __m256i low = _mm256_clmulepi64_epi128(half[i], by_128_bytes, 0x00);
            __m256i high = _mm256_clmulepi64_epi128(half[i], by_128_bytes, 0x11);
            __m256i next = _mm256_loadu_si256((const __m256i *)*bytes + i);
            half[i] = _mm256_xor_si256(_mm256_xor_si256(low, high), next);
        }
    __m128i lanes[HALF_BYTES / LANE_BYTES];
    UNROLLED
    for (int i = 0; i < 4; i++) _mm256_storeu_si256((__m256i *)lanes + i, half[i]);
    __m128i one = lanes[0];
    for (int i = 1; i < HALF_BYTES / LANE_BYTES; i++) one = fold(one, by_16_bytes, lanes[i]);
    return one;
}

static int has_half_lanes(void) { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("vpclmulqdq"); }

#else
static __m128i fold_half_blocks(const uint8_t **bytes, uint64_t *num_bytes) { return fold_blocks(bytes, num_bytes); }
static int has_half_lanes(void) { return 0; }
#endif

typedef __m128i (*folding)(const uint8_t **bytes, uint64_t *num_bytes);

static uint32_t crc32_with(folding fold_all, const uint8_t *bytes, uint64_t num_bytes) {
    uint32_t crc = 0xffffffffu;
    if (num_bytes >= NUM_LANES * LANE_BYTES) {
        uint8_t remainder[LANE_BYTES];
        _mm_storeu_si128((__m128i *)remainder, fold_all(&bytes, &num_bytes));
        crc = bit_by_bit(0, remainder, LANE_BYTES);
    }
    return ~bit_by_bit(crc, bytes, num_bytes);
}

uint32_t crc32_narrow(const uint8_t *bytes, uint64_t num_bytes) { return crc32_with(fold_blocks, bytes, num_bytes); }

/* Registers of four lanes fold no faster: from 128 bytes at a time on memory is what takes the time. */
uint32_t crc32_of(const uint8_t *bytes, uint64_t num_bytes) {
    int has_room = num_bytes >= HALF_BYTES && has_half_lanes();
    return crc32_with(has_room ? fold_half_blocks : fold_blocks, bytes, num_bytes);
}

#else
int crc32_is_fast(void) { return 0; }
uint32_t crc32_of(const uint8_t *bytes, uint64_t num_bytes) {
    (void)bytes, (void)num_bytes;
    return 0;
}
uint32_t crc32_narrow(const uint8_t *bytes, uint64_t num_bytes) { return crc32_of(bytes, num_bytes); }
#endif
