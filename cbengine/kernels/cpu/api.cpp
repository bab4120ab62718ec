// What Python calls, through ctypes. Pointers are to memory that stays as it is during the call; no call keeps any of them.
// Results: 0, or -1 where memory ran out.

#include <cstdlib>
#include <new>
#include <system_error>

#include "attention.h"

namespace cb {
namespace {

enum Kind : int32_t {
  KIND_EMBED = 0,
  KIND_NORM = 1,
  KIND_PRODUCT = 2,
  KIND_ROPE = 3,
  KIND_ATTEND = 4,
  KIND_QUANTIZE = 5,
  KIND_PICK = 6
};
enum RowsOf : int32_t { ROWS_TOKENS = 0, ROWS_SAMPLES = 1 };

// One operation of a step. Its number of rows is the step's number of tokens, or of sampled tokens. `group`: which of the
// step's batches it sees, that is, whose block tables.
struct Operation {
  int32_t kind, rows_of, group, unused;
  union {
    Embed embed;
    Norm norm;
    Product product;
    Rope rope;
    Attend attend;
    Quantize quantize;
    Pick pick;
  };
};

struct Step {
  const Batch* batches;
  const Operation* operations;
  int64_t count;
};

void work_on_step(void* context, Member& member) {
  const Step& step = *static_cast<const Step*>(context);
  for (int64_t i = 0; i < step.count; ++i) {
    const Operation& operation = step.operations[i];
    const Batch& batch = step.batches[operation.group];
    const int64_t rows = operation.rows_of == ROWS_TOKENS ? batch.tokens : batch.samples;
    switch (operation.kind) {
      case KIND_EMBED: embed_work(operation.embed, batch, member); break;
      case KIND_NORM: norm_work(operation.norm, rows, member); break;
      case KIND_ROPE: rope_work(operation.rope, batch, member); break;
      case KIND_ATTEND: attend_work(operation.attend, batch, member); break;
      case KIND_QUANTIZE: quantize_work(operation.quantize, rows, member); break;
      case KIND_PICK: pick_work(operation.pick, batch, member); break;
      default: {
        Product product = operation.product;
        product.rows = rows;
        product_work(product, member);
      }
    }
    if (i + 1 < step.count) member.team->barrier();  // the run itself ends with one
  }
}

size_t scratch_for(const Operation& operation) {
  if (operation.kind == KIND_PRODUCT) return product_scratch();
  if (operation.kind != KIND_ATTEND) return 0;
  return attend_scratch(operation.attend.heads, operation.attend.kv_heads, operation.attend.dim);
}

int run(Team* team, Step& step) {
  size_t scratch = 64;
  for (int64_t i = 0; i < step.count; ++i) {
    const size_t needed = scratch_for(step.operations[i]);
    if (needed > scratch) scratch = needed;
  }
  return team->run(work_on_step, &step, scratch) ? 0 : -1;
}

}  // namespace
}  // namespace cb

using namespace cb;

extern "C" {

// Sizes of the structures, so that a mismatch with the Python side is found at once.
int64_t cb_size_of(int32_t which) {
  const int64_t sizes[] = {sizeof(Matrix), sizeof(Batch),  sizeof(Embed),    sizeof(Norm), sizeof(Product),
                           sizeof(Rope),   sizeof(Attend), sizeof(Quantize), sizeof(Pick), sizeof(Operation)};
  return which >= 0 && which < 10 ? sizes[which] : 0;
}

int32_t cb_panel_width() { return NR; }

const char* cb_instructions() {
#if defined(__AVX512F__)
  return "AVX-512";
#elif defined(__AVX2__)
  return "AVX2";
#elif defined(__aarch64__)
  return "NEON";
#else
  return "portable";
#endif
}

// Null where the threads could not be started.
Team* cb_team_new(int32_t size) {
  try {
    return new Team(size);
  } catch (const std::exception&) {
    return nullptr;
  }
}

// Ends the helpers. No run may be in progress.
void cb_team_free(Team* team) {
  if (!team->foreign()) delete team;
}

int64_t cb_packed_bytes(int64_t columns, int64_t depth, int32_t format, int32_t gated) {
  return packed_bytes(columns, depth, format, gated);
}

// 1 if the format holds every weight exactly, else 0.
int32_t cb_pack(const Matrix* matrix, void* data, const float* source, int64_t first, int64_t count, int32_t part) {
  return pack(*matrix, data, source, first, count, part);
}

void cb_unpack(const Matrix* matrix, float* target, int64_t first, int64_t count, int32_t part) {
  unpack(*matrix, target, first, count, part);
}

// All operations of a step, one after the other; the batches have been placed.
int32_t cb_run(Team* team, const Batch* batches, const Operation* operations, int64_t count) {
  Step step{batches, operations, count};
  return run(team, step);
}

// The attention of one layer by itself; `batch` has been placed.
int32_t cb_attend(Team* team, const Batch* batch, const Attend* attend) {
  Operation operation{KIND_ATTEND, ROWS_TOKENS, 0, 0, {}};
  operation.attend = *attend;
  Step step{batch, &operation, 1};
  return run(team, step);
}

// `quantize`: makes the product's x first; or null.
int32_t cb_product(Team* team, const Quantize* quantize, const Product* product) {
  Operation operations[2] = {{KIND_QUANTIZE, ROWS_TOKENS, 0, 0, {}}, {KIND_PRODUCT, ROWS_TOKENS, 0, 0, {}}};
  if (quantize) operations[0].quantize = *quantize;
  operations[1].product = *product;
  Batch batch{};
  batch.tokens = product->rows;
  Step step{&batch, quantize ? operations : operations + 1, quantize ? 2 : 1};
  return run(team, step);
}

// Words of a row of integers, which `Quantize` makes of `depth` floats.
int64_t cb_row_words(int64_t depth) { return int8_row_words(depth); }

void cb_place(const Batch* batch) { place(*batch); }

void cb_write_pages(const Pages* pages, const Batch* batch, const float* key, const float* value, int64_t key_stride,
                    int64_t value_stride, int64_t kv_heads, int64_t dim) {
  write_pages(*pages, *batch, key, value, key_stride, value_stride, kv_heads, dim);
}

}  // extern "C"
