#include "attention.h"

#include "tile.h"

namespace cb {

namespace {

// Keys are taken in blocks that begin at multiples of KEYS: a token's result does not depend on how its prompt was cut, nor
// on what else is computed. Blocks (or parts of them) that a token does not see change nothing, bit by bit.
constexpr int KEYS = 32;
constexpr int QUERY_ROWS = 84;  // query rows (tokens times heads of a group) that share the keys of a block
constexpr float LOWEST = -1e30f;

int64_t padded(int64_t dim) { return (dim + NR - 1) / NR * NR; }

int64_t tokens_together(int64_t group) { return group < QUERY_ROWS ? QUERY_ROWS / group : 1; }

int64_t most_rows(int64_t heads, int64_t kv_heads) {
  const int64_t group = heads / kv_heads, rows = tokens_together(group) * group;
  return rows > heads ? rows : heads;
}

// Memory is read as fast as it can be only if it is asked for all the time, so the lines of the next block are asked for in
// four places: every second one of the keys while the present keys are transposed, and of the values while they are summed,
// the others (`fetch`) in between.
constexpr int LINE = 16;  // floats

// Where the keys and values of one block lie: those of KV head 0.
struct Places {
  const float* key[KEYS];
  const float* value[KEYS];
};

// One member's memory.
struct Scratch {
  Places now, next;
  const float* copied[KEYS];
  float* query;   // [rows, dim], scaled
  float* out;     // [rows, padded dim], not yet divided by `total`
  float* panels;  // [KEYS / NR, dim, NR]: the block's keys, transposed
  float* scores;  // [MRMAX, KEYS]
  float* values;  // [KEYS, padded dim]: copies, where a row of values is no whole number of panels
  float* best;    // [rows]
  float* total;   // [rows]

  Scratch(char* memory, int64_t rows, int64_t dim) {
    float* at = reinterpret_cast<float*>(memory);
    const auto take = [&](int64_t count) {
      float* mine = at;
      at += (count + 15) / 16 * 16;
      return mine;
    };
    query = take(rows * dim);
    out = take(rows * padded(dim));
    panels = take(KEYS * dim);
    scores = take(MRMAX * KEYS);
    values = take(dim % NR ? KEYS * padded(dim) : 0);
    best = take(rows);
    total = take(rows);
    size = (char*)at - memory;
  }
  size_t size;
};

// Query tokens [first, first + count) of one sequence, and the heads that read KV heads [head, head + heads). `later`: a
// sequence that this member is likely to take next, or -1.
struct Task {
  int64_t seq, head, heads, first, count, later;
};

class Block {
 public:
  Block(const Attend& op, const Batch& batch, const Task& task, Scratch& s)
      : op(op), batch(batch), task(task), s(s), group(op.heads / op.kv_heads), rows(task.count * group) {
    const int64_t start = batch.query_starts[task.seq];
    position = batch.context_lens[task.seq] - (batch.query_starts[task.seq + 1] - start) + task.first;
    low = op.window && position >= op.window ? position - op.window + 1 : 0;
    high = position + task.count;
  }

  // Heads in the inner loop: a token's heads lie side by side, so that memory is read from front to back.
  void run() {
    load_queries();
    find(task.seq, low / KEYS * KEYS, low, high, s.next);
    for (int64_t base = low / KEYS * KEYS; base < high; base += KEYS) {
      const int from = (int)(low > base ? low - base : 0), to = (int)(high - base < KEYS ? high - base : KEYS);
      s.now = s.next;
      find_next(base + KEYS);
      for (int64_t head = 0; head < task.heads; ++head) {
        load_keys(from, to, task.head + head);
        const RowBlocks blocks(rows);
        for (long i = 0; i < blocks.count; ++i) {
          const int64_t row = blocks.cut(i), end = blocks.cut(i + 1);
          if (position + (end - 1) / group >= base) score_rows(base, from, to, head, row, (int)(end - row));
        }
      }
    }
    write_out();
  }

 private:
  const Attend& op;
  const Batch& batch;
  const Task& task;
  Scratch& s;
  const int64_t group, rows;  // rows: of one KV head; those of the next follow
  int64_t position;   // of the first token
  int64_t low, high;  // keys that any token sees

  int64_t token(int64_t row) const { return batch.query_starts[task.seq] + task.first + row % rows / group; }
  int64_t head(int64_t row) const { return (task.head + row / rows) * group + row % group; }

  void load_queries() {
    for (int64_t row = 0; row < task.heads * rows; ++row) {
      const float* from = op.query + token(row) * op.query_stride + head(row) * op.dim;
      for (int64_t d = 0; d < op.dim; ++d) s.query[row * op.dim + d] = from[d] * op.scale;
      // A sink is a key without a value: the softmax begins with it.
      s.best[row] = op.sinks ? op.sinks[head(row)] : LOWEST;
      s.total[row] = op.sinks ? 1.0f : 0.0f;
    }
    memset(s.out, 0, sizeof(float) * task.heads * rows * padded(op.dim));
  }

