// Attention of single query tokens over paged keys and values, on a CPU.
//
// Each query token walks the blocks of its own sequence, so nothing is gathered or padded. The query heads that share a
// KV head are served together: every key and value comes from memory once. The softmax is accumulated online, block by
// block, with queries and sums in vector registers.
//
// HEAD_DIM (a multiple of 4) and ELEMENT (float or bf16) are set when the file is compiled for a model.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

struct bf16 {
  uint16_t bits;
};

using T = ELEMENT;
constexpr int D = HEAD_DIM;
#ifdef __AVX512F__
constexpr int LANES = D % 16 == 0 ? 16 : D % 8 == 0 ? 8 : 4;
#else
constexpr int LANES = D % 8 == 0 ? 8 : 4;
#endif
constexpr int VECTORS = D / LANES;
typedef float Vec __attribute__((vector_size(LANES * 4)));
typedef uint32_t VecBits __attribute__((vector_size(LANES * 4)));
typedef uint16_t VecHalf __attribute__((vector_size(LANES * 2)));

static inline Vec load(const float* at) {
  Vec value;
  std::memcpy(&value, at, sizeof value);
  return value;
}
static inline Vec load(const bf16* at) {
  VecHalf half;
  std::memcpy(&half, at, sizeof half);
  const VecBits bits = __builtin_convertvector(half, VecBits) << 16;
  Vec value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
static inline void store(float* at, Vec value) { std::memcpy(at, &value, sizeof value); }
static inline void store(bf16* at, Vec value) {  // round to nearest even
  VecBits bits;
  std::memcpy(&bits, &value, sizeof bits);
  const VecHalf half = __builtin_convertvector((bits + 0x7fff + ((bits >> 16) & 1)) >> 16, VecHalf);
  std::memcpy(at, &half, sizeof half);
}
// One head's keys or values of a block as floats: in place, or unpacked once for all query heads that share them.
static inline const float* as_floats(const float* at, int64_t, int64_t, int64_t, float*) { return at; }
static inline const float* as_floats(const bf16* at, int64_t stride, int64_t first, int64_t last, float* unpacked) {
  for (int64_t t = first; t < last; ++t)
    for (int v = 0; v < VECTORS; ++v) store(unpacked + t * D + v * LANES, load(at + t * stride + v * LANES));
  return unpacked;
}
static inline float sum_of(Vec value) {
  float lanes[LANES], sum = 0;
  std::memcpy(lanes, &value, sizeof lanes);
  for (int i = 0; i < LANES; ++i) sum += lanes[i];
  return sum;
}

// exp(x) for x <= 0, to about 2e-7: 2^n times a polynomial on [-ln 2 / 2, ln 2 / 2]. Unlike std::exp it vectorises.
static inline float exp_negative(float x) {
  x = std::max(x, -87.0f);
  const float n = std::nearbyint(x * 1.44269504f);
  const float r = (x - n * 0.693145752f) - n * 1.42860677e-6f;
  float p = 1.38873136e-3f;
  p = p * r + 8.33360776e-3f;
  p = p * r + 4.16664853e-2f;
  p = p * r + 1.66666672e-1f;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  const int32_t bits = (int32_t(n) + 127) << 23;
  float scale;
  std::memcpy(&scale, &bits, sizeof scale);
  return p * scale;
}

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
  const int64_t stored_stride = num_kv_heads * D;  // from one position to the next
  const int64_t stride = std::is_same<T, float>::value ? stored_stride : D;
#pragma omp parallel
  {
    std::vector<float> scores(block_tokens), peaks(group), totals(group), sums(group * D);
    std::vector<float> unpacked(2 * block_tokens * D);
#pragma omp for schedule(dynamic, 1) collapse(2)
    for (int64_t i = 0; i < count; ++i) {
      for (int64_t head = 0; head < num_kv_heads; ++head) {
        const int64_t at = (tokens[i] * num_heads + head * group) * D;
        const int64_t end = positions[i] + 1;
        const int64_t begin = window > 0 ? std::max<int64_t>(0, end - window) : 0;
        std::fill(sums.begin(), sums.end(), 0.0f);
        for (int64_t g = 0; g < group; ++g) {
          peaks[g] = sinks ? sinks[head * group + g] : -std::numeric_limits<float>::max();
          totals[g] = sinks ? 1 : 0;
        }
        for (int64_t b = begin / block_tokens; b * block_tokens < end; ++b) {
          const T* block = cache + tables[table_of[i] * width + b] * 2 * block_tokens * stored_stride + head * D;
          const int64_t first = std::max<int64_t>(0, begin - b * block_tokens);
          const int64_t last = std::min(block_tokens, end - b * block_tokens);
          const float* keys = as_floats(block, stored_stride, first, last, unpacked.data());
          const float* values = as_floats(block + block_tokens * stored_stride, stored_stride, first, last,
                                          unpacked.data() + block_tokens * D);
          for (int64_t g = 0; g < group; ++g) {
            Vec q[VECTORS];
            for (int v = 0; v < VECTORS; ++v) q[v] = load(query + at + g * D + v * LANES);
            float top = peaks[g];
            for (int64_t t = first; t < last; ++t) {
              Vec dot = q[0] * load(keys + t * stride);
              for (int v = 1; v < VECTORS; ++v) dot += q[v] * load(keys + t * stride + v * LANES);
              const float score = sum_of(dot) * scaling;
              scores[t] = softcap > 0 ? softcap * std::tanh(score / softcap) : score;
              top = std::max(top, scores[t]);
            }
            float weight = 0;
            for (int64_t t = first; t < last; ++t) {
              scores[t] = exp_negative(scores[t] - top);
              weight += scores[t];
            }
            const float shrink = exp_negative(peaks[g] - top);
            totals[g] = totals[g] * shrink + weight;
            peaks[g] = top;
            Vec sum[VECTORS];
            for (int v = 0; v < VECTORS; ++v) sum[v] = load(&sums[g * D + v * LANES]) * shrink;
            for (int64_t t = first; t < last; ++t)
              for (int v = 0; v < VECTORS; ++v) sum[v] += scores[t] * load(values + t * stride + v * LANES);
            for (int v = 0; v < VECTORS; ++v) store(&sums[g * D + v * LANES], sum[v]);
          }
        }
        for (int64_t g = 0; g < group; ++g)
          for (int v = 0; v < VECTORS; ++v)
            store(out + at + g * D + v * LANES, load(&sums[g * D + v * LANES]) * (1 / totals[g]));
      }
    }
  }
}
