// Attention of a single token, which takes keys and values as they lie.

#pragma once

#include "attention_call.hpp"

namespace token {

constexpr int64_t STRIP = 32;                           // positions that are looked at together
constexpr int KEYS = 4;                                 // of them that queries take at once
constexpr int QUERIES = 2 * ROWS / KEYS;                // that take them
constexpr int SUMS = 4 * ROWS / 3;                      // vectors that gather values; of more, some leave registers
constexpr int64_t LINE = 64 / int64_t(sizeof(CACHED));  // numbers in a line of the processor's cache

// What is multiplied: one number of a row at a time, or two.
constexpr bool IN_BF16 = ROUNDS && MULTIPLIES_BF16 && std::is_same_v<C, bf16> && D % PANEL == 0;
using Factor = std::conditional_t<IN_BF16, Bf16s, float>;
constexpr int64_t EACH = IN_BF16 ? 2 : 1;

// Vectors come in pairs, and D may not be a multiple of two registers.
constexpr int SHORT_LANES = D % (2 * LANES) == 0 ? LANES : D % 16 == 0 ? 8 : 4;
constexpr int PAIRS = D / (2 * SHORT_LANES);
typedef float Short __attribute__((vector_size(SHORT_LANES * 4)));
typedef float Four __attribute__((vector_size(16)));

static inline Short load(const float* at) {
  Short value;
  std::memcpy(&value, at, sizeof value);
  return value;
}
static inline void store(float* at, Short value) { std::memcpy(at, &value, sizeof value); }

// Where the sums for place `d` of a value lie. In bfloat16, `load_pair` puts even places of a pair of vectors before odd
// ones, and `interleave` four of each eight.
static constexpr int64_t placed(int64_t d) {
  if (std::is_same_v<C, float>) return d;
  const int64_t within = d % (2 * SHORT_LANES), first = d - within;
  if (IN_BF16) return first + within / 4 % 2 * SHORT_LANES + within / 8 * 4 + within % 4;
  return first + within % 2 * SHORT_LANES + within / 2;
}
template <int64_t first, size_t... lane>
static inline Short in_order(Short a, Short b, std::index_sequence<lane...>) {
  return lanes_of<int(placed(first + lane))...>(a, b);
}
static inline void store_in_order(const float* sums, float scale, T* to) {
  constexpr auto lanes = std::make_index_sequence<SHORT_LANES>{};
  float ordered[D];
  for (int64_t d = 0; d < D; d += 2 * SHORT_LANES) {
    const Short a = load(sums + d), b = load(sums + d + SHORT_LANES);
    store(ordered + d, in_order<0>(a, b, lanes));
    store(ordered + d + SHORT_LANES, in_order<SHORT_LANES>(a, b, lanes));
  }
  for (int64_t d = 0; d < D; ++d) assign(to[d], ordered[d] * scale);
}

// Each lane of four: [a0 + a2, b0 + b2, a1 + a3, b1 + b3].
template <size_t... lane>
static inline Short interleave_sums(Short a, Short b, std::index_sequence<lane...>) {
  return lanes_of<int(lane / 4 * 4 + lane % 4 / 2 + lane % 2 * SHORT_LANES)...>(a, b) +
         lanes_of<int(lane / 4 * 4 + lane % 4 / 2 + lane % 2 * SHORT_LANES + 2)...>(a, b);
}

// to[i] = the sum of vector i. Sums of four vectors come together, so that they share the steps.
static inline void store_sums(const Short (&vectors)[4], float* to, int count) {
  constexpr auto lanes = std::make_index_sequence<SHORT_LANES>{};
  const Short even = interleave_sums(vectors[0], vectors[2], lanes), odd = interleave_sums(vectors[1], vectors[3], lanes);
  const Short fours = interleave_sums(even, odd, lanes);
  Four sums = {}, part;
  for (int lane = 0; lane < SHORT_LANES; lane += 4) {
    std::memcpy(&part, reinterpret_cast<const float*>(&fours) + lane, sizeof part);
    sums += part;
  }
  std::memcpy(to, &sums, count * sizeof(float));
}

// What a row's softmax has seen so far: the largest score, and the sum of weights relative to it.
struct Softmax {
  float peak = NEVER, total = 0;

