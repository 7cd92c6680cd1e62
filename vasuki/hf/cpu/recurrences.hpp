// One token of each row through a recurrence, whose states are updated where they lie: read once and written once.
//
//   delta rule   S <- decay S + k (x) beta (v - k^T decay S),  y = q^T S        S [keys, values]
//   Mamba-2      S <- decay S + x (x) (step b),                y = S c          S [channels, numbers]

#pragma once

#include "vectors.hpp"

constexpr int64_t MOST_IN_HEAD = 512;  // keys or values of a head; the stack has room for a few such

// from [count] -> to, of length `scale`
static void unit(const float* from, float* to, int64_t count, float scale) {
  float sum = 1e-6f;
  for (int64_t i = 0; i < count; ++i) sum += from[i] * from[i];
  for (int64_t i = 0; i < count; ++i) to[i] = from[i] * (scale / std::sqrt(sum));
}

struct DeltaRule {
  const float *query, *key;     // [rows, key_heads, keys]
  const float *value;           // [rows, heads, values]
  const float *log_decay;       // [rows, heads, 1 or keys]
  const float *beta;            // [rows, heads]
  float *states, *out;          // [rows, heads, keys, values], [rows, heads, values]
  int64_t rows, heads, key_heads, keys, values;
  int64_t decays;               // of a head: one, or one for each key
  int64_t normalizes;           // queries and keys are to be of length 1

  void update(int64_t row, int64_t head) const {
    const int64_t at = row * heads + head, of = row * key_heads + head / (heads / key_heads);
    float q[MOST_IN_HEAD], k[MOST_IN_HEAD], decay[MOST_IN_HEAD], delta[MOST_IN_HEAD] = {};
    const float scale = 1 / std::sqrt(float(keys));
    if (normalizes) {
      unit(query + of * keys, q, keys, scale);
      unit(key + of * keys, k, keys, 1);
    } else {
      for (int64_t i = 0; i < keys; ++i) q[i] = query[of * keys + i] * scale, k[i] = key[of * keys + i];
    }
    for (int64_t i = 0; i < keys; ++i) decay[i] = std::exp(log_decay[at * decays + (decays > 1 ? i : 0)]);
    float* __restrict state = states + at * keys * values;
    for (int64_t i = 0; i < keys; ++i) {
      const float weight = decay[i] * k[i];
      for (int64_t j = 0; j < values; ++j) delta[j] += weight * state[i * values + j];
    }
    for (int64_t j = 0; j < values; ++j) delta[j] = (value[at * values + j] - delta[j]) * beta[at];
    float* __restrict y = out + at * values;
    for (int64_t j = 0; j < values; ++j) y[j] = 0;
    for (int64_t i = 0; i < keys; ++i)
      for (int64_t j = 0; j < values; ++j) {
        const float now = decay[i] * state[i * values + j] + k[i] * delta[j];
        state[i * values + j] = now;
        y[j] += q[i] * now;
      }
  }

  void all() const {
#pragma omp parallel for collapse(2) if (worth_sharing(rows * heads * keys * values))
    for (int64_t row = 0; row < rows; ++row)
      for (int64_t head = 0; head < heads; ++head) update(row, head);
  }
};

struct Mamba2 {
  const float *x;               // [rows, heads, channels]
  const float *step, *decay;    // [rows, heads]
  const float *b, *c;           // [rows, groups, numbers]
  float *states, *out;          // [rows, heads, channels, numbers], [rows, heads, channels]
  int64_t rows, heads, groups, channels, numbers;

  void update(int64_t row, int64_t head) const {
    const int64_t at = row * heads + head, of = (row * groups + head / (heads / groups)) * numbers;
    for (int64_t i = 0; i < channels; ++i) {
      float* __restrict state = states + (at * channels + i) * numbers;
      const float weight = step[at] * x[at * channels + i];
      Vec sums = {};
      for (int64_t j = 0; j < numbers; j += LANES) {
        const int64_t count = numbers - j;
        const Vec now = decay[at] * load_some(state + j, count) + weight * load_some(b + of + j, count);
        store_some(state + j, now, count);
        sums += now * load_some(c + of + j, count);
      }
      out[at * channels + i] = sum_of(sums);
    }
  }

  void all() const {
#pragma omp parallel for collapse(2) if (worth_sharing(rows * heads * channels * numbers))
    for (int64_t row = 0; row < rows; ++row)
      for (int64_t head = 0; head < heads; ++head) update(row, head);
  }
};
