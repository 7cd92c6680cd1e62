// Attention of packed chunks over paged keys and values, on a CPU.
//
// Work comes in tiles: up to some tens of successive tokens of one chunk, which walk the blocks of their own sequence, so
// nothing is gathered or padded in memory. The query heads that share a KV head are served together: every key and value
// comes from memory once for all of them. The softmax is accumulated online, span by span.
//
// A single token takes keys and values as they lie. More tokens make small matrix products worthwhile: of keys by queries,
// which are transposed once, and of weights by values. Queries are the columns of the first, so that a softmax goes down
// them, a register side by side.
//
// HEAD_DIM (a multiple of 8), ELEMENT (float or bf16), CACHED, the same of the cache, and ROUNDS, whether those products may
// be of numbers rounded to bfloat16, are set when the file is compiled for a model.

#include <omp.h>

#include <limits>
#include <type_traits>
#include <utility>
#include <vector>

#include "vectors.hpp"

using T = ELEMENT;
using C = CACHED;
constexpr int64_t D = HEAD_DIM;
constexpr int64_t WIDTH = (D + PANEL - 1) / PANEL * PANEL;  // D in whole panels

// What a tile multiplies: one number of a row at a time, or two.
using Factor = std::conditional_t<ROUNDS && MULTIPLIES_BF16, Bf16s, float>;
constexpr int64_t EACH = std::is_same_v<Factor, Bf16s> ? 2 : 1;
constexpr int64_t SPAN = 64;                                // positions that a tile looks at together
constexpr int64_t MOST_ROWS = 128;                          // queries of a tile, so that scratch memory stays in cache
constexpr int64_t STRIP = 32;                               // positions that a single token looks at together
constexpr int KEYS = 4;                                     // of them that its queries take at once
constexpr int QUERIES = 2 * ROWS / KEYS;                    // that take them
constexpr int SUMS = 4 * ROWS / 3;                          // vectors that gather values; of more, some leave registers
constexpr int64_t LINE = 64 / int64_t(sizeof(CACHED));      // numbers in a line of the processor's cache

// The single token's vectors. They come in pairs, and D may not be a multiple of two registers.
constexpr int SHORT_LANES = D % (2 * LANES) == 0 ? LANES : D % 16 == 0 ? 8 : 4;
constexpr int PAIRS = D / (2 * SHORT_LANES);
typedef float Short __attribute__((vector_size(SHORT_LANES * 4)));
typedef float Four __attribute__((vector_size(16)));

static inline float to_float(float value) { return value; }
static inline void assign(float& to, float value) { to = value; }
static inline Short load(const float* at) {
  Short value;
  std::memcpy(&value, at, sizeof value);
  return value;
}
static inline void store(float* at, Short value) { std::memcpy(at, &value, sizeof value); }

// Where `load_pair` puts place `d` of a head: in bfloat16, even places of a pair of vectors come before odd ones.
static inline int64_t placed(int64_t d) {
  if (std::is_same_v<C, float>) return d;
  const int64_t in_pair = d % (2 * SHORT_LANES);
  return d - in_pair + in_pair % 2 * SHORT_LANES + in_pair / 2;
}

// Each lane of four: [a0 + a2, b0 + b2, a1 + a3, b1 + b3].
template <size_t... lane>
static inline Short interleave_sums(Short a, Short b, std::index_sequence<lane...>) {
  typedef int32_t Places __attribute__((vector_size(SHORT_LANES * 4)));
  constexpr Places first = {int32_t(lane / 4 * 4 + lane % 4 / 2 + lane % 2 * SHORT_LANES)...};
  return __builtin_shuffle(a, b, first) + __builtin_shuffle(a, b, first + 2);
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
  // Keys of a block for one KV head; its values follow after `block_tokens * stride()`.
  const C* keys(const int64_t* table, int64_t block, int64_t head) const {
    return cache + table[block] * 2 * block_tokens * stride() + head * D;
  }
  int64_t begin(int64_t position) const { return window > 0 ? std::max<int64_t>(0, position + 1 - window) : 0; }
  void cap(float* scores, int64_t count) const {
    if (softcap > 0)
      for (int64_t t = 0; t < count; ++t) scores[t] = softcap * std::tanh(scores[t] / softcap);
  }
};

