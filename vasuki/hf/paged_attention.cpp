// Attention of packed chunks over paged keys and values, on a CPU.
//
// Work comes in tiles: up to some tens of successive tokens of one chunk, which walk the blocks of their own sequence, so
// nothing is gathered or padded in memory. The query heads that share a KV head are served together: every key and value
// comes from memory once for all of them. The softmax is accumulated online, span by span.
//
// A single token takes keys and values as they lie. More tokens make small matrix products worthwhile: a span
// of keys is transposed, and values copied, into scratch memory that the first-level cache keeps.
//
// HEAD_DIM (a multiple of 4), ELEMENT (float or bf16) and CACHED, the same of the cache, are set when the file is compiled
// for a model.

#include <omp.h>

#include <limits>
#include <type_traits>
#include <vector>

#include "vectors.hpp"

using T = ELEMENT;
using C = CACHED;
constexpr int64_t D = HEAD_DIM;
constexpr int64_t WIDTH = (D + PANEL - 1) / PANEL * PANEL;  // D in whole panels
constexpr int64_t SPAN = 64;                                // positions that a tile looks at together
constexpr int64_t MOST_ROWS = 128;                          // queries of a tile, so that scratch memory stays in cache
constexpr int TOKEN_ROWS = 4;                               // a single token's queries that take a key at once
constexpr int64_t CACHE_LINE = 64, PREFETCH_BYTES = 1024;

// The single token's vectors: D may not be a multiple of LANES.
constexpr int SHORT_LANES = D % LANES == 0 ? LANES : D % 8 == 0 && LANES > 8 ? 8 : 4;
constexpr int VECTORS = D / SHORT_LANES;
typedef float Short __attribute__((vector_size(SHORT_LANES * 4)));

