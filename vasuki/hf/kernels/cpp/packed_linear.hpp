// y = x W^T + b in float32, for the few rows of a step, on a CPU, and what follows, while sums are at hand: y is added to
// a residual, or rounded for the next product. Of a gated MLP, both products and what joins them:
// y = (x U^T + c) * silu(x W^T + b), so that neither product is ever in memory as a whole.
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

#include "tile_registers.hpp"
#include "vectors.hpp"

constexpr int64_t BAND = 16 * ROWS;         // rows that a panel serves before the next one is read
constexpr int64_t CHUNK = 1024;             // rows of a panel that serve a band before the next: what a cache holds
constexpr int64_t SHARES = 4;               // of the work that each thread takes, or more
constexpr int STREAMS = 4;                  // most panels that are read side by side
constexpr int64_t LINE = 64;                // bytes of a line of the processor's cache
constexpr int64_t WORTH_THREADS = 1 << 19;  // multiplications; below that, waking threads takes longer than they save

// Outputs of `depth` rows of W a panel, and as many X a row of x: one for each input, or for two.
template <typename W>
struct Layer {
  const W* panels;
  const float* bias;  // [out] or null
  int64_t depth, out;

  const W* panel(int64_t index) const { return panels + index * PANEL * depth; }
  Vec bias_at(int64_t column) const { return bias ? load_some(bias + column, out - column) : Vec{}; }
};

// Rows of panels, `stride` apart, that are multiplied next. Each of `parts` tiles asks for its part of them meanwhile,
// but not for more than a line of each panel in a step: what is read faster, the processor sees coming.
template <typename W>
struct Next {
  const W* panel;
  int64_t stride, rows, part, parts;

  template <int panels>
  auto prefetch(int64_t steps) const {
    const int64_t lines = rows * PANEL * sizeof(W) / LINE, first = lines * part / parts, own = lines / parts;
    const int64_t every = 0 < own && own <= steps ? steps / own : 0, bytes = stride * sizeof(W);
    const char* line = reinterpret_cast<const char*>(panel) + first * LINE;
    return [=, due = every - 1](int64_t k) mutable {
      if (k != due) return;
#pragma GCC unroll 4
      for (int p = 0; p < panels; ++p) __builtin_prefetch(line + p * bytes, 0, 2);
      line += LINE;
      due += every;
    };
  }
};

// sums [rows][panels][2] += x . neighbouring panels, over `depth` of their rows. A function of its own keeps sums in
// registers.
template <int panels, int rows, typename X, typename W>
[[gnu::noinline]] static void add_tile(const X* x, int64_t x_stride, const W* panel, int64_t stride, int64_t depth,
                                       Vec* sums, Next<W> next) {
  const auto from = [=](int p, int r, int half) { return sums[(r * panels + p) * 2 + half]; };
  const auto to = [=](int p, int r, int half, Vec sum) { sums[(r * panels + p) * 2 + half] = sum; };
  multiply<panels, rows>(x, x_stride, 1, panel, PANEL, stride, depth, from, to, next.template prefetch<panels>(depth));
}

// Where sums go, and what is added to them on the way.
struct Target {
  Rows y;
  const float* plus;  // [rows, y.width] or null

  void store(int64_t row, int64_t column, Vec sums) const {
    if (plus) sums += load_some(plus + row * y.width + column, y.width - column);
    y.store(row, column, sums);
  }
};

// y = sums + bias, of so many rows from `first` on and `width` panels; or that times silu of what the gate comes to. Rows
// of sums lie `stride` apart.
template <bool gated, typename W>
struct Ending {
  Layer<W> layer, gate;
  Target target;

  void operator()(const float* sums, const float* gate_sums, int64_t stride, int64_t first, int64_t rows, int64_t panel,
                  int64_t width) const {
    for (int64_t i = 0; i < width * PANEL; i += LANES) {
      const int64_t column = panel * PANEL + i;
      const Vec bias = layer.bias_at(column), gate_bias = gated ? gate.bias_at(column) : Vec{};
      for (int64_t row = 0; row < rows; ++row) {
        Vec value = load_some(sums + row * stride + i, LANES) + bias;
        if constexpr (gated) value *= silu(load_some(gate_sums + row * stride + i, LANES) + gate_bias);
        target.store(first + row, column, value);
      }
    }
  }
};

// Threads for so many multiplications.
static inline int64_t threads_for(int64_t products) {
  return omp_in_parallel() || products < WORTH_THREADS ? 1 : omp_get_max_threads();
}

// Calls body(first, count, group, threads) for bands of rows and groups of panels, on as many threads as are worth it. A
// panel serves a band before the next one is read; there are enough bands that no thread waits long for another.
template <typename Body>
static void share_out(int64_t rows, int64_t most_rows, int64_t groups, int64_t products, Body&& body) {
  const int64_t threads = threads_for(products);
  const int64_t tiles = (rows + most_rows - 1) / most_rows, shares = (SHARES * threads + groups - 1) / groups;
  const int64_t band_rows = std::min(BAND, (tiles + shares - 1) / shares * most_rows);
#pragma omp parallel for schedule(dynamic) collapse(2) num_threads(threads)
  for (int64_t band = 0; band < rows; band += band_rows)
    for (int64_t group = 0; group < groups; ++group) body(band, std::min(band_rows, rows - band), group, threads);
}

