// Rotary position embedding, in place: of the first `rotated` numbers of a head, halves a and b become
// a cos - b sin and b cos + a sin.

#pragma once

#include "vectors.hpp"

// x [tokens], `stride` apart: heads of `dim` numbers; cos, sin [tokens, rotated]
static void rotate(float* x, const float* cos, const float* sin, int64_t tokens, int64_t stride, int64_t heads,
                   int64_t dim, int64_t rotated) {
  const int64_t half = rotated / 2;
#pragma omp parallel for if (worth_sharing(tokens * heads * dim))
  for (int64_t token = 0; token < tokens; ++token) {
    const float *c = cos + token * rotated, *s = sin + token * rotated;
    for (int64_t head = 0; head < heads; ++head) {
      float* __restrict a = x + token * stride + head * dim;
      float* __restrict b = a + half;
      for (int64_t i = 0; i < half; ++i) {
        const float first = a[i], second = b[i];
        a[i] = first * c[i] - second * s[i];
        b[i] = second * c[half + i] + first * s[half + i];
      }
    }
  }
}
