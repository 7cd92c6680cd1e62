// The tokens of each row through a recurrence, one after the other, whose states are updated where they lie, and the short
// convolution before it.
//
//   delta rule   S <- decay S + k (x) beta (v - k^T decay S),  y = q^T S        S [keys, values]
//   Mamba-2      S <- decay S + x (x) (step b),                y = S c          S [channels, numbers]
//   Mamba        the same, where every number of S has a decay of its own: exp(step a)
//
// A state is larger than the smallest cache, but its columns (rows, in Mamba-2) do not know of each other. So a few of them
// take several tokens before the next ones do.

#pragma once

#include "vectors.hpp"

constexpr int64_t MOST_IN_HEAD = 512;  // keys or values of a head; the stack has room for a few such a token
constexpr int64_t TOGETHER = 16;       // tokens that a part of a state takes before the next part does

// from [count] -> to, of length `scale`
static void unit(const float* from, float* to, int64_t count, float scale) {
  Vec sums = {};
  for (int64_t i = 0; i < count; i += LANES) {
    const Vec some = load_some(from + i, count - i);
    sums = multiply_add(some, some, sums);
  }
  scale /= std::sqrt(sum_of(sums) + 1e-6f);
  for (int64_t i = 0; i < count; ++i) to[i] = from[i] * scale;
}

struct DeltaRule {
  const float *query, *key;     // [rows, tokens, key_heads, keys]
  const float *value;           // [rows, tokens, heads, values]
  const float *log_decay;       // [rows, tokens, heads, 1 or keys]
  const float *beta;            // [rows, tokens, heads]
  float *states, *out;          // [rows, heads, keys, values], [rows, tokens, heads, values]
  int64_t rows, tokens, heads, key_heads, keys, values;
  int64_t decays;               // of a head: one, or one for each key
  int64_t normalizes;           // queries and keys are to be of length 1

  struct Token {
    float q[MOST_IN_HEAD], k[MOST_IN_HEAD], decay[MOST_IN_HEAD];
    const float *value, *beta;
    float* out;
  };

  void prepare(int64_t at, int64_t head, Token& token) const {
    const int64_t of = (at * key_heads + head / (heads / key_heads)) * keys, here = at * heads + head;
    const float scale = 1 / std::sqrt(float(keys));
    if (normalizes) {
      unit(query + of, token.q, keys, scale);
      unit(key + of, token.k, keys, 1);
    } else {
      for (int64_t i = 0; i < keys; ++i) token.q[i] = query[of + i] * scale, token.k[i] = key[of + i];
    }
    const float* from = log_decay + here * decays;
    const float first = std::exp(from[0]);
    for (int64_t i = 0; i < keys; ++i) token.decay[i] = decays > 1 ? std::exp(from[i]) : first;
    token.value = value + here * values, token.beta = beta + here, token.out = out + here * values;
  }

  // `count` columns of a state, at most LANES x `vectors`.
  template <int vectors>
  void update(const Token& token, float* state, int64_t column, int64_t count) const {
    Vec delta[vectors] = {}, y[vectors] = {};
    for (int64_t i = 0; i < keys; ++i) {
      const float weight = token.decay[i] * token.k[i];
#pragma GCC unroll 4
      for (int v = 0; v < vectors; ++v)
        delta[v] = multiply_add(weight, load_some(state + i * values + v * LANES, count - v * LANES), delta[v]);
    }
#pragma GCC unroll 4
    for (int v = 0; v < vectors; ++v)
      delta[v] = (load_some(token.value + column + v * LANES, count - v * LANES) - delta[v]) * *token.beta;
    for (int64_t i = 0; i < keys; ++i)
#pragma GCC unroll 4
      for (int v = 0; v < vectors; ++v) {
        float* at = state + i * values + v * LANES;
        const Vec now = multiply_add(token.decay[i], load_some(at, count - v * LANES), token.k[i] * delta[v]);
        store_some(at, now, count - v * LANES);
        y[v] = multiply_add(token.q[i], now, y[v]);
      }
#pragma GCC unroll 4
    for (int v = 0; v < vectors; ++v) store_some(token.out + column + v * LANES, y[v], count - v * LANES);
  }

  void all() const {
    constexpr int VECTORS = 4, COLUMNS = VECTORS * LANES;
#pragma omp parallel for collapse(2) if (worth_sharing(rows * tokens * heads * keys * values))
    for (int64_t row = 0; row < rows; ++row)
      for (int64_t head = 0; head < heads; ++head) {
        Token together[TOGETHER];
        for (int64_t first = 0; first < tokens; first += TOGETHER) {
          const int64_t count = std::min(TOGETHER, tokens - first);
          for (int64_t t = 0; t < count; ++t) prepare(row * tokens + first + t, head, together[t]);
          for (int64_t column = 0; column < values; column += COLUMNS) {
            float* state = states + (row * heads + head) * keys * values + column;
            if (values - column >= COLUMNS)  // whole vectors, as the compiler sees
              for (int64_t t = 0; t < count; ++t) update<VECTORS>(together[t], state, column, COLUMNS);
            else
              for (int64_t t = 0; t < count; ++t) update<VECTORS>(together[t], state, column, values - column);
          }
        }
      }
  }
};

