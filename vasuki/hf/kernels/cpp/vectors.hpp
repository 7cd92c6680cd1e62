// What the CPU kernels share: vector registers, bfloat16, exp, and the inner loop of small matrix products.
#pragma once

#ifdef __FMA__
#include <immintrin.h>
#endif

#ifdef _OPENMP
#include <omp.h>
#else  // a compiler without it: one thread
static inline int omp_get_max_threads() { return 1; }
static inline int omp_in_parallel() { return 0; }
#endif

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

struct bf16 {
  uint16_t bits;
};
// The upper half is the nearest bfloat16, or the even one of two.
static inline uint32_t rounded_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits + 0x7fff + ((bits >> 16) & 1);
}
static inline void assign(bf16& to, float value) { to.bits = uint16_t(rounded_bits(value) >> 16); }
static inline float to_float(bf16 value) {
  const uint32_t bits = uint32_t(value.bits) << 16;
  float wide;
  std::memcpy(&wide, &bits, sizeof wide);
  return wide;
}

struct Bf16s {  // neighbours, as processors multiply them
  bf16 first, second;
};

// ROWS x 2 sums, two weights and one factor fill the vector registers.
#if defined(__AVX512F__)
constexpr int LANES = 16, ROWS = 12;
#elif defined(__AVX2__)
constexpr int LANES = 8, ROWS = 6;
#elif defined(__aarch64__)
constexpr int LANES = 4, ROWS = 12;
#else
constexpr int LANES = 4, ROWS = 6;
#endif
constexpr int PANEL = 2 * LANES;  // columns of a panel

// For fewer numbers, waking threads takes longer than they save; within a parallel region all are at work.
static inline bool worth_sharing(int64_t numbers) { return numbers >= 1 << 16 && !omp_in_parallel(); }

typedef float Vec __attribute__((vector_size(LANES * 4)));
typedef int32_t Ints __attribute__((vector_size(LANES * 4)));
typedef uint32_t Bits __attribute__((vector_size(LANES * 4)));
typedef uint16_t Halves __attribute__((vector_size(LANES * 2)));

constexpr uint32_t UPPER = 0xffff0000u;

// a * b + c, rounded once where processors can. Compilers settle that loop by loop, and the same numbers may pass through
// several: by how many rows are computed together, by where a prompt is cut.
template <typename V>
static inline V multiply_add(V a, V b, V c) {
#if defined(__FMA__) || defined(__aarch64__)
  if constexpr (std::is_same_v<V, float>) {
    return __builtin_fmaf(a, b, c);
#ifdef __AVX512VL__
  } else if constexpr (sizeof(V) == 64) {
    return (V)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#endif
#ifdef __FMA__
  } else if constexpr (sizeof(V) == 32) {
    return (V)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
  } else if constexpr (sizeof(V) == 16) {
    return (V)_mm_fmadd_ps((__m128)a, (__m128)b, (__m128)c);
#endif
  } else {
    for (size_t lane = 0; lane < sizeof(V) / sizeof(float); ++lane) c[lane] = __builtin_fmaf(a[lane], b[lane], c[lane]);
    return c;
  }
#else
  return a * b + c;
#endif
}
// The same number for all lanes.
template <typename V, typename = std::enable_if_t<!std::is_same_v<V, float>>>
static inline V multiply_add(float a, V b, V c) {
  return multiply_add(a - V{}, b, c);  // a sum with 0 would be computed: it is another number where a is -0
}

// The named lanes of two vectors; lanes of the second are numbered after the first one's.
template <int... lanes, typename V>
static inline V lanes_of(V first, V second) {
#ifdef __clang__
  return __builtin_shufflevector(first, second, lanes...);
#else
  typedef int32_t Places __attribute__((vector_size(sizeof(V))));
  return __builtin_shuffle(first, second, Places{lanes...});
#endif
}

// Two vectors of numbers that lie side by side. In bfloat16, number j of the first and of the second share 32 bits, the
// first in the lower half: one load and two operations widen both.
template <typename V>
static inline void load_pair(const bf16* at, V& first, V& second) {
  typedef uint32_t Words __attribute__((vector_size(sizeof(V))));
  Words both;
  std::memcpy(&both, at, sizeof both);
  const Words low = both << 16, high = both & UPPER;
  std::memcpy(&first, &low, sizeof first);
  std::memcpy(&second, &high, sizeof second);
}
template <typename V>
static inline void load_pair(const float* at, V& first, V& second) {
  std::memcpy(&first, at, sizeof first);
  std::memcpy(&second, at + sizeof(V) / sizeof(float), sizeof second);
}

