// Tile registers in software, for tests of what is written for processors that have them (AMX). Put before a source by the
// compiler's `-include`. After Intel's Architecture Instruction Set Extensions reference, chapter 3, and stricter: what a
// thread has not configured is no register of its own, and a use of it ends the process.

#pragma once

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#define __AMX_BF16__ 1

namespace emulated {

struct Config {
  uint8_t palette, start, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};
static_assert(sizeof(Config) == 64);

struct Register {
  alignas(64) uint8_t rows[16][64];
};

inline thread_local Config config = {};
inline thread_local Register registers[8];

[[noreturn]] inline void fault(const char* what) {
  std::fprintf(stderr, "tile registers: %s\n", what);
  std::abort();
}

inline void configure(const void* from) {
  std::memcpy(&config, from, sizeof config);
  if (config.palette != 1 || config.start != 0) fault("no such palette");
  for (uint8_t each : config.reserved)
    if (each) fault("a reserved byte is set");
  for (int i = 0; i < 16; ++i) {
    if (config.row_bytes[i] > 64 || config.rows[i] > 16 || (i >= 8 && (config.row_bytes[i] || config.rows[i])))
      fault("too large");
    if ((config.row_bytes[i] == 0) != (config.rows[i] == 0)) fault("half a size");
  }
  std::memset(registers, 0, sizeof registers);
}

inline Register& used(int i) {
  if (config.palette != 1 || config.rows[i] == 0) fault("not configured");
  return registers[i];
}

inline void load(int i, const void* base, int64_t stride) {
  Register& to = used(i);
  std::memset(&to, 0, sizeof to);
  for (int row = 0; row < config.rows[i]; ++row)
    std::memcpy(to.rows[row], static_cast<const char*>(base) + row * stride, config.row_bytes[i]);
}

inline void store(int i, void* base, int64_t stride) {
  const Register& from = used(i);
  for (int row = 0; row < config.rows[i]; ++row)
    std::memcpy(static_cast<char*>(base) + row * stride, from.rows[row], config.row_bytes[i]);
}

inline float number(const Register& from, int row, int at) {
  uint16_t bits;
  std::memcpy(&bits, from.rows[row] + 2 * at, sizeof bits);
  const uint32_t wide = uint32_t(bits) << 16;
  float value;
  std::memcpy(&value, &wide, sizeof value);
  return value;
}

inline void multiply(int sums, int a, int b) {
  Register &to = used(sums), &left = used(a), &right = used(b);
  const int rows = config.rows[sums], columns = config.row_bytes[sums] / 4, pairs = config.row_bytes[a] / 4;
  if (config.rows[a] != rows || config.row_bytes[b] != 4 * columns || config.rows[b] != pairs) fault("sizes disagree");
  for (int row = 0; row < rows; ++row)
    for (int column = 0; column < columns; ++column) {
      float sum, even = 0, odd = 0;
      for (int k = 0; k < pairs; ++k) {
        even += number(left, row, 2 * k) * number(right, k, 2 * column);
        odd += number(left, row, 2 * k + 1) * number(right, k, 2 * column + 1);
      }
      std::memcpy(&sum, to.rows[row] + 4 * column, sizeof sum);
      sum += even + odd;
      std::memcpy(to.rows[row] + 4 * column, &sum, sizeof sum);
    }
}

inline long permitted(long number, long request, long feature) {
  return number == SYS_arch_prctl && request == 0x1023 && feature == 18 ? 0 : -1;
}

}  // namespace emulated

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stream_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#define _tile_loadconfig(from) emulated::configure(from)
#define _tile_release() (emulated::config = {})
#define _tile_zero(i) std::memset(&emulated::used(i), 0, sizeof(emulated::Register))
#define _tile_loadd(i, base, stride) emulated::load(i, base, stride)
#define _tile_stream_loadd(i, base, stride) emulated::load(i, base, stride)
#define _tile_stored(i, base, stride) emulated::store(i, base, stride)
#define _tile_dpbf16ps(sums, a, b) emulated::multiply(sums, a, b)
#define syscall(...) emulated::permitted(__VA_ARGS__)