struct Mamba2 {
  const float *x;               // [rows, tokens, heads, channels]
  const float *step, *decay;    // [rows, tokens, heads]
  const float *b, *c;           // [rows, tokens, groups, numbers]
  float *states, *out;          // [rows, heads, channels, numbers], [rows, tokens, heads, channels]
  int64_t rows, tokens, heads, groups, channels, numbers;

  void update(float* __restrict state, int64_t at, int64_t head, int64_t channel) const {
    const int64_t here = at * heads + head, of = (at * groups + head / (heads / groups)) * numbers;
    const float weight = step[here] * x[here * channels + channel];
    Vec sums = {};
    for (int64_t j = 0; j < numbers; j += LANES) {
      const int64_t count = numbers - j;
      const Vec now = multiply_add(decay[here], load_some(state + j, count), weight * load_some(b + of + j, count));
      store_some(state + j, now, count);
      sums = multiply_add(now, load_some(c + of + j, count), sums);
    }
    out[here * channels + channel] = sum_of(sums);
  }

  void all() const {
#pragma omp parallel for collapse(2) if (worth_sharing(rows * tokens * heads * channels * numbers))
    for (int64_t row = 0; row < rows; ++row)
      for (int64_t head = 0; head < heads; ++head)
        for (int64_t first = 0; first < tokens; first += TOGETHER)
          for (int64_t i = 0; i < channels; ++i)
            for (int64_t t = first; t < std::min(first + TOGETHER, tokens); ++t)
              update(states + ((row * heads + head) * channels + i) * numbers, row * tokens + t, head, i);
  }
};

struct Mamba {
  const float *x, *step;        // [rows, channels, tokens]
  const float* a;               // [channels, numbers], none above 0, as no step is below it
  const float *b, *c;           // [rows, tokens, numbers]
  float *states, *out;          // [rows, channels, numbers], [rows, channels, tokens]
  int64_t rows, tokens, channels, numbers;

  void all() const {
#pragma omp parallel for collapse(2) if (worth_sharing(rows * tokens * channels * numbers))
    for (int64_t row = 0; row < rows; ++row)
      for (int64_t channel = 0; channel < channels; ++channel) {
        const int64_t at = row * channels + channel;
        float* __restrict state = states + at * numbers;
        for (int64_t t = 0; t < tokens; ++t) {
          const int64_t of = (row * tokens + t) * numbers;
          const float forward = step[at * tokens + t], weight = forward * x[at * tokens + t];
          Vec sums = {};
          for (int64_t j = 0; j < numbers; j += LANES) {
            const int64_t count = numbers - j;
            const Vec decay = exp_negative(forward * load_some(a + channel * numbers + j, count));
            const Vec now = multiply_add(decay, load_some(state + j, count), weight * load_some(b + of + j, count));
            store_some(state + j, now, count);
            sums = multiply_add(now, load_some(c + of + j, count), sums);
          }
          out[at * tokens + t] = sum_of(sums);
        }
      }
  }
};

// Each channel by itself: out[t] = sum over k of weight[k] x[t - width + 1 + k] + bias, where nothing is before the first.
struct Convolution {
  const float* x;               // [rows, tokens, channels]
  const float *weight, *bias;   // [width, channels], [channels] or none
  float* out;                   // [rows, tokens, channels]
  int64_t rows, tokens, channels, width;
  int64_t activates;            // the sum, by silu

  void all() const {
#pragma omp parallel for collapse(2) if (worth_sharing(rows * tokens * channels))
    for (int64_t row = 0; row < rows; ++row)
      for (int64_t t = 0; t < tokens; ++t) {
        const int64_t at = (row * tokens + t) * channels, first = std::max<int64_t>(0, width - 1 - t);
        for (int64_t i = 0; i < channels; i += LANES) {
          const int64_t count = channels - i;
          Vec sum = bias ? load_some(bias + i, count) : Vec{};
          for (int64_t k = first; k < width; ++k) {
            const float* before = x + at + (k + 1 - width) * channels + i;
            sum = multiply_add(load_some(weight + k * channels + i, count), load_some(before, count), sum);
          }
          store_some(out + at + i, activates ? silu(sum) : sum, count);
        }
      }
  }
};

// The same for one token of each row, behind the last ones of its channels, which move up.
struct ConvolutionStep {
  const float* x;               // [rows, channels]
  const float *weight, *bias;   // [channels, width], [channels] or none
  float *states, *out;          // [rows, channels, width], [rows, channels]
  int64_t rows, channels, width;
  int64_t activates;

  void update(int64_t row) const {
    float *state = states + row * channels * width, *to = out + row * channels;
    for (int64_t i = 0; i < channels; ++i) {
      float* __restrict last = state + i * width;
      float sum = bias ? bias[i] : 0;
      for (int64_t k = 0; k + 1 < width; ++k) last[k] = last[k + 1];
      last[width - 1] = x[row * channels + i];
      for (int64_t k = 0; k < width; ++k) sum = multiply_add(weight[i * width + k], last[k], sum);
      to[i] = sum;
    }
    if (activates)
      for (int64_t i = 0; i < channels; i += LANES) store_some(to + i, silu(load_some(to + i, channels - i)), channels - i);
  }

  void all() const {
#pragma omp parallel for if (worth_sharing(rows * channels * width))
    for (int64_t row = 0; row < rows; ++row) update(row);
  }
};
