// Vectors of floats, by the vector extensions that GCC and clang share: one source for AVX-512, AVX2, SSE and NEON.
//
// VW: floats in a vector. NV: vectors in one row of a panel of a matrix (gemm.h). MRMAX: rows of the largest tile whose
// accumulators fit the registers (MRMAX * NV of them, and NV + 1 for operands).
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) || defined(__F16C__)
#include <immintrin.h>
#endif

namespace cb {

#if defined(__AVX512F__)
constexpr int VW = 16, NV = 2, MRMAX = 14;
#elif defined(__AVX2__)
constexpr int VW = 8, NV = 2, MRMAX = 6;
#elif defined(__aarch64__)
constexpr int VW = 4, NV = 4, MRMAX = 6;
#else
constexpr int VW = 4, NV = 2, MRMAX = 4;
#endif
constexpr int NR = VW * NV;

typedef float vf __attribute__((vector_size(VW * 4)));
typedef int32_t vi __attribute__((vector_size(VW * 4)));
typedef uint32_t vu __attribute__((vector_size(VW * 4)));
typedef float vf_mem __attribute__((vector_size(VW * 4), aligned(4), may_alias));
typedef uint32_t vu_mem __attribute__((vector_size(VW * 4), aligned(4), may_alias));

static inline vf load(const float* p) { return *reinterpret_cast<const vf_mem*>(p); }
static inline void store(float* p, vf x) { *reinterpret_cast<vf_mem*>(p) = x; }
static inline vf splat(float x) { return x - vf{}; }

// The first n < VW floats; the others are 0 and are not touched in memory.
static inline vf load_part(const float* p, int n) {
  float x[VW] = {};
  memcpy(x, p, sizeof(float) * n);
  return load(x);
}
static inline void store_part(float* p, vf v, int n) {
  float x[VW];
  store(x, v);
  memcpy(p, x, sizeof(float) * n);
}

static inline vf vmax(vf a, vf b) { return a > b ? a : b; }
static inline vf vmin(vf a, vf b) { return a < b ? a : b; }

static inline vi lane_index() {
#if defined(__AVX512F__)
  return vi{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#elif defined(__AVX2__)
  return vi{0, 1, 2, 3, 4, 5, 6, 7};
#else
  return vi{0, 1, 2, 3};
#endif
}

#if defined(__clang__)
#define CB_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define CB_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (vi){__VA_ARGS__})
#endif

// Folds a vector, halves against halves. The order is always the same, so a sum depends on nothing but its terms.
template <class F>
static inline float fold(vf x, const F& f) {
#if defined(__AVX512F__)
  x = f(x, CB_SHUFFLE(x, x, 8, 9, 10, 11, 12, 13, 14, 15, 8, 9, 10, 11, 12, 13, 14, 15));
  x = f(x, CB_SHUFFLE(x, x, 4, 5, 6, 7, 4, 5, 6, 7, 4, 5, 6, 7, 4, 5, 6, 7));
  x = f(x, CB_SHUFFLE(x, x, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3));
  x = f(x, CB_SHUFFLE(x, x, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1));
#elif defined(__AVX2__)
  x = f(x, CB_SHUFFLE(x, x, 4, 5, 6, 7, 4, 5, 6, 7));
  x = f(x, CB_SHUFFLE(x, x, 2, 3, 2, 3, 2, 3, 2, 3));
  x = f(x, CB_SHUFFLE(x, x, 1, 1, 1, 1, 1, 1, 1, 1));
#else
  x = f(x, CB_SHUFFLE(x, x, 2, 3, 2, 3));
  x = f(x, CB_SHUFFLE(x, x, 1, 1, 1, 1));
#endif
  return x[0];
}
static inline float sum_of(vf x) {
  return fold(x, [](vf a, vf b) { return a + b; });
}
static inline float max_of(vf x) {
  return fold(x, [](vf a, vf b) { return vmax(a, b); });
}

// e^x to about 2 ulp; 0 for e^-inf, and NaN stays NaN. Cephes' polynomial.
static inline vf vexp(vf x) {
#if defined(__AVX512F__)
  x = vmax(splat(-104.0f), x);  // below which the result is 0 anyway
  const vf n = (vf)_mm512_roundscale_ps((__m512)(x * 1.44269504088896341f), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
  const vf given = x;
  x = vmin(splat(88.0f), vmax(splat(-87.0f), x));
  const vf shifted = x * 1.44269504088896341f + 12582912.0f;  // 1.5 * 2^23: rounds to the nearest integer
  const vf n = shifted - 12582912.0f;
#endif
  const vf r = x - n * 0.693359375f + n * 2.12194440e-4f;
  vf p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + (r + 1.0f);
#if defined(__AVX512F__)
  return (vf)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
  const vi scale = ((vi)shifted - 0x4b400000) << 23;  // n into the exponent
  return given < -87.0f ? vf{} : (vf)((vi)p + scale);
#endif
}

// tanh to about 2e-7: 1 - 2 / (e^2x + 1), and an odd polynomial near 0, where that loses digits.
static inline vf vtanh(vf x) {
  const vf square = x * x;
  vf p = splat(-5.70498872745e-3f);
  p = p * square + 2.06390887954e-2f;
  p = p * square - 5.37397155531e-2f;
  p = p * square + 1.33314422036e-1f;
  p = p * square - 3.33332819422e-1f;
  const vf near = p * square * x + x;
  const vf far = 1.0f - 2.0f / (vexp(x + x) + 1.0f);
  return square < 0.390625f ? near : far;
}

static inline vf silu(vf x) { return x / (1.0f + vexp(-x)); }
static inline vf gelu_tanh(vf x) {
  return 0.5f * x * (1.0f + vtanh(0.7978845608028654f * (x + 0.044715f * x * x * x)));
}
static inline vf relu(vf x) { return vmax(x, vf{}); }

// Two vectors' lower (upper) halves, lane by lane in turn: a0 b0 a1 b1 …
static inline vf zip_low(vf a, vf b) {
#if defined(__AVX512F__)
  return CB_SHUFFLE(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
#elif defined(__AVX2__)
  return CB_SHUFFLE(a, b, 0, 8, 1, 9, 2, 10, 3, 11);
#else
  return CB_SHUFFLE(a, b, 0, 4, 1, 5);
#endif
}
static inline vf zip_high(vf a, vf b) {
#if defined(__AVX512F__)
  return CB_SHUFFLE(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
#elif defined(__AVX2__)
  return CB_SHUFFLE(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
#else
  return CB_SHUFFLE(a, b, 2, 6, 3, 7);
#endif
}

// Lanes N apart, within groups of 2 N, change places.
template <int N>
static inline vf swap_lanes(vf x) {
#if defined(__AVX512F__)
  if constexpr (N == 8) return CB_SHUFFLE(x, x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
  else return CB_SHUFFLE(x, x, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
#elif defined(__AVX2__)
  return CB_SHUFFLE(x, x, 4, 5, 6, 7, 0, 1, 2, 3);
#else
  return x;  // not asked for
#endif
}

// Lane i is `fold(x[i], f)` to the last bit, for i < R; the other lanes repeat these. f must not care for the order of its
// two arguments. R: a power of two from 4 to VW. Folding R vectors together takes fewer shuffles than one after the other.
template <int R, class F>
static inline vf fold_rows(vf (&x)[R], const F& f) {
#pragma GCC unroll 4
  for (int n = R / 2; n >= 1; n /= 2)
#pragma GCC unroll 8
    for (int i = 0; i < n; ++i) x[i] = f(zip_low(x[i], x[i + n]), zip_high(x[i], x[i + n]));
  if constexpr (VW / 2 >= R && VW / 2 >= 4) x[0] = f(x[0], swap_lanes<VW / 2>(x[0]));
  if constexpr (VW / 4 >= R && VW / 4 >= 4) x[0] = f(x[0], swap_lanes<VW / 4>(x[0]));
  return x[0];
}

// VW vectors of VW floats, rows to columns: log2(VW) perfect shuffles of the whole.
static inline void transpose(vf (&x)[VW]) {
  for (int step = 1; step < VW; step *= 2) {
    vf y[VW];
#pragma GCC unroll 16
    for (int i = 0; i < VW / 2; ++i) {
      y[2 * i] = zip_low(x[i], x[i + VW / 2]);
      y[2 * i + 1] = zip_high(x[i], x[i + VW / 2]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < VW; ++i) x[i] = y[i];
  }
}

// How weights are kept: one row of a panel is NR of them, read as NV vectors of floats. `slot(c)` is where column c of the
// panel stands in the row. All three are exact: Python picks one that holds every weight of the tensor.
struct F32 {
  typedef float Word;
  static int slot(int column) { return column; }
  static Word of(float x) { return x; }
  static float back(Word x) { return x; }
  static inline void read(const Word* p, vf (&out)[NV]) {
#pragma GCC unroll 4
    for (int i = 0; i < NV; ++i) out[i] = load(p + i * VW);
  }
};

// Two columns share a 32-bit word, so that a shift and a mask make two vectors of floats.
static inline int paired_slot(int column) {
  const int pair = column / (2 * VW), in_pair = column % (2 * VW);
  return pair * 2 * VW + (in_pair % VW) * 2 + in_pair / VW;
}

struct BF16 {
  typedef uint16_t Word;
  static int slot(int column) { return paired_slot(column); }
  static Word of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits >> 16;
  }
  static float back(Word x) {
    const uint32_t bits = (uint32_t)x << 16;
    float out;
    memcpy(&out, &bits, 4);
    return out;
  }
  static inline void read(const Word* p, vf (&out)[NV]) {
#pragma GCC unroll 4
    for (int i = 0; i < NV; i += 2) {
      const vu both = *reinterpret_cast<const vu_mem*>(p + i * VW);
      out[i] = (vf)(both << 16);
      out[i + 1] = (vf)(both & 0xffff0000u);
    }
  }
};

// IEEE half precision, finite values only.
struct F16 {
  typedef uint16_t Word;
  static Word of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    const uint32_t sign = bits >> 16 & 0x8000u;
    float magnitude = std::fabs(x) * 1.92592994e-34f;  // 2^-112: half's exponents become float's, subnormal ones too
    memcpy(&bits, &magnitude, 4);
    return sign | bits >> 13;
  }
  static float back(Word x) {
    const uint32_t bits = (uint32_t)(x & 0x7fffu) << 13;
    float out;
    memcpy(&out, &bits, 4);
    out *= 5.19229686e33f;  // 2^112
    return x & 0x8000u ? -out : out;
  }
#if defined(__AVX512F__)
  static int slot(int column) { return column; }
  static inline void read(const Word* p, vf (&out)[NV]) {
    for (int i = 0; i < NV; ++i)
      out[i] = (vf)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + i * VW)));
  }
#elif defined(__AVX2__) && defined(__F16C__)
  static int slot(int column) { return column; }
  static inline void read(const Word* p, vf (&out)[NV]) {
    for (int i = 0; i < NV; ++i)
      out[i] = (vf)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + i * VW)));
  }
#else
  static int slot(int column) { return paired_slot(column); }
  static inline vf widen(vu half) {
    const vf magnitude = (vf)((half & 0x7fffu) << 13) * 5.19229686e33f;
    return (vf)((vu)magnitude | (half & 0x8000u) << 16);
  }
  static inline void read(const Word* p, vf (&out)[NV]) {
    for (int i = 0; i < NV; i += 2) {
      const vu both = *reinterpret_cast<const vu_mem*>(p + i * VW);
      out[i] = widen(both & 0xffffu);
      out[i + 1] = widen(both >> 16);
    }
  }
#endif
};

// Weights in groups of GROUP along the depth that are offset + scale * code, code being a small integer: what most formats
// of quantised checkpoints unpack to. Products of scale and code are exact, so the sum is rounded once, however it is made.
template <int BITS_, int GROUP_>
struct Affine {
  static constexpr int BITS = BITS_, GROUP = GROUP_, CODES = 1 << BITS, PER_WORD = 32 / BITS;

  // One group of a panel. A word holds the codes of PER_WORD consecutive depths, the lowest bits first.
  struct Block {
    float scale[NR], offset[NR];
    uint32_t words[GROUP / PER_WORD][NR];
  };

  // The codes of the i-th depth in each word, as floats.
  static inline vf codes(vu words, int i) {
#if defined(__AVX512F__)
    if (BITS == 4) {  // a table of 16: the permutation looks at the lowest 4 bits only
      const vf table = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
      return (vf)_mm512_permutexvar_ps((__m512i)(words >> (i * BITS)), (__m512)table);
    }
#endif
    return __builtin_convertvector((vi)((words >> (i * BITS)) & (uint32_t)(CODES - 1)), vf);
  }
  static inline vu words_at(const Block& block, int row, int vector) {
    return *reinterpret_cast<const vu_mem*>(&block.words[row][vector * VW]);
  }
};

}  // namespace cb
