// What both kinds of attention share: the call, and numbers taken from its tensors.
//
// HEAD_DIM (a multiple of 8), ELEMENT (float or bf16), CACHED, the same of the cache, and ROUNDS, whether products may be of
// numbers rounded to bfloat16, are set when the file is compiled for a model.

#pragma once

#include <limits>
#include <type_traits>
#include <utility>
#include <vector>

#include "vectors.hpp"

using T = ELEMENT;
using C = CACHED;
constexpr int64_t D = HEAD_DIM;
constexpr float NEVER = -std::numeric_limits<float>::max();  // a score whose weight is nothing

static inline float to_float(float value) { return value; }
static inline void assign(float& to, float value) { to = value; }

// One number, or two neighbours.
template <typename From>
static inline void take(float& to, const From* from, float scale = 1) {
  to = to_float(*from) * scale;
}
template <typename From>
static inline void take(Bf16s& to, const From* from, float scale) {
  round_to(to, to_float(from[0]) * scale, to_float(from[1]) * scale);
}
static inline void take(Bf16s& to, const float* from) { round_to(to, from[0], from[1]); }
static inline void take(Bf16s& to, const bf16* from) { to = {from[0], from[1]}; }

struct Tile {
  int64_t first, tokens;  // of the packed batch
  int64_t position;       // of the first
  int64_t table;          // row of the tables
  int64_t generated;      // whether its tokens are of a row's output
};

struct Call {
  const T* query;
  const C* cache;
  const int64_t* tables;
  const float* sinks;
  T* out;
  int64_t width, block_tokens, query_stride, num_heads, num_kv_heads, window;
  float scaling, softcap;

  int64_t group() const { return num_heads / num_kv_heads; }
  int64_t stride() const { return num_kv_heads * D; }  // from one position to the next
  int64_t to_values() const { return block_tokens * stride(); }
  // The key of a position for one KV head; its value follows `to_values` after it.
  const C* key(const Tile& tile, int64_t position, int64_t head) const {
    const int64_t block = tables[tile.table * width + position / block_tokens];
    return cache + (block * 2 * block_tokens + position % block_tokens) * stride() + head * D;
  }
  const C* first_keys(const Tile& tile, int64_t head) const { return key(tile, begin(tile.position), head); }
  const T* query_of(int64_t token, int64_t head) const { return query + token * query_stride + head * D; }
  T* out_of(int64_t token, int64_t head) const { return out + (token * num_heads + head) * D; }
  int64_t begin(int64_t position) const { return window > 0 ? std::max<int64_t>(0, position + 1 - window) : 0; }
  void cap(float* scores, int64_t count) const {
    if (softcap > 0)
      for (int64_t t = 0; t < count; ++t) scores[t] = softcap * std::tanh(scores[t] / softcap);
  }
};
