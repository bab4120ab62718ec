// Causal attention over paged keys and values.
#pragma once

#include "rows.h"

namespace cb {

// As `AttentionBackend.attend` defines it. `query` and `out`: [tokens, heads, dim], strides in floats from token to token.
struct Attend {
  const float* query;
  float* out;
  int64_t query_stride, out_stride;
  int64_t heads, kv_heads, dim;
  int64_t window;  // tokens that a token sees, itself included; 0 for all
  const float* sinks;
  float scale, cap;  // cap: 0 for none
  Pages pages;
};

size_t attend_scratch(int64_t heads, int64_t kv_heads, int64_t dim);
// Within a run of the team: this member's share.
void attend_work(const Attend& op, const Batch& batch, Member& member);

}  // namespace cb
