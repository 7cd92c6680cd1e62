// y = x W^T + b in float32, for the few rows of a step, on a CPU. Of a gated MLP, both products and what joins them:
// y = (x U^T + c) * silu(x W^T + b), tile by tile, so that neither product is ever in memory as a whole.
//
//   x [rows, in]     in tiles of ROWS rows, as they lie
//   W [out, in]      in panels of PANEL outputs, so that the inner loop reads one stream: [out / PANEL][in][PANEL]
//
// Weights that were saved in bfloat16 stay so and are widened in registers: that halves the traffic that bounds a step of
// few rows, and changes no value. Every output is summed over `in` from first to last, whatever the number of rows, so
// that a row's result does not depend on its neighbours.

#include "vectors.hpp"

constexpr int64_t BAND = 16 * ROWS;         // rows that a panel serves before the next one is read
constexpr int64_t WORTH_THREADS = 1 << 19;  // multiplications; below that, waking threads takes longer than they save

template <typename W>
struct Layer {
  const W* panels;
  const float* bias;  // [out] or null

  // outputs = x[first ..] W^T + b for one panel.
  template <int rows>
  void operator()(const float* x, int64_t in, int64_t panel, int64_t valid, float (&outputs)[rows][PANEL]) const {
    Vec sums[rows][2] = {};
    multiply<rows>(x, in, panels + panel * PANEL * in, PANEL, in, sums);
    std::memcpy(outputs, sums, sizeof outputs);
    if (bias)
      for (int r = 0; r < rows; ++r)
        for (int64_t j = 0; j < valid; ++j) outputs[r][j] += bias[panel * PANEL + j];
  }
};

static inline float silu(float x) {
  const float e = exp_negative(-std::abs(x));
  return x * (x < 0 ? e : 1.0f) / (1.0f + e);
}

// y = layer(x), or layer(x) * silu(gate(x)), panel by panel.
template <typename W, bool gated>
static void linear(const float* x, Layer<W> layer, Layer<W> gate, float* y, int64_t rows, int64_t in, int64_t out) {
  const int64_t num_panels = (out + PANEL - 1) / PANEL;
#pragma omp parallel for schedule(dynamic) collapse(2) if (rows * in * out >= WORTH_THREADS)
  for (int64_t band = 0; band < rows; band += BAND)
    for (int64_t p = 0; p < num_panels; ++p) {
      const int64_t valid = std::min<int64_t>(PANEL, out - p * PANEL);
      for_tiles(band, std::min(BAND, rows - band), [&](int64_t first, auto tile) {
        float outputs[tile][PANEL];
        layer(x + first * in, in, p, valid, outputs);
        if constexpr (gated) {
          float gates[tile][PANEL];
          gate(x + first * in, in, p, valid, gates);
          for (int r = 0; r < tile; ++r)
            for (int j = 0; j < PANEL; ++j) outputs[r][j] *= silu(gates[r][j]);
        }
        for (int r = 0; r < tile; ++r)
          std::memcpy(y + (first + r) * out + p * PANEL, outputs[r], valid * sizeof(float));
      });
    }
}

extern "C" {
int64_t vasuki_panel_columns() { return PANEL; }

// x [rows, in], panels as above, biases [out] or null, y [rows, out]
#define LINEAR(NAME, W)                                                                                               \
  void vasuki_linear_##NAME(const float* x, const W* panels, const float* bias, float* y, int64_t rows, int64_t in,   \
                            int64_t out) {                                                                            \
    linear<W, false>(x, {panels, bias}, {}, y, rows, in, out);                                                        \
  }                                                                                                                   \
  void vasuki_gated_##NAME(const float* x, const W* panels, const float* bias, const W* gate_panels,                  \
                           const float* gate_bias, float* y, int64_t rows, int64_t in, int64_t out) {                 \
    linear<W, true>(x, {panels, bias}, {gate_panels, gate_bias}, y, rows, in, out);                                   \
  }
LINEAR(bf16, bf16)
LINEAR(float, float)
}