// How rows and panels meet, by what the processor has. In vectors, a factor is best used for two panels at once, if
// their weights come as they are multiplied. So few rows that they leave registers free take several panels side by side
// in any case: their weights come from memory, and one chain of sums would wait for it.
template <typename X>
struct Tiling {
  static constexpr int LEAST = std::is_same_v<X, Bf16s> ? 2 : 1, MOST_ROWS = ROWS / LEAST;
  static constexpr int together(int64_t rows) { return int(std::clamp<int64_t>(ROWS / rows, LEAST, STREAMS)); }

  bool by_registers;
  int64_t rows, panels;  // of a tile, at most

  Tiling(int64_t count, int64_t depth) : by_registers(tiles::take<X>(depth)) {
    rows = by_registers ? tiles::ROWS : MOST_ROWS;
    panels = by_registers ? 1 : together(count);
  }
  int64_t width(int64_t left) const { return left >= panels ? panels : left >= LEAST ? LEAST : 1; }
};

// sums [count][width][2] = x . `width` panels. All rows take a chunk of them before the next one, which comes meanwhile,
// and `then` at last.
template <typename X, typename W>
static void multiply_panels(const Tiling<X>& tiling, tiles::Registers& registers, const X* x, int64_t count,
                            const W* panels, int64_t width, int64_t depth, const W* then, Vec* sums) {
  const int64_t stride = PANEL * depth, parts = (count + tiling.rows - 1) / tiling.rows;
  std::fill_n(sums, count * width * 2, Vec{});
  for (int64_t k = 0; k < depth; k += CHUNK) {
    const int64_t taken = std::min(CHUNK, depth - k);
    const W *chunk = panels + k * PANEL, *following = k + taken < depth ? chunk + taken * PANEL : then;
    int64_t part = 0;
    for_even_parts(count, tiling.rows, [&](int64_t first, int64_t rows) {
      const Next<W> next{following, stride, taken, part++, parts};
      const X* from = x + first * depth + k;
      Vec* to = sums + first * width * 2;
      if constexpr (std::is_same_v<X, Bf16s>)
        if (tiling.by_registers) {
          registers.use(rows);
          return tiles::multiply<true>(from, depth, chunk, PANEL, taken, reinterpret_cast<float*>(to), PANEL, rows,
                                       next.template prefetch<1>(taken));
        }
      as_constant<Tiling<X>::MOST_ROWS>(rows, [&](auto tile) {
        const auto add = [&](auto side_by_side) {
          add_tile<side_by_side, tile>(from, depth, chunk, stride, taken, to, next);
        };
        constexpr int together = Tiling<X>::together(tile), least = Tiling<X>::LEAST;
        if (width == together) return add(std::integral_constant<int, together>{});
        if (width == least) return add(std::integral_constant<int, least>{});
        add(std::integral_constant<int, 1>{});
      });
    });
  }
}

// y = layer(x), or layer(x) * silu(gate(x)), and `plus` [rows, y.width] if it is given.
template <bool gated, typename X, typename W>
static void linear(const X* x, Layer<W> layer, Layer<W> gate, const float* plus, Rows y, int64_t rows) {
  if (rows == 0) return;  // a step in which nothing is sampled
  const Ending<gated, W> ending{layer, gate, {y, plus}};
  const Tiling<X> tiling(rows, layer.depth);
  const int64_t num_panels = (y.width + PANEL - 1) / PANEL, groups = (num_panels + tiling.panels - 1) / tiling.panels;
  const auto serve = [&](int64_t band, int64_t count, int64_t group, int64_t threads) {
    tiles::Registers registers;
    Vec sums[1 + gated][BAND * Tiling<X>::LEAST * 2];
    const int64_t last = std::min((group + 1) * tiling.panels, num_panels);
    for (int64_t p = group * tiling.panels, width; p < last; p += width) {
      width = tiling.width(last - p);
      const auto product = [&](const Layer<W>& own, const W* then, Vec* to) {
        multiply_panels(tiling, registers, x + band * own.depth, count, own.panel(p), width, own.depth, then, to);
      };
      const W* after = layer.panel(std::min(p + width * threads, num_panels - width));
      product(layer, gated ? gate.panel(p) : after, sums[0]);
      if constexpr (gated) product(gate, after, sums[1]);
      const auto own = [&](int of) { return reinterpret_cast<const float*>(sums[of]); };
      ending(own(0), own(gated), width * PANEL, band, count, p, width);
    }
  };
  share_out(rows, tiling.rows, groups, rows * layer.depth * y.width, serve);
}
