// Products of bfloat16 by processors that have registers for tiles of matrices (AMX): 16 rows of 64 bytes each, which are
// 16 sums, or 16 pairs of factors.
//
//   A [16 rows][16 pairs]  x  B [16 pairs][16 columns]  ->  sums [16 rows][16 columns], in one instruction
//
// A lies as rows do, pair by pair, and B as half a panel's columns do: neither is copied. A thread says how many rows of a
// register it uses before it does, and gives them up when it is done.

#pragma once

#include "vectors.hpp"

#ifdef __AMX_BF16__
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace tiles {

constexpr int64_t ROWS = 32;   // most rows that are multiplied together
constexpr int64_t DEPTH = 16;  // pairs that one instruction sums

#ifdef __AMX_BF16__
constexpr int64_t COLUMNS = 16;
static_assert(PANEL == 2 * COLUMNS);

// The tile registers of a thread, while this object lives: up to 16 rows use 4 for factors and 0 and 1 for sums, up to 16 more 5, 2 and 3; half
// panels use 6 and 7.
class Registers {
 public:
  ~Registers() {
    if (rows_) _tile_release();
  }

  void use(int64_t rows) {
    if (rows == rows_) return;
    rows_ = rows;
    struct alignas(64) {
      uint8_t palette = 1, start = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {};
    } sizes;
    const uint8_t upper = uint8_t(std::min<int64_t>(rows, 16)), lower = uint8_t(std::max<int64_t>(rows - 16, 1));
    for (int i : {0, 1, 4}) sizes.rows[i] = upper;
    for (int i : {2, 3, 5}) sizes.rows[i] = lower;
    for (int i : {6, 7}) sizes.rows[i] = DEPTH;
    asm volatile("" ::: "memory");
    _tile_loadconfig(&sizes);
  }

 private:
  int64_t rows_ = 0;
};

// Registers 0 to 3 begin with sums, left and right, of 16 rows `bytes` apart and of 16 below them, if there are `both`; or
// with zeros.
[[gnu::always_inline]] static inline void take_up(bool adds, bool both, const float* sums, const float* below,
                                                  int64_t bytes) {
  asm volatile("" ::: "memory");  // the instructions do not say what they read
  if (adds) {
    _tile_loadd(0, sums, bytes);
    _tile_loadd(1, sums + COLUMNS, bytes);
    if (both) {
      _tile_loadd(2, below, bytes);
      _tile_loadd(3, below + COLUMNS, bytes);
    }
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
}

[[gnu::always_inline]] static inline void put_down(bool both, float* sums, float* below, int64_t bytes) {
  _tile_stored(0, sums, bytes);
  _tile_stored(1, sums + COLUMNS, bytes);
  if (both) {
    _tile_stored(2, below, bytes);
    _tile_stored(3, below + COLUMNS, bytes);
  }
}

// sums [rows][PANEL], `stride` apart, plus or = a [rows] . panel, over `depth` rows of a panel, a multiple of DEPTH. Rows of
// `a` lie `a_stride` apart, rows of a panel `row_stride`. The thread has registers in use for as many rows, at most ROWS.
template <bool adds, typename Meanwhile>
[[gnu::noinline]] static void multiply(const Bf16s* a, int64_t a_stride, const Bf16s* panel, int64_t row_stride,
                                       int64_t depth, float* sums, int64_t stride, int64_t rows, Meanwhile meanwhile) {
  const int64_t a_bytes = a_stride * sizeof *a, row_bytes = row_stride * sizeof *panel, bytes = stride * sizeof *sums;
  const bool both = rows > 16;
  const Bf16s* below = a + 16 * a_stride;
  float* sums_below = sums + 16 * stride;
  take_up(adds, both, sums, sums_below, bytes);
  for (int64_t k = 0; k < depth; k += DEPTH) {
    for (int64_t i = 0; i < DEPTH; ++i) meanwhile(k + i);
    const Bf16s* from = panel + k * row_stride;
    _tile_loadd(6, from, row_bytes);
    _tile_loadd(4, a + k, a_bytes);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, from + COLUMNS, row_bytes);
    _tile_dpbf16ps(1, 4, 7);
    if (both) {
      _tile_loadd(5, below + k, a_bytes);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  put_down(both, sums, sums_below, bytes);
}

// Whether the system lets this process use them, and they multiply as is said above: whole numbers, exactly.
static bool work() {
  constexpr long ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
  if (syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) != 0) return false;
  constexpr int64_t rows = 19, depth = 2 * DEPTH;
  Bf16s a[rows][depth], panel[depth][PANEL];
  float sums[rows][PANEL];
  const auto factor = [](int64_t i, int64_t k) { return float((3 * i + 5 * k) % 7 - 3); };
  for (int64_t k = 0; k < depth; ++k) {
    for (int64_t row = 0; row < rows; ++row) round_to(a[row][k], factor(row, 2 * k), factor(row, 2 * k + 1));
    for (int64_t i = 0; i < PANEL; ++i) round_to(panel[k][i], factor(2 * i, 2 * k), factor(2 * i, 2 * k + 1));
  }
  Registers registers;
  registers.use(rows);
  multiply<false>(a[0], depth, panel[0], PANEL, depth, sums[0], PANEL, rows, [](int64_t) {});
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t i = 0; i < PANEL; ++i) {
      float sum = 0;
      for (int64_t k = 0; k < 2 * depth; ++k) sum += factor(row, k) * factor(2 * i, k);
      if (sum != sums[row][i]) return false;
    }
  return true;
}

static bool usable() {
  static const bool found = work();
  return found;
}
#else
static constexpr bool usable() { return false; }  // and nothing of this is ever called
struct Registers {
  void use(int64_t) {}
};
template <bool adds, typename Meanwhile>
static void multiply(const Bf16s*, int64_t, const Bf16s*, int64_t, int64_t, float*, int64_t, int64_t, Meanwhile) {}
#endif

// Whether rows of `depth` factors are multiplied by them.
template <typename Factor>
static inline bool take(int64_t depth) {
  return std::is_same_v<Factor, Bf16s> && depth % DEPTH == 0 && usable();
}

// sums [rows][columns], `stride` apart, plus or = a [rows] . panels, which lie `panel_stride` apart.
template <bool adds, typename Factor>
static void multiply_all(const Factor* a, int64_t a_stride, int64_t rows, const Factor* panels, int64_t row_stride,
                         int64_t panel_stride, int64_t columns, int64_t depth, float* sums, int64_t stride) {
  if constexpr (std::is_same_v<Factor, Bf16s>) {
    Registers registers;
    for (int64_t first = 0; first < rows; first += ROWS) {
      const int64_t taken = std::min(ROWS, rows - first);
      registers.use(taken);
      for (int64_t panel = 0; panel * PANEL < columns; ++panel)
        multiply<adds>(a + first * a_stride, a_stride, panels + panel * panel_stride, row_stride, depth,
                       sums + first * stride + panel * PANEL, stride, taken, [](int64_t) {});
    }
  }
}

// Swaps the upper right and the lower left quarter of each square of 2 `step` numbers, then of larger ones.
template <int step, size_t... lane>
static inline void turn(Ints (&block)[LANES], std::index_sequence<lane...> lanes) {
  if constexpr (step < LANES) {
#pragma GCC unroll 16
    for (int i = 0; i < LANES; ++i)
      if (!(i & step)) {
        const Ints above = block[i], below = block[i + step];
        block[i] = lanes_of<int(lane & step ? lane + LANES - step : lane)...>(above, below);
        block[i + step] = lanes_of<int(lane & step ? lane + LANES : lane + step)...>(above, below);
      }
    turn<2 * step>(block, lanes);
  }
}

// to[column][row] = from[row][column], of multiples of LANES. Rows of `to` lie `to_stride` apart.
template <typename Factor>
static void transpose(const Factor* from, int64_t rows, int64_t columns, Factor* to, int64_t to_stride) {
  static_assert(sizeof(Factor) == sizeof(int32_t));
  for (int64_t row = 0; row < rows; row += LANES)
    for (int64_t column = 0; column < columns; column += LANES) {
      Ints block[LANES];
      for (int i = 0; i < LANES; ++i) std::memcpy(&block[i], from + (row + i) * columns + column, sizeof block[i]);
      turn<1>(block, std::make_index_sequence<LANES>{});
      for (int i = 0; i < LANES; ++i) std::memcpy(to + (column + i) * to_stride + row, &block[i], sizeof block[i]);
    }
}

}  // namespace tiles
