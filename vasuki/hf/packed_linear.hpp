// y = x W^T + b in float32, for the few rows of a step, on a CPU, and what follows, while a tile is in registers: y is added
// to a residual, or rounded for the next product. Of a gated MLP, both products and what joins them:
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
constexpr int64_t SHARES = 4;               // of the work that each thread takes, or more
constexpr int STREAMS = 4;                  // most panels that are read side by side
constexpr int64_t LINE = 64;                // bytes of a line of the processor's cache
constexpr int64_t WORTH_THREADS = 1 << 19;  // multiplications; below that, waking threads takes longer than they save

// The panel that this thread needs next. Each of `parts` tiles asks for its part of it while it computes.
struct Next {
  int64_t panel, part, parts;
};

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

  Vec bias_at(int64_t column, int64_t out) const { return bias ? load_some(bias + column, out - column) : Vec{}; }

  // While `streams` panels are read, as many come.
  template <int streams>
  Prefetch meanwhile(Next next, int64_t depth) const {
    constexpr int64_t row_bytes = PANEL * sizeof(W);
    const int64_t every = std::max<int64_t>(1, next.parts * LINE / (streams * row_bytes));
    const char* panel = reinterpret_cast<const char*>(panels) + next.panel * depth * row_bytes;
    return {panel + depth / every * LINE * next.part, every};
  }

  // to(s, r, half, sums) for x[r] W^T + b and neighbouring panels. A function of its own keeps sums in registers.
  template <int streams, int rows, typename X, typename To>
  [[gnu::noinline]] void tile(const X* x, int64_t depth, int64_t out, int64_t panel, Next next, To to) const {
    const int64_t size = PANEL * depth;
    const auto from = [=, *this](int s, int, int half) { return bias_at((panel + s) * PANEL + half * LANES, out); };
    multiply<streams, rows>(x, depth, 1, panels + panel * size, PANEL, size, depth, from, to,
                            meanwhile<streams>(next, depth));
  }
};

