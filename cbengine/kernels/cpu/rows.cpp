#include "rows.h"

#include <algorithm>

namespace cb {

namespace {

// Calls f(row) for this member's share of the rows.
template <class F>
void for_rows(int64_t rows, Member& member, const F& f) {
  const int threads = member.team->size();
  int64_t share = threads == 1 ? rows : rows / (4 * threads);
  if (share < 1) share = 1;
  for (long task; member.team->take((rows + share - 1) / share, &task);)
    for (int64_t row = task * share; row < rows && row < (task + 1) * share; ++row) f(row);
}

float sum_of_squares(const float* x, int64_t n, float shift) {
  vf sum = {};
  int64_t i = 0;
  for (; i + VW <= n; i += VW) {
    const vf d = load(x + i) - shift;
    sum += d * d;
  }
  float rest = 0;
  for (; i < n; ++i) rest += (x[i] - shift) * (x[i] - shift);
  return sum_of(sum) + rest;
}

float mean_of(const float* x, int64_t n) {
  vf sum = {};
  int64_t i = 0;
  for (; i + VW <= n; i += VW) sum += load(x + i);
  float rest = 0;
  for (; i < n; ++i) rest += x[i];
  return (sum_of(sum) + rest) / (float)n;
}

// out (+)= (x - shift) * scale * weight + bias
void scale_row(const float* x, float* out, int64_t n, float shift, float scale, const float* weight, const float* bias,
               bool add) {
  for (int64_t i = 0; i < n; i += VW) {
    const int width = n - i < VW ? (int)(n - i) : VW;
    const auto get = [&](const float* p) { return width == VW ? load(p + i) : load_part(p + i, width); };
    vf y = (get(x) - shift) * scale;
    if (weight) y *= get(weight);
    if (bias) y += get(bias);
    if (add) y += get(out);
    if (width == VW) store(out + i, y);
    else store_part(out + i, y, width);
  }
}

void rms_norm(float* x, int64_t n, const float* weight, float eps) {
  const float scale = 1.0f / std::sqrt(sum_of_squares(x, n, 0) / (float)n + eps);
  scale_row(x, x, n, 0, scale, weight, nullptr, false);
}

// Halves of the first `rotary` floats against each other, as transformers' rotate_half.
void rotate(float* x, int64_t half, const float* cos, const float* sin) {
  int64_t i = 0;
  for (; i + VW <= half; i += VW) {
    const vf a = load(x + i), b = load(x + half + i), c = load(cos + i), s = load(sin + i);
    store(x + i, a * c - b * s);
    store(x + half + i, b * c + a * s);
  }
  for (; i < half; ++i) {
    const float a = x[i], b = x[half + i];
    x[i] = a * cos[i] - b * sin[i];
    x[half + i] = b * cos[i] + a * sin[i];
  }
}

void write_token(const Pages& pages, const Batch& batch, int64_t token, const float* key, const float* value,
                 int64_t kv_heads, int64_t dim) {
  const int64_t slot = batch.slots[token];
  const int64_t at = slot / batch.page_size * pages.block_stride + slot % batch.page_size * pages.token_stride;
  for (int64_t h = 0; h < kv_heads; ++h) {
    memcpy(pages.key + at + h * pages.head_stride, key + h * dim, sizeof(float) * dim);
    memcpy(pages.value + at + h * pages.head_stride, value + h * dim, sizeof(float) * dim);
  }
}

void rope_row(const Rope& op, const Batch& batch, int64_t token) {
  float* query = op.x + token * op.x_stride;
  float* key = query + op.heads * op.dim;
  float* value = key + op.kv_heads * op.dim;
  if (op.clip > 0)
    for (float* x = query; x < value + op.kv_heads * op.dim; ++x) *x = std::fmin(std::fmax(*x, -op.clip), op.clip);
  if (op.query_norm && op.norm_whole) {
    rms_norm(query, op.heads * op.dim, op.query_norm, op.norm_eps);
    rms_norm(key, op.kv_heads * op.dim, op.key_norm, op.norm_eps);
  } else if (op.query_norm) {
    for (int64_t h = 0; h < op.heads; ++h) rms_norm(query + h * op.dim, op.dim, op.query_norm, op.norm_eps);
    for (int64_t h = 0; h < op.kv_heads; ++h) rms_norm(key + h * op.dim, op.dim, op.key_norm, op.norm_eps);
  }
  const int64_t half = op.rotary / 2;
  int64_t position = batch.positions[token];
  position = position < op.table_rows ? position : op.table_rows - 1;
  const float *cos = op.cos + position * half, *sin = op.sin + position * half;
  for (float* x = query; x < value; x += op.dim) rotate(x, half, cos, sin);
  write_token(op.pages, batch, token, key, value, op.kv_heads, op.dim);
}

// How many keys two sequences with one query each have in the same pages, from the first on. At least its newest key is
// each one's own.
int32_t keys_alike(const Batch& batch, int64_t a, int64_t b) {
  const int32_t *x = batch.tables + a * batch.table_stride, *y = batch.tables + b * batch.table_stride;
  const int64_t most = std::min(batch.context_lens[a], batch.context_lens[b]) - 1;
  int64_t keys = 0;
  for (int64_t page = 0; page < batch.table_width && keys < most && x[page] == y[page]; ++page) keys += batch.page_size;
  return (int32_t)std::max<int64_t>(0, std::min(keys, most));
}

// Fills `order` and `alike`. With one query, a sequence's first block tells who may begin alike.
void find_alike(const Batch& batch) {
  const auto single = [&](int32_t seq) { return batch.query_starts[seq + 1] - batch.query_starts[seq] == 1; };
  for (int64_t i = 0; i < batch.seqs; ++i) batch.order[i] = (int32_t)i, batch.alike[i] = 0;
  int32_t* const end = std::stable_partition(batch.order, batch.order + batch.seqs, single);
  std::stable_sort(batch.order, end, [&](int32_t a, int32_t b) {
    return batch.tables[a * batch.table_stride] < batch.tables[b * batch.table_stride];
  });
  for (int32_t* at = batch.order + 1; at < end; ++at) batch.alike[at - batch.order] = keys_alike(batch, at[-1], at[0]);
}

}  // namespace

void place(const Batch& batch) {
  find_alike(batch);
  for (int64_t token = 0; token < batch.tokens; ++token)
    batch.slots[token] = WRITE_BLOCK * batch.page_size + batch.positions[token] % batch.page_size;
  for (int64_t seq = 0; seq < batch.seqs; ++seq) {
    const int32_t* table = batch.tables + seq * batch.table_stride;
    for (int64_t token = batch.query_starts[seq]; token < batch.query_starts[seq + 1]; ++token) {
      const int64_t page = batch.positions[token] / batch.page_size;
      const int64_t block = page < batch.table_width ? table[page] : WRITE_BLOCK;
      if (block > WRITE_BLOCK) batch.slots[token] += (block - WRITE_BLOCK) * batch.page_size;
    }
  }
}

void embed_work(const Embed& op, const Batch& batch, Member& member) {
  const int64_t depth = op.matrix.depth;
  for_rows(batch.tokens, member, [&](int64_t token) {
    const int64_t id = batch.token_ids[token];
    float* out = op.out + token * op.out_stride;
    if (!op.table) {
      read_column(op.matrix, id, op.scale, out);
    } else if (op.matrix.format == FORMAT_F32) {
      const float* from = static_cast<const float*>(op.table) + id * depth;
      for (int64_t k = 0; k < depth; ++k) out[k] = from[k] * op.scale;
    } else {
      const uint16_t* from = static_cast<const uint16_t*>(op.table) + id * depth;
      const bool bf16 = op.matrix.format == FORMAT_BF16;
      for (int64_t k = 0; k < depth; ++k) out[k] = (bf16 ? BF16::back(from[k]) : F16::back(from[k])) * op.scale;
    }
  });
}

void norm_work(const Norm& op, int64_t rows, Member& member) {
  for_rows(rows, member, [&](int64_t row) {
    const float* x = op.x + row * op.x_stride;
    const float shift = op.kind == NORM_LAYER ? mean_of(x, op.width) : 0.0f;
    const float scale = 1.0f / std::sqrt(sum_of_squares(x, op.width, shift) / (float)op.width + op.eps);
    float* out = op.out + row * op.out_stride;
    scale_row(x, out, op.width, shift, scale, op.weight, op.bias, op.add);
    if (op.integers) quantize(out, op.width, op.integers + row * op.integers_stride);
  });
}

void pick_work(const Pick& op, const Batch& batch, Member& member) {
  for_rows(batch.samples, member, [&](int64_t row) {
    memcpy(op.out + row * op.out_stride, op.x + batch.sample_index[row] * op.x_stride, sizeof(float) * op.width);
  });
}

void quantize_work(const Quantize& op, int64_t rows, Member& member) {
  for_rows(rows, member, [&](int64_t row) {
    quantize(op.x + row * op.x_stride, op.depth, op.out + row * op.out_stride);
  });
}

void rope_work(const Rope& op, const Batch& batch, Member& member) {
  for_rows(batch.tokens, member, [&](int64_t token) { rope_row(op, batch, token); });
}

void write_pages(const Pages& pages, const Batch& batch, const float* key, const float* value, int64_t key_stride,
                 int64_t value_stride, int64_t kv_heads, int64_t dim) {
  for (int64_t token = 0; token < batch.tokens; ++token)
    write_token(pages, batch, token, key + token * key_stride, value + token * value_stride, kv_heads, dim);
}

}  // namespace cb
