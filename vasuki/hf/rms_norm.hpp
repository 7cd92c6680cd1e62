// y = x / sqrt(mean(x^2) + eps) * weight, row by row, in one pass over memory.

#pragma once

#include "vectors.hpp"

// x, y, weight [width]; y may be x
static void norm_row(const float* x, const float* weight, float* y, int64_t width, float eps) {
  Vec sums = {};
  int64_t i = 0;
  for (; i + LANES <= width; i += LANES) {
    Vec part;
    std::memcpy(&part, x + i, sizeof part);
    sums += part * part;
  }
  float sum = 0;
  for (int lane = 0; lane < LANES; ++lane) sum += sums[lane];
  for (; i < width; ++i) sum += x[i] * x[i];
  const float scale = 1 / std::sqrt(sum / float(width) + eps);
  for (int64_t j = 0; j < width; ++j) y[j] = x[j] * scale * weight[j];
}

// x, y [rows, width], weight [width]
static void rms_norm(const float* x, const float* weight, float* y, int64_t rows, int64_t width, float eps) {
#pragma omp parallel for if (rows * width >= WORTH_SHARING)
  for (int64_t row = 0; row < rows; ++row) norm_row(x + row * width, weight, y + row * width, width, eps);
}

// x [tokens], `stride` apart: heads of `dim` numbers, each normed where it lies; weight [dim]
static void norm_heads(float* x, const float* weight, int64_t tokens, int64_t stride, int64_t heads, int64_t dim,
                       float eps) {
#pragma omp parallel for if (tokens * heads * dim >= WORTH_SHARING)
  for (int64_t token = 0; token < tokens; ++token)
    for (int64_t head = 0; head < heads; ++head) {
      float* own = x + token * stride + head * dim;
      norm_row(own, weight, own, dim, eps);
    }
}
