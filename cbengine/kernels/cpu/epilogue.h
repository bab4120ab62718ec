// From the sums of a product to its output: bias, activation, what is added, cap.
#pragma once

#include "matrix.h"

namespace cb {

static inline vf activate(vf x, int32_t activation) {
  switch (activation) {
    case ACT_SILU: return silu(x);
    case ACT_GELU_TANH: return gelu_tanh(x);
    case ACT_RELU: return relu(x);
    default: return x;
  }
}

static inline vf finish(const Product& g, vf x, const float* out, int width) {
  if (g.epilogue == EPILOGUE_ADD) x += width == VW ? load(out) : load_part(out, width);
  if (g.cap > 0) x = g.cap * vtanh(x / g.cap);
  return x;
}

// A tile into the output: `rows` rows, and the columns of `panel_count` panels from panel `panel` on.
static inline void write_tile(const Product& g, const float* tile, long ldt, long row, int rows, int64_t panel,
                              int panel_count) {
  const bool gated = g.matrix.gated;
  const int steps = gated ? NV / 2 : NV;  // vectors of output for each panel
  for (int m = 0; m < rows; ++m) {
    float* out = g.out + (row + m) * g.out_stride;
    for (int p = 0; p < panel_count; ++p) {
      const float* in = tile + m * ldt + p * NR;
      const float* bias = g.matrix.bias ? g.matrix.bias + (panel + p) * NR : nullptr;
      for (int v = 0; v < steps; ++v) {
        const int64_t column = ((panel + p) * steps + v) * VW;
        if (column >= g.matrix.columns) break;
        const int width = g.matrix.columns - column < VW ? (int)(g.matrix.columns - column) : VW;
        vf x = load(in + v * VW);
        if (bias) x += load(bias + v * VW);
        if (gated) {
          vf factor = load(in + NR / 2 + v * VW);
          if (bias) factor += load(bias + NR / 2 + v * VW);
          x = activate(x, g.activation) * factor;
        }
        x = finish(g, x, out + column, width);
        if (width == VW) store(out + column, x);
        else store_part(out + column, x, width);
      }
    }
  }
}

}  // namespace cb
