#include "attention.h"

#include <algorithm>

#include "tile.h"

namespace cb {

namespace {

// Keys are taken in blocks that begin at multiples of KEYS: a token's result does not depend on how its prompt was cut, nor
// on what else is computed. Blocks (or parts of them) that a token does not see change nothing, bit by bit.
constexpr int KEYS = 32;
constexpr int QUERY_ROWS = 84;  // query rows (tokens times heads of a group) that share the keys of a block
constexpr int MOST_ROWS = 128;  // of all KV heads, where several sequences are taken together
constexpr float LOWEST = -1e30f;

int64_t padded(int64_t dim) { return (dim + NR - 1) / NR * NR; }

int64_t tokens_together(int64_t group) { return group < QUERY_ROWS ? QUERY_ROWS / group : 1; }

// Sequences with one query each whose rows of a KV head fill a tile.
int64_t sequences_together(int64_t heads, int64_t kv_heads) {
  const int64_t count = std::min<int64_t>(MRMAX / (heads / kv_heads), MOST_ROWS / heads);
  return std::max<int64_t>(count, 1);
}

int64_t most_rows(int64_t heads, int64_t kv_heads) {
  const int64_t group = heads / kv_heads;
  return std::max(tokens_together(group) * group, sequences_together(heads, kv_heads) * heads);
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
  float* best;    // [rows], and a vector more, since they are read as vectors
  float* total;   // [rows], likewise

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
    best = take(rows + VW);
    total = take(rows + VW);
    size = (char*)at - memory;
  }
  size_t size;
};

// Query tokens [first, first + count) of one sequence, and the heads that read KV heads [head, head + heads). Or the only
// query of each of `seqs` sequences, which have their first `shared` keys in common: one after the other in the batch's
// `order`, from place `at` on. `later`: a sequence that this member is likely to take next, or -1.
struct Task {
  int64_t at, seqs, shared, head, heads, first, count, later;
};

// Rows [first, end) of each KV head with keys [low, high) of a sequence. position: of the first row's token.
struct Walk {
  int64_t seq, low, high, first, end, position;
};

class Block {
 public:
  Block(const Attend& op, const Batch& batch, const Task& task, Scratch& s)
      : op(op), batch(batch), task(task), s(s), group(op.heads / op.kv_heads), rows(task.seqs * task.count * group) {}

  void run() {
    load_queries();
    const int64_t count = task.seqs + (task.shared ? 1 : 0);
    Walk walk = part(0);
    find(walk.seq, walk.low / KEYS * KEYS, walk.low, walk.high, s.next);
    for (int64_t i = 0; i < count; ++i) {
      const Walk next = i + 1 < count ? part(i + 1) : later();
      read(walk, next);
      walk = next;
    }
    write_out();
  }

 private:
  const Attend& op;
  const Batch& batch;
  const Task& task;
  Scratch& s;
  const int64_t group, rows;  // rows: of one KV head; those of the next follow

  int64_t seq(int64_t member) const { return batch.order[task.at + member]; }
  // Of several sequences' rows, or of one sequence's.
  int64_t token(int64_t row) const {
    const int64_t in_head = row % rows / group, member = task.seqs > 1 ? in_head : 0;
    return batch.query_starts[seq(member)] + task.first + in_head - member;
  }
  int64_t head(int64_t row) const { return (task.head + row / rows) * group + row % group; }

  // What is computed one after the other: what all have in common, then what each has for itself.
  Walk part(int64_t i) const {
    if (task.shared && i == 0) return Walk{seq(0), 0, task.shared, 0, rows, task.shared};
    const int64_t member = task.shared ? i - 1 : i, s = seq(member), each = task.count * group;
    const int64_t queries = batch.query_starts[s + 1] - batch.query_starts[s];
    const int64_t position = batch.context_lens[s] - queries + task.first;
    const int64_t seen = op.window && position >= op.window ? position - op.window + 1 : 0;
    return Walk{s, std::max(seen, task.shared), position + task.count, member * each, (member + 1) * each, position};
  }

  // What is fetched at the end.
  Walk later() const {
    const int64_t end = task.later < 0 ? 0 : batch.context_lens[task.later];
    return Walk{task.later, op.window && end > op.window ? end - op.window : 0, end, 0, 0, 0};
  }

