// Elements of the dtypes that gradients, errors and norms are kept in, widened to float32 and back
// as PyTorch converts them. Included by cpu_codec.cpp alone.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#ifdef __F16C__
#include <immintrin.h>
#endif

namespace {

constexpr int32_t kMagnitudeBits = 0x7fffffff;
constexpr int32_t kInfinityBits = 0x7f800000;

// Adding 1.5 * 2**23 to a float below 2**22 in magnitude rounds it half to even, and leaves the
// integer in the low bits of the sum, in two's complement.
constexpr float kRoundToInteger = 0x1.8p23f;

int32_t bits_of(float x) {
  int32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

float from_bits(int32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

// For exponents in -126..127.
constexpr int32_t power_of_two_bits(int32_t exponent) { return (exponent + 127) << 23; }

// floor(log2(x)), given the bits of x >= 0; -127 for zero and subnormals.
int32_t exponent_of(int32_t magnitude) { return (magnitude >> 23) - 127; }

// A sign, kExponent bits of exponent and kMantissa of mantissa. With kIsIeee the largest exponent
// stands for infinity and NaN; without it only all ones are NaN, and there is no infinity.
template <class Bits_, int kExponent, int kMantissa_, bool kIsIeee>
struct SmallFloat {
  using Bits = Bits_;
  static constexpr int kMantissa = kMantissa_;
  static constexpr int kBias = (1 << (kExponent - 1)) - 1;
  static constexpr int kShift = 23 - kMantissa;               // to the mantissa of a float32
  static constexpr int kSignShift = 31 - kExponent - kMantissa;  // to its sign
  static constexpr int32_t kLargest = (1 << (kExponent + kMantissa)) - 1;
  // The first magnitude that is not finite.
  static constexpr int32_t kNotFinite = kIsIeee ? ((1 << kExponent) - 1) << kMantissa : kLargest;
  Bits bits;
};

using BFloat16 = SmallFloat<uint16_t, 8, 7, true>;
using Float16 = SmallFloat<uint16_t, 5, 10, true>;
using Float8E4M3 = SmallFloat<uint8_t, 4, 3, false>;

inline float widen(float x) { return x; }
inline float widen(int8_t x) { return x; }

template <class Bits, int E, int M, bool kIsIeee>
inline float widen(SmallFloat<Bits, E, M, kIsIeee> x) {
  using Type = SmallFloat<Bits, E, M, kIsIeee>;
  const int32_t magnitude = x.bits & Type::kLargest;
  const int32_t sign = (x.bits & (Type::kLargest + 1)) << Type::kSignShift;
  // Multiplying moves the bias, of subnormals too.
  const float value =
      from_bits(magnitude << Type::kShift) * from_bits(power_of_two_bits(127 - Type::kBias));
  const int32_t not_finite = kInfinityBits | magnitude << Type::kShift;
  return from_bits((magnitude < Type::kNotFinite ? bits_of(value) : not_finite) | sign);
}

inline void narrow(float x, float& to) { to = x; }

inline void narrow(float x, int8_t& to) {
  to = static_cast<int8_t>(bits_of(std::min(std::max(x, -127.0f), 127.0f) + kRoundToInteger));
}

// Half to even; what is too large becomes infinity, or NaN where there is none.
template <class Bits, int E, int M, bool kIsIeee>
inline void narrow(float x, SmallFloat<Bits, E, M, kIsIeee>& to) {
  using Type = SmallFloat<Bits, E, M, kIsIeee>;
  const int32_t magnitude = bits_of(x) & kMagnitudeBits;
  const int32_t half = (1 << (Type::kShift - 1)) - 1 + (magnitude >> Type::kShift & 1);
  int32_t rounded =
      ((magnitude + half) >> Type::kShift) - ((127 - Type::kBias) << Type::kMantissa);
  // A sum with a float whose unit in the last place is the smallest subnormal rounds to those.
  constexpr int32_t kUnit = power_of_two_bits(24 - Type::kBias - Type::kMantissa);
  const int32_t subnormal = bits_of(from_bits(magnitude) + from_bits(kUnit)) - kUnit;
  rounded = magnitude < power_of_two_bits(1 - Type::kBias) ? subnormal : rounded;
  rounded = std::min(rounded, Type::kNotFinite);
  rounded = magnitude > kInfinityBits ? Type::kLargest : rounded;
  const int32_t sign = (bits_of(x) >> Type::kSignShift) & (Type::kLargest + 1);
  to.bits = static_cast<Bits>(rounded | sign);
}

// As `compiled.py` numbers them.
enum Dtype : int64_t { kFloat32, kBFloat16, kFloat16, kInt8, kFloat8E4M3 };

// Calls `function` with a pointer to elements of that dtype, the first of them at `index`.
template <class Function>
void with_elements(void* elements, int64_t dtype, int64_t index, Function function) {
  switch (dtype) {
    case kFloat32: return function(static_cast<float*>(elements) + index);
    case kBFloat16: return function(static_cast<BFloat16*>(elements) + index);
    case kFloat16: return function(static_cast<Float16*>(elements) + index);
    case kInt8: return function(static_cast<int8_t*>(elements) + index);
    case kFloat8E4M3: return function(static_cast<Float8E4M3*>(elements) + index);
  }
}

template <class Type>
void widen_all(const Type* source, int64_t length, float* target) {
  for (int64_t i = 0; i < length; ++i) target[i] = widen(source[i]);
}

template <class Type>
void narrow_all(const float* source, int64_t length, Type* target) {
  for (int64_t i = 0; i < length; ++i) narrow(source[i], target[i]);
}

#ifdef __F16C__
// The default error dtype has instructions of its own, which compilers do not find by themselves.
void widen_all(const Float16* source, int64_t length, float* target) {
  const int64_t whole = length & ~int64_t{7};
  for (int64_t i = 0; i < whole; i += 8) {
    const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(source + i));
    _mm256_storeu_ps(target + i, _mm256_cvtph_ps(halves));
  }
  widen_all<Float16>(source + whole, length - whole, target + whole);
}

void narrow_all(const float* source, int64_t length, Float16* target) {
  const int64_t whole = length & ~int64_t{7};
  for (int64_t i = 0; i < whole; i += 8) {
    const __m128i halves = _mm256_cvtps_ph(_mm256_loadu_ps(source + i), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(target + i), halves);
  }
  narrow_all<Float16>(source + whole, length - whole, target + whole);
}
#endif

void load(const void* elements, int64_t dtype, int64_t index, int64_t length, float* target) {
  with_elements(const_cast<void*>(elements), dtype, index,
                [&](const auto* source) { widen_all(source, length, target); });
}

void store(const float* source, void* elements, int64_t dtype, int64_t index, int64_t length) {
  with_elements(elements, dtype, index,
                [&](auto* target) { narrow_all(source, length, target); });
}

}  // namespace
