// y = x W^T + b in float32, for the few rows of a step, on a CPU.
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
static void linear(const float* x, const W* panels, const float* bias, float* y, int64_t rows, int64_t in, int64_t out) {
  const int64_t num_panels = (out + PANEL - 1) / PANEL;
#pragma omp parallel for schedule(dynamic, 4) collapse(2) if (rows * in * out >= WORTH_THREADS)
  for (int64_t band = 0; band < rows; band += BAND)
    for (int64_t p = 0; p < num_panels; ++p) {
      const int64_t valid = std::min<int64_t>(PANEL, out - p * PANEL);
      for_tiles(band, std::min(BAND, rows - band), [&](int64_t first, auto tile) {
        Vec sums[tile][2] = {};
        multiply<tile>(x + first * in, in, panels + p * PANEL * in, PANEL, in, sums);
        for (int64_t r = 0; r < tile; ++r) {
          float outputs[PANEL];
          std::memcpy(outputs, sums[r], sizeof outputs);
          float* to = y + (first + r) * out + p * PANEL;
          for (int64_t j = 0; j < valid; ++j) to[j] = outputs[j] + (bias ? bias[p * PANEL + j] : 0);
        }
      });
    }
}

extern "C" {
int64_t vasuki_panel_columns() { return PANEL; }

// x [rows, in], panels as above, bias [out] or null, y [rows, out]
void vasuki_linear_bf16(const float* x, const bf16* panels, const float* bias, float* y, int64_t rows, int64_t in,
                        int64_t out) {
  linear(x, panels, bias, y, rows, in, out);
}
void vasuki_linear_float(const float* x, const float* panels, const float* bias, float* y, int64_t rows, int64_t in,
                         int64_t out) {
  linear(x, panels, bias, y, rows, in, out);
}
}
