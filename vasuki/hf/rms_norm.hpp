// y = x / sqrt(mean(x^2) + eps) * weight, row by row, in one pass over memory.

#pragma once

#include "vectors.hpp"

// x, y [rows, width], weight [width]
static void rms_norm(const float* x, const float* weight, float* y, int64_t rows, int64_t width, float eps) {
#pragma omp parallel for if (rows * width >= WORTH_SHARING)
  for (int64_t row = 0; row < rows; ++row) {
    const float* from = x + row * width;
    float* to = y + row * width;
    Vec sums = {};
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) {
      Vec part;
      std::memcpy(&part, from + i, sizeof part);
      sums += part * part;
    }
    float sum = 0;
    for (int lane = 0; lane < LANES; ++lane) sum += sums[lane];
    for (; i < width; ++i) sum += from[i] * from[i];
    const float scale = 1 / std::sqrt(sum / float(width) + eps);
    for (int64_t j = 0; j < width; ++j) to[j] = from[j] * scale * weight[j];
  }
}