// What a row's softmax has seen so far: the largest score, and the sum of weights relative to it.
struct Softmax {
  float peak = -std::numeric_limits<float>::max(), total = 0;

  // Turns scores into weights. Returns what earlier sums shrink by.
  float add(float* scores, int64_t count) {
    float top = peak, weight = 0;
    for (int64_t t = 0; t < count; ++t) top = std::max(top, scores[t]);
    for (int64_t t = 0; t < count; ++t) {
      scores[t] = exp_negative(scores[t] - top);
      weight += scores[t];
    }
    const float shrink = exp_negative(peak - top);
    total = total * shrink + weight;
    peak = top;
    return shrink;
  }
};

static Softmax softmax_of(const Call& call, int64_t head) {
  return call.sinks ? Softmax{call.sinks[head], 1} : Softmax{};
}

// The softmax of some queries, LANES side by side.
struct Queries {
  Vec peak, total, shrink;  // what it has seen so far, and what earlier sums shrink by
  Ints first, last;         // positions that they see

  // Turns scores of `count` positions from `span` on into weights; rows of both lie `stride` apart. `masked` says that not
  // every query sees all of them.
  void soften(const float* scores, Factor* weights, int64_t count, int64_t stride, int64_t span, bool masked) {
    constexpr float NEVER = -std::numeric_limits<float>::max();
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
  std::vector<float> query, scores, sums;  // of single tokens; the scores and sums of tiles
  std::vector<Softmax> softmax;
  std::vector<Queries> queries;       // of a tile
  std::vector<Factor> columns;        // the same: panels [rows / PANEL][D / EACH][PANEL]
  std::vector<Factor> keys, weights;  // [SPAN][D / EACH], [SPAN / EACH][rows]
  std::vector<Factor> values;         // [SPAN / EACH][WIDTH]

  explicit Scratch(int64_t rows)
      : query(rows * D),
        scores(padded(rows) * SPAN),
        sums(rows * WIDTH),
        softmax(rows),
        queries(padded(rows) / LANES),
        columns(padded(rows) * D / EACH),
        keys(SPAN * D / EACH),
        weights(padded(rows) * SPAN / EACH),
        values(SPAN * WIDTH / EACH) {}

  static int64_t padded(int64_t rows) { return (rows + PANEL - 1) / PANEL * PANEL; }
};

// scores[r * SPAN + t] = query r . key t, for some queries and keys.
template <int rows, int keys>
static inline void multiply_keys(const float* query, const C* key, int64_t stride, float* scores) {
  Short dots[rows][KEYS] = {};
  for (int pair = 0; pair < PAIRS; ++pair) {
    const int64_t at = pair * 2 * SHORT_LANES;
#pragma GCC unroll 4
    for (int t = 0; t < keys; ++t) {
      Short first, second;
      load_pair(key + t * stride + at, first, second);
#pragma GCC unroll 8
      for (int r = 0; r < rows; ++r) {
        dots[r][t] += load(query + r * D + at) * first;
        dots[r][t] += load(query + r * D + at + SHORT_LANES) * second;
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < rows; ++r) store_sums(dots[r], scores + r * SPAN, keys);
}

// sums[r] += weights[r * SPAN + t] * value t over `count` values, for some queries and pairs of vectors.
template <int rows, int pairs>
static inline void add_values(const float* weights, const C* value, int64_t stride, int64_t count, float* sums) {
  Short own[rows][2 * pairs];
#pragma GCC unroll 8
  for (int r = 0; r < rows; ++r)
#pragma GCC unroll 16
    for (int v = 0; v < 2 * pairs; ++v) own[r][v] = load(sums + r * D + v * SHORT_LANES);
  for (int64_t t = 0; t < count; ++t)
#pragma GCC unroll 8
    for (int pair = 0; pair < pairs; ++pair) {
      Short first, second;
      load_pair(value + t * stride + pair * 2 * SHORT_LANES, first, second);
#pragma GCC unroll 8
      for (int r = 0; r < rows; ++r) {
        own[r][2 * pair] += weights[r * SPAN + t] * first;
        own[r][2 * pair + 1] += weights[r * SPAN + t] * second;
      }
    }
#pragma GCC unroll 8
  for (int r = 0; r < rows; ++r)
#pragma GCC unroll 16
    for (int v = 0; v < 2 * pairs; ++v) store(sums + r * D + v * SHORT_LANES, own[r][v]);
}

// Asks for memory line by line: `width` numbers each of positions `stride` apart. The processor foresees what lies in
// one piece too, but not beyond a page.
struct Prefetch {
  const C* at;
  int64_t stride, width, column = 0;

  void take(int64_t count) {
    for (; count > 0; count -= LINE) {
      __builtin_prefetch(at + column, 0, 2);  // which more lines can be on their way to than to the first level
      column += LINE;
      if (column >= width) column = 0, at += stride;
    }
  }
};

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

// One token's query heads of KV heads [first_head, last_head). They take the positions in strips, all heads one strip
// before the next, so that memory is read in the order in which it lies: while a strip's scores are computed its values
// are on their way, and while its values are added the next strip's keys.
static void attend_token(const Call& call, int64_t token, int64_t position, const int64_t* table, int64_t first_head,
                         int64_t last_head, Scratch& scratch) {
  const int64_t block_tokens = call.block_tokens, stride = call.stride(), end = position + 1;
  const int64_t group = call.group(), heads = last_head - first_head, rows = heads * group, width = heads * D;
  const int64_t first_row = first_head * group, at = (token * call.num_heads + first_row) * D;
  const T* from = call.query + token * call.query_stride + first_row * D;
  float *query = scratch.query.data(), *sums = scratch.sums.data(), *scores = scratch.scores.data();
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t d = 0; d < D; ++d) query[row * D + placed(d)] = to_float(from[row * D + d]) * call.scaling;
    scratch.softmax[row] = softmax_of(call, first_row + row);
  }
  std::fill(sums, sums + rows * D, 0.0f);
  const auto keys_at = [&](int64_t t) { return call.keys(table, t / block_tokens, first_head) + t % block_tokens * stride; };
  for (int64_t first = call.begin(position), last; first < end; first = last) {
    last = std::min({first - first % block_tokens % STRIP + STRIP, first - first % block_tokens + block_tokens, end});
    const C *keys = keys_at(first), *values = keys + block_tokens * stride;
    Prefetch ahead{values, stride, width};
    for_tiles<KEYS>(0, last - first, [&](int64_t t, auto taken) {
      for (int64_t head = 0; head < heads; ++head) {
        ahead.take(taken * D);
        for_tiles<QUERIES>(head * group, group, [&](int64_t row, auto tile) {
          multiply_keys<tile, taken>(query + row * D, keys + t * stride + head * D, stride, scores + row * SPAN + t);
        });
      }
    });
    for (int64_t row = 0; row < rows; ++row) {
      float* own_scores = scores + row * SPAN;
      call.cap(own_scores, last - first);
      const float shrink = scratch.softmax[row].add(own_scores, last - first);
      if (shrink != 1)
        for (int64_t d = 0; d < D; ++d) sums[row * D + d] *= shrink;
    }
    ahead = {keys_at(std::min(last, position)), stride, width};
    for (int64_t head = 0; head < heads; ++head)
      for_tiles<QUERIES>(head * group, group, [&](int64_t row, auto tile) {
        for_tiles<std::max(1, SUMS / 2 / tile)>(0, PAIRS, [&](int64_t pair, auto taken) {
          const int64_t place = pair * 2 * SHORT_LANES;
          if (row == head * group) ahead.take(STRIP * D / PAIRS * taken);
          add_values<tile, taken>(scores + row * SPAN, values + head * D + place, stride, last - first,
                                  sums + row * D + place);
        });
      });
  }
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t d = 0; d < D; ++d)
      assign(call.out[at + row * D + d], sums[row * D + placed(d)] / scratch.softmax[row].total);
}

