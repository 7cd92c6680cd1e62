// The products of packed_linear.hpp for many rows, by tile registers: 32 rows by a panel at a time, of which a quarter is in
// each of four registers. Weights are what the first-level cache holds, and rows come past it from the second: they lie in
// tiles, so that each is loaded from as few lines as can be.
//
//   x [rows / 16][in / 32][16][32]     bfloat16
//
// A sum that does not fit is put down in float32 and taken up again, which changes no bit: sums are those of few rows.

#pragma once

#include "packed_linear.hpp"
#include "scratch.hpp"

namespace tiles {

constexpr int64_t HELD = 288;         // pairs of a panel in the first-level cache
constexpr int64_t KEPT = 1 << 18;     // pairs of rows in the second-level cache
constexpr int64_t MOST_BAND = 512;    // rows
constexpr int64_t LEAST_BAND = 256;   // rows, or weights would come from memory faster than it gives them
constexpr int64_t TOGETHER = 16;      // panels that rows serve while they are in the cache, if they do not fit as a whole

// Whether so many rows of `depth` pairs are multiplied like this.
static inline bool many(int64_t rows, int64_t depth) { return rows > ROWS && take<Bf16s>(depth); }

#ifdef __AMX_BF16__
constexpr int64_t TILE = 16 * DEPTH;   // pairs
constexpr int64_t BLOCK = ROWS * PANEL;  // sums

// What is read soon, and written, is asked for while products are computed.
struct Ahead {
  const Bf16s* weights;  // a line after the other
  int64_t lines;         // of them, in a step
  const char* written = nullptr;  // rows that are written next, two lines of each
  int64_t stride = 0;             // bytes

  void step(int64_t k) {
    for (int64_t i = 0; i < lines; ++i, weights += LINE / sizeof *weights) __builtin_prefetch(weights, 0, 2);
    if (!written) return;
    for (int64_t row = 0; row < 2; ++row, written += stride) {
      __builtin_prefetch(written, 1, 3);
      __builtin_prefetch(written + LINE, 1, 3);
    }
  }
};

// sums [16 * tiles][PANEL] plus or = rows . panel, over `depth` pairs. Tiles of the lower 16 rows lie `below` pairs further.
template <int tiles>
[[gnu::noinline]] static void multiply_block(const Bf16s* rows, int64_t below, const Bf16s* panel, int64_t depth,
                                             bool adds, float* sums, Ahead& ahead) {
  constexpr int64_t bytes = PANEL * sizeof *sums;
  float* sums_below = sums + BLOCK / 2;
  take_up(adds, tiles > 1, sums, sums_below, bytes);
  for (int64_t k = 0; k < depth; k += DEPTH) {
    ahead.step(k);
    _tile_loadd(6, panel, PANEL * sizeof *panel);
    _tile_stream_loadd(4, rows, DEPTH * sizeof *rows);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, panel + COLUMNS, PANEL * sizeof *panel);
    _tile_dpbf16ps(1, 4, 7);
    if constexpr (tiles > 1) {
      _tile_stream_loadd(5, rows + below, DEPTH * sizeof *rows);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    panel += DEPTH * PANEL;
    rows += TILE;
  }
  put_down(tiles > 1, sums, sums_below, bytes);
}

// How x is cut, so that caches hold what is used again.
struct Cut {
  int64_t band, slice, panels;  // rows, pairs of them, and the panels that they serve

  Cut(int64_t rows, int64_t depth) {
    band = std::min({(rows + ROWS - 1) / ROWS * ROWS, MOST_BAND, std::max(LEAST_BAND, KEPT / depth / ROWS * ROWS)});
    slice = std::min(depth, KEPT / band / DEPTH * DEPTH);
    panels = slice < depth ? TOGETHER : 1;
  }
};

template <bool gated>
static void linear(const Bf16s* x, Layer<Bf16s> layer, Layer<Bf16s> gate, const float* plus, Rows y, int64_t rows) {
  const int64_t depth = layer.depth, num_panels = (y.width + PANEL - 1) / PANEL;
  const Ending<gated, Bf16s> ending{layer, gate, {y, plus}};
  const Cut cut(rows, depth);
  const auto serve = [&](int64_t band, int64_t count, int64_t first, int64_t last) {
    Registers registers;
    registers.use(ROWS);
    constexpr int64_t products = 1 + gated;
    const int64_t blocks = (count + ROWS - 1) / ROWS, panel_sums = blocks * BLOCK;
    float* sums = static_cast<float*>(scratch<struct Sums>((last - first) * products * panel_sums, 1, Rows::FLOATS).at);
    // A block of them is enough where each is done with at once, and stays in the first-level cache.
    const bool at_once = !gated && depth <= HELD;
    for (int64_t slice = 0; slice < depth; slice += cut.slice)
      for (int64_t p = first; p < last; ++p)
        for (int64_t product = 0; product < products; ++product) {
          const Layer<Bf16s>& own = product ? gate : layer;
          float* to = sums + ((p - first) * products + product) * panel_sums;
          for_even_parts(std::min(cut.slice, depth - slice) / DEPTH, HELD / DEPTH, [&](int64_t begin, int64_t steps) {
            const int64_t k = slice + begin * DEPTH, part = steps * DEPTH;
            const Bf16s* panel = own.panel(p) + k * PANEL;
            const bool whole = k + part == depth && product + 1 == products;
            const int64_t lines = part * PANEL * sizeof *panel / LINE;
            Ahead ahead{panel + part * PANEL, (lines + blocks * steps - 1) / (blocks * steps)};
            for (int64_t block = 0; block < blocks; ++block) {
              const int64_t row = band + block * ROWS, taken = std::min(ROWS, rows - row);
              const Bf16s* from = x + row * depth + k * 16;
              float* own_sums = to + (at_once ? 0 : block * BLOCK);
              if (y.kind == Rows::FLOATS && whole) {
                ahead.written = static_cast<const char*>(y.at) + (row * y.width + p * PANEL) * 4;
                ahead.stride = y.width * 4;
              }
              if (taken > 16)
                multiply_block<2>(from, depth * 16, panel, part, k > 0, own_sums, ahead);
              else
                multiply_block<1>(from, 0, panel, part, k > 0, own_sums, ahead);
              if (whole) ending(own_sums - product * panel_sums, own_sums, PANEL, row, taken, p, 1);
            }
          });
        }
  };
  const int64_t threads = threads_for(rows * depth * y.width);
#pragma omp parallel for schedule(dynamic) collapse(2) num_threads(threads)
  for (int64_t band = 0; band < rows; band += cut.band)
    for (int64_t p = 0; p < num_panels; p += cut.panels)
      serve(band, std::min(cut.band, rows - band), p, std::min(p + cut.panels, num_panels));
}
#else
template <bool gated>
static void linear(const Bf16s*, Layer<Bf16s>, Layer<Bf16s>, const float*, Rows, int64_t) {}
#endif

}  // namespace tiles
