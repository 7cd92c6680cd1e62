// What a decoder layer of a model in float32 computes beside its attention, on a CPU: operator by operator, and all that
// lies before and behind attention in a call each.

#include <memory>

#include "packed_linear.hpp"
#include "rms_norm.hpp"
#include "rotary.hpp"

// Memory for what does not leave a call. It is kept for the next one of the same use.
template <typename Use>
static Rows scratch(int64_t rows, int64_t width, bool in_bf16) {
  static thread_local std::unique_ptr<float[]> kept;
  static thread_local int64_t size = 0;
  if (rows * width > size) kept.reset(new float[size = rows * width]);
  return {kept.get(), width, in_bf16};
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

  // Memory for inputs as it takes them.
  template <typename Use>
  Rows inputs(int64_t rows) const {
    return scratch<Use>(rows, in, format == ROUNDED);
  }
  // y [rows, out] = x [rows, in] W^T + b, and `plus` [rows, out] if it is given; y may be `plus`
  void multiply(Rows x, Rows y, int64_t rows, const float* plus = nullptr) const { run<false>(*this, x, plus, y, rows); }
  // y [rows, out] = (x W^T + b) * silu(gate(x))
  void multiply_gated(const Matrix& gate, Rows x, Rows y, int64_t rows) const { run<true>(gate, x, nullptr, y, rows); }

 private:
  template <bool gated>
  void run(const Matrix& gate, Rows x, const float* plus, Rows y, int64_t rows) const {
    const float* wide = static_cast<const float*>(x.at);
    if (format == WIDE) return linear<gated>(wide, of<float>(), gate.of<float>(), plus, y, rows, in);
    if (format == NARROW) return linear<gated>(wide, of<bf16>(), gate.of<bf16>(), plus, y, rows, in);
    if constexpr (MULTIPLIES_BF16) {
      const Bf16s* pairs = static_cast<const Bf16s*>(x.in_bf16 ? x.at : round_all(wide, rows).at);
      linear<gated>(pairs, of<Bf16s>(), gate.of<Bf16s>(), plus, y, rows, in / 2);
    }
  }
  template <typename W>
  Layer<W> of() const {
    return {static_cast<const W*>(panels), bias};
  }
  Rows round_all(const float* x, int64_t rows) const {
    const Rows y = inputs<struct Rounded>(rows);
#pragma omp parallel for if (worth_sharing(rows * in))
    for (int64_t row = 0; row < rows; ++row)
      for (int64_t i = 0; i < in; i += LANES) y.store(row, i, load_some(x + row * in + i, in - i));
    return y;
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

// Rows that a thread takes through several operators, so that what one leaves is in its cache for the next, and threads wait
// for each other once. Slabs of fewer rows would read weights too often; so few rows are shared out operator by operator.
constexpr int64_t SLAB = 128, LEAST_SLAB = 32;

// Calls body(first, count) for all rows, or for slabs of nearly equal size.
template <typename Body>
static void in_slabs(int64_t rows, Body&& body) {
  const int64_t threads = omp_get_max_threads(), tiles = (rows + ROWS - 1) / ROWS;
  if (threads == 1 || rows < LEAST_SLAB * threads) return body(0, rows);
  const int64_t slabs = (rows + SLAB * threads - 1) / (SLAB * threads) * threads;
  const auto begin = [&](int64_t slab) { return std::min(rows, tiles * slab / slabs * ROWS); };
#pragma omp parallel for schedule(dynamic)
  for (int64_t slab = 0; slab < slabs; ++slab) body(begin(slab), begin(slab + 1) - begin(slab));
}

static Rows floats(const float* x, int64_t width) { return {const_cast<float*>(x), width, false}; }

extern "C" {
int64_t vasuki_panel_columns() { return PANEL; }
int64_t vasuki_multiplies_bf16() { return MULTIPLIES_BF16; }

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

// x [tokens, hidden] -> joined queries, keys and values [tokens, qkv.out], of which the heads of the first two are normed,
// if there are norms for them, and rotated by angles cos, sin [tokens, rotated].
void vasuki_before_attention(const DecoderLayer* layer, const float* x, const float* cos, const float* sin, float* qkv,
                             int64_t tokens, int64_t rotated) {
  const int64_t stride = layer->qkv.out, dim = layer->head_dim, queries = layer->query_heads, keys = layer->key_heads;
  in_slabs(tokens, [&](int64_t first, int64_t count) {
    const Rows normed = layer->qkv.inputs<struct Normed>(count);
    float* own = qkv + first * stride;
    rms_norm(x + first * layer->qkv.in, layer->first.weight, normed, count, layer->first.eps);
    layer->qkv.multiply(normed, floats(own, stride), count);
    if (layer->query.weight) norm_heads(own, layer->query.weight, count, stride, queries, dim, layer->query.eps);
    if (layer->key.weight) norm_heads(own + queries * dim, layer->key.weight, count, stride, keys, dim, layer->key.eps);
    rotate(own, cos + first * rotated, sin + first * rotated, count, stride, queries + keys, dim, rotated);
  });
}

// attended [tokens, o.in], x [tokens, hidden] -> y = x + o(attended), and if `with_mlp` y += mlp(norm(y)).
void vasuki_after_attention(const DecoderLayer* layer, const float* attended, const float* x, float* y, int64_t tokens,
                            int64_t with_mlp) {
  const int64_t in = layer->o.in, hidden = layer->o.out;
  in_slabs(tokens, [&](int64_t first, int64_t count) {
    float* own = y + first * hidden;
    layer->o.multiply(floats(attended + first * in, in), floats(own, hidden), count, x + first * hidden);
    if (!with_mlp) return;
    const Rows normed = layer->up.inputs<struct Normed>(count), between = layer->down.inputs<struct Between>(count);
    rms_norm(own, layer->second.weight, normed, count, layer->second.eps);
    layer->up.multiply_gated(layer->gate, normed, between, count);
    layer->down.multiply(between, floats(own, hidden), count, own);
  });
}
}