// Copies positions [first, last) of a sequence to scratch memory that the first-level cache keeps.
static void copy_span(const Call& call, const int64_t* table, int64_t head, int64_t first, int64_t last,
                      Scratch& scratch) {
  const auto keys_at = [&](int64_t position) {
    return call.keys(table, position / call.block_tokens, head) + position % call.block_tokens * call.stride();
  };
  const int64_t to_values = call.block_tokens * call.stride();
  for (int64_t position = first; position < last; ++position) {
    const C* keys = keys_at(position);
    Factor* to = scratch.keys.data() + (position - first) * (D / EACH);
    for (int64_t i = 0; i < D / EACH; ++i) take(to[i], keys + i * EACH);
  }
  for (int64_t position = first; position < last; position += EACH) {
    const C* values = keys_at(position) + to_values;
    const C* below = EACH > 1 && position + 1 < last ? keys_at(position + 1) + to_values : nullptr;
    Factor* to = scratch.values.data() + (position - first) / EACH * WIDTH;
    for (int64_t d = 0; d < D; ++d) take_below(to[d], values, below, d);
  }
}

// `count` tokens of a chunk, the first at `position`, and some query heads that share a KV head: row g * count + i is
// query head `query_head` + g of token i.
static void attend_tile(const Call& call, int64_t token, int64_t count, int64_t position, const int64_t* table,
                        int64_t head, int64_t query_head, int64_t query_heads, Scratch& scratch) {
  const int64_t rows = query_heads * count, width = Scratch::padded(rows), end = position + count;
  float *sums = scratch.sums.data(), *scores = scratch.scores.data();
  Factor* columns = scratch.columns.data();
  std::fill(columns, columns + width * D / EACH, Factor{});
  std::fill(sums, sums + rows * WIDTH, 0.0f);
  for (int64_t row = 0; row < width; ++row) {
    const int64_t own_head = query_head + std::min(row, rows - 1) / count;
    const Softmax softmax = softmax_of(call, own_head);
    Queries& beside = scratch.queries[row / LANES];
    beside.peak[row % LANES] = softmax.peak;
    beside.total[row % LANES] = softmax.total;
    beside.first[row % LANES] = int32_t(call.begin(position + row % count));
    beside.last[row % LANES] = int32_t(position + row % count);
    if (row >= rows) continue;
    const T* from = call.query + (token + row % count) * call.query_stride + own_head * D;
    Factor* to = columns + row / PANEL * PANEL * (D / EACH) + row % PANEL;
    for (int64_t i = 0; i < D / EACH; ++i) take(to[i * PANEL], from + i * EACH, call.scaling);
  }
  // Spans begin at multiples of SPAN, so that a token's sums are the same in whatever tile it comes.
  for (int64_t span = call.begin(position) / SPAN * SPAN; span < end; span += SPAN) {
    const int64_t seen = std::min(SPAN, end - span), depth = (seen + EACH - 1) / EACH;
    const bool masked = span + seen - 1 > position || span < call.begin(end - 1);
    copy_span(call, table, head, span, span + seen, scratch);
    for (int64_t panel = 0; panel < width; panel += PANEL) {
      for_tiles(0, seen, [&](int64_t first, auto tile) {
        const auto zero = [](int, int, int) { return Vec{}; };
        const auto store = [&](int, int t, int half, Vec products) {
          std::memcpy(scores + (first + t) * width + panel + half * LANES, &products, sizeof products);
        };
        multiply<1, tile>(scratch.keys.data() + first * (D / EACH), D / EACH, 1, columns + panel * (D / EACH), PANEL, 0,
                          D / EACH, zero, store, Nothing{});
      });
    }
    if (call.softcap > 0) call.cap(scores, seen * width);
    for (int64_t row = 0; row < width; row += LANES)
      scratch.queries[row / LANES].soften(scores + row, scratch.weights.data() + row, seen, width, span, masked);
    for (int64_t row = 0; row < rows; ++row)
      if (const float shrink = scratch.queries[row / LANES].shrink[row % LANES]; shrink != 1)
        for (int64_t d = 0; d < WIDTH; ++d) sums[row * WIDTH + d] *= shrink;
    for (int64_t p = 0; p < WIDTH / PANEL; ++p)
      for_tiles(0, rows, [&](int64_t first, auto tile) {
        float* own = sums + first * WIDTH + p * PANEL;
        const auto load = [&](int, int r, int half) { return load_some(own + r * WIDTH + half * LANES, LANES); };
        const auto store = [&](int, int r, int half, Vec sum) {
          std::memcpy(own + r * WIDTH + half * LANES, &sum, sizeof sum);
        };
        multiply<1, tile>(scratch.weights.data() + first, 1, width, scratch.values.data() + p * PANEL, WIDTH, 0, depth,
                          load, store, Nothing{});
      });
  }
  for (int64_t row = 0; row < rows; ++row) {
    T* to = call.out + ((token + row % count) * call.num_heads + query_head + row / count) * D;
    for (int64_t d = 0; d < D; ++d) assign(to[d], sums[row * WIDTH + d] / scratch.queries[row / LANES].total[row % LANES]);
  }
}

