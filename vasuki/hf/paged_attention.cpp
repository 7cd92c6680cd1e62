// Attention of single query tokens over paged keys and values, on a CPU.
//
// Each query token walks the blocks of its own sequence, so nothing is gathered or padded. The query heads that share a
// KV head are served together: every key and value is read once. The softmax is accumulated online, block by block.
//
// HEAD_DIM and ELEMENT (float or bf16) are set when the file is compiled for a model.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

struct bf16 {
  uint16_t bits;
};

static inline float load(const float* at) { return *at; }
static inline float load(const bf16* at) {
  const uint32_t bits = uint32_t(at->bits) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
static inline void store(float* at, float value) { *at = value; }
static inline void store(bf16* at, float value) {  // round to nearest even
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  at->bits = uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

constexpr int D = HEAD_DIM;
using T = ELEMENT;

// query, out   [num_packed_tokens, num_heads, D], in which `tokens` names the ones to serve
// cache        [num_blocks, 2, block_tokens, num_kv_heads, D]
// tables       [num_tables, width], blocks in order of position; token i uses row `table_of[i]`
// positions    [count]; a token sees positions 0 .. positions[i], or the last `window` of them if window > 0
// sinks        [num_heads] or null: one more logit in each softmax, which takes weight and gives no value
// softcap      scores are squashed to (-softcap, softcap) if > 0
extern "C" void vasuki_paged_attention(const T* query, const T* cache, const int64_t* tokens, const int64_t* positions,
                                       const int64_t* table_of, const int64_t* tables, const float* sinks, T* out,
                                       int64_t count, int64_t width, int64_t block_tokens, int64_t num_heads,
                                       int64_t num_kv_heads, int64_t window, float scaling, float softcap) {
  const int64_t group = num_heads / num_kv_heads;
  const int64_t stride = num_kv_heads * D;  // from one position to the next
#pragma omp parallel
  {
    std::vector<float> q(group * D), sum(group * D), score(group * block_tokens), peak(group), total(group);
#pragma omp for schedule(dynamic, 1) collapse(2)
    for (int64_t i = 0; i < count; ++i) {
      for (int64_t head = 0; head < num_kv_heads; ++head) {
        const int64_t at = (tokens[i] * num_heads + head * group) * D;
        const int64_t end = positions[i] + 1;
        const int64_t begin = window > 0 ? std::max<int64_t>(0, end - window) : 0;
        for (int64_t j = 0; j < group * D; ++j) {
          q[j] = load(query + at + j) * scaling;
          sum[j] = 0;
        }
        for (int64_t g = 0; g < group; ++g) {
          peak[g] = sinks ? sinks[head * group + g] : -std::numeric_limits<float>::max();
          total[g] = sinks ? 1 : 0;
        }
        for (int64_t b = begin / block_tokens; b * block_tokens < end; ++b) {
          const T* keys = cache + tables[table_of[i] * width + b] * 2 * block_tokens * stride + head * D;
          const T* values = keys + block_tokens * stride;
          const int64_t first = std::max<int64_t>(0, begin - b * block_tokens);
          const int64_t last = std::min(block_tokens, end - b * block_tokens);
          for (int64_t t = first; t < last; ++t) {
            float key[D];
            for (int d = 0; d < D; ++d) key[d] = load(keys + t * stride + d);
            for (int64_t g = 0; g < group; ++g) {
              float dot = 0;
              for (int d = 0; d < D; ++d) dot += q[g * D + d] * key[d];
              score[g * block_tokens + t] = softcap > 0 ? softcap * std::tanh(dot / softcap) : dot;
            }
          }
          for (int64_t g = 0; g < group; ++g) {
            float* s = score.data() + g * block_tokens;
            float top = peak[g];
            for (int64_t t = first; t < last; ++t) top = std::max(top, s[t]);
            const float shrink = std::exp(peak[g] - top);
            float weight = 0;
            for (int64_t t = first; t < last; ++t) {
              s[t] = std::exp(s[t] - top);
              weight += s[t];
            }
            total[g] = total[g] * shrink + weight;
            peak[g] = top;
            if (shrink != 1)
              for (int d = 0; d < D; ++d) sum[g * D + d] *= shrink;
          }
          for (int64_t t = first; t < last; ++t) {
            float value[D];
            for (int d = 0; d < D; ++d) value[d] = load(values + t * stride + d);
            for (int64_t g = 0; g < group; ++g) {
              const float weight = score[g * block_tokens + t];
              for (int d = 0; d < D; ++d) sum[g * D + d] += weight * value[d];
            }
          }
        }
        for (int64_t g = 0; g < group; ++g) {
          const float scale = 1 / total[g];
          for (int d = 0; d < D; ++d) store(out + at + g * D + d, sum[g * D + d] * scale);
        }
      }
    }
  }
}
