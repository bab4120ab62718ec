#include "matrix.h"

#include "tile.h"

namespace cb {

namespace {

constexpr long ROW_GROUP = 9 * MRMAX;  // rows that stay in the core's cache while panels pass
constexpr long DEPTH_CHUNK = 256;      // longest chain of additions; partial sums are added up in order
constexpr int MAX_TILE = MRMAX * NR > 8 * NR ? MRMAX * NR : 8 * NR;

int64_t panels(int64_t columns, int32_t gated) {
  const int64_t width = gated ? NR / 2 : NR;
  return (columns + width - 1) / width;
}

template <class F>
auto with_format(int32_t format, const F& f) {
  if (format == FORMAT_BF16) return f(BF16{});
  if (format == FORMAT_F16) return f(F16{});
  return f(F32{});
}

// Panel and column in it of a column of one part of the matrix.
inline void locate(int64_t column, int32_t part, int64_t* panel, int* in_panel) {
  const int64_t width = part == PART_WHOLE ? NR : NR / 2;
  *panel = column / width;
  *in_panel = (int)(column % width) + (part == PART_UP ? NR / 2 : 0);
}

inline vf activate(vf x, int32_t activation) {
  switch (activation) {
    case ACT_SILU: return silu(x);
    case ACT_GELU_TANH: return gelu_tanh(x);
    case ACT_RELU: return relu(x);
    default: return x;
  }
}

inline vf finish(const Product& g, vf x, const float* out, int width) {
  if (g.epilogue == EPILOGUE_ADD) x += width == VW ? load(out) : load_part(out, width);
  if (g.cap > 0) x = g.cap * vtanh(x / g.cap);
  return x;
}

// A tile's columns, which begin at column `panel` * NR of the matrix, into the output.
void write_tile(const Product& g, const float* tile, long ldt, long row, int rows, int64_t panel, int panel_count) {
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

template <class W, int P>
void rows_by_panels(const Product& g, long row, int rows, int64_t panel, float* tile) {
  typedef typename W::Word Word;
  const long depth = g.matrix.depth, chunks = (depth + DEPTH_CHUNK - 1) / DEPTH_CHUNK;
  const Word* b = static_cast<const Word*>(g.matrix.data) + panel * NR * depth;
  const float* a = g.x + row * g.x_stride;
  with_rows < P == 1 ? MRMAX : 4 / P > (rows, [&](auto mr) {
    for (long i = 0; i < chunks; ++i) {
      const long from = depth * i / chunks, to = depth * (i + 1) / chunks;
      tile_product<W, mr.value, P>(a + from, g.x_stride, b + from * NR, NR * depth, to - from, i > 0, tile, P * NR);
    }
  });
  write_tile(g, tile, P * NR, row, rows, panel, P);
}

// Rows [row, end) times panels [panel, stop).
template <class W>
void block(const Product& g, long row, long end, int64_t panel, int64_t stop, float* tile) {
  const RowBlocks blocks(end - row);
  // One or two rows need several panels at once, for enough additions that do not wait for each other.
  if (end - row == 1)
    for (; panel + 4 <= stop; panel += 4) rows_by_panels<W, 4>(g, row, 1, panel, tile);
  if (end - row == 2)
    for (; panel + 2 <= stop; panel += 2) rows_by_panels<W, 2>(g, row, 2, panel, tile);
  for (; panel < stop; ++panel)
    for (long i = 0; i < blocks.count; ++i) {
      const long at = row + blocks.cut(i);
      rows_by_panels<W, 1>(g, at, (int)(row + blocks.cut(i + 1) - at), panel, tile);
    }
}

}  // namespace

int64_t panels_of(const Matrix& matrix) { return panels(matrix.columns, matrix.gated); }

int64_t packed_bytes(int64_t columns, int64_t depth, int32_t format, int32_t gated) {
  return panels(columns, gated) * NR * depth * (format == FORMAT_F32 ? 4 : 2);
}

bool pack(const Matrix& matrix, void* data, const float* source, int64_t first, int64_t count, int32_t part) {
  return with_format(matrix.format, [&](auto format) {
    typedef decltype(format) W;
    bool exact = true;
    for (int64_t i = 0; i < count; ++i) {
      int64_t panel;
      int column;
      locate(first + i, part, &panel, &column);
      auto* to = static_cast<typename W::Word*>(data) + panel * NR * matrix.depth + W::slot(column);
      const float* from = source + i * matrix.depth;
      for (int64_t k = 0; k < matrix.depth; ++k) {
        const auto word = W::of(from[k]);
        exact &= W::back(word) == from[k];
        to[k * NR] = word;
      }
    }
    return exact;
  });
}

void unpack(const Matrix& matrix, float* target, int64_t first, int64_t count, int32_t part) {
  with_format(matrix.format, [&](auto format) {
    typedef decltype(format) W;
    for (int64_t i = 0; i < count; ++i) {
      int64_t panel;
      int column;
      locate(first + i, part, &panel, &column);
      const auto* from = static_cast<const typename W::Word*>(matrix.data) + panel * NR * matrix.depth + W::slot(column);
      for (int64_t k = 0; k < matrix.depth; ++k) target[i * matrix.depth + k] = W::back(from[k * NR]);
    }
    return true;
  });
}

void read_column(const Matrix& matrix, int64_t column, float scale, float* target) {
  unpack(matrix, target, column, 1, PART_WHOLE);
  for (int64_t k = 0; k < matrix.depth; ++k) target[k] *= scale;
}

size_t product_scratch() { return sizeof(float) * MAX_TILE; }

void product_work(const Product& g, Member& member) {
  const int threads = member.team->size();
  const int64_t all = panels_of(g.matrix);
  const long groups = (g.rows + ROW_GROUP - 1) / ROW_GROUP;
  // Several tasks for each thread, so that one that lost its core for a while holds up little.
  int64_t share = threads == 1 ? all : all * groups / (4 * threads);
  const int64_t together = g.rows == 1 ? 4 : g.rows == 2 ? 2 : 1;  // panels that `block` takes at once
  share = share < together ? together : share / together * together;
  const int64_t shares = (all + share - 1) / share;
  float* tile = reinterpret_cast<float*>(member.scratch);
  for (long task; member.team->take(shares * groups, &task);) {
    const int64_t panel = task / groups * share, stop = panel + share < all ? panel + share : all;
    const long group = task % groups;
    const long row = g.rows * group / groups, end = g.rows * (group + 1) / groups;
    with_format(g.matrix.format, [&](auto format) {
      block<decltype(format)>(g, row, end, panel, stop, tile);
      return true;
    });
  }
}

}  // namespace cb
