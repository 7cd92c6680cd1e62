// A decoder layer without its attention, with activations in float32, on a CPU.

#pragma once

#include "packed_linear.hpp"
#include "rms_norm.hpp"
#include "rotary.hpp"
#include "tile_linear.hpp"

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
    if (format != ROUNDED) return scratch<Use>(rows, in, Rows::FLOATS);
    return scratch<Use>(rows, in, tiles::many(rows, in / 2) ? Rows::TILES : Rows::ROUNDED);
  }
  // y [rows, out] = x [rows, in] W^T + b, and `plus` [rows, out] if it is given; y may be `plus`
  void multiply(Rows x, Rows y, int64_t rows, const float* plus = nullptr) const { run<false>(*this, x, plus, y, rows); }
  // y [rows, out] = (x W^T + b) * silu(gate(x))
  void multiply_gated(const Matrix& gate, Rows x, Rows y, int64_t rows) const { run<true>(gate, x, nullptr, y, rows); }

 private:
  template <bool gated>
  void run(const Matrix& gate, Rows x, const float* plus, Rows y, int64_t rows) const {
    const float* wide = static_cast<const float*>(x.at);
    if (format == WIDE) return linear<gated>(wide, of<float>(), gate.of<float>(), plus, y, rows);
    if (format == NARROW) return linear<gated>(wide, of<bf16>(), gate.of<bf16>(), plus, y, rows);
    if constexpr (MULTIPLIES_BF16) {
      const Rows given = x.kind == Rows::FLOATS ? round_all(wide, rows) : x;
      const Bf16s* pairs = static_cast<const Bf16s*>(given.at);
      if (given.kind == Rows::TILES) return tiles::linear<gated>(pairs, of<Bf16s>(), gate.of<Bf16s>(), plus, y, rows);
      linear<gated>(pairs, of<Bf16s>(), gate.of<Bf16s>(), plus, y, rows);
    }
  }
  template <typename W>
  Layer<W> of() const {
    return {static_cast<const W*>(panels), bias, std::is_same_v<W, Bf16s> ? in / 2 : in, out};
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

// Rows that a thread takes through several operators, so that what one leaves is in its cache for the next, and threads wait
// for each other once. Slabs of fewer rows would read weights too often; so few rows are shared out operator by operator.
struct Slabs {
  int64_t most, least, together;  // rows: of a slab, and those that are multiplied together, so that few are left over

  // Of rows that begin with a product by this matrix. Tile registers take weights in faster than vectors do.
  static Slabs of(const Matrix& first) {
    if (first.format == ROUNDED && tiles::take<Bf16s>(first.in / 2)) return {256, 64, tiles::ROWS};
    return {128, 32, ROWS};
  }

  // Calls body(first, count) for all rows, or for slabs of nearly equal size.
  template <typename Body>
  void each(int64_t rows, Body&& body) const {
    const int64_t threads = omp_get_max_threads(), parts = (rows + together - 1) / together;
    if (threads == 1 || rows < least * threads) return body(0, rows);
    const int64_t slabs = (rows + most * threads - 1) / (most * threads) * threads;
    const auto begin = [&](int64_t slab) { return std::min(rows, parts * slab / slabs * together); };
#pragma omp parallel for schedule(dynamic)
    for (int64_t slab = 0; slab < slabs; ++slab) body(begin(slab), begin(slab + 1) - begin(slab));
  }
};

static Rows floats(const float* x, int64_t width) { return {const_cast<float*>(x), width, Rows::FLOATS}; }

struct Angles {
  const float *cos, *sin;  // [tokens, rotated]
  int64_t rotated;
};

struct DecoderLayer {
  Norm first, second, query, key;
  Matrix qkv, o, up, gate, down;
  int64_t query_heads, key_heads, head_dim;
  int64_t window;  // as vasuki_paged_attention takes it, and
  float scaling;

  // x [tokens, hidden] -> joined queries, keys and values [tokens, qkv.out], of which the heads of the first two are
  // normed, if there are norms for them, and rotated.
  void before_attention(const float* x, const Angles& angles, float* joined, int64_t tokens) const {
    const int64_t stride = qkv.out, rotated = angles.rotated;
    Slabs::of(qkv).each(tokens, [&](int64_t begin, int64_t count) {
      const Rows normed = qkv.inputs<struct Normed>(count);
      float *queries = joined + begin * stride, *keys = queries + query_heads * head_dim;
      rms_norm(x + begin * qkv.in, first.weight, normed, count, first.eps);
      qkv.multiply(normed, floats(queries, stride), count);
      if (query.weight) norm_heads(queries, query.weight, count, stride, query_heads, head_dim, query.eps);
      if (key.weight) norm_heads(keys, key.weight, count, stride, key_heads, head_dim, key.eps);
      rotate(queries, angles.cos + begin * rotated, angles.sin + begin * rotated, count, stride, query_heads + key_heads,
             head_dim, rotated);
    });
  }

  // attended [tokens, o.in], x [tokens, hidden] -> y = x + o(attended), and if `with_mlp` y += mlp(norm(y)); y may be x
  void after_attention(const float* attended, const float* x, float* y, int64_t tokens, bool with_mlp) const {
    const int64_t hidden = o.out;
    Slabs::of(o).each(tokens, [&](int64_t begin, int64_t count) {
      float* own = y + begin * hidden;
      o.multiply(floats(attended + begin * o.in, o.in), floats(own, hidden), count, x + begin * hidden);
      if (!with_mlp) return;
      const Rows normed = up.inputs<struct Normed>(count), between = down.inputs<struct Between>(count);
      rms_norm(own, second.weight, normed, count, second.eps);
      up.multiply_gated(gate, normed, between, count);
      down.multiply(between, floats(own, hidden), count, own);
    });
  }
};
