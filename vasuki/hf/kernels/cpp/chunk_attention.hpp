// Attention of a tile of successive tokens: two small matrix products, of keys by queries, which are transposed once, and
// of weights by values. Queries are the columns of the first, so that a softmax goes down them, a register side by side.

#pragma once

#include "attention_call.hpp"
#include "tile_registers.hpp"

namespace chunk {

constexpr int64_t SPAN = 64;                                // positions that a tile looks at together
constexpr int64_t MOST_ROWS = 128;                          // queries of a tile, so that scratch memory stays in cache
constexpr int64_t WIDTH = (D + PANEL - 1) / PANEL * PANEL;  // D in whole panels

// What is multiplied: one number of a row at a time, or two.
using Factor = std::conditional_t<ROUNDS && MULTIPLIES_BF16, Bf16s, float>;
constexpr int64_t EACH = std::is_same_v<Factor, Bf16s> ? 2 : 1;
// Whether they are multiplied by tile registers.
static inline bool by_registers() { return tiles::take<Factor>(D / EACH); }

// The softmax of some queries, LANES side by side.
struct Queries {
  Vec peak, total, shrink;  // what it has seen so far, and what earlier sums shrink by
  Ints first, last;         // positions that they see

  // Turns scores of `count` positions from `span` on into weights; rows of both lie `stride` apart. `masked` says that not
  // every query sees all of them.
  void soften(const float* scores, Factor* weights, int64_t count, int64_t stride, int64_t span, bool masked) {
    const auto sees = [&](int64_t t) { return (first <= int32_t(span + t)) & (last >= int32_t(span + t)); };
    const auto score = [&](int64_t t) {
      Vec own;
      std::memcpy(&own, scores + t * stride, sizeof own);
      return own;
    };
    Vec top = peak, sum = {};
    for (int64_t t = 0; t < count; ++t) {
      const Vec own = masked ? (sees(t) ? score(t) : Vec{} + NEVER) : score(t);
      top = own > top ? own : top;
    }
    for (int64_t t = 0; t < count; t += EACH) {
      Vec own[EACH] = {};
      for (int64_t each = 0; each < std::min(EACH, count - t); ++each) {
        own[each] = exp_negative(score(t + each) - top);
        if (masked) own[each] = sees(t + each) ? own[each] : Vec{};
        sum += own[each];
      }
      store_factors(weights + t / EACH * stride, own);
    }
    shrink = exp_negative(peak - top);
    total = total * shrink + sum;
    peak = top;
  }
};

// Of `rows` queries.
struct Scratch {
  std::vector<float> scores, sums;
  std::vector<Queries> queries;
  std::vector<Factor> columns;        // the same: panels [rows / PANEL][D / EACH][PANEL]
  std::vector<Factor> keys, weights;  // [SPAN][D / EACH], [SPAN / EACH][rows]
  std::vector<Factor> values;         // [SPAN / EACH][WIDTH]
  std::vector<Factor> turned;         // weights as rows: [rows][SPAN / EACH]; where tile registers are used

  explicit Scratch(int64_t rows)
      : scores(padded(rows) * SPAN),
        sums(rows * WIDTH),
        queries(padded(rows) / LANES),
        columns(padded(rows) * D / EACH),
        keys(SPAN * D / EACH),
        weights(padded(rows) * SPAN / EACH),
        values(SPAN * WIDTH / EACH),
        turned(by_registers() ? weights.size() : 0) {}

