// y = x W^T + b in float32, for the few rows of a step, on a CPU. Of a gated MLP, both products and what joins them:
// y = (x U^T + c) * silu(x W^T + b), tile by tile, so that neither product is ever in memory as a whole.
//
//   x [rows, in]     in tiles of ROWS rows, as they lie
//   W [out, in]      in panels of PANEL outputs, so that the inner loop reads one stream: [out / PANEL][in][PANEL]
//
// Weights that were saved in bfloat16 stay so, which halves the traffic that bounds a step of few rows. Where x is float32
// they are widened in registers, which changes no value. In a model that computes in bfloat16 x is rounded to it, and
// weights lie in pairs of successive inputs, [out / PANEL][in / 2][PANEL][2], as processors multiply bfloat16. Every output
// is summed over `in` from first to last, whatever the number of rows, so that a row's result does not depend on its
// neighbours.

#pragma once

#include <omp.h>

#include "vectors.hpp"

constexpr int64_t BAND = 16 * ROWS;         // rows that a panel serves before the next one is read
constexpr int STREAMS = 4;                  // most panels that are read side by side
constexpr int64_t FEW_TILES = 3;            // of rows: they use a panel up before the next one has come by itself
constexpr int64_t LINE = 64;                // bytes of a line of the processor's cache
constexpr int64_t WORTH_THREADS = 1 << 19;  // multiplications; below that, waking threads takes longer than they save

static inline int64_t valid_columns(int64_t panel, int64_t out) { return std::min<int64_t>(PANEL, out - panel * PANEL); }

// The panel that this thread needs next. Each of `parts` tiles asks for its part of it while it computes.
struct Next {
  int64_t panel, part, parts;
};
struct Unknown {};

struct Prefetch {
  const char* line;
  int64_t every, due = 0;  // rows of the panel at hand

  void operator()(int64_t k) {
    if (k != due) return;
    __builtin_prefetch(line, 0, 2);
    line += LINE;
    due += every;
  }
};

// `depth` rows of W make a panel, and as many X a row of x: one for each input, or for two.
template <typename W>
struct Layer {
  const W* panels;
  const float* bias;  // [out] or null

  Prefetch meanwhile(Next next, int64_t depth) const {
    constexpr int64_t row_bytes = PANEL * sizeof(W);
    const int64_t every = std::max<int64_t>(1, next.parts * LINE / row_bytes);
    const char* panel = reinterpret_cast<const char*>(panels) + next.panel * depth * row_bytes;
    return {panel + depth / every * LINE * next.part, every};
  }
  Nothing meanwhile(Unknown, int64_t) const { return {}; }

  // outputs = x[first ..] W^T + b for neighbouring panels.
  template <int streams, int rows, typename X, typename Ahead>
  void operator()(const X* x, int64_t depth, int64_t out, int64_t panel, Ahead next,
                  float (&outputs)[streams][rows][PANEL]) const {
    Vec sums[streams][rows][2] = {};
    const int64_t size = PANEL * depth;
    multiply<streams, rows>(x, depth, 1, panels + panel * size, PANEL, size, depth, sums, meanwhile(next, depth));
    std::memcpy(outputs, sums, sizeof outputs);
    if (bias)
      for (int s = 0; s < streams; ++s)
        for (int r = 0; r < rows; ++r)
          for (int64_t j = 0; j < valid_columns(panel + s, out); ++j) outputs[s][r][j] += bias[(panel + s) * PANEL + j];
  }
};

static inline float silu(float x) {
  const float e = exp_negative(-std::abs(x));
  return x * (x < 0 ? e : 1.0f) / (1.0f + e);
}

// y = layer(x), or layer(x) * silu(gate(x)), for a tile of rows and neighbouring panels.
template <bool gated, int streams, int rows, typename X, typename W, typename Ahead>
static void linear_tile(const X* x, Layer<W> layer, Layer<W> gate, float* y, int64_t depth, int64_t out, int64_t panel,
                        Ahead next) {
  float outputs[streams][rows][PANEL];
  layer(x, depth, out, panel, next, outputs);
  if constexpr (gated) {
    float gates[streams][rows][PANEL];
    gate(x, depth, out, panel, next, gates);
    for (int s = 0; s < streams; ++s)
      for (int r = 0; r < rows; ++r)
        for (int j = 0; j < PANEL; ++j) outputs[s][r][j] *= silu(gates[s][r][j]);
  }
  for (int s = 0; s < streams; ++s)
    for (int r = 0; r < rows; ++r)
      std::memcpy(y + r * out + (panel + s) * PANEL, outputs[s][r], valid_columns(panel + s, out) * sizeof(float));
}

// The same for all of them. So few rows that they leave registers free read several panels side by side: their weights come
// from memory, and one chain of sums would wait for it.
template <bool gated, typename X, typename W>
static void linear(const X* x, Layer<W> layer, Layer<W> gate, float* y, int64_t rows, int64_t depth, int64_t out) {
  if (rows == 0) return;  // a step in which nothing is sampled
  const int64_t num_panels = (out + PANEL - 1) / PANEL, streams = std::clamp<int64_t>(ROWS / rows, 1, STREAMS);
  const int64_t threads = omp_get_max_threads();
#pragma omp parallel for schedule(dynamic) collapse(2) if (rows * depth * out >= WORTH_THREADS)
  for (int64_t band = 0; band < rows; band += BAND)
    for (int64_t p = 0; p < num_panels; p += streams) {
      const int64_t count = std::min(BAND, rows - band), tiles = (count + ROWS - 1) / ROWS;
      for_tiles(band, count, [&](int64_t first, auto tile) {
        constexpr int together = std::clamp<int>(ROWS / tile, 1, STREAMS);
        const X* from = x + first * depth;
        float* to = y + first * out;
        if (streams > 1 && streams == together && p + streams <= num_panels)
          return linear_tile<gated, together, tile>(from, layer, gate, to, depth, out, p, Unknown{});
        for (int64_t own = p; own < std::min(p + streams, num_panels); ++own)
          if (streams == 1 && tiles <= FEW_TILES) {
            const Next next{std::min(own + threads, num_panels - 1), (first - band) / ROWS, tiles};
            linear_tile<gated, 1, tile>(from, layer, gate, to, depth, out, own, next);
          } else {
            linear_tile<gated, 1, tile>(from, layer, gate, to, depth, out, own, Unknown{});
          }
      });
    }
}