  // Heads in the inner loop: a token's heads lie side by side, so that memory is read from front to back.
  void read(const Walk& walk, const Walk& next) {
    for (int64_t base = walk.low / KEYS * KEYS; base < walk.high; base += KEYS) {
      const int from = (int)std::max<int64_t>(walk.low - base, 0), to = (int)std::min<int64_t>(walk.high - base, KEYS);
      s.now = s.next;
      if (base + KEYS < walk.high) find(walk.seq, base + KEYS, walk.low, walk.high, s.next);
      else if (next.low < next.high) find(next.seq, next.low / KEYS * KEYS, next.low, next.high, s.next);
      for (int64_t head = 0; head < task.heads; ++head) {
        load_keys(from, to, task.head + head);
        const RowBlocks blocks(walk.end - walk.first);
        for (long i = 0; i < blocks.count; ++i) {
          const int64_t row = blocks.cut(i), end = blocks.cut(i + 1);
          if (walk.position + (end - 1) / group >= base)
            score_rows(walk, base, from, to, head, row, (int)(end - row));
        }
      }
    }
  }

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
  void score_rows(const Walk& walk, int64_t base, int from, int to, int64_t head, int64_t first_row, int count) {
    const int first = from / NR, last = (to + NR - 1) / NR;  // panels
    const int64_t row = head * rows + walk.first + first_row;
    const bool fetching = first_row == 0;
    const float* query = s.query + row * op.dim;
    with_rows(count, [&](auto mr) {
      for (int p = first; p < last; ++p) {
        if (fetching) fetch(s.next.key, p * NR, (p + 1) * NR, head);
        tile_product<F32, mr.value, 1>(query, op.dim, s.panels + p * NR * op.dim, 0, op.dim, false, s.scores + p * NR, KEYS);
      }
    });
    if (fetching) fetch(s.next.value, 0, KEYS, head);
    float change[(MRMAX + VW - 1) / VW * VW];
    const Keys keys{base, first * NV, last * NV, from, to};
    for (int m = 0; m < count; m += VW) {
      const int left = count - m < VW ? count - m : VW;
      store(change + m, left <= 4 ? soften<4>(keys, walk, row + m, first_row + m, left, s.scores + m * KEYS)
                                  : soften<VW>(keys, walk, row + m, first_row + m, left, s.scores + m * KEYS));
    }
    // No row sees keys past its own, so none is read that the last row does not see.
    const int64_t seen = walk.position + (first_row + count - 1) / group + 1 - base;
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

  // Some keys of the block that begins at `base`: vectors [first, last) of scores, of which [from, to) are looked at.
  struct Keys {
    int64_t base;
    int first, last, from, to;
  };

  // Scores of `count` <= R rows to weights, relative to each row's best score so far, and what they add up to. Returns what
  // the row's earlier weights have to be multiplied with, since the best score grew; lane i is row i.
  template <int R>
  vf soften(const Keys& keys, const Walk& walk, int64_t row, int64_t in_walk, int count, float* scores) {
    vf x[R];
#pragma GCC unroll 16
    for (int m = 0; m < R; ++m)
      x[m] = m < count ? bound(keys, walk.position + (in_walk + m) / group, scores + m * KEYS) : splat(-INFINITY);
    // The state of rows past `count`, of which these vectors have lanes, is written back as it was.
    const auto mine = lane_index() < count;
    const vf before = load(s.best + row);
    vf most = fold_rows<R>(x, [](vf a, vf b) { return vmax(a, b); });
    most = vmax(mine ? most : before, before);
    store(s.best + row, most);
#pragma GCC unroll 16
    for (int m = 0; m < R; ++m) x[m] = m < count ? weigh(keys, s.best[row + m], scores + m * KEYS) : vf{};
    const vf sums = fold_rows<R>(x, [](vf a, vf b) { return a + b; }), change = vexp(before - most);
    const vf total = load(s.total + row);
    store(s.total + row, mine ? total * change + sums : total);
    return change;
  }

  // The scores of the token at position `at`, capped, and -infinity for keys that it does not see; the largest of each lane.
  vf bound(const Keys& keys, int64_t at, float* scores) {
    int from = keys.from, to = keys.to;
    const int64_t oldest = op.window ? at - op.window + 1 - keys.base : 0;
    if (oldest > from) from = (int)(oldest < KEYS ? oldest : KEYS);
    if (at + 1 - keys.base < to) to = (int)(at + 1 - keys.base);
    vf best = splat(-INFINITY);
    for (int v = keys.first; v < keys.last; ++v) {
      vf x = load(scores + v * VW);
      if (op.cap > 0) x = op.cap * vtanh(x / op.cap);
      if (from > v * VW || to < v * VW + VW) {
        const vi key = lane_index() + v * VW;
        x = (key >= from) & (key < to) ? x : splat(-INFINITY);
      }
      store(scores + v * VW, x);
      best = vmax(best, x);
    }
    return best;
  }

  // e to the power of how much a score is under the best one, and the sums of each lane.
  static vf weigh(const Keys& keys, float best, float* scores) {
    vf sum = {};
    for (int v = keys.first; v < keys.last; ++v) {
      const vf weight = vexp(load(scores + v * VW) - best);
      store(scores + v * VW, weight);
      sum += weight;
    }
    return sum;
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
// head; or, where there are enough sequences with only one query to share out, such a query with all heads, and those of
// several sequences that begin alike.
class Tasks {
 public:
  Tasks(const Attend& op, const Batch& batch, int threads)
      : op(op), batch(batch), together(tokens_together(op.heads / op.kv_heads)), threads(threads) {
    int64_t single = 0;
    while (single < batch.seqs && queries_of(single) == 1) ++single;
    whole = threads == 1 || single >= 4 * threads;
    most = op.window ? 1 : std::min(sequences_together(op.heads, op.kv_heads), std::max<int64_t>(single / (2 * threads), 1));
    for (int64_t at = 0; at < batch.seqs; at += seqs_of(at)) count += tasks_of(at);
  }

  int64_t count = 0;

  // Tasks are asked for in rising order.
  Task at(int64_t task) {
    while (task - before >= tasks_of(place)) before += tasks_of(place), place += seqs_of(place);
    if (queries_of(place) == 1 && whole) {
      const int64_t seqs = seqs_of(place), later = place + seqs * threads;
      int64_t shared = seqs > 1 ? batch.context_lens[batch.order[place]] : 0;
      for (int64_t i = 1; i < seqs; ++i) shared = std::min<int64_t>(shared, batch.alike[place + i]);
      return Task{place, seqs, shared / KEYS * KEYS, 0, op.kv_heads, 0, 1, later < batch.seqs ? batch.order[later] : -1};
    }
    const int64_t first = (task - before) / op.kv_heads * together, left = queries_of(place) - first;
    return Task{place, 1, 0, (task - before) % op.kv_heads, 1, first, std::min(left, together), -1};
  }

  // A padded sequence, or one whose numbers make no sense, attends to nothing. It has nothing in common with another.
  bool empty(const Task& task) const { return batch.context_lens[batch.order[task.at]] < queries_of(task.at); }

 private:
  const Attend& op;
  const Batch& batch;
  const int64_t together;
  const int threads;
  bool whole;
  int64_t most;  // sequences of a task
  int64_t place = 0, before = 0;

  int64_t queries_of(int64_t place) const {
    return batch.query_starts[batch.order[place] + 1] - batch.query_starts[batch.order[place]];
  }
  // How many sequences, from this place on, are one task: those that have at least a block of keys in common.
  int64_t seqs_of(int64_t place) const {
    int64_t count = 1;
    if (whole && queries_of(place) == 1)
      while (count < most && place + count < batch.seqs && batch.alike[place + count] >= KEYS) ++count;
    return count;
  }
  int64_t tasks_of(int64_t place) const {
    const int64_t queries = queries_of(place);
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
    const int64_t start = batch.query_starts[batch.order[task.at]] + task.first;
    if (tasks.empty(task)) clear_tokens(op, start, start + task.count);
    else Block(op, batch, task, scratch).run();
  }
}

}  // namespace cb