static inline float to_float(float value) { return value; }
static inline float to_float(bf16 value) {
  const uint32_t bits = uint32_t(value.bits) << 16;
  float wide;
  std::memcpy(&wide, &bits, sizeof wide);
  return wide;
}
static inline void assign(float& to, float value) { to = value; }
static inline void assign(bf16& to, float value) {  // rounds to nearest even
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  to.bits = uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
static inline Short load(const float* at) {
  Short value;
  std::memcpy(&value, at, sizeof value);
  return value;
}
static inline Short load(const bf16* at) {
  typedef uint16_t Narrow __attribute__((vector_size(SHORT_LANES * 2)));
  typedef uint32_t Wide __attribute__((vector_size(SHORT_LANES * 4)));
  Narrow narrow;
  std::memcpy(&narrow, at, sizeof narrow);
  const Wide bits = __builtin_convertvector(narrow, Wide) << 16;
  Short value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
static inline void store(float* at, Short value) { std::memcpy(at, &value, sizeof value); }
static inline float sum_of(Short value) {
  float sum = 0;
  for (int i = 0; i < SHORT_LANES; ++i) sum += value[i];
  return sum;
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

struct Scratch {
  std::vector<float> query, scores, sums, keys, values;
  std::vector<Softmax> softmax;

  Scratch(int64_t rows, int64_t block_tokens)
      : query(rows * D),
        scores(rows * std::max(SPAN, block_tokens)),
        sums(rows * WIDTH),
        keys(SPAN * WIDTH),
        values(SPAN * WIDTH),
        softmax(rows) {}
};

// scores[r * stride] = query r . key, for some queries.
template <int rows>
static inline void multiply_key(const float* query, const C* key, float* scores, int64_t stride) {
  Short dots[rows] = {};
#pragma GCC unroll 64
  for (int v = 0; v < VECTORS; ++v) {
    const Short part = load(key + v * SHORT_LANES);
#pragma GCC unroll 4
    for (int r = 0; r < rows; ++r) dots[r] += load(query + r * D + v * SHORT_LANES) * part;
  }
#pragma GCC unroll 4
  for (int r = 0; r < rows; ++r) scores[r * stride] = sum_of(dots[r]);
}

// sums[r] += weights[r * stride] * value, for some queries.
template <int rows>
static inline void add_value(const float* weights, int64_t stride, const C* value, float* sums) {
#pragma GCC unroll 64
  for (int v = 0; v < VECTORS; ++v) {
    const Short part = load(value + v * SHORT_LANES);
#pragma GCC unroll 4
    for (int r = 0; r < rows; ++r) {
      float* sum = sums + r * D + v * SHORT_LANES;
      store(sum, load(sum) + weights[r * stride] * part);
    }
  }
}

// Asks for the bytes that are read soon after `at`. The processor foresees them too, but not beyond a page.
static inline void prefetch(const C* at, int64_t count) {
  for (int64_t i = 0; i < count; i += CACHE_LINE / int64_t(sizeof(C)))
    __builtin_prefetch(reinterpret_cast<const char*>(at + i) + PREFETCH_BYTES);
}

// One token's query heads of KV heads [first_head, last_head). All of them take a key before any takes the next, so that
// memory is read in the order in which it lies: a head's keys by themselves, with gaps between them, come half as fast.
static void attend_token(const Call& call, int64_t token, int64_t position, const int64_t* table, int64_t first_head,
                         int64_t last_head, Scratch& scratch) {
  const int64_t block_tokens = call.block_tokens, stride = call.stride(), end = position + 1, begin = call.begin(position);
  const int64_t group = call.group(), heads = last_head - first_head, rows = heads * group;
  const int64_t first_row = first_head * group, at = (token * call.num_heads + first_row) * D;
  const T* from = call.query + token * call.query_stride + first_row * D;
  float *query = scratch.query.data(), *sums = scratch.sums.data(), *scores = scratch.scores.data();
  for (int64_t i = 0; i < rows * D; ++i) query[i] = to_float(from[i]) * call.scaling;
  std::fill(sums, sums + rows * D, 0.0f);
  for (int64_t row = 0; row < rows; ++row) scratch.softmax[row] = softmax_of(call, first_row + row);
  for (int64_t b = begin / block_tokens; b * block_tokens < end; ++b) {
    const int64_t first = std::max<int64_t>(0, begin - b * block_tokens);
    const int64_t last = std::min(block_tokens, end - b * block_tokens);
    const C *keys = call.keys(table, b, first_head), *values = keys + block_tokens * stride;
    for (int64_t t = first; t < last; ++t) {
      prefetch(keys + t * stride, heads * D);
      for (int64_t head = 0; head < heads; ++head)
        for_tiles<TOKEN_ROWS>(head * group, group, [&](int64_t row, auto tile) {
          multiply_key<tile>(query + row * D, keys + t * stride + head * D, scores + row * block_tokens + t, block_tokens);
        });
    }
    for (int64_t row = 0; row < rows; ++row) {
      float* own_scores = scores + row * block_tokens + first;
      call.cap(own_scores, last - first);
      const float shrink = scratch.softmax[row].add(own_scores, last - first);
      for (int64_t d = 0; d < D; ++d) sums[row * D + d] *= shrink;
    }
    for (int64_t t = first; t < last; ++t) {
      prefetch(values + t * stride, heads * D);
      for (int64_t head = 0; head < heads; ++head)
        for_tiles<TOKEN_ROWS>(head * group, group, [&](int64_t row, auto tile) {
          add_value<tile>(scores + row * block_tokens + t, block_tokens, values + t * stride + head * D, sums + row * D);
        });
    }
  }
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t d = 0; d < D; ++d) assign(call.out[at + row * D + d], sums[row * D + d] / scratch.softmax[row].total);
}

// Copies positions [first, last) of a sequence: keys transposed [D][SPAN], values [SPAN][WIDTH].
static void copy_span(const Call& call, const int64_t* table, int64_t head, int64_t first, int64_t last,
                      Scratch& scratch) {
  for (int64_t position = first; position < last;) {
    const int64_t offset = position % call.block_tokens;
    const int64_t count = std::min(call.block_tokens - offset, last - position);
    const C* keys = call.keys(table, position / call.block_tokens, head) + offset * call.stride();
    const C* values = keys + call.block_tokens * call.stride();
    float* to_keys = scratch.keys.data() + position - first;
    for (int64_t d = 0; d < D; ++d)
      for (int64_t t = 0; t < count; ++t) to_keys[d * SPAN + t] = to_float(keys[t * call.stride() + d]);
    for (int64_t t = 0; t < count; ++t) {
      float* to_values = scratch.values.data() + (position - first + t) * WIDTH;
      for (int64_t d = 0; d < D; ++d) to_values[d] = to_float(values[t * call.stride() + d]);
    }
    position += count;
  }
}

// `count` tokens of a chunk, the first at `position`, and some query heads that share a KV head: row g * count + i is
// query head `query_head` + g of token i.
static void attend_tile(const Call& call, int64_t token, int64_t count, int64_t position, const int64_t* table,
                        int64_t head, int64_t query_head, int64_t query_heads, Scratch& scratch) {
  const int64_t rows = query_heads * count, end = position + count;
  float *query = scratch.query.data(), *sums = scratch.sums.data(), *scores = scratch.scores.data();
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t own_head = query_head + row / count;
    const T* from = call.query + (token + row % count) * call.query_stride + own_head * D;
    for (int64_t d = 0; d < D; ++d) query[row * D + d] = to_float(from[d]) * call.scaling;
    scratch.softmax[row] = softmax_of(call, own_head);
  }
  std::fill(sums, sums + rows * WIDTH, 0.0f);
  // Spans begin at multiples of SPAN, so that a token's sums are the same in whatever tile it comes.
  for (int64_t span = call.begin(position) / SPAN * SPAN; span < end; span += SPAN) {
    const int64_t span_end = std::min(span + SPAN, end);
    copy_span(call, table, head, span, span_end, scratch);
    const int64_t panels = (span_end - span + PANEL - 1) / PANEL;
    for (int64_t p = 0; p < panels; ++p)
      for_tiles(0, rows, [&](int64_t first, auto tile) {
        Vec products[1][tile][2] = {};
        multiply<1, tile>(query + first * D, D, scratch.keys.data() + p * PANEL, SPAN, 0, D, products);
        for (int64_t r = 0; r < tile; ++r)
          std::memcpy(scores + (first + r) * SPAN + p * PANEL, products[0][r], sizeof products[0][r]);
      });
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t own = position + row % count;
      const int64_t from = std::max(call.begin(own), span) - span, to = std::min(own + 1, span_end) - span;
      float* own_scores = scores + row * SPAN;
      if (from >= to) {
        std::fill(own_scores, own_scores + span_end - span, 0.0f);
        continue;
      }
      std::fill(own_scores, own_scores + from, 0.0f);
      std::fill(own_scores + to, own_scores + (span_end - span), 0.0f);
      call.cap(own_scores + from, to - from);
      const float shrink = scratch.softmax[row].add(own_scores + from, to - from);
      for (int64_t d = 0; d < WIDTH; ++d) sums[row * WIDTH + d] *= shrink;
    }
    for (int64_t p = 0; p < WIDTH / PANEL; ++p)
      for_tiles(0, rows, [&](int64_t first, auto tile) {
        Vec products[1][tile][2];
        for (int64_t r = 0; r < tile; ++r)
          std::memcpy(products[0][r], sums + (first + r) * WIDTH + p * PANEL, sizeof products[0][r]);
        multiply<1, tile>(scores + first * SPAN, SPAN, scratch.values.data() + p * PANEL, WIDTH, 0, span_end - span,
                          products);
        for (int64_t r = 0; r < tile; ++r)
          std::memcpy(sums + (first + r) * WIDTH + p * PANEL, products[0][r], sizeof products[0][r]);
      });
  }
  for (int64_t row = 0; row < rows; ++row) {
    T* to = call.out + ((token + row % count) * call.num_heads + query_head + row / count) * D;
    for (int64_t d = 0; d < D; ++d) assign(to[d], sums[row * WIDTH + d] / scratch.softmax[row].total);
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
    Scratch scratch(std::max(num_heads, longest * slice), block_tokens);
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
