#include "matrix.h"

#include <type_traits>

#include "codes.h"
#include "epilogue.h"
#include "int8.h"
#include "tile.h"

namespace cb {

namespace {

constexpr long ROW_GROUP = 10 * MRMAX;  // rows that stay in the core's cache while panels pass
constexpr long DEPTH_CHUNK = 320;      // longest chain of additions; partial sums are added up in order
constexpr int64_t STRIP_BYTES = 4 << 20;  // weights that stay in the shared cache while groups of rows pass
constexpr int64_t PIECES = 4;             // for each member, of a strip and a group of rows, at least
constexpr int64_t PIECE_WORK = 3 << 19;   // multiplications that are worth being handed out as a piece
constexpr long CHUNK_UNIT = 32;        // no chunk ends within a group of codes

typedef Affine<4, 32> Codes4;
typedef Affine<8, 32> Codes8;
typedef Affine<8, 16> Codes8Short;

struct Int8 {};

template <class W>
struct is_affine : std::false_type {};
template <int BITS, int GROUP>
struct is_affine<Affine<BITS, GROUP>> : std::true_type {};

template <class F>
auto with_format(int32_t format, const F& f) {
  switch (format) {
    case FORMAT_BF16: return f(BF16{});
    case FORMAT_F16: return f(F16{});
    case FORMAT_CODES4: return f(Codes4{});
    case FORMAT_CODES8: return f(Codes8{});
    case FORMAT_CODES8_SHORT: return f(Codes8Short{});
    case FORMAT_INT8: return f(Int8{});
    default: return f(F32{});
  }
}

int64_t panels(int64_t columns, int32_t gated) {
  const int64_t width = gated ? NR / 2 : NR;
  return (columns + width - 1) / width;
}

// One panel, and one column of it, in either kind of format.
template <class W>
const typename W::Word* panel_of(const void* data, int64_t panel, int64_t depth) {
  return static_cast<const typename W::Word*>(data) + panel * NR * depth;
}
template <class A>
const typename A::Block* groups_of(const void* data, int64_t panel, int64_t depth) {
  return static_cast<const typename A::Block*>(data) + panel * (depth / A::GROUP);
}

// Cuts the depth into the fewest chunks, evenly: chunk i is [cut(i), cut(i + 1)).
struct Chunks {
  long depth, count;
  explicit Chunks(long depth) : depth(depth), count((depth + DEPTH_CHUNK - 1) / DEPTH_CHUNK) {}
  long cut(long i) const { return i == count ? depth : depth / CHUNK_UNIT * i / count * CHUNK_UNIT; }
};

// Panel and column in it of a column of one part of the matrix.
inline void locate(int64_t column, int32_t part, int64_t* panel, int* in_panel) {
  const int64_t width = part == PART_WHOLE ? NR : NR / 2;
  *panel = column / width;
  *in_panel = (int)(column % width) + (part == PART_UP ? NR / 2 : 0);
}

template <class W>
bool pack_column(void* data, int64_t depth, int64_t panel, int column, const float* from) {
  if constexpr (std::is_same<W, Int8>::value) {
    return int8_pack_column(data, depth, panel, column, from);
  } else if constexpr (is_affine<W>::value) {
    auto* groups = const_cast<typename W::Block*>(groups_of<W>(data, panel, depth));
    for (int64_t g = 0; g < depth / W::GROUP; ++g) {
      Coding coding;
      uint8_t codes[W::GROUP];
      if (!find_coding(from + g * W::GROUP, W::GROUP, W::CODES - 1, &coding, codes)) return false;
      groups[g].scale[column] = coding.scale;
      groups[g].offset[column] = coding.offset;
      for (int i = 0; i < W::GROUP / W::PER_WORD; ++i) {
        uint32_t word = 0;
        for (int k = 0; k < W::PER_WORD; ++k) word |= (uint32_t)codes[i * W::PER_WORD + k] << (k * W::BITS);
        groups[g].words[i][column] = word;
      }
    }
    return true;
  } else {
    auto* to = const_cast<typename W::Word*>(panel_of<W>(data, panel, depth)) + W::slot(column);
    bool exact = true;
    for (int64_t k = 0; k < depth; ++k) {
      const auto word = W::of(from[k]);
      exact &= std::is_same<W, F32>::value || W::back(word) == from[k];
      to[k * NR] = word;
    }
    return exact;
  }
}

template <class W>
void unpack_column(const void* data, int64_t depth, int64_t panel, int column, float scale, float* to) {
  if constexpr (std::is_same<W, Int8>::value) {
    int8_unpack_column(data, depth, panel, column, scale, to);
  } else if constexpr (is_affine<W>::value) {
    const auto* groups = groups_of<W>(data, panel, depth);
    for (int64_t k = 0; k < depth; ++k) {
      const auto& block = groups[k / W::GROUP];
      const int in_group = (int)(k % W::GROUP);
      const uint32_t word = block.words[in_group / W::PER_WORD][column];
      const uint32_t code = word >> (in_group % W::PER_WORD * W::BITS) & (W::CODES - 1);
      to[k] = (block.offset[column] + block.scale[column] * (float)code) * scale;
    }
  } else {
    const auto* from = panel_of<W>(data, panel, depth) + W::slot(column);
    for (int64_t k = 0; k < depth; ++k) to[k] = W::back(from[k * NR]) * scale;
  }
}

// One member's memory.
struct Scratch {
  float tiles[ROW_GROUP * NR];
  float panel[(DEPTH_CHUNK + CHUNK_UNIT) * NR];  // unpacked codes
};

// Rows [row, end) times one panel. The chunk of the panel stays in the nearest cache while the blocks of rows pass.
template <class W>
void one_panel(const Product& g, long row, long end, int64_t panel, Scratch& s) {
  const long depth = g.matrix.depth;
  const Chunks chunks(depth);
  const RowBlocks blocks(end - row);
  for (long i = 0; i < chunks.count; ++i) {
    const long from = chunks.cut(i), to = chunks.cut(i + 1);
    for (long b = 0; b < blocks.count; ++b) {
      const float* x = g.x + (row + blocks.cut(b)) * g.x_stride + from;
      float* tile = s.tiles + blocks.cut(b) * NR;
      with_rows((int)(blocks.cut(b + 1) - blocks.cut(b)), [&](auto mr) {
        if constexpr (is_affine<W>::value) {
          const auto* groups = groups_of<W>(g.matrix.data, panel, depth) + from / W::GROUP;
          const long count = (to - from) / W::GROUP;
          if (b > 0)  // the first block of rows has left the unpacked panel behind
            tile_product<F32, mr.value, 1>(x, g.x_stride, s.panel, 0, to - from, i > 0, tile, NR);
          else if (blocks.count > 1)
            affine_product<W, mr.value, true>(x, g.x_stride, groups, count, i > 0, tile, NR, s.panel);
          else
            affine_product<W, mr.value, false>(x, g.x_stride, groups, count, i > 0, tile, NR, nullptr);
        } else {
          const auto* weights = panel_of<W>(g.matrix.data, panel, depth) + from * NR;
          tile_product<W, mr.value, 1>(x, g.x_stride, weights, 0, to - from, i > 0, tile, NR);
        }
      });
    }
  }
  write_tile(g, s.tiles, NR, row, (int)(end - row), panel, 1);
}

// One or two rows and P panels at once, for enough additions that do not wait for each other.
template <class W, int MR, int P>
void several_panels(const Product& g, long row, int64_t panel, Scratch& s) {
  const long depth = g.matrix.depth;
  const Chunks chunks(depth);
  const auto* weights = panel_of<W>(g.matrix.data, panel, depth);
  for (long i = 0; i < chunks.count; ++i) {
    const long from = chunks.cut(i), to = chunks.cut(i + 1);
    tile_product<W, MR, P>(g.x + row * g.x_stride + from, g.x_stride, weights + from * NR, NR * depth, to - from, i > 0,
                           s.tiles, P * NR);
  }
  write_tile(g, s.tiles, P * NR, row, MR, panel, P);
}

// Rows [row, end) times panels [panel, stop).
template <class W>
void block(const Product& g, long row, long end, int64_t panel, int64_t stop, Scratch& s) {
  if constexpr (!is_affine<W>::value) {
    if (end - row == 1)
      for (; panel + 4 <= stop; panel += 4) several_panels<W, 1, 4>(g, row, panel, s);
    if (end - row == 2)
      for (; panel + 2 <= stop; panel += 2) several_panels<W, 2, 2>(g, row, panel, s);
  }
  for (; panel < stop; ++panel) one_panel<W>(g, row, end, panel, s);
}

// Rows [row, end) times panels [panel, stop).
struct Piece {
  long row, end;
  int64_t panel, stop;
};

// Cuts a product into pieces for the members of a team. From the inside out: several pieces of equal size for each member,
// so that nobody waits long for the last one, nor for one that lost its core for a while; groups of rows, whose inputs stay
// in a core's own cache from one piece to the next; and strips of panels, whose weights stay in the shared cache from one
// group of rows to the next.
class Cut {
 public:
  Cut(const Product& g, int threads) : rows(g.rows), all(panels_of(g.matrix)) {
    groups = (rows + ROW_GROUP - 1) / ROW_GROUP;
    const int64_t bytes = packed_bytes(g.matrix.columns, g.matrix.depth, g.matrix.format, g.matrix.gated);
    strips = groups <= 1 ? 1 : (bytes + STRIP_BYTES - 1) / STRIP_BYTES;
    together = rows == 1 ? 4 : rows == 2 ? 2 : 1;  // panels that `block` takes at once
    units = (all + together - 1) / together;
    if (strips > units) strips = units;
    const int64_t work = (groups ? rows / groups : 0) * g.matrix.depth * NR * (units / strips) * together;
    shares = threads == 1 ? 1 : PIECES * threads;
    if (threads > 1 && work / PIECE_WORK > shares) shares = work / PIECE_WORK;
    if (shares > units / strips) shares = units / strips > 0 ? units / strips : 1;
  }

