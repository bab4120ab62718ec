// Inner products of small integers, and rows of activations as such.
//
// Weights are codes 0 … 255 that stand for code - 128; activations are whole numbers -127 … 127, with one scale for each
// GROUP of consecutive elements of a row. A word of weights holds the codes of 4 consecutive depths of one column, the first
// in the lowest bits; a panel's row of words is NR of them. Sums within a group are exact, on every CPU.
#pragma once

#include "simd.h"

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace cb {

constexpr int GROUP = 64, STEPS = GROUP / 4;  // depths, and words, that share the scale of their activations
constexpr int ZERO = 128;

#if defined(__AVX512VNNI__) || (defined(__AVXVNNI__) && !defined(__AVX512F__))
#define CB_BYTE_DOTS 1
#else
#define CB_BYTE_DOTS 0
#endif

#if CB_BYTE_DOTS
// Four products at once: activations are bytes, 4 to a word.
constexpr int PARTS = 1;
#else
// Two products at once: activations have 16 bits, and 4 of them are two words, (0, 2) and (1, 3).
constexpr int PARTS = 2;
#endif

// Rows of the largest tile: its sums, and what the weights of one step take, fit the registers.
#if defined(__AVX512F__)
constexpr int DOT_ROWS = CB_BYTE_DOTS ? 14 : 12;
#elif CB_BYTE_DOTS
constexpr int DOT_ROWS = 6;
#else
constexpr int DOT_ROWS = 4;
#endif

// The PARTS that a word of weights is multiplied in.
static inline vu part_of(vu words, int part) {
#if CB_BYTE_DOTS
  (void)part;
  return words;
#else
  return (part ? words >> 8 : words) & 0x00ff00ffu;
#endif
}

static inline vi dot(vi sum, vu weights, uint32_t activations) {
  const vu x = (vu)(vi{} + (int32_t)activations);
#if CB_BYTE_DOTS && defined(__AVX512F__)
  return (vi)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)weights, (__m512i)x);
#elif CB_BYTE_DOTS
  return (vi)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)weights, (__m256i)x);
#elif defined(__AVX512BW__)
  return sum + (vi)_mm512_madd_epi16((__m512i)weights, (__m512i)x);
#elif defined(__AVX2__)
  return sum + (vi)_mm256_madd_epi16((__m256i)weights, (__m256i)x);
#elif defined(__SSE2__)
  return sum + (vi)_mm_madd_epi16((__m128i)weights, (__m128i)x);
#else
  const vi low = (vi)(weights & 0xffffu) * ((vi)(x << 16) >> 16);
  return sum + low + (vi)(weights >> 16) * ((vi)x >> 16);
#endif
}

// A row of activations: for each group its scale and -ZERO times the sum of its integers, then the integers.
struct GroupHead {
  float scale;
  int32_t start;
};

static inline int64_t groups_in(int64_t depth) { return (depth + GROUP - 1) / GROUP; }
static inline int64_t steps_in(int64_t depth) { return (depth + 3) / 4; }
static inline int64_t head_words(int64_t depth) { return (groups_in(depth) * 2 + 15) / 16 * 16; }
// Words of a whole row: whole vectors are written, whatever the depth.
static inline int64_t row_words(int64_t depth) { return head_words(depth) + groups_in(depth) * STEPS * PARTS; }

// VW integers -127 … 127 to where they belong: `at` is the place of the first one's word.
static inline void store_integers(uint32_t* at, vi x) {
#if CB_BYTE_DOTS && defined(__AVX512F__)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(at), _mm512_cvtepi32_epi8((__m512i)x));
#elif CB_BYTE_DOTS
  uint8_t bytes[VW];
  for (int i = 0; i < VW; ++i) bytes[i] = (uint8_t)x[i];
  memcpy(at, bytes, VW);
#else
#if defined(__AVX512F__)
  const vi later = CB_SHUFFLE(x, x, 2, 3, 2, 3, 6, 7, 6, 7, 10, 11, 10, 11, 14, 15, 14, 15);
#elif defined(__AVX2__)
  const vi later = CB_SHUFFLE(x, x, 2, 3, 2, 3, 6, 7, 6, 7);
#else
  const vi later = CB_SHUFFLE(x, x, 2, 3, 2, 3);
#endif
  const vi pairs = (x & 0xffff) | (later << 16);
#pragma GCC unroll 4
  for (int i = 0; i < VW / 4; ++i) memcpy(at + 2 * i, reinterpret_cast<const char*>(&pairs) + 16 * i, 8);
#endif
}