  // Places of the keys [low, high) of a sequence in the block that begins at `base`. The others are set to one of them.
  void find(int64_t seq, int64_t base, int64_t low, int64_t high, Places& places) const {
    const int32_t* table = batch.tables + seq * batch.table_stride;
    const int from = (int)(low > base ? low - base : 0), to = (int)(high - base < KEYS ? high - base : KEYS);
    for (int j = from; j < to;) {
      const int64_t page = (base + j) / batch.page_size, offset = (base + j) % batch.page_size;
      int64_t at = table[page] * op.pages.block_stride + offset * op.pages.token_stride;
      int64_t run = batch.page_size - offset;
      if (run > to - j) run = to - j;
      for (; run; --run, ++j, at += op.pages.token_stride) {
        places.key[j] = op.pages.key + at;
        places.value[j] = op.pages.value + at;
      }
    }
    for (int j = 0; j < from; ++j) places.key[j] = places.key[from], places.value[j] = places.value[from];
    for (int j = to; j < KEYS; ++j) places.key[j] = places.key[to - 1], places.value[j] = places.value[to - 1];
  }

  // What will be read after the present block, to be fetched meanwhile.
  void find_next(int64_t base) {
    if (base < high) return find(task.seq, base, low, high, s.next);
    if (task.later < 0) return;
    const int64_t end = batch.context_lens[task.later], begin = op.window && end > op.window ? end - op.window : 0;
    if (end > 0) find(task.later, begin / KEYS * KEYS, begin, end, s.next);
  }

  // Asks for every second line of rows [from, to) of the next block.
  void fetch(const float* const* rows, int from, int to, int64_t head) const {
    const int64_t offset = (task.head + head) * op.pages.head_stride;
    for (int j = from; j < to; ++j)
      for (int64_t d = LINE; d < op.dim; d += 2 * LINE) __builtin_prefetch(rows[j] + offset + d, 0, 2);
  }

  // Transposes keys [from, to) of the present block.
  void load_keys(int from, int to, int64_t head) {
    const int64_t offset = head * op.pages.head_stride;
    for (int j = from / VW * VW; j < to; j += VW) transpose_keys(j, offset);
    if (op.dim % NR)
      for (int j = from; j < to; ++j) {
        memcpy(s.values + j * padded(op.dim), s.now.value[j] + offset, sizeof(float) * op.dim);
        s.copied[j] = s.values + j * padded(op.dim);
      }
  }

  // Keys [j, j + VW) into the columns of a panel.
  void transpose_keys(int j, int64_t offset) {
    const float* const* row = s.now.key + j;
    float* panel = s.panels + j / NR * NR * op.dim + j % NR;
    int64_t d = 0;
    for (; d + VW <= op.dim; d += VW) {
      vf x[VW];
#pragma GCC unroll 16
      for (int i = 0; i < VW; ++i) {
        x[i] = load(row[i] + offset + d);
        if (d % (2 * LINE) == 0) __builtin_prefetch(s.next.key[j + i] + offset + d, 0, 2);
      }
      transpose(x);
#pragma GCC unroll 16
      for (int i = 0; i < VW; ++i) store(panel + (d + i) * NR, x[i]);
    }
    for (; d < op.dim; ++d)
      for (int i = 0; i < VW; ++i) panel[d * NR + i] = row[i][offset + d];
  }

  // One step of the online softmax for the keys of one block and `count` rows, from row `in_head` of a KV head on.
  void score_rows(int64_t base, int from, int to, int64_t head, int64_t in_head, int count) {
    const int first = from / NR, last = (to + NR - 1) / NR;  // panels
    const int64_t row = head * rows + in_head;
    const float* query = s.query + row * op.dim;
    with_rows(count, [&](auto mr) {
      for (int p = first; p < last; ++p) {
        if (in_head == 0) fetch(s.next.key, p * NR, (p + 1) * NR, head);
        tile_product<F32, mr.value, 1>(query, op.dim, s.panels + p * NR * op.dim, 0, op.dim, false, s.scores + p * NR, KEYS);
      }
    });
    float change[(MRMAX + VW - 1) / VW * VW] = {}, sums[MRMAX];
    for (int m = 0; m < count; ++m) {
      if (in_head == 0) fetch(s.next.value, KEYS * m / count, KEYS * (m + 1) / count, head);
      change[m] = soften(base, first * NV, last * NV, from, to, position + (in_head + m) / group, s.best + row + m,
                         s.scores + m * KEYS, sums + m);
    }
    for (int m = 0; m < count; m += VW) store(change + m, vexp(load(change + m)));
    for (int m = 0; m < count; ++m) s.total[row + m] = s.total[row + m] * change[m] + sums[m];
    // No row sees keys past its own, so none is read that the last row does not see.
    const int64_t seen = position + (in_head + count - 1) / group + 1 - base;
    if (seen < to) to = (int)seen;
    const bool copied = op.dim % NR;
    const float* const* value = copied ? s.copied : s.now.value;
    const int64_t offset = copied ? 0 : (task.head + head) * op.pages.head_stride;
    with_rows(count, [&](auto mr) {
      for (int64_t d = 0; d < op.dim; d += NR)
        weighted_rows<mr.value>(s.scores + from, KEYS, value + from, s.next.value + from, offset + d, to - from, change,
                                s.out + row * padded(op.dim) + d, padded(op.dim));
    });
  }

