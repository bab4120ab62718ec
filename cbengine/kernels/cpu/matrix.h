// Matrices of weights, packed for the kernels of tile.h, and products with them.
//
// A matrix of n columns and `depth` rows (a linear layer's weight, transposed) is kept as panels of NR columns, each panel
// from its first depth to its last. The last panel is filled up with zeros. `gated` matrices hold two of n / 2 columns: in
// each panel the first NR / 2 columns are of the one that the activation is applied to, the others of its factor.
#pragma once

#include "simd.h"
#include "team.h"

namespace cb {

// How the weights are kept. Each is exact, or `pack` refuses it, but for the last. CODES: of 4 or 8 bits, in groups of 32 or
// 16. INT8: see int8.h; products with it take rows of integers.
enum Format : int32_t {
  FORMAT_F32 = 0,
  FORMAT_BF16 = 1,
  FORMAT_F16 = 2,
  FORMAT_CODES4 = 3,
  FORMAT_CODES8 = 4,
  FORMAT_CODES8_SHORT = 5,
  FORMAT_INT8 = 6
};
enum Part : int32_t { PART_WHOLE = 0, PART_GATE = 1, PART_UP = 2 };
enum Activation : int32_t { ACT_NONE = 0, ACT_SILU = 1, ACT_GELU_TANH = 2, ACT_RELU = 3 };
enum Epilogue : int32_t { EPILOGUE_STORE = 0, EPILOGUE_ADD = 1, EPILOGUE_GATED = 2 };

struct Matrix {
  const void* data;
  const float* bias;  // one for each column, in the panels' order, filled up; or null
  int64_t columns;    // of the output: half of what the panels hold, if gated
  int64_t depth;
  int32_t format;
  int32_t gated;
};

// out = x W^T + bias, or added to out, or act(gate) * up; then cap * tanh(. / cap) if cap > 0.
struct Product {
  const float* x;                // rows of integers (int8.h) for FORMAT_INT8
  float* out;
  int64_t x_stride, out_stride;  // floats, or words, from row to row
  int64_t rows;
  Matrix matrix;
  int32_t epilogue;
  int32_t activation;
  float cap;
};

int64_t panels_of(const Matrix& matrix);
// 0 if the format does not go with this depth.
int64_t packed_bytes(int64_t columns, int64_t depth, int32_t format, int32_t gated);
// Puts columns [first, first + count) in place: `source` is [count, depth], a part of a linear layer's weight. False if the
// format does not hold all of them exactly.
bool pack(const Matrix& matrix, void* data, const float* source, int64_t first, int64_t count, int32_t part);
void unpack(const Matrix& matrix, float* target, int64_t first, int64_t count, int32_t part);
// One column, times `scale`: the embedding of a token, where the embedding is the output matrix too.
void read_column(const Matrix& matrix, int64_t column, float scale, float* target);

size_t product_scratch();
// Within a run of the team: this member's share.
void product_work(const Product& product, Member& member);

}  // namespace cb