// One row of `depth` floats. A group's scale is its largest magnitude over 127; every integer is the nearest one, ties to
// even, of x * (127 / largest). A group with nothing over 1e-30 is 0; one with an infinity or a NaN has a NaN for its scale.
static inline void quantize_row(const float* x, int64_t depth, uint32_t* out) {
  auto* heads = reinterpret_cast<GroupHead*>(out);
  uint32_t* words = out + head_words(depth);
  for (int64_t g = 0; g < groups_in(depth); ++g, words += STEPS * PARTS) {
    vf v[GROUP / VW];
    vf largest = {}, wrong = {};
#pragma GCC unroll 16
    for (int i = 0; i < GROUP / VW; ++i) {
      const int64_t from = g * GROUP + i * VW, left = depth - from;
      v[i] = left >= VW ? load(x + from) : left > 0 ? load_part(x + from, (int)left) : vf{};
      largest = vmax(largest, (vf)((vu)v[i] & 0x7fffffffu));
      wrong += v[i] * 0.0f;
    }
    const float most = max_of(largest), nan = sum_of(wrong);
    const bool none = !(most > 1e-30f) || nan != 0.0f;
    const float factor = none ? 0.0f : 127.0f / most;
    vi total = {};
#pragma GCC unroll 16
    for (int i = 0; i < GROUP / VW; ++i) {
      // The bounds keep the product and the addition from becoming one operation, whose result would differ.
      vf y = none ? vf{} : vmin(splat(127.0f), vmax(splat(-127.0f), v[i] * factor));
      y += 12582912.0f;  // 1.5 * 2^23: rounds to the nearest integer
      const vi q = (vi)y - 0x4b400000;
      total += q;
      store_integers(words + i * VW / 4 * PARTS, q);
    }
    int32_t sum = 0;
    for (int i = 0; i < VW; ++i) sum += total[i];
    heads[g].scale = nan != 0.0f ? nan : none ? 0.0f : most / 127.0f;
    heads[g].start = -ZERO * sum;
  }
}

// tile[m, c] (+)= sum over groups [first, last) of scale[m, g] * (exact sum over the group).
//
// a: MR rows of activations, `lda` words apart, with `heads` words in front of the integers. b: the words of P panels,
// `panel_stride` words apart, from the first group on. steps: words in a row, in all groups. tile: MR rows of P * NR
// floats, `ldt` apart. Every element is one chain of operations in the order of the groups, whatever MR and P are.
template <int MR, int P>
static void dot_tile(const uint32_t* a, long lda, long heads, const uint32_t* b, long panel_stride, long first, long last,
                     long steps, bool add, float* tile, long ldt) {
  if (!add)
    for (int m = 0; m < MR; ++m)
      for (int v = 0; v < P * NV; ++v) store(tile + m * ldt + v * VW, vf{});
  // Rows are addressed in threes (base, base + lda, base + 2 lda), which takes few registers.
  const uint32_t* row[(MR + 2) / 3];
#pragma GCC unroll 16
  for (int i = 0; i < (MR + 2) / 3; ++i) row[i] = a + 3 * i * lda + heads + first * STEPS * PARTS;
  for (long g = first; g < last; ++g) {
    vi sum[MR][P * NV];
#pragma GCC unroll 16
    for (int m = 0; m < MR; ++m) {
      const int32_t start = reinterpret_cast<const GroupHead*>(a + m * lda)[g].start;
#pragma GCC unroll 16
      for (int v = 0; v < P * NV; ++v) sum[m][v] = vi{} + start;
    }
    const long count = steps - g * STEPS < STEPS ? steps - g * STEPS : STEPS;
#pragma GCC unroll 2
    for (long k = 0; k < count; ++k) {
      vu w[P][NV];
#pragma GCC unroll 4
      for (int p = 0; p < P; ++p) {
#pragma GCC unroll 4
        for (int v = 0; v < NV; ++v) w[p][v] = *reinterpret_cast<const vu_mem*>(b + p * panel_stride + v * VW);
        if (MR > 2)
#pragma GCC unroll 4
          for (int line = 0; line < NR; line += 16) __builtin_prefetch(b + p * panel_stride + 16 * NR + line);
      }
      b += NR;
#pragma GCC unroll 2
      for (int part = 0; part < PARTS; ++part) {
        vu factor[P][NV];
#pragma GCC unroll 4
        for (int p = 0; p < P; ++p)
#pragma GCC unroll 4
          for (int v = 0; v < NV; ++v) factor[p][v] = part_of(w[p][v], part);
#pragma GCC unroll 16
        for (int m = 0; m < MR; ++m) {
          const uint32_t x = row[m / 3][(m % 3) * lda + part];
#pragma GCC unroll 4
          for (int p = 0; p < P; ++p)
#pragma GCC unroll 4
            for (int v = 0; v < NV; ++v) sum[m][p * NV + v] = dot(sum[m][p * NV + v], factor[p][v], x);
        }
      }
#pragma GCC unroll 16
      for (int i = 0; i < (MR + 2) / 3; ++i) row[i] += PARTS;
    }
#pragma GCC unroll 16
    for (int m = 0; m < MR; ++m) {
      const float scale = reinterpret_cast<const GroupHead*>(a + m * lda)[g].scale;
#pragma GCC unroll 16
      for (int v = 0; v < P * NV; ++v) {
        float* at = tile + m * ldt + v * VW;
        const vf exact = __builtin_convertvector(sum[m][v], vf);
        store(at, load(at) + exact * scale);
      }
    }
  }
}

}  // namespace cb