  // Scores of the token at position `at`, vectors [first, last), to weights relative to the best score so far, and their
  // sum. Returns by how much the best score grew, negated.
  float soften(int64_t base, int first, int last, int from, int to, int64_t at, float* so_far, float* scores, float* total) {
    const int64_t oldest = op.window ? at - op.window + 1 - base : 0;
    if (oldest > from) from = (int)(oldest < KEYS ? oldest : KEYS);
    if (at + 1 - base < to) to = (int)(at + 1 - base);
    vf best = splat(-INFINITY);
    for (int v = first; v < last; ++v) {
      vf x = load(scores + v * VW);
      if (op.cap > 0) x = op.cap * vtanh(x / op.cap);
      if (from > v * VW || to < v * VW + VW) {
        const vi key = lane_index() + v * VW;
        x = (key >= from) & (key < to) ? x : splat(-INFINITY);
      }
      store(scores + v * VW, x);
      best = vmax(best, x);
    }
    const float before = *so_far, now = std::fmax(before, max_of(best));
    vf sum = {};
    for (int v = first; v < last; ++v) {
      const vf weight = vexp(load(scores + v * VW) - now);
      store(scores + v * VW, weight);
      sum += weight;
    }
    *total = sum_of(sum);
    *so_far = now;
    return before - now;
  }

  void write_out() {
    for (int64_t row = 0; row < task.heads * rows; ++row) {
      float* to = op.out + token(row) * op.out_stride + head(row) * op.dim;
      const float* from = s.out + row * padded(op.dim);
      const float share = 1.0f / s.total[row];
      for (int64_t d = 0; d < op.dim; ++d) to[d] = from[d] * share;
    }
  }
};

// Walks the tasks of a batch, in the order in which the team hands them out: a block of one sequence's queries with one KV
// head, or a sequence's only query with all of them, where there are enough of those to share out.
class Tasks {
 public:
  Tasks(const Attend& op, const Batch& batch, int threads)
      : op(op), batch(batch), together(tokens_together(op.heads / op.kv_heads)), threads(threads) {
    int64_t single = 0;
    for (int64_t seq = 0; seq < batch.seqs; ++seq) single += queries_of(seq) == 1;
    whole = threads == 1 || single >= 4 * threads;
    for (int64_t seq = 0; seq < batch.seqs; ++seq) count += tasks_of(seq);
  }

  int64_t count = 0;

  // Tasks are asked for in rising order.
  Task at(int64_t task) {
    while (task - before >= tasks_of(seq)) before += tasks_of(seq++);
    if (queries_of(seq) == 1 && whole) {
      const int64_t later = seq + threads < batch.seqs ? seq + threads : -1;
      return Task{seq, 0, op.kv_heads, 0, 1, later};
    }
    const int64_t first = (task - before) / op.kv_heads * together, left = queries_of(seq) - first;
    return Task{seq, (task - before) % op.kv_heads, 1, first, left < together ? left : together, -1};
  }

  // A padded sequence, or one whose numbers make no sense, attends to nothing.
  bool empty(int64_t seq) const { return batch.context_lens[seq] < queries_of(seq); }

 private:
  const Attend& op;
  const Batch& batch;
  const int64_t together;
  const int threads;
  bool whole;
  int64_t seq = 0, before = 0;

  int64_t queries_of(int64_t seq) const { return batch.query_starts[seq + 1] - batch.query_starts[seq]; }
  int64_t tasks_of(int64_t seq) const {
    const int64_t queries = queries_of(seq);
    return queries == 1 && whole ? 1 : (queries + together - 1) / together * op.kv_heads;
  }
};

void clear_tokens(const Attend& op, int64_t first, int64_t end) {
  for (int64_t token = first; token < end; ++token)
    memset(op.out + token * op.out_stride, 0, sizeof(float) * op.heads * op.dim);
}

}  // namespace

size_t attend_scratch(int64_t heads, int64_t kv_heads, int64_t dim) {
  return Scratch(nullptr, most_rows(heads, kv_heads), dim).size;
}

void attend_work(const Attend& op, const Batch& batch, Member& member) {
  Tasks tasks(op, batch, member.team->size());
  Scratch scratch(member.scratch, most_rows(op.heads, op.kv_heads), op.dim);
  if (member.index == 0) clear_tokens(op, batch.query_starts[batch.seqs], batch.tokens);
  for (long taken; member.team->take(tasks.count, &taken);) {
    const Task task = tasks.at(taken);
    const int64_t start = batch.query_starts[task.seq] + task.first;
    if (tasks.empty(task.seq)) clear_tokens(op, start, start + task.count);
    else Block(op, batch, task, scratch).run();
  }
}

}  // namespace cb