  long tasks() const { return (long)(strips * groups * shares); }

  Piece piece(long task) const {
    const int64_t share = task % shares, group = task / shares % groups, strip = task / shares / groups;
    const int64_t first = units * strip / strips, last = units * (strip + 1) / strips;
    const int64_t panel = (first + (last - first) * share / shares) * together;
    const int64_t stop = (first + (last - first) * (share + 1) / shares) * together;
    return Piece{(long)(rows * group / groups), (long)(rows * (group + 1) / groups), panel, stop < all ? stop : all};
  }

 private:
  const int64_t rows, all;  // panels
  int64_t groups, strips, together, units, shares;
};

}  // namespace

int64_t panels_of(const Matrix& matrix) { return panels(matrix.columns, matrix.gated); }

int64_t packed_bytes(int64_t columns, int64_t depth, int32_t format, int32_t gated) {
  return with_format(format, [&](auto kind) -> int64_t {
    typedef decltype(kind) W;
    if constexpr (std::is_same<W, Int8>::value)
      return panels(columns, gated) * int8_panel_bytes(depth);
    else if constexpr (is_affine<W>::value)
      return depth % W::GROUP ? 0 : panels(columns, gated) * (depth / W::GROUP) * (int64_t)sizeof(typename W::Block);
    else
      return panels(columns, gated) * NR * depth * (int64_t)sizeof(typename W::Word);
  });
}

bool pack(const Matrix& matrix, void* data, const float* source, int64_t first, int64_t count, int32_t part) {
  return with_format(matrix.format, [&](auto format) {
    for (int64_t i = 0; i < count; ++i) {
      int64_t panel;
      int column;
      locate(first + i, part, &panel, &column);
      if (!pack_column<decltype(format)>(data, matrix.depth, panel, column, source + i * matrix.depth)) return false;
    }
    return true;
  });
}

void unpack(const Matrix& matrix, float* target, int64_t first, int64_t count, int32_t part) {
  with_format(matrix.format, [&](auto format) {
    for (int64_t i = 0; i < count; ++i) {
      int64_t panel;
      int column;
      locate(first + i, part, &panel, &column);
      unpack_column<decltype(format)>(matrix.data, matrix.depth, panel, column, 1.0f, target + i * matrix.depth);
    }
    return true;
  });
}

void read_column(const Matrix& matrix, int64_t column, float scale, float* target) {
  with_format(matrix.format, [&](auto format) {
    unpack_column<decltype(format)>(matrix.data, matrix.depth, column / NR, (int)(column % NR), scale, target);
    return true;
  });
}

size_t product_scratch() { return sizeof(Scratch); }

void product_work(const Product& g, Member& member) {
  const Cut cut(g, member.team->size());
  Scratch& scratch = *reinterpret_cast<Scratch*>(member.scratch);
  for (long task; member.team->take(cut.tasks(), &task);) {
    const Piece piece = cut.piece(task);
    with_format(g.matrix.format, [&](auto format) {
      typedef decltype(format) W;
      if constexpr (std::is_same<W, Int8>::value)
        int8_block(g, piece.row, piece.end, piece.panel, piece.stop, scratch.tiles);
      else
        block<W>(g, piece.row, piece.end, piece.panel, piece.stop, scratch);
      return true;
    });
  }
}

}  // namespace cb
