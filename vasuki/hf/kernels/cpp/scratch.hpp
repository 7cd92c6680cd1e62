// Memory for what does not leave a call.

#pragma once

#include <memory>

#include "vectors.hpp"

struct alignas(64) Line {  // of the processor's cache, which tile registers are slow to load across
  float numbers[16];
};

// [rows, width], kept for the next call of the same use on this thread; rows in tiles are as many as fill them.
template <typename Use>
static Rows scratch(int64_t rows, int64_t width, Rows::Kind kind) {
  static thread_local std::unique_ptr<Line[]> kept;
  static thread_local int64_t size = 0;
  const int64_t whole = (rows + Rows::TILE_ROWS - 1) / Rows::TILE_ROWS * Rows::TILE_ROWS;
  const int64_t bytes = kind == Rows::FLOATS ? rows * width * sizeof(float) : whole * width * sizeof(bf16);
  const int64_t lines = (bytes + sizeof(Line) - 1) / sizeof(Line);
  if (lines > size) kept.reset(new Line[size = lines]);
  return {kept.get(), width, kind};
}
