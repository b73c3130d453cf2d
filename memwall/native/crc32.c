/* The crc32 of zlib, folded 64 or 256 bytes at a time: 128-bit remainders are multiplied by powers of x without carries.
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
#define WIDE_BYTES 256 /* four registers of four lanes each */

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
    for (int i = 0; i < NUM_LANES; i++) lanes[i] = _mm_loadu_si128((const __m128i *)*bytes + i);
    lanes[0] = _mm_xor_si128(lanes[0], _mm_cvtsi32_si128(-1));
    for (*bytes += step_bytes, *num_bytes -= step_bytes; *num_bytes >= step_bytes;
         *bytes += step_bytes, *num_bytes -= step_bytes)
        for (int i = 0; i < NUM_LANES; i++)
            lanes[i] = fold(lanes[i], by_64_bytes, _mm_loadu_si128((const __m128i *)*bytes + i));
    __m128i one = lanes[0];
    for (int i = 1; i < NUM_LANES; i++) one = fold(one, by_16_bytes, lanes[i]);
    return one;
}

#if defined(__clang__) || __GNUC__ >= 8
/* The same for blocks of 256 bytes. */
__attribute__((target("avx512f,vpclmulqdq,pclmul,sse4.1"))) static __m128i fold_wide_blocks(const uint8_t **bytes,
                                                                                            uint64_t *num_bytes) {
    const __m512i by_256_bytes =
        _mm512_broadcast_i32x4(_mm_set_epi64x(0x1322d1430, 0x11542778a)); /* x^(2048-32), x^(2048+32) */
    const __m128i by_16_bytes = _mm_set_epi64x(0x0ccaa009e, 0x1751997d0);
    __m512i wide[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) wide[i] = _mm512_loadu_si512((const __m512i *)*bytes + i);
    wide[0] = _mm512_xor_si512(wide[0], _mm512_inserti32x4(_mm512_setzero_si512(), _mm_cvtsi32_si128(-1), 0));
    for (*bytes += WIDE_BYTES, *num_bytes -= WIDE_BYTES; *num_bytes >= WIDE_BYTES;
         *bytes += WIDE_BYTES, *num_bytes -= WIDE_BYTES)
#pragma GCC unroll 4 /* else the registers lie in memory */
        for (int i = 0; i < 4; i++) {
            __m512i low = _mm512_clmulepi64_epi128(wide[i], by_256_bytes, 0x00);
            __m512i high = _mm512_clmulepi64_epi128(wide[i], by_256_bytes, 0x11);
            __m512i next = _mm512_loadu_si512((const __m512i *)*bytes + i);
            wide[i] = _mm512_ternarylogic_epi64(low, high, next, 0x96); /* the sum of all three */
        }
    __m128i lanes[WIDE_BYTES / LANE_BYTES];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) _mm512_storeu_si512((__m512i *)lanes + i, wide[i]);
    __m128i one = lanes[0];
    for (int i = 1; i < WIDE_BYTES / LANE_BYTES; i++) one = fold(one, by_16_bytes, lanes[i]);
    return one;
}

/* Of processors and of kernels, which have to keep the wide registers. */
static int has_wide_lanes(void) { return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("vpclmulqdq"); }

#else /* a compiler that does not know these instructions */
static __m128i fold_wide_blocks(const uint8_t **bytes, uint64_t *num_bytes) { return fold_blocks(bytes, num_bytes); }
static int has_wide_lanes(void) { return 0; }
#endif

static uint32_t crc32_with(int is_wide, const uint8_t *bytes, uint64_t num_bytes) {
    uint32_t crc = 0xffffffffu;
    if (num_bytes >= NUM_LANES * LANE_BYTES) {
        __m128i one = is_wide ? fold_wide_blocks(&bytes, &num_bytes) : fold_blocks(&bytes, &num_bytes);
        uint8_t remainder[LANE_BYTES];
        _mm_storeu_si128((__m128i *)remainder, one);
        crc = bit_by_bit(0, remainder, LANE_BYTES);
    }
    return ~bit_by_bit(crc, bytes, num_bytes);
}

uint32_t crc32_of(const uint8_t *bytes, uint64_t num_bytes) {
    return crc32_with(num_bytes >= WIDE_BYTES && has_wide_lanes(), bytes, num_bytes);
}

uint32_t crc32_narrow(const uint8_t *bytes, uint64_t num_bytes) { return crc32_with(0, bytes, num_bytes); }

#else
int crc32_is_fast(void) { return 0; }
uint32_t crc32_of(const uint8_t *bytes, uint64_t num_bytes) {
    (void)bytes, (void)num_bytes;
    return 0;
}
uint32_t crc32_narrow(const uint8_t *bytes, uint64_t num_bytes) { return crc32_of(bytes, num_bytes); }
#endif
