// What is computed for each token alone: embedding, norms, rotary positions, and writing keys and values into their pages.
#pragma once

#include "int8.h"

namespace cb {

// The tokens of one step, as `StepInputs` has them: all int32, all in host memory.
struct Batch {
  int64_t tokens, seqs, samples;
  int64_t page_size, table_stride, table_width;
  const int32_t* token_ids;     // [tokens]
  const int32_t* positions;     // [tokens]
  const int32_t* query_starts;  // [seqs + 1]
  const int32_t* context_lens;  // [seqs]; 0 for a padded sequence
  const int32_t* tables;        // [seqs, table_stride]
  const int32_t* sample_index;  // [samples]
  // Filled by `place`:
  int64_t* slots;  // [tokens]: block * page_size + offset that a token is written to
  int32_t* order;  // [seqs]: the sequences, those with one query first and what begins with the same block side by side
  int32_t* alike;  // [seqs]: how many keys are the same, in the same pages, as those of the one before it in `order`
};

// Keys and values of one layer: [blocks, page_size, kv_heads, dim], strides in floats.
struct Pages {
  float* key;
  float* value;
  int64_t block_stride, token_stride, head_stride;
};

// Where the tokens of padded sequences and those past the last sequence are written.
constexpr int64_t WRITE_BLOCK = 1;

struct Embed {
  float* out;
  int64_t out_stride;
  Matrix matrix;      // the output matrix, if the two are tied
  const void* table;  // else [vocabulary, depth] in `matrix.format`
  float scale;
};

enum NormKind : int32_t { NORM_RMS = 0, NORM_LAYER = 1 };

// out = norm(x) * weight + bias, or added to out. `integers`: where the result goes as integers too, for a product with
// FORMAT_INT8; or null.
struct Norm {
  const float* x;
  float* out;
  int64_t x_stride, out_stride, width;
  const float* weight;
  const float* bias;
  uint32_t* integers;
  int64_t integers_stride;
  float eps;
  int32_t kind, add;
};

// Row i of `out` = row `sample_index[i]` of `x`.
struct Pick {
  const float* x;
  float* out;
  int64_t x_stride, out_stride, width;
};

// In place, for each token: clip, norm of queries and keys (each head apart, or all of a token's heads together), rotate
// queries and keys, and write keys and values into their pages. Row: queries, then keys, then values.
struct Rope {
  float* x;
  int64_t x_stride, heads, kv_heads, dim, rotary;
  const float* cos;  // [table_rows, rotary / 2]
  const float* sin;
  int64_t table_rows;
  const float* query_norm;  // [dim] or [heads * dim], or null
  const float* key_norm;
  float norm_eps, clip;  // clip: largest magnitude; 0 for none
  int32_t norm_whole;    // the norm is over all heads of a token together
  Pages pages;
};

void place(const Batch& batch);
void embed_work(const Embed& op, const Batch& batch, Member& member);
void norm_work(const Norm& op, int64_t rows, Member& member);
void pick_work(const Pick& op, const Batch& batch, Member& member);
void rope_work(const Rope& op, const Batch& batch, Member& member);
void quantize_work(const Quantize& op, int64_t rows, Member& member);
// Copies keys and values, [tokens, kv_heads, dim] with the given strides from token to token, into their pages.
void write_pages(const Pages& pages, const Batch& batch, const float* key, const float* value, int64_t key_stride,
                 int64_t value_stride, int64_t kv_heads, int64_t dim);

}  // namespace cb
