#include "int8.h"

#include "dots.h"
#include "epilogue.h"
#include "tile.h"

namespace cb {

namespace {

constexpr long CHUNK = 10;  // groups of a panel that stay in the nearest cache while the blocks of rows pass

struct Panel {
  const float* scales;
  const uint32_t* words;
  Panel(const void* data, int64_t panel, int64_t depth)
      : scales(reinterpret_cast<const float*>(static_cast<const char*>(data) + panel * int8_panel_bytes(depth))),
        words(reinterpret_cast<const uint32_t*>(scales + NR)) {}
};

// Cuts the groups into the fewest chunks, evenly.
struct Chunks {
  long groups, count;
  explicit Chunks(long groups) : groups(groups), count((groups + CHUNK - 1) / CHUNK) {}
  long cut(long i) const { return groups * i / count; }
};

template <int MR, int P>
void tile_of(const Product& g, long row, int64_t panel, long first, long last, float* tile, long ldt) {
  const int64_t depth = g.matrix.depth;
  const auto* x = reinterpret_cast<const uint32_t*>(g.x) + row * g.x_stride;
  const uint32_t* words = Panel(g.matrix.data, panel, depth).words + first * STEPS * NR;
  dot_tile<MR, P>(x, g.x_stride, head_words(depth), words, int8_panel_bytes(depth) / 4, first, last, steps_in(depth),
                  first > 0, tile, ldt);
}

// Every column times its scale.
void scale_tile(const Product& g, float* tile, long ldt, long rows, int64_t panel, int panels) {
  for (int p = 0; p < panels; ++p) {
    const float* scales = Panel(g.matrix.data, panel + p, g.matrix.depth).scales;
    vf by[NV];
    for (int v = 0; v < NV; ++v) by[v] = load(scales + v * VW);
    for (long m = 0; m < rows; ++m)
      for (int v = 0; v < NV; ++v) {
        float* at = tile + m * ldt + p * NR + v * VW;
        store(at, load(at) * by[v]);
      }
  }
}

void one_panel(const Product& g, long row, long end, int64_t panel, float* tiles) {
  const Chunks chunks(groups_in(g.matrix.depth));
  const RowBlocks blocks(end - row, DOT_ROWS);
  for (long i = 0; i < chunks.count; ++i)
    for (long b = 0; b < blocks.count; ++b)
      with_rows<DOT_ROWS>((int)(blocks.cut(b + 1) - blocks.cut(b)), [&](auto mr) {
        tile_of<mr.value, 1>(g, row + blocks.cut(b), panel, chunks.cut(i), chunks.cut(i + 1), tiles + blocks.cut(b) * NR,
                             NR);
      });
  scale_tile(g, tiles, NR, end - row, panel, 1);
  write_tile(g, tiles, NR, row, (int)(end - row), panel, 1);
}

// One or two rows and P panels at once, for enough sums that do not wait for each other.
template <int MR, int P>
void several_panels(const Product& g, long row, int64_t panel, float* tiles) {
  tile_of<MR, P>(g, row, panel, 0, groups_in(g.matrix.depth), tiles, P * NR);
  scale_tile(g, tiles, P * NR, MR, panel, P);
  write_tile(g, tiles, P * NR, row, MR, panel, P);
}

}  // namespace

int64_t int8_row_words(int64_t depth) { return row_words(depth); }

void quantize(const float* x, int64_t depth, uint32_t* out) { quantize_row(x, depth, out); }

int64_t int8_panel_bytes(int64_t depth) { return NR * (4 + 4 * steps_in(depth)); }

bool int8_pack_column(void* data, int64_t depth, int64_t panel, int column, const float* from) {
  float largest = 0;
  for (int64_t k = 0; k < depth; ++k) {
    if (!std::isfinite(from[k])) return false;
    largest = std::fmax(largest, std::fabs(from[k]));
  }
  const Panel to(data, panel, depth);
  const float scale = largest / 127.0f;
  const_cast<float*>(to.scales)[column] = scale;
  for (int64_t step = 0; step < steps_in(depth); ++step) {
    uint32_t word = 0;
    for (int64_t i = 0; i < 4; ++i) {
      const int64_t k = step * 4 + i;
      const float steps = k < depth && scale > 0 ? std::nearbyint(from[k] / scale) : 0.0f;
      const float kept = std::fmin(127.0f, std::fmax(-127.0f, steps));  // a tiny scale may be rounded
      word |= (uint32_t)((int)kept + ZERO) << (8 * i);
    }
    const_cast<uint32_t*>(to.words)[step * NR + column] = word;
  }
  return true;
}

void int8_unpack_column(const void* data, int64_t depth, int64_t panel, int column, float scale, float* to) {
  const Panel from(data, panel, depth);
  for (int64_t k = 0; k < depth; ++k) {
    const uint32_t code = from.words[k / 4 * NR + column] >> (k % 4 * 8) & 0xffu;
    to[k] = (float)((int)code - ZERO) * from.scales[column] * scale;
  }
}

void int8_block(const Product& g, long row, long end, int64_t panel, int64_t stop, float* tiles) {
  if (end - row == 1)
    for (; panel + 4 <= stop; panel += 4) several_panels<1, 4>(g, row, panel, tiles);
  if (end - row == 2)
    for (; panel + 2 <= stop; panel += 2) several_panels<2, 2>(g, row, panel, tiles);
  for (; panel < stop; ++panel) one_panel(g, row, end, panel, tiles);
}

}  // namespace cb
