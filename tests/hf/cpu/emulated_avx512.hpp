// Vectors of 512 bits and their products of bfloat16 (AVX-512 with BF16) in software, for tests of what is written for
// processors that have them. Put before a source by the compiler's `-include`. The compiler makes a vector of whatever
// registers there are; the few instructions that the sources name are below, after Intel's Architecture Instruction Set
// Extensions reference, chapter 2: they take and leave numbers too small for a normal exponent as zeros.

#pragma once

#ifndef __AVX512BF16__
#include <cstdint>
#include <cstring>

#include "emulated_vectors.hpp"

#define __AVX512BF16__ 1

namespace emulated {

typedef float Floats __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));
typedef uint16_t Shorts __attribute__((vector_size(64)));
typedef uint16_t HalfOfShorts __attribute__((vector_size(32)));

constexpr uint32_t SIGN = 0x80000000u, EXPONENT = 0x7f800000u, MANTISSA = 0x007fffffu;

template <typename To, typename From>
inline To as(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

inline Words flushed(Words bits) { return (bits & EXPONENT) == 0 ? bits & SIGN : bits; }

inline Floats plus_product(Floats sums, Words a, Words b) {
  const Floats products = as<Floats>(flushed(a)) * as<Floats>(flushed(b));  // exact, but for their exponent
  return as<Floats>(flushed(as<Words>(as<Floats>(flushed(as<Words>(sums))) + products)));
}

// Of each lane, the upper numbers are multiplied and added first, then the lower ones.
[[gnu::noinline]] inline Floats add_products(Floats sums, Words a, Words b) {
  sums = plus_product(sums, a & 0xffff0000u, b & 0xffff0000u);
  return plus_product(sums, a << 16, b << 16);
}

// To the nearest, or the even one of two.
[[gnu::noinline]] inline HalfOfShorts rounded(Floats values) {
  const Words bits = flushed(as<Words>(values)), upper = bits >> 16;
  const Words nearest = (bits + 0x7fff + (upper & 1)) >> 16;
  const auto is_no_number = (bits & EXPONENT) == EXPONENT & (bits & MANTISSA) != 0;
  return __builtin_convertvector(is_no_number ? upper | 0x40 : nearest, HalfOfShorts);
}

inline Words load(const void* at) {
  Words words;
  std::memcpy(&words, at, sizeof words);
  return words;
}

// Of each 16 bytes of two rows, the pairs of what lies one below the other: of the first half, or of the second.
template <int first>
[[gnu::noinline]] inline Words interleaved(const Words& above, const Words& below) {
  const Shorts a = as<Shorts>(above), b = as<Shorts>(below);
  Shorts pairs;
  for (int i = 0; i < 32; ++i) pairs[i] = (i % 2 ? b : a)[i / 8 * 8 + first + i % 8 / 2];
  return as<Words>(pairs);
}

}  // namespace emulated

#define __m512 emulated::Floats
#define __m512i emulated::Words
#define __m512bh emulated::Words
#define _mm512_loadu_si512(at) emulated::load(at)
#define _mm512_set1_epi32(value) (emulated::Words{} + uint32_t(value))
#define _mm512_dpbf16_ps(sums, a, b) emulated::add_products(sums, a, b)
#define _mm512_cvtneps_pbh(values) emulated::rounded(values)
#define _mm512_unpacklo_epi16(a, b) emulated::interleaved<0>(a, b)
#define _mm512_unpackhi_epi16(a, b) emulated::interleaved<4>(a, b)
#endif
