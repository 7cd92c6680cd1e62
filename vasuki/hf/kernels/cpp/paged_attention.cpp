// Attention of packed chunks over paged keys and values, on a CPU.
//
// Work comes in tiles: up to some tens of successive tokens of a prompt, or one of an output, which walk the blocks of
// their own sequence, so nothing is gathered or padded in memory. The query heads that share a KV head are served together:
// every key and value comes from memory once for all of them. The softmax is accumulated online, span by span.

#include <atomic>
#include <optional>

#include "chunk_attention.hpp"
#include "token_attention.hpp"

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
// tiles        [num_tiles, 5]: first packed token, tokens, position of the first, row of `tables`, and whether it is one token
//              of a row's output. Which kernel serves a token is settled by that alone, not by what it is computed with,
//              so that its sums are the same wherever its prompt is cut, and where its row is computed again.
// tables       [num_tables, width], blocks in order of position
// sinks        [num_heads] or null: one more logit in each softmax, which takes weight and gives no value
// window       a token sees positions up to its own, or the last `window` of them if window > 0
// softcap      scores are squashed to (-softcap, softcap) if > 0
// longest      most tokens of a tile
extern "C" void vasuki_paged_attention(const T* query, const C* cache, const Tile* tiles, const int64_t* tables,
                                       const float* sinks, T* out, int64_t num_tiles, int64_t longest, int64_t width,
                                       int64_t block_tokens, int64_t query_stride, int64_t num_heads,
                                       int64_t num_kv_heads, int64_t window, float scaling, float softcap) {
  const Call call{query,        cache,        tables,    sinks,        out,    width,   block_tokens,
                  query_stride, num_heads, num_kv_heads, window, scaling, softcap};
  // Heads are shared out among threads only where there are few tiles: side by side they read memory in order.
  const int64_t lanes = num_tiles >= 4 * omp_get_max_threads() ? 1 : num_kv_heads, parts = num_tiles * lanes;
  const int64_t group = call.group(), slice = std::max<int64_t>(1, std::min(group, chunk::MOST_ROWS / longest));
  const auto first_head = [&](int64_t lane) { return lane * num_kv_heads / lanes; };
  std::atomic<int64_t> taken{0};
#pragma omp parallel
  {
    token::Scratch of_tokens(num_heads);
    std::optional<chunk::Scratch> of_chunks;
    for (int64_t part = taken++, next; part < parts; part = next) {
      const Tile& tile = tiles[part / lanes];
      const int64_t first = first_head(part % lanes), last = first_head(part % lanes + 1);
      if (tile.generated) {
        next = taken++;  // before its time, so that its first keys are asked for
        const int64_t known = std::min(next, parts - 1);
        const C* after = call.first_keys(tiles[known / lanes], first_head(known % lanes));
        token::attend(call, tile, first, last, after, of_tokens);
        continue;
      }
      if (!of_chunks) of_chunks.emplace(longest * slice);
      for (int64_t head = first; head < last; ++head)
        for (int64_t g = 0; g < group; g += slice)
          chunk::attend(call, tile, head, head * group + g, std::min(slice, group - g), *of_chunks);
      next = taken++;
    }
  }
}