static inline void keep(const T* from, C* to, int64_t count) {
  if constexpr (std::is_same_v<T, C>)
    std::memcpy(to, from, count * sizeof(T));
  else
    for (int64_t i = 0; i < count; ++i) assign(to[i], to_float(from[i]));
}

// Stores keys and values of a step's tokens. keys, values [tokens, num_kv_heads * D], tokens `key_stride` and `value_stride`
// apart; a key goes to row `rows[token]` of the cache seen as [.., num_kv_heads * D], its value
// `block_tokens` further.
extern "C" void vasuki_paged_write(const T* keys, const T* values, const int64_t* rows, C* cache, int64_t tokens,
                                   int64_t key_stride, int64_t value_stride, int64_t block_tokens,
                                   int64_t num_kv_heads) {
  const int64_t width = num_kv_heads * D;
#pragma omp parallel for if (tokens * width >= 1 << 15)
  for (int64_t token = 0; token < tokens; ++token) {
    C* to = cache + rows[token] * width;
    keep(keys + token * key_stride, to, width);
    keep(values + token * value_stride, to + block_tokens * width, width);
  }
}

// query, out   [num_packed_tokens, num_heads, D], tokens of the query `query_stride` apart
// cache        [num_blocks, 2, block_tokens, num_kv_heads, D]
// tiles        [num_tiles, 4]: first packed token, tokens, position of the first, row of `tables`
// tables       [num_tables, width], blocks in order of position
// sinks        [num_heads] or null: one more logit in each softmax, which takes weight and gives no value
// window       a token sees positions up to its own, or the last `window` of them if window > 0
// softcap      scores are squashed to (-softcap, softcap) if > 0
// longest      most tokens of a tile
extern "C" void vasuki_paged_attention(const T* query, const C* cache, const int64_t* tiles, const int64_t* tables,
                                       const float* sinks, T* out, int64_t num_tiles, int64_t longest, int64_t width,
                                       int64_t block_tokens, int64_t query_stride, int64_t num_heads,
                                       int64_t num_kv_heads, int64_t window, float scaling, float softcap) {
  const Call call{query,        cache,        tables,    sinks,        out,    width,   block_tokens,
                  query_stride, num_heads, num_kv_heads, window, scaling, softcap};
  // Heads are shared out among threads only where there are few tiles: side by side they read memory in order.
  const int64_t lanes = num_tiles >= 4 * omp_get_max_threads() ? 1 : num_kv_heads;
#pragma omp parallel
  {
    const int64_t group = call.group(), slice = std::max<int64_t>(1, std::min(group, MOST_ROWS / longest));
    Scratch scratch(std::max(num_heads, longest * slice));
#pragma omp for schedule(dynamic, 1) collapse(2)
    for (int64_t i = 0; i < num_tiles; ++i)
      for (int64_t lane = 0; lane < lanes; ++lane) {
        const int64_t *tile = tiles + i * 4, *table = tables + tile[3] * width;
        const int64_t first_head = lane * num_kv_heads / lanes, last_head = (lane + 1) * num_kv_heads / lanes;
        if (tile[1] == 1) {
          attend_token(call, tile[0], tile[2], table, first_head, last_head, scratch);
          continue;
        }
        for (int64_t head = first_head; head < last_head; ++head)
          for (int64_t g = 0; g < group; g += slice)
            attend_tile(call, tile[0], tile[1], tile[2], table, head, head * group + g, std::min(slice, group - g),
                        scratch);
      }
  }
}