  // Turns scores into weights, of which whole vectors are written. Returns what earlier sums shrink by.
  float add(float* scores, int64_t count) {
    Vec tops = Vec{} + peak, weights = {};
    for (int64_t t = count; t % LANES; ++t) scores[t] = NEVER;
    for (int64_t t = 0; t < count; t += LANES) {
      const Vec own = load_some(scores + t, LANES);
      tops = own > tops ? own : tops;
    }
    float top = tops[0];
    for (int lane = 1; lane < LANES; ++lane) top = std::max(top, tops[lane]);
    for (int64_t t = 0; t < count; t += LANES) {
      const Vec own = exp_negative(load_some(scores + t, LANES) - top);
      store_some(scores + t, own, LANES);
      weights += own;
    }
    const float shrink = exp_negative(peak - top);
    total = total * shrink + sum_of(weights);
    peak = top;
    return shrink;
  }
};

// Of `rows` queries.
struct Scratch {
  std::vector<float> scores, sums;     // [rows][STRIP], [rows][D]
  std::vector<Factor> query, weights;  // [rows][D / EACH], [rows][STRIP / EACH]
  std::vector<Softmax> softmax;

  explicit Scratch(int64_t rows)
      : scores(rows * STRIP), sums(rows * D), query(rows * D / EACH), weights(rows * STRIP / EACH), softmax(rows) {}
};

// Asks for `width` numbers. More can be on their way to the second level of cache than to the first.
template <int64_t width, typename Number>
static inline void ask_for(const Number* at) {
  for (int64_t i = 0; i < width; i += LINE) __builtin_prefetch(at + i, 0, 2);
}

// scores[r * STRIP + t] = query r . key t, for some queries and keys. `next` lies like the keys, and is asked for.
template <int rows, int keys>
static inline void multiply_keys(const float* query, const C* key, const C* next, int64_t stride, float* scores) {
  Short dots[rows][KEYS] = {};
  for (int pair = 0; pair < PAIRS; ++pair) {
    const int64_t at = pair * 2 * SHORT_LANES;
#pragma GCC unroll 4
    for (int t = 0; t < keys; ++t) {
      Short first, second;
      load_pair(key + t * stride + at, first, second);
      ask_for<2 * SHORT_LANES>(next + t * stride + at);
#pragma GCC unroll 8
      for (int r = 0; r < rows; ++r) {
        dots[r][t] = multiply_add(load(query + r * D + at), first, dots[r][t]);
        dots[r][t] = multiply_add(load(query + r * D + at + SHORT_LANES), second, dots[r][t]);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < rows; ++r) store_sums(dots[r], scores + r * STRIP, keys);
}

// Some vectors of each row's sums, into registers and back.
template <int rows, int vectors>
static inline void load_rows(const float* sums, Short (&own)[rows][vectors]) {
#pragma GCC unroll 8
  for (int r = 0; r < rows; ++r)
#pragma GCC unroll 16
    for (int v = 0; v < vectors; ++v) own[r][v] = load(sums + r * D + v * SHORT_LANES);
}
template <int rows, int vectors>
static inline void store_rows(float* sums, const Short (&own)[rows][vectors]) {
#pragma GCC unroll 8
  for (int r = 0; r < rows; ++r)
#pragma GCC unroll 16
    for (int v = 0; v < vectors; ++v) store(sums + r * D + v * SHORT_LANES, own[r][v]);
}

// sums[r] += weights[r * STRIP + t] * value t over `count` values, for some queries and pairs of vectors. `next` lies like
// the values, and is asked for.
template <int rows, int pairs>
static inline void add_values(const float* weights, const C* value, const C* next, int64_t stride, int64_t /* skipped */,
                              int64_t count, float* sums) {
  Short own[rows][2 * pairs];
  load_rows(sums, own);
  for (int64_t t = 0; t < count; ++t) {
    ask_for<2 * SHORT_LANES * pairs>(next + t * stride);
#pragma GCC unroll 8
    for (int pair = 0; pair < pairs; ++pair) {
      Short first, second;
      load_pair(value + t * stride + pair * 2 * SHORT_LANES, first, second);
#pragma GCC unroll 8
      for (int r = 0; r < rows; ++r) {
        own[r][2 * pair] = multiply_add(weights[r * STRIP + t], first, own[r][2 * pair]);
        own[r][2 * pair + 1] = multiply_add(weights[r * STRIP + t], second, own[r][2 * pair + 1]);
      }
    }
  }
  store_rows(sums, own);
}

#ifdef __AVX512BF16__
// The same, two places of a key at a time.
template <int rows, int keys>
static inline void multiply_keys(const Bf16s* query, const bf16* key, const bf16* next, int64_t stride, float* scores) {
  Vec dots[rows][KEYS] = {};
#pragma GCC unroll 2
  for (int64_t at = 0; at < D; at += PANEL)
#pragma GCC unroll 4
    for (int t = 0; t < keys; ++t) {
      const Pairs own = load_pairs(key + t * stride + at);
      ask_for<PANEL>(next + t * stride + at);
#pragma GCC unroll 8
      for (int r = 0; r < rows; ++r) dots[r][t] = add_products(dots[r][t], load_pairs(query + (r * D + at) / 2), own);
    }
#pragma GCC unroll 8
  for (int r = 0; r < rows; ++r) store_sums(dots[r], scores + r * STRIP, keys);
}

// Of two rows, the pairs of what lies one below the other, in two vectors: each takes four of eight columns.
static inline void interleave(const bf16* first, const bf16* second, Pairs& low, Pairs& high) {
  const __m512i above = _mm512_loadu_si512(first), below = _mm512_loadu_si512(second);
  low = (Pairs)_mm512_unpacklo_epi16(above, below);
  high = (Pairs)_mm512_unpackhi_epi16(above, below);
}

// The same, two values at a time: of an even position and the next one. The first `skipped` are none of the row's.
template <int rows, int pairs>
static inline void add_values(const Bf16s* weights, const bf16* value, const bf16* next, int64_t stride, int64_t skipped,
                              int64_t count, float* sums) {
  Vec own[rows][2 * pairs];
  load_rows(sums, own);
  for (int64_t t = 0; t < count; t += 2) {
    const int64_t first = std::max(t, skipped), second = std::min(t + 1, count - 1);
    ask_for<PANEL * pairs>(next + t * stride);
    ask_for<PANEL * pairs>(next + (t + 1) * stride);
#pragma GCC unroll 8
    for (int pair = 0; pair < pairs; ++pair) {
      Pairs low, high;
      interleave(value + first * stride + pair * PANEL, value + second * stride + pair * PANEL, low, high);
#pragma GCC unroll 8
      for (int r = 0; r < rows; ++r) {
        const Pairs factor = repeat(weights[(r * STRIP + t) / 2]);
        own[r][2 * pair] = add_products(own[r][2 * pair], factor, low);
        own[r][2 * pair + 1] = add_products(own[r][2 * pair + 1], factor, high);
      }
    }
  }
  store_rows(sums, own);
}
#endif

static inline void place(const T* from, float scale, float* query) {
  for (int64_t d = 0; d < D; ++d) query[placed(d)] = to_float(from[d]) * scale;
}
static inline void place(const T* from, float scale, Bf16s* query) {
  for (int64_t d = 0; d < D; d += 2) take(query[d / 2], from + d, scale);
}

// Weights as values are multiplied by them: by none behind the last.
static inline void place(const float* weights, int64_t count, float* to) { std::copy(weights, weights + count, to); }
static inline void place(const float* weights, int64_t count, Bf16s* to) {
  for (int64_t t = 0; t < count; t += LANES) store_some(&to->first + t, rounded(load_some(weights + t, count - t)), LANES);
}

// A token's query heads of KV heads [first_head, last_head). They take the positions in strips, all heads one strip before
// the next, so that memory is read in the order in which it lies. While one strip is used the next one is on its way, and
// in the last one's time keys that another token begins with: those `after`. Strips, and the pairs that values are
// multiplied in, begin where they do whatever the size of blocks, so that a token's sums are the same over any blocks of
// an even size.
static void attend(const Call& call, const Tile& tile, int64_t first_head, int64_t last_head, const C* after,
                   Scratch& scratch) {
  const int64_t stride = call.stride(), begin = call.begin(tile.position), end = tile.position + 1;
  const int64_t group = call.group(), heads = last_head - first_head, rows = heads * group, first_row = first_head * group;
  float *sums = scratch.sums.data(), *scores = scratch.scores.data();
  Factor *query = scratch.query.data(), *weights = scratch.weights.data();
  for (int64_t row = 0; row < rows; ++row) {
    place(call.query_of(tile.first, first_row + row), call.scaling, query + row * D / EACH);
    scratch.softmax[row] = call.sinks ? Softmax{call.sinks[first_row + row], 1} : Softmax{};
  }
  std::fill(sums, sums + rows * D, 0.0f);
  for (int64_t first = begin - begin % EACH, last; first < end; first = last) {
    last = std::min(first - first % STRIP + STRIP, end);
    const int64_t skipped = std::max<int64_t>(0, begin - first), count = last - first;
    // Calls body(at, keys, next keys, count) for what each block has of the strip, `at` positions behind its first.
    const auto in_blocks = [&](int64_t at, auto&& body) {
      for (int64_t taken; at < count; at += taken) {
        const int64_t from = first + at;
        taken = std::min(count - at, call.block_tokens - from % call.block_tokens);
        const C* keys = call.key(tile, from, first_head);
        body(at, keys, from + STRIP < end ? call.key(tile, from + STRIP, first_head) : at == skipped ? after : keys, taken);
      }
    };
    in_blocks(skipped, [&](int64_t at, const C* keys, const C* next, int64_t taken) {
      for_tiles<KEYS>(0, taken, [&](int64_t t, auto some) {
        for (int64_t head = 0; head < heads; ++head) {
          const int64_t own = t * stride + head * D;
          for_tiles<QUERIES>(head * group, group, [&](int64_t row, auto queries) {
            multiply_keys<queries, some>(query + row * D / EACH, keys + own, next + own, stride,
                                         scores + row * STRIP + at + t);
          });
        }
      });
    });
    for (int64_t row = 0; row < rows; ++row) {
      float* own_scores = scores + row * STRIP;
      call.cap(own_scores + skipped, count - skipped);
      std::fill(own_scores, own_scores + skipped, NEVER);
      const float shrink = scratch.softmax[row].add(own_scores, count);
      if (shrink != 1)
        for (int64_t d = 0; d < D; ++d) sums[row * D + d] *= shrink;
    }
    in_blocks(0, [&](int64_t at, const C* keys, const C* next, int64_t taken) {
      if (at + taken <= skipped) return;  // a block of one position
      const C *values = keys + call.to_values(), *next_values = next + call.to_values();
      for (int64_t row = 0; row < rows; ++row) place(scores + row * STRIP + at, taken, weights + row * STRIP / EACH);
      for (int64_t head = 0; head < heads; ++head)
        for_tiles<QUERIES>(head * group, group, [&](int64_t row, auto queries) {
          for_tiles<std::max(1, SUMS / 2 / queries)>(0, PAIRS, [&](int64_t pair, auto some) {
            const int64_t first_lane = pair * 2 * SHORT_LANES, own = head * D + first_lane;
            add_values<queries, some>(weights + row * STRIP / EACH, values + own, next_values + own, stride,
                                      std::max<int64_t>(0, skipped - at), taken, sums + row * D + first_lane);
          });
        });
    });
  }
  for (int64_t row = 0; row < rows; ++row)
    store_in_order(sums + row * D, 1 / scratch.softmax[row].total, call.out_of(tile.first, first_row + row));
}

}  // namespace token