  static int64_t padded(int64_t rows) { return (rows + PANEL - 1) / PANEL * PANEL; }
};

// One number, or that below it too, if there is one.
template <typename From>
static inline void take_below(float& to, const From* first, const From*, int64_t at) {
  take(to, first + at);
}
template <typename From>
static inline void take_below(Bf16s& to, const From* first, const From* second, int64_t at) {
  const From both[2] = {first[at], second ? second[at] : From{}};
  take(to, both);
}

// Copies positions [first, last) of a sequence to scratch memory that the first-level cache keeps.
static void copy_span(const Call& call, const Tile& tile, int64_t head, int64_t first, int64_t last, Scratch& scratch) {
  for (int64_t position = first; position < last; ++position) {
    const C* keys = call.key(tile, position, head);
    Factor* to = scratch.keys.data() + (position - first) * (D / EACH);
    for (int64_t i = 0; i < D / EACH; ++i) take(to[i], keys + i * EACH);
  }
  for (int64_t position = first; position < last; position += EACH) {
    const C* values = call.key(tile, position, head) + call.to_values();
    const C* below = EACH > 1 && position + 1 < last ? call.key(tile, position + 1, head) + call.to_values() : nullptr;
    Factor* to = scratch.values.data() + (position - first) / EACH * WIDTH;
    for (int64_t d = 0; d < D; ++d) take_below(to[d], values, below, d);
  }
}

// scores[t][row] = key t . query row, for `seen` keys and `width` queries
static void score(Scratch& scratch, int64_t seen, int64_t width) {
  constexpr int64_t depth = D / EACH;
  const Factor *keys = scratch.keys.data(), *columns = scratch.columns.data();
  float* scores = scratch.scores.data();
  if (by_registers())
    return tiles::multiply_all<false>(keys, depth, seen, columns, PANEL, PANEL * depth, width, depth, scores, width);
  for (int64_t panel = 0; panel < width; panel += PANEL) {
    for_even_tiles(seen, [&](int64_t first, auto taken) {
      const auto zero = [](int, int, int) { return Vec{}; };
      const auto store = [&](int, int t, int half, Vec products) {
        std::memcpy(scores + (first + t) * width + panel + half * LANES, &products, sizeof products);
      };
      multiply<1, taken>(keys + first * depth, depth, 1, columns + panel * depth, PANEL, 0, depth, zero, store, Nothing{});
    });
  }
}

// sums[row] += weights[t][row] * value t, for `seen` values and `rows` of `width` queries
static void add_values(Scratch& scratch, int64_t seen, int64_t rows, int64_t width) {
  const int64_t depth = (seen + EACH - 1) / EACH;
  const Factor* weights = scratch.weights.data();
  Factor* values = scratch.values.data();
  float* sums = scratch.sums.data();
  if (by_registers()) {
    constexpr int64_t most = SPAN / EACH;
    const int64_t whole = (depth + tiles::DEPTH - 1) / tiles::DEPTH * tiles::DEPTH;
    // What another sequence left there may be no numbers, which no weight of 0 takes away.
    std::fill(values + depth * WIDTH, values + whole * WIDTH, Factor{});
    tiles::transpose(weights, whole, width, scratch.turned.data(), most);
    return tiles::multiply_all<true>(scratch.turned.data(), most, rows, values, WIDTH, PANEL, WIDTH, whole, sums, WIDTH);
  }
  for (int64_t panel = 0; panel < WIDTH; panel += PANEL)
    for_even_tiles(rows, [&](int64_t first, auto queries) {
      float* own = sums + first * WIDTH + panel;
      const auto load = [&](int, int r, int half) { return load_some(own + r * WIDTH + half * LANES, LANES); };
      const auto store = [&](int, int r, int half, Vec sum) {
        std::memcpy(own + r * WIDTH + half * LANES, &sum, sizeof sum);
      };
      multiply<1, queries>(weights + first, 1, width, values + panel, WIDTH, 0, depth, load, store, Nothing{});
    });
}

// A tile's tokens and some query heads that share a KV head: row g * tokens + i is query head `query_head` + g of token i.
static void attend(const Call& call, const Tile& tile, int64_t head, int64_t query_head, int64_t query_heads,
                   Scratch& scratch) {
  const int64_t count = tile.tokens, position = tile.position, end = position + count;
  const int64_t rows = query_heads * count, width = Scratch::padded(rows);
  float *sums = scratch.sums.data(), *scores = scratch.scores.data();
  Factor* columns = scratch.columns.data();
  std::fill(columns, columns + width * D / EACH, Factor{});
  std::fill(sums, sums + rows * WIDTH, 0.0f);
  for (int64_t row = 0; row < width; ++row) {
    const int64_t own_head = query_head + std::min(row, rows - 1) / count;
    Queries& queries = scratch.queries[row / LANES];
    queries.peak[row % LANES] = call.sinks ? call.sinks[own_head] : NEVER;
    queries.total[row % LANES] = call.sinks ? 1 : 0;
    queries.first[row % LANES] = int32_t(call.begin(position + row % count));
    queries.last[row % LANES] = int32_t(position + row % count);
    if (row >= rows) continue;
    const T* from = call.query_of(tile.first + row % count, own_head);
    Factor* to = columns + row / PANEL * PANEL * (D / EACH) + row % PANEL;
    for (int64_t i = 0; i < D / EACH; ++i) take(to[i * PANEL], from + i * EACH, call.scaling);
  }
  // Spans begin at multiples of SPAN, so that a token's sums are the same in whatever tile it comes.
  for (int64_t span = call.begin(position) / SPAN * SPAN; span < end; span += SPAN) {
    const int64_t seen = std::min(SPAN, end - span);
    const bool masked = span + seen - 1 > position || span < call.begin(end - 1);
    copy_span(call, tile, head, span, span + seen, scratch);
    score(scratch, seen, width);
    if (call.softcap > 0) call.cap(scores, seen * width);
    for (int64_t row = 0; row < width; row += LANES)
      scratch.queries[row / LANES].soften(scores + row, scratch.weights.data() + row, seen, width, span, masked);
    for (int64_t row = 0; row < rows; ++row)
      if (const float shrink = scratch.queries[row / LANES].shrink[row % LANES]; shrink != 1)
        for (int64_t d = 0; d < WIDTH; ++d) sums[row * WIDTH + d] *= shrink;
    add_values(scratch, seen, rows, width);
  }
  for (int64_t row = 0; row < rows; ++row) {
    T* to = call.out_of(tile.first + row % count, query_head + row / count);
    for (int64_t d = 0; d < D; ++d) assign(to[d], sums[row * WIDTH + d] / scratch.queries[row / LANES].total[row % LANES]);
  }
}

}  // namespace chunk