static inline Vec silu(Vec x) {
  const Vec e = exp_negative(x < 0 ? x : -x);
  return x * (x < 0 ? e : Vec{} + 1.0f) / (1.0f + e);
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

// target = layer(x), or layer(x) * silu(gate(x)), for a tile of rows and neighbouring panels.
template <bool gated, int streams, int rows, typename X, typename W>
static void linear_tile(const X* x, Layer<W> layer, Layer<W> gate, Target target, int64_t row, int64_t depth,
                        int64_t panel, Next next) {
  const X* from = x + row * depth;
  const int64_t out = target.y.width;
  const auto store = [=](int s, int r, int half, Vec sums) {
    target.store(row + r, (panel + s) * PANEL + half * LANES, sums);
  };
  if constexpr (gated) {
    Vec memory[streams][rows][2], (*outputs)[rows][2] = memory;
    layer.template tile<streams, rows>(
        from, depth, out, panel, next, [=](int s, int r, int half, Vec sums) { outputs[s][r][half] = sums; });
    gate.template tile<streams, rows>(from, depth, out, panel, next, [=](int s, int r, int half, Vec sums) {
      store(s, r, half, outputs[s][r][half] * silu(sums));
    });
  } else {
    layer.template tile<streams, rows>(from, depth, out, panel, next, store);
  }
}

// Calls body(first, count, group, threads) for bands of rows and groups of panels, on as many threads as are worth it. A
// panel serves a band before the next one is read; bands are so many that no thread waits long for another.
template <typename Body>
static void share_out(int64_t rows, int64_t most_rows, int64_t groups, int64_t products, Body&& body) {
  const bool alone = omp_in_parallel() || products < WORTH_THREADS;
  const int64_t threads = alone ? 1 : omp_get_max_threads();
  const int64_t tiles = (rows + most_rows - 1) / most_rows, shares = (SHARES * threads + groups - 1) / groups;
  const int64_t band_rows = std::min(BAND, (tiles + shares - 1) / shares * most_rows);
#pragma omp parallel for schedule(dynamic) collapse(2) num_threads(threads)
  for (int64_t band = 0; band < rows; band += band_rows)
    for (int64_t group = 0; group < groups; ++group) body(band, std::min(band_rows, rows - band), group, threads);
}

// target = layer(x), or layer(x) * silu(gate(x)), for all rows, by tile registers.
template <bool gated>
static void linear_by_registers(const Bf16s* x, Layer<Bf16s> layer, Layer<Bf16s> gate, Target target, int64_t rows,
                                int64_t depth) {
  const int64_t out = target.y.width, num_panels = (out + PANEL - 1) / PANEL;
  const auto serve = [&](int64_t band, int64_t count, int64_t panel, int64_t threads) {
    tiles::Registers registers;
    float sums[1 + gated][tiles::ROWS][PANEL];
    const int64_t parts = (count + tiles::ROWS - 1) / tiles::ROWS;
    for (int64_t part = 0; part < parts; ++part) {
      const int64_t first = band + part * tiles::ROWS, taken = std::min(tiles::ROWS, band + count - first);
      const Next next{std::min(panel + threads, num_panels - 1), part, parts};
      const auto multiply = [&](const Layer<Bf16s>& own, float* to) {
        tiles::multiply<false>(x + first * depth, depth, own.panels + panel * PANEL * depth, PANEL, depth, to, PANEL, taken,
                               own.template meanwhile<1>(next, depth));
      };
      registers.use(taken);
      multiply(layer, sums[0][0]);
      if constexpr (gated) multiply(gate, sums[1][0]);
      for (int64_t row = 0; row < taken; ++row)
        for (int64_t half = 0; half < PANEL; half += LANES) {
          const int64_t column = panel * PANEL + half;
          const auto output = [&](const Layer<Bf16s>& own, const float* from) {
            return load_some(from + row * PANEL + half, LANES) + own.bias_at(column, out);
          };
          Vec value = output(layer, sums[0][0]);
          if constexpr (gated) value *= silu(output(gate, sums[1][0]));
          target.store(first + row, column, value);
        }
    }
  };
  share_out(rows, tiles::ROWS, num_panels, rows * depth * out, serve);
}

// The same, by what the processor has. In vectors, a factor is best used for two panels at once, if their weights come as
// they are multiplied. So few rows that they leave registers free read several panels side by side in any case: their
// weights come from memory, and one chain of sums would wait for it.
template <bool gated, typename X, typename W>
static void linear(const X* x, Layer<W> layer, Layer<W> gate, const float* plus, Rows y, int64_t rows, int64_t depth) {
  if (rows == 0) return;  // a step in which nothing is sampled
  const Target target{y, plus};
  if constexpr (std::is_same_v<X, Bf16s>)
    if (tiles::take<X>(depth)) return linear_by_registers<gated>(x, layer, gate, target, rows, depth);
  constexpr int least = std::is_same_v<X, Bf16s> ? 2 : 1, most_rows = ROWS / least;
  const int64_t num_panels = (y.width + PANEL - 1) / PANEL, streams = std::clamp<int64_t>(ROWS / rows, least, STREAMS);
  const int64_t groups = (num_panels + streams - 1) / streams;
  const auto serve = [&](int64_t band, int64_t count, int64_t group, int64_t threads) {
    const int64_t p = group * streams, parts = (count + most_rows - 1) / most_rows;
    for_tiles<most_rows>(band, count, [&](int64_t first, auto tile) {
      constexpr int together = std::clamp<int>(ROWS / tile, least, STREAMS);
      const auto take = [&](int64_t own, auto panels) {
        const Next next{std::min(own + panels * threads, num_panels - panels), (first - band) / most_rows, parts};
        linear_tile<gated, panels, tile>(x, layer, gate, target, first, depth, own, next);
      };
      const int64_t last = std::min(p + streams, num_panels);
      if (streams == together && p + streams == last) return take(p, std::integral_constant<int, together>{});
      int64_t own = p;
      for (; own + least <= last; own += least) take(own, std::integral_constant<int, least>{});
      for (; own < last; ++own) take(own, std::integral_constant<int, 1>{});
    });
  };
  share_out(rows, most_rows, groups, rows * depth * y.width, serve);
}
