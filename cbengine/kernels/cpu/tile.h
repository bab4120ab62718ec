// The inner product of a few rows with a panel of columns: what matrix products and attention spend their time in.
#pragma once

#include "simd.h"

namespace cb {

// tile[m, c] = sum over k of a[m, k] * b[k, c], or that added to what the tile holds.
//
// a: MR rows, `lda` floats apart. b: P panels, `panel_stride` words apart, each of `depth` rows of NR weights. tile: MR rows of
// P * NR floats, `ldt` apart.
// Every element is one chain of fused multiply-adds in the order of k, whatever MR and P are: the result for a row does
// not depend on the rows that are computed with it.
template <class W, int MR, int P>
static void tile_product(const float* a, long lda, const typename W::Word* b, long panel_stride, long depth, bool add,
                         float* tile, long ldt) {
  vf sum[MR][P * NV];
#pragma GCC unroll 16
  for (int m = 0; m < MR; ++m)
#pragma GCC unroll 16
    for (int v = 0; v < P * NV; ++v) sum[m][v] = vf{};
  // Rows are addressed in threes (base, base + lda, base + 2 lda), which takes few registers.
  const float* row[(MR + 2) / 3];
#pragma GCC unroll 16
  for (int i = 0; i < (MR + 2) / 3; ++i) row[i] = a + 3 * i * lda;
#pragma GCC unroll 2
  for (long k = 0; k < depth; ++k) {
    vf w[P][NV];
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p) {
      W::read(b + p * panel_stride, w[p]);
      // Far ahead where there is arithmetic to hide it. Streaming for one or two rows is left to the hardware.
      if (MR > 2) __builtin_prefetch(b + p * panel_stride + 32 * NR);
    }
    b += NR;
#pragma GCC unroll 16
    for (int m = 0; m < MR; ++m) {
      const float x = row[m / 3][(m % 3) * lda];
#pragma GCC unroll 4
      for (int p = 0; p < P; ++p)
#pragma GCC unroll 4
        for (int v = 0; v < NV; ++v) sum[m][p * NV + v] += x * w[p][v];
    }
#pragma GCC unroll 16
    for (int i = 0; i < (MR + 2) / 3; ++i) ++row[i];
  }
#pragma GCC unroll 16
  for (int m = 0; m < MR; ++m)
#pragma GCC unroll 16
    for (int v = 0; v < P * NV; ++v) {
      float* at = tile + m * ldt + v * VW;
      store(at, add ? load(at) + sum[m][v] : sum[m][v]);
    }
}

// The same for one panel of groups, unpacked on the way. With KEEP, the unpacked panel goes to `out`, [count * GROUP, NR],
// where `tile_product` reads it as F32.
template <class A, int MR, bool KEEP>
static void affine_product(const float* a, long lda, const typename A::Block* groups, long count, bool add, float* tile,
                           long ldt, float* out) {
  vf sum[MR][NV];
#pragma GCC unroll 16
  for (int m = 0; m < MR; ++m)
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) sum[m][v] = vf{};
  const float* row[(MR + 2) / 3];
#pragma GCC unroll 16
  for (int i = 0; i < (MR + 2) / 3; ++i) row[i] = a + 3 * i * lda;
  for (long g = 0; g < count; ++g) {
    const typename A::Block& block = groups[g];
    vf scale[NV], offset[NV];
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) scale[v] = load(block.scale + v * VW), offset[v] = load(block.offset + v * VW);
#pragma GCC unroll 1
    for (int r = 0; r < A::GROUP / A::PER_WORD; ++r) {
      vu words[NV];
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) words[v] = A::words_at(block, r, v);
#pragma GCC unroll 8
      for (int k = 0; k < A::PER_WORD; ++k) {
        vf w[NV];
#pragma GCC unroll 4
        for (int v = 0; v < NV; ++v) w[v] = offset[v] + scale[v] * A::codes(words[v], k);
        if (KEEP)
#pragma GCC unroll 4
          for (int v = 0; v < NV; ++v) store(out + k * NR + v * VW, w[v]);
#pragma GCC unroll 16
        for (int m = 0; m < MR; ++m) {
          const float x = row[m / 3][(m % 3) * lda + k];
#pragma GCC unroll 4
          for (int v = 0; v < NV; ++v) sum[m][v] += x * w[v];
        }
      }
#pragma GCC unroll 16
      for (int i = 0; i < (MR + 2) / 3; ++i) row[i] += A::PER_WORD;
      if (KEEP) out += A::PER_WORD * NR;
    }
  }
#pragma GCC unroll 16
  for (int m = 0; m < MR; ++m)
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) {
      float* at = tile + m * ldt + v * VW;
      store(at, add ? load(at) + sum[m][v] : sum[m][v]);
    }
}

// out[m, d] = out[m, d] * scale[m] + sum over j of weight[m, j] * rows[j][offset + d], for d < NR: one chain in the order
// of j. Meanwhile every second line of the rows that will be needed next, `next`, is asked for.
template <int MR>
static void weighted_rows(const float* weight, long ldw, const float* const* rows, const float* const* next, long offset,
                          long count, const float* scale, float* out, long ldo) {
  vf sum[MR][NV];
#pragma GCC unroll 16
  for (int m = 0; m < MR; ++m)
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) sum[m][v] = vf{};
  const float* at[(MR + 2) / 3];
#pragma GCC unroll 16
  for (int i = 0; i < (MR + 2) / 3; ++i) at[i] = weight + 3 * i * ldw;
  for (long j = 0; j < count; ++j) {
    vf x[NV];
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) x[v] = load(rows[j] + offset + v * VW);
#pragma GCC unroll 4
    for (int v = 0; v < NR; v += 32) __builtin_prefetch(next[j] + offset + v, 0, 2);
#pragma GCC unroll 16
    for (int m = 0; m < MR; ++m) {
      const float p = at[m / 3][(m % 3) * ldw];
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) sum[m][v] += p * x[v];
    }
#pragma GCC unroll 16
    for (int i = 0; i < (MR + 2) / 3; ++i) ++at[i];
  }
#pragma GCC unroll 16
  for (int m = 0; m < MR; ++m)
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) {
      float* to = out + m * ldo + v * VW;
      store(to, load(to) * scale[m] + sum[m][v]);
    }
}

// Cuts `rows` into the fewest blocks of at most `most` rows, evenly: block i is [cut(i), cut(i + 1)).
struct RowBlocks {
  long rows, count;
  explicit RowBlocks(long rows, long most = MRMAX) : rows(rows), count((rows + most - 1) / most) {}
  long cut(long i) const { return rows * i / count; }
};

// Calls f(std::integral_constant<int, mr>) for a number of rows that is known only now.
template <int N>
struct Rows {
  static constexpr int value = N;
};

template <int N = MRMAX, class F>
static inline void with_rows(int mr, const F& f) {
  if constexpr (N > 1) {
    if (mr < N) return with_rows<N - 1>(mr, f);
  }
  f(Rows<N>{});
}

}  // namespace cb
