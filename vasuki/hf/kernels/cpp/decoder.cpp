// What a decoder with activations in float32 computes on a CPU: operator by operator, what lies before and behind a
// layer's attention, and whole layers, one after the other.

#include "decoder_layer.hpp"
#include "recurrences.hpp"

struct Tiles {
  const int64_t* at;  // [count, 4]
  int64_t count, longest;
};

// How a step's chunks lie in the KV cache, and the functions that a model's paged_attention.cpp is compiled to.
struct Attention {
  void (*write)(const float* keys, const float* values, const int64_t* rows, void* cache, int64_t tokens,
                int64_t key_stride, int64_t value_stride, int64_t block_tokens, int64_t num_kv_heads);
  void (*attend)(const float* query, const void* cache, const int64_t* tiles, const int64_t* tables, const float* sinks,
                 float* out, int64_t num_tiles, int64_t longest, int64_t width, int64_t block_tokens,
                 int64_t query_stride, int64_t num_heads, int64_t num_kv_heads, int64_t window, float scaling,
                 float softcap);
  const int64_t *rows, *tables;
  int64_t width, block_tokens;
  Tiles all, sampled;

  // joined [tokens, qkv.out], as `before_attention` leaves it
  void store(const DecoderLayer& layer, const float* joined, void* cache, int64_t tokens) const {
    const int64_t stride = layer.qkv.out;
    const float *keys = joined + layer.query_heads * layer.head_dim, *values = keys + layer.key_heads * layer.head_dim;
    write(keys, values, rows, cache, tokens, stride, stride, block_tokens, layer.key_heads);
  }
  // The same -> attended [tokens, o.in], of those that tiles are of.
  void of(const Tiles& tiles, const DecoderLayer& layer, const float* joined, const void* cache, float* attended) const {
    attend(joined, cache, tiles.at, tables, nullptr, attended, tiles.count, tiles.longest, width, block_tokens,
           layer.qkv.out, layer.query_heads, layer.key_heads, layer.window, layer.scaling, 0);
  }
};

// rows [count] of x [.., width] -> y [count, width]
static void pick(const float* x, const int64_t* rows, int64_t count, int64_t width, float* y) {
  for (int64_t i = 0; i < count; ++i) std::memcpy(y + i * width, x + rows[i] * width, width * sizeof *y);
}

enum Activation : int64_t { SIGMOID, SILU, GELU_TANH };

static inline Vec activated(Vec x, Activation kind) {
  if (kind == SIGMOID) return times_sigmoid(x == x ? Vec{} + 1.0f : x, x);  // of what is no number, none
  if (kind == SILU) return silu(x);
  // Its x / 2 (1 + tanh(u)) is x / (1 + exp(-2 u)).
  return times_sigmoid(x, 1.59576912f * x * multiply_add(0.044715f * x, x, Vec{} + 1.0f));
}

template <typename Use>
static float* floats_for(int64_t rows, int64_t width) {
  return static_cast<float*>(scratch<Use>(rows, width, Rows::FLOATS).at);
}

extern "C" {
int64_t vasuki_panel_columns() { return PANEL; }
int64_t vasuki_multiplies_bf16() { return MULTIPLIES_BF16; }
int64_t vasuki_has_tile_registers() { return tiles::usable(); }

void vasuki_linear(const Matrix* matrix, const float* x, float* y, int64_t rows) {
  matrix->multiply(floats(x, matrix->in), floats(y, matrix->out), rows);
}

void vasuki_gated(const Matrix* up, const Matrix* gate, const float* x, float* y, int64_t rows) {
  up->multiply_gated(*gate, floats(x, up->in), floats(y, up->out), rows);
}

void vasuki_rms_norm(const float* x, const float* weight, float* y, int64_t rows, int64_t width, float eps) {
  rms_norm(x, weight, floats(y, width), rows, eps);
}

void vasuki_rotate(float* x, const float* cos, const float* sin, int64_t tokens, int64_t stride, int64_t heads, int64_t dim,
                   int64_t rotated) {
  rotate(x, cos, sin, tokens, stride, heads, dim, rotated);
}

// x [count] -> y, by a function of single numbers
void vasuki_activate(const float* x, float* y, int64_t count, int64_t kind) {
#pragma omp parallel for if (worth_sharing(count))
  for (int64_t i = 0; i < count; i += LANES) {
    const Vec own = load_some(x + i, count - i);
    store_some(y + i, activated(own, Activation(kind)), count - i);
  }
}

int64_t vasuki_most_in_head() { return MOST_IN_HEAD; }
void vasuki_delta_rule(const DeltaRule* rule) { rule->all(); }
void vasuki_mamba_2(const Mamba2* mamba) { mamba->all(); }
void vasuki_mamba(const Mamba* mamba) { mamba->all(); }
void vasuki_convolution(const Convolution* convolution) { convolution->all(); }
void vasuki_convolution_step(const ConvolutionStep* step) { step->all(); }

void vasuki_before_attention(const DecoderLayer* layer, const Angles* angles, const float* x, float* joined,
                             int64_t tokens) {
  layer->before_attention(x, *angles, joined, tokens);
}

void vasuki_after_attention(const DecoderLayer* layer, const float* attended, const float* x, float* y, int64_t tokens,
                            int64_t with_mlp) {
  layer->after_attention(attended, x, y, tokens, with_mlp);
}

// x [tokens, hidden] is taken through `count` layers, each with a cache of its own. Of the last one nobody wants more than
// keys and values, but for samples [attention->sampled.count]: y [the same, hidden].
void vasuki_layers(const DecoderLayer* layers, int64_t count, const Angles* angles, const Attention* attention,
                   void* const* caches, float* x, int64_t tokens, const int64_t* samples, float* y) {
  for (int64_t i = 0; i < count; ++i) {
    const DecoderLayer& layer = layers[i];
    float* joined = floats_for<struct Joined>(tokens, layer.qkv.out);
    float* attended = floats_for<struct Attended>(tokens, layer.o.in);
    layer.before_attention(x, *angles, joined, tokens);
    attention->store(layer, joined, caches[i], tokens);
    if (i + 1 < count) {
      attention->of(attention->all, layer, joined, caches[i], attended);
      layer.after_attention(attended, x, x, tokens, true);
      continue;
    }
    const int64_t wanted = attention->sampled.count;
    float* picked = floats_for<struct Picked>(wanted, layer.o.in);
    attention->of(attention->sampled, layer, joined, caches[i], attended);
    pick(attended, samples, wanted, layer.o.in, picked);
    pick(x, samples, wanted, layer.o.out, y);
    layer.after_attention(picked, y, y, wanted, true);
  }
}
}
