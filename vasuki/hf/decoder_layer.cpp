// What a decoder layer of a model in float32 computes beside its attention, on a CPU: operator by operator, and all that
// lies before and behind attention in a call.

#include <memory>

#include "packed_linear.hpp"
#include "rms_norm.hpp"
#include "rotary.hpp"

// Memory for what does not leave a call. It is kept for the next one of the same use.
template <typename Use, typename T>
static T* scratch(int64_t count) {
  static thread_local std::unique_ptr<T[]> kept;
  static thread_local int64_t size = 0;
  if (count > size) kept.reset(new T[size = count]);
  return kept.get();
}

// x [count], two and two.
static const Bf16s* rounded(const float* x, int64_t count) {
  Bf16s* to = scratch<struct Inputs, Bf16s>(count / 2);
#pragma omp parallel for if (count >= WORTH_SHARING)
  for (int64_t i = 0; i < count / 2; ++i) round_to(to[i], x[2 * i], x[2 * i + 1]);
  return to;
}

enum Format : int64_t {
  WIDE,     // weights in float32
  NARROW,   // weights in bfloat16
  ROUNDED,  // weights in bfloat16, and inputs are rounded to it; where processors multiply that
};

struct Matrix {
  const void* panels;
  const float* bias;  // [out] or null
  int64_t in, out;
  Format format;

  // y [rows, out] = x [rows, in] W^T + b
  void multiply(const float* x, float* y, int64_t rows) const { run<false>(*this, x, y, rows); }
  // y [rows, out] = (x W^T + b) * silu(gate(x))
  void multiply_gated(const Matrix& gate, const float* x, float* y, int64_t rows) const { run<true>(gate, x, y, rows); }

 private:
  template <bool gated>
  void run(const Matrix& gate, const float* x, float* y, int64_t rows) const {
    if (format == WIDE) return linear<gated>(x, of<float>(), gate.of<float>(), y, rows, in, out);
    if (format == NARROW) return linear<gated>(x, of<bf16>(), gate.of<bf16>(), y, rows, in, out);
    if constexpr (MULTIPLIES_BF16)
      linear<gated>(rounded(x, rows * in), of<Bf16s>(), gate.of<Bf16s>(), y, rows, in / 2, out);
  }
  template <typename W>
  Layer<W> of() const {
    return {static_cast<const W*>(panels), bias};
  }
};

struct Norm {
  const float* weight;  // or null: there is none
  float eps;
};

struct DecoderLayer {
  Norm first, second, query, key;
  Matrix qkv, o, up, gate, down;
  int64_t query_heads, key_heads, head_dim;
};

static void add(const float* x, float* y, int64_t count) {
#pragma omp parallel for if (count >= WORTH_SHARING)
  for (int64_t i = 0; i < count; ++i) y[i] += x[i];
}

extern "C" {
int64_t vasuki_panel_columns() { return PANEL; }
int64_t vasuki_multiplies_bf16() { return MULTIPLIES_BF16; }

void vasuki_linear(const Matrix* matrix, const float* x, float* y, int64_t rows) { matrix->multiply(x, y, rows); }

void vasuki_gated(const Matrix* up, const Matrix* gate, const float* x, float* y, int64_t rows) {
  up->multiply_gated(*gate, x, y, rows);
}

void vasuki_rms_norm(const float* x, const float* weight, float* y, int64_t rows, int64_t width, float eps) {
  rms_norm(x, weight, y, rows, width, eps);
}

void vasuki_rotate(float* x, const float* cos, const float* sin, int64_t tokens, int64_t stride, int64_t heads, int64_t dim,
                   int64_t rotated) {
  rotate(x, cos, sin, tokens, stride, heads, dim, rotated);
}

// x [tokens, hidden] -> joined queries, keys and values [tokens, qkv.out], of which the heads of the first two are normed,
// if there are norms for them, and rotated by angles cos, sin [tokens, rotated].
void vasuki_before_attention(const DecoderLayer* layer, const float* x, const float* cos, const float* sin, float* qkv,
                             int64_t tokens, int64_t rotated) {
  const int64_t hidden = layer->qkv.in, stride = layer->qkv.out, dim = layer->head_dim;
  const int64_t queries = layer->query_heads, keys = layer->key_heads;
  float* normed = scratch<struct Normed, float>(tokens * hidden);
  rms_norm(x, layer->first.weight, normed, tokens, hidden, layer->first.eps);
  layer->qkv.multiply(normed, qkv, tokens);
  if (layer->query.weight) norm_heads(qkv, layer->query.weight, tokens, stride, queries, dim, layer->query.eps);
  if (layer->key.weight) norm_heads(qkv + queries * dim, layer->key.weight, tokens, stride, keys, dim, layer->key.eps);
  rotate(qkv, cos, sin, tokens, stride, queries + keys, dim, rotated);
}

// attended [tokens, o.in], x [tokens, hidden] -> y = x + o(attended), and y normed for the MLP.
void vasuki_after_attention(const DecoderLayer* layer, const float* attended, const float* x, float* y, float* normed,
                            int64_t tokens) {
  const int64_t hidden = layer->o.out;
  layer->o.multiply(attended, y, tokens);
  add(x, y, tokens * hidden);
  rms_norm(y, layer->second.weight, normed, tokens, hidden, layer->second.eps);
}

// y += mlp(normed)
void vasuki_add_mlp(const DecoderLayer* layer, const float* normed, float* y, int64_t tokens) {
  const int64_t hidden = layer->down.out, inner = layer->down.in;
  float *between = scratch<struct Between, float>(tokens * (inner + hidden)), *output = between + tokens * inner;
  layer->up.multiply_gated(layer->gate, normed, between, tokens);
  layer->down.multiply(between, output, tokens);
  add(output, y, tokens * hidden);
}
}