static inline Halves rounded(Vec values) {
#ifdef __AVX512BF16__
  return (Halves)_mm512_cvtneps_pbh((__m512)values);
#else
  Bits bits;
  std::memcpy(&bits, &values, sizeof bits);
  return __builtin_convertvector((bits + 0x7fff + ((bits >> 16) & 1)) >> 16, Halves);
#endif
}

// The first `count` lanes, or all if there are fewer.
static inline Vec load_some(const float* at, int64_t count) {
  Vec values = {};
  if (count >= LANES)
    std::memcpy(&values, at, sizeof values);
  else if (count > 0)
    std::memcpy(&values, at, count * sizeof *at);
  return values;
}
template <typename T, typename V>
static inline void store_some(T* to, V values, int64_t count) {
  static_assert(sizeof values == LANES * sizeof(T));
  if (count >= LANES)
    std::memcpy(to, &values, sizeof values);
  else if (count > 0)
    std::memcpy(to, &values, count * sizeof *to);
}

static inline float sum_of(Vec lanes) {
  float sum = 0;
  for (int lane = 0; lane < LANES; ++lane) sum += lanes[lane];
  return sum;
}

// Rows of `width` numbers: as they are, rounded to bfloat16, or such in the order in which tile registers load them,
// [rows / TILE_ROWS][width / TILE_WIDTH][TILE_ROWS][TILE_WIDTH].
struct Rows {
  enum Kind { FLOATS, ROUNDED, TILES };
  static constexpr int64_t TILE_ROWS = 16, TILE_WIDTH = 32;

  void* at;
  int64_t width;
  Kind kind;

  void store(int64_t row, int64_t column, Vec values) const {
    const int64_t first = row * width + column, count = width - column;
    if (kind == FLOATS) return store_some(static_cast<float*>(at) + first, values, count);
    store_some(static_cast<bf16*>(at) + (kind == TILES ? in_tiles(row, column) : first), rounded(values), count);
  }

 private:
  int64_t in_tiles(int64_t row, int64_t column) const {
    const int64_t tile = row / TILE_ROWS * (width / TILE_WIDTH) + column / TILE_WIDTH;
    return (tile * TILE_ROWS + row % TILE_ROWS) * TILE_WIDTH + column % TILE_WIDTH;
  }
};

// exp(x) for x <= 0, to about 2e-7: 2^n times a polynomial on [-ln 2 / 2, ln 2 / 2]. Unlike std::exp it vectorises. For a
// number or a vector of them, n = `whole` being the integer next to x / ln 2.
template <typename V, typename I>
static inline V exp_negative(V x, V whole, I n) {
  const V r = multiply_add(-1.42860677e-6f, whole, multiply_add(-0.693145752f, whole, x));
  V p = multiply_add(1.38873136e-3f, r, V{} + 8.33360776e-3f);
  for (const float next : {4.16664853e-2f, 1.66666672e-1f, 0.5f, 1.0f, 1.0f}) p = multiply_add(p, r, V{} + next);
  const I bits = (n + 127) << 23;
  V scale;
  std::memcpy(&scale, &bits, sizeof scale);
  return p * scale;
}
static inline float exp_negative(float x) {
  x = std::max(x, -87.0f);
  const float whole = std::nearbyint(x * 1.44269504f);
  return exp_negative(x, whole, int32_t(whole));
}
static inline Vec exp_negative(Vec x) {
  x = x > -87.0f ? x : Vec{} - 87.0f;
  const Ints n = __builtin_convertvector(x * 1.44269504f - 0.5f, Ints);  // which cuts off
  return exp_negative(x, __builtin_convertvector(n, Vec), n);
}

// factor / (1 + exp(-x))
static inline Vec times_sigmoid(Vec factor, Vec x) {
  const Vec e = exp_negative(x < 0 ? x : -x);
  return factor * (x < 0 ? e : Vec{} + 1.0f) / (1.0f + e);
}
static inline Vec silu(Vec x) { return times_sigmoid(x, x); }

// sums[r] += a[r * stride] * row, for a row of a panel: a number for each column.
template <int rows, typename W>
static inline void add_row(const float* a, int64_t stride, const W* row, Vec (&sums)[rows][2]) {
  Vec first, second;
  load_pair(row, first, second);
#pragma GCC unroll 12
  for (int r = 0; r < rows; ++r) {
    const float factor = a[r * stride];
    sums[r][0] = multiply_add(factor, first, sums[r][0]);
    sums[r][1] = multiply_add(factor, second, sums[r][1]);
  }
}

#ifdef __AVX512BF16__
constexpr bool MULTIPLIES_BF16 = true;

typedef __m512bh Pairs;  // as many as there are lanes
static inline Pairs load_pairs(const void* at) { return (Pairs)_mm512_loadu_si512(at); }
static inline Pairs repeat(const Bf16s& pair) {
  int32_t both;
  std::memcpy(&both, &pair, sizeof both);
  return (Pairs)_mm512_set1_epi32(both);
}
static inline Vec add_products(Vec sums, Pairs a, Pairs b) { return (Vec)_mm512_dpbf16_ps((__m512)sums, a, b); }

