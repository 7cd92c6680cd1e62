// y = x / sqrt(mean(x^2) + eps) * weight, row by row, in one pass over memory.

#pragma once

#include "vectors.hpp"

// x, weight [y.width]; row `row` of y may be x
static void norm_row(const float* x, const float* weight, Rows y, int64_t row, float eps) {
  Vec sums = {};
  for (int64_t i = 0; i < y.width; i += LANES) {
    const Vec part = load_some(x + i, y.width - i);
    sums += part * part;
  }
  const float scale = 1 / std::sqrt(sum_of(sums) / float(y.width) + eps);
  for (int64_t i = 0; i < y.width; i += LANES)
    y.store(row, i, load_some(x + i, y.width - i) * scale * load_some(weight + i, y.width - i));
}

// x [rows, y.width], weight [y.width]
static void rms_norm(const float* x, const float* weight, Rows y, int64_t rows, float eps) {
#pragma omp parallel for if (worth_sharing(rows * y.width))
  for (int64_t row = 0; row < rows; ++row) norm_row(x + row * y.width, weight, y, row, eps);
}

// x [tokens], `stride` apart: heads of `dim` numbers, each normed where it lies; weight [dim]
static void norm_heads(float* x, const float* weight, int64_t tokens, int64_t stride, int64_t heads, int64_t dim,
                       float eps) {
#pragma omp parallel for if (worth_sharing(tokens * heads * dim))
  for (int64_t token = 0; token < tokens; ++token)
    for (int64_t head = 0; head < heads; ++head) {
      float* own = x + token * stride + head * dim;
      norm_row(own, weight, {own, dim, Rows::FLOATS}, 0, eps);
    }
}
