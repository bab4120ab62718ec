// Matrices of 8-bit weights, and products with rows of 8-bit activations (`dots.h`).
//
// A panel: NR floats, the scales of its columns, then its words. A weight is scale * (code - ZERO), and scale is the column's
// largest magnitude over 127. Unlike the other formats this one is not exact.
#pragma once

#include "matrix.h"

namespace cb {

// Rows of floats to rows of small integers: what a product with FORMAT_INT8 takes as its x, with strides in words.
struct Quantize {
  const float* x;
  uint32_t* out;
  int64_t x_stride, out_stride, depth;
};

int64_t int8_row_words(int64_t depth);
void quantize(const float* x, int64_t depth, uint32_t* out);

int64_t int8_panel_bytes(int64_t depth);
// False if a weight is not finite.
bool int8_pack_column(void* data, int64_t depth, int64_t panel, int column, const float* from);
void int8_unpack_column(const void* data, int64_t depth, int64_t panel, int column, float scale, float* to);
// Rows [row, end) times panels [panel, stop). `tiles`: memory for (end - row) * NR floats, and at least 4 * NR.
void int8_block(const Product& product, long row, long end, int64_t panel, int64_t stop, float* tiles);

}  // namespace cb