// The same for two rows in one, of which each column holds a number next to the other's: both products are added at once.
template <int rows>
static inline void add_row(const Bf16s* a, int64_t stride, const Bf16s* row, Vec (&sums)[rows][2]) {
  const Pairs first = load_pairs(row), second = load_pairs(row + LANES);
#pragma GCC unroll 12
  for (int r = 0; r < rows; ++r) {
    const Pairs factor = repeat(a[r * stride]);
    sums[r][0] = add_products(sums[r][0], factor, first);
    sums[r][1] = add_products(sums[r][1], factor, second);
  }
}
#else
constexpr bool MULTIPLIES_BF16 = false;
#endif

static inline void round_to(Bf16s& to, float first, float second) {  // in one word, so that it vectorises
  const uint32_t both = rounded_bits(first) >> 16 | (rounded_bits(second) & UPPER);
  std::memcpy(&to, &both, sizeof both);
}

// to[lane] = what a row of a panel multiplies: a number, or that below it too.
static inline void store_factors(float* to, const Vec (&from)[1]) { std::memcpy(to, from, sizeof from); }
static inline void store_factors(Bf16s* to, const Vec (&from)[2]) {
  float first[LANES], second[LANES];
  std::memcpy(first, &from[0], sizeof first);
  std::memcpy(second, &from[1], sizeof second);
  for (int lane = 0; lane < LANES; ++lane) round_to(to[lane], first[lane], second[lane]);
}

template <int panels, int rows, typename Body>
static inline void each_sum(Body&& body) {
#pragma GCC unroll 12
  for (int p = 0; p < panels; ++p)
#pragma GCC unroll 12
    for (int r = 0; r < rows; ++r)
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half) body(p, r, half);
}

// For `rows` rows of `a` and some panels: to(p, r, half, from(p, r, half) + a[r] . panel p), over the `depth` rows of a panel
// from first to last. Rows of `a` lie `a_stride` apart and their numbers `a_step`, rows of a panel `row_stride`, and panels
// `panel_stride`. `meanwhile(k)` is called before row `k`.
template <int panels, int rows, typename A, typename W, typename From, typename To, typename Meanwhile>
static inline void multiply(const A* a, int64_t a_stride, int64_t a_step, const W* panel, int64_t row_stride,
                            int64_t panel_stride, int64_t depth, From from, To to, Meanwhile meanwhile) {
  Vec sums[panels][rows][2];  // in registers
  each_sum<panels, rows>([&](int p, int r, int half) { sums[p][r][half] = from(p, r, half); });
  for (int64_t k = 0; k < depth; ++k) {
    meanwhile(k);
#pragma GCC unroll 12
    for (int p = 0; p < panels; ++p)
      add_row(a + k * a_step, a_stride, panel + p * panel_stride + k * row_stride, sums[p]);
  }
  each_sum<panels, rows>([&](int p, int r, int half) { to(p, r, half, sums[p][r][half]); });
}
struct Nothing {
  void operator()(int64_t) const {}
};

// Calls body(first, integral_constant<rows>) for tiles of at most ROWS of `count` rows.
template <int rows = ROWS, typename Body>
static inline void for_tiles(int64_t first, int64_t count, Body&& body) {
  for (; count >= rows; first += rows, count -= rows) body(first, std::integral_constant<int, rows>{});
  if constexpr (rows > 1)
    if (count > 0) for_tiles<rows - 1>(first, count, body);
}

// Calls body(first, rows) for parts of `count` rows, as few as can be and nearly of a size.
template <typename Body>
static inline void for_even_parts(int64_t count, int64_t most_rows, Body&& body) {
  for (int64_t first = 0, parts = (count + most_rows - 1) / most_rows; parts > 0; --parts) {
    const int64_t rows = (count - first + parts - 1) / parts;
    body(first, rows);
    first += rows;
  }
}

// Calls body(integral_constant<n>), 0 < n <= most.
template <int most, typename Body>
static inline void as_constant(int64_t n, Body&& body) {
  if constexpr (most > 1)
    if (n < most) return as_constant<most - 1>(n, body);
  body(std::integral_constant<int, most>{});
}

// Calls body(first, integral_constant<rows>) for such parts of at most ROWS rows. Where rows are few, for_tiles is faster: it
// does not divide.
template <typename Body>
static inline void for_even_tiles(int64_t count, Body&& body) {
  for_even_parts(count, ROWS, [&](int64_t first, int64_t rows) {
    as_constant<ROWS>(rows, [&](auto tile) { body(first, tile); });
  });
}
