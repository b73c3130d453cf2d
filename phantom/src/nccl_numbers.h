// What NCCL's reductions compute, in the order of the ranks, on the host. Types of 16 and 8 bits are summed in float32
// and rounded once.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "nccl_api.h"

namespace phantom::nccl {

constexpr size_t kBytes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
static_assert(sizeof(kBytes) / sizeof(size_t) == ncclNumTypes);

// A number of so many bits of exponent and of mantissa; one that has no infinity has numbers in its place, and one NaN.
template <typename Bits, int kExponent, int kMantissa, bool kHasInfinity = true>
struct Small {
  static constexpr int kBias = (1 << (kExponent - 1)) - 1, kTop = (1 << kExponent) - 1, kOne = 1 << kMantissa;
  static constexpr int kSign = 8 * sizeof(Bits) - 1;
  static constexpr Bits kNan = kHasInfinity ? (kTop << kMantissa) | (kOne >> 1) : (kTop << kMantissa) | (kOne - 1);
  Bits bits = 0;

  Small() = default;
  explicit Small(float value) {
    const Bits sign = std::signbit(value) ? Bits(1) << kSign : 0;
    const float size = std::fabs(value);
    Bits most = kHasInfinity ? Bits(kTop << kMantissa) : kNan;
    if (std::isnan(value)) { bits = sign | kNan; return; }
    if (std::isinf(value)) { bits = sign | most; return; }
    int exponent = size == 0 ? 1 - kBias : std::max(std::ilogb(size), 1 - kBias);
    // To the nearest, and of two that are as near to the even one.
    auto scaled = static_cast<int64_t>(std::nearbyint(std::ldexp(static_cast<double>(size), kMantissa - exponent)));
    const int64_t found = scaled < kOne ? scaled : (int64_t(exponent + kBias) << kMantissa) + scaled - kOne;
    bits = sign | static_cast<Bits>(std::min<int64_t>(found, most));
  }
  explicit operator float() const {
    const int exponent = (bits >> kMantissa) & kTop, mantissa = bits & (kOne - 1);
    const float sign = bits >> kSign ? -1.0f : 1.0f;
    if (kHasInfinity && exponent == kTop) return mantissa ? NAN : sign * INFINITY;
    if (!kHasInfinity && exponent == kTop && mantissa == kOne - 1) return NAN;
    if (exponent == 0) return sign * std::ldexp(static_cast<float>(mantissa), 1 - kBias - kMantissa);
    return sign * std::ldexp(static_cast<float>(mantissa + kOne), exponent - kBias - kMantissa);
  }
};

// Calls `work` with a value of the type; false: there is no such type.
template <typename Work>
bool with_type(int type, Work work) {
  switch (type) {
    case ncclInt8: work(int8_t{}); return true;
    case ncclUint8: work(uint8_t{}); return true;
    case ncclInt32: work(int32_t{}); return true;
    case ncclUint32: work(uint32_t{}); return true;
    case ncclInt64: work(int64_t{}); return true;
    case ncclUint64: work(uint64_t{}); return true;
    case ncclFloat16: work(Small<uint16_t, 5, 10>{}); return true;
    case ncclFloat32: work(float{}); return true;
    case ncclFloat64: work(double{}); return true;
    case ncclBfloat16: work(Small<uint16_t, 8, 7>{}); return true;
    case ncclFloat8e4m3: work(Small<uint8_t, 4, 3, false>{}); return true;
    case ncclFloat8e5m2: work(Small<uint8_t, 5, 2>{}); return true;
    default: return false;
  }
}

template <typename T>
using Wide = std::conditional_t<std::is_arithmetic_v<T>, T, float>;

// `parts` are those of the ranks in turn.
template <typename T>
void reduce(T* to, const std::vector<const char*>& parts, size_t count, int operation) {
  for (size_t at = 0; at < count; ++at) {
    Wide<T> found{};
    for (size_t rank = 0; rank < parts.size(); ++rank) {
      const auto each = static_cast<Wide<T>>(reinterpret_cast<const T*>(parts[rank])[at]);
      if (rank == 0) found = each;
      else if (operation == ncclProd) found *= each;
      else if (operation == ncclMax) found = std::max(found, each);
      else if (operation == ncclMin) found = std::min(found, each);
      else found += each;
    }
    if (operation == ncclAvg) found /= static_cast<Wide<T>>(parts.size());
    to[at] = static_cast<T>(found);
  }
}

// What a rank gives under ncclRedOpCreatePreMulSum.
template <typename T>
void scale(T* at, size_t count, const void* factor) {
  const auto by = static_cast<Wide<T>>(*static_cast<const T*>(factor));
  for (size_t each = 0; each < count; ++each) at[each] = static_cast<T>(static_cast<Wide<T>>(at[each]) * by);
}

}  // namespace phantom::nccl
