// The executor's attention: tasks over spans, heads and splits of the context.
#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "executor.hpp"

namespace slip {
namespace {

constexpr int kQueries = 16;    // queries of one key-value head that are attended together
constexpr int kTaken = 4, kFew = 16;  // tasks that a thread takes at once if there are kFew for each thread
constexpr int kSplitRows = 16;  // spans up to this length are spread over threads by splits of their context

// Copy the keys and values of one position from a slot to place `at` of a scratch block.
void gather(const KVLayer& c, int head, int slot, int at, uint8_t* k, uint8_t* v, float* k_scale, float* v_scale) {
  size_t pair = 2 * c.element();
  int block = slot / kBlock, from = slot % kBlock;
  const uint8_t *ks = c.k_block(block, head), *vs = c.v_block(block, head);
  for (int d = 0; d < c.k_pad / 2; ++d) memcpy(k + (d * kBlock + at) * pair, ks + (d * kBlock + from) * pair, pair);
  size_t one = c.element();
  for (int d = 0; d < c.v_pad; ++d) memcpy(v + ((at / 2 * c.v_pad + d) * 2 + at % 2) * one, vs + ((from / 2 * c.v_pad + d) * 2 + from % 2) * one, one);
  if (c.int8) {
    k_scale[at] = c.k_scales(block, head)[from];
    v_scale[at] = c.v_scales(block, head)[from];
  }
}

}  // namespace

int Executor::first_visible(const AttentionOp& op, const Span& span, int position) const {
  const int first = op.window ? (op.anchored ? span.base - op.window : position - op.window + 1) : 0;
  return first > op.start ? first : op.start;
}

void Executor::copy_slots(const int32_t* pairs, int count) {
  for (int i = 0; i < 2 * count; ++i)
    if (pairs[i] < 0 || pairs[i] / kBlock >= blocks_limit_) throw std::runtime_error("copied slot " + std::to_string(pairs[i]) + " is outside the cache");
  for (const AttentionOp& op : attentions_)
    for (int i = 0; i < count; ++i)
      for (int head = 0; head < op.cache.heads; ++head) {
        const int to = pairs[2 * i + 1], block = to / kBlock;
        const KVLayer& c = op.cache;
        float *k_scales = c.int8 ? c.k_scales(block, head) : nullptr, *v_scales = c.int8 ? c.v_scales(block, head) : nullptr;
        gather(c, head, pairs[2 * i], to % kBlock, c.k_block(block, head), c.v_block(block, head), k_scales, v_scales);
      }
}

// Rows of a span that are attended together, `most` at most: as alike as can be, and so many that the threads are done at
// about the same time where there are `columns` (heads of all spans) to share. Reading keys and values counts as a row.
int Executor::chunk_of(int rows, int most, int columns) const {
  const int least = (rows + most - 1) / most, threads = pool_.size();
  int chunk = most;
  long best = -1;
  for (int pieces = least; pieces <= rows && pieces < least + threads; ++pieces) {
    const int each = (rows + pieces - 1) / pieces;
    const long rounds = ((long)columns * pieces + threads - 1) / threads, time = rounds * (each + 1);
    if (best >= 0 && time >= best) continue;
    best = time;
    chunk = each;
  }
  return chunk;
}

// Tasks are the same for all layers of a program: they differ in windows, which only skip splits.
void Executor::plan_attention() {
  tasks_.clear();
  if (attentions_.empty()) return;
  task_heads_ = attentions_[0].cache.heads;
  task_group_ = attentions_[0].heads / task_heads_;
  split_parallel_ = false;
  const bool blocks = std::any_of(attentions_.begin(), attentions_.end(), [](const AttentionOp& op) { return op.block; });
  int splits = 0;
  for (size_t s = 0; s < spans_.size(); ++s) {
    const Span& span = spans_[s];
    const int chunk = span.linear ? chunk_of(span.rows, kQueries / task_group_ > 1 ? kQueries / task_group_ : 1, (int)spans_.size() * task_heads_) : 1;
    bool spread = span.rows <= kSplitRows && span.base + span.rows > kSplit && (int)spans_.size() * task_heads_ < 4 * pool_.size();
    for (int head = 0; head < task_heads_; ++head)
      for (int r = 0; r < span.rows; r += chunk) {
        int rows = span.rows - r < chunk ? span.rows - r : chunk, last = 0;
        for (int i = 0; i < rows; ++i) last = in_->position[span.row0 + r + i] > last ? in_->position[span.row0 + r + i] : last;
        if (blocks) {
          if (!span.linear) throw std::runtime_error("the rows of a block are a chain in the block table's slots");
          last = span.base + span.rows - 1;
        }
        int n = last / kSplit + 1;
        splits = n > splits ? n : splits;
        if (!spread) tasks_.push_back({(int)s, span.row0 + r, rows, head, -1});
        else
          for (int i = 0; i < n; ++i) tasks_.push_back({(int)s, span.row0 + r, rows, head, i});
        split_parallel_ |= spread;
      }
  }
  separate_ = !split_parallel_ && spans_.size() == (size_t)in_->rows;
  if (!split_parallel_) return;
  if ((int)partials_.size() < splits) partials_.resize(splits);
  size_t cells = (size_t)in_->rows * task_heads_ * task_group_;
  for (int i = 0; i < splits; ++i) {
    Partial& p = partials_[i];
    if (p.total.size() < cells) {
      p.total.resize(cells);
      p.peak.resize(cells);
      p.out.resize(cells * round_up(kMaxHeadDim, kGroup));
    }
    std::fill(p.total.begin(), p.total.begin() + cells, 0.0f);
  }
}

void Executor::rotate_and_write(const AttentionOp& op, int row, int head) {
  const KVLayer& c = op.cache;
  int group = op.heads / c.heads, position = in_->position[row];
  const float *cosine = op.cosine + (size_t)position * op.half, *sine = op.sine + (size_t)position * op.half;
  auto turn = [&](float* x, const float* norm) {
    if (norm) kernels().rmsnorm(x, norm, op.eps, 1, c.k_dim, x);
    kernels().rope(x, cosine, sine, op.half);
  };
  for (int g = 0; g < group; ++g) {
    float* q = buffers_[op.q].row(row) + (head * group + g) * c.k_dim;
    turn(q, op.q_norm);
    kernels().round_bf16(q, q, c.k_dim);
  }
  float* k = buffers_[op.k].row(row) + head * c.k_dim;
  turn(k, op.k_norm);
  kernels().kv_write(c, in_->slot[row], head, k, buffers_[op.v].row(row) + head * c.v_dim);
}

void Executor::block_of(const AttentionOp& op, const Span& span, int row, int block, int place, int t, KVBlock& out) {
  const KVLayer& c = op.cache;
  const int32_t* table = in_->tables + (size_t)span.sequence * in_->table_width;
  int head = place_head_[t];
  if (span.linear || (block + 1) * kBlock <= span.base) {
    int b = table[block];
    out = {c.k_block(b, head), c.v_block(b, head), c.int8 ? c.k_scales(b, head) : nullptr, c.int8 ? c.v_scales(b, head) : nullptr};
    return;
  }
  Scratch& s = scratch_[t];
  size_t size = c.k_bytes() + c.v_bytes(), blocks = kSplit / kBlock;
  if (s.gathered.size() < size * blocks) s.gathered.resize(size * blocks);
  if (s.gathered_scales.size() < 2 * kBlock * blocks) s.gathered_scales.resize(2 * kBlock * blocks);
  uint8_t *k = s.gathered.data() + place * size, *v = k + c.k_bytes();
  float *ks = s.gathered_scales.data() + place * 2 * kBlock, *vs = ks + kBlock;
  memset(k, 0, size);
  memset(ks, 0, 2 * kBlock * sizeof(float));
  for (int at = 0; at < kBlock; ++at) {
    int position = block * kBlock + at;
    if (position > in_->position[row]) break;
    int slot = position < span.base ? table[block] * kBlock + at : paths_[row][position - span.base];
    gather(c, head, slot, at, k, v, ks, vs);
  }
  out = {k, v, ks, vs};
}

void Executor::finish(const AttentionOp& op, int row, int head, const float* out, float total) {
  float* to = buffers_[op.out].row(row) + (size_t)head * op.cache.v_dim;
  memcpy(to, out, op.cache.v_dim * sizeof(float));
  kernels().scale(to, 1.0f / total, op.cache.v_dim);
}

// A block of a task's keys in the cache; null past its last one, or if they are gathered first.
const uint8_t* Executor::keys_of(const AttentionOp& op, const AttentionTask& task, int block) const {
  const Span& span = spans_[task.span];
  const int last = in_->position[task.row0 + task.rows - 1] / kBlock;
  if (block > last || !(span.linear || (block + 1) * kBlock <= span.base)) return nullptr;
  return op.cache.k_block(in_->tables[(size_t)span.sequence * in_->table_width + block], task.head);
}

// Fetch what the next task writes: a key's numbers lie in as many lines as it has pairs.
void Executor::fetch_slot(const AttentionOp& op, const AttentionTask& task) const {
  const KVLayer& c = op.cache;
  const int slot = in_->slot[task.row0];
  const uint8_t* k = c.k_block(slot / kBlock, task.head) + (size_t)(slot % kBlock) * 2 * c.element();
  for (int d = 0; d < c.k_pad / 2; ++d) __builtin_prefetch(k + (size_t)d * kBlock * 2 * c.element(), 1, 2);
}

// Hand out tasks, a few at a time where there are many, so that a thread knows what comes next; after them it is taken
// to be what is left when every other thread has taken as many.
template <class Fn> void Executor::take_tasks(int instruction, Fn fn) {
  const int count = (int)tasks_.size(), each = count >= kFew * pool_.size() ? kTaken : 1;
  for (int i; (i = next_[instruction * 2].fetch_add(each, std::memory_order_relaxed)) < count;) {
    const int end = i + each < count ? i + each : count, likely = i + pool_.size() * each;
    for (; i < end; ++i) {
      const int after = i + 1 < end ? i + 1 : likely;
      fn(tasks_[i], after < count ? &tasks_[after] : nullptr);
    }
  }
}

void Executor::attend(const AttentionOp& op, const AttentionTask& task, const AttentionTask* next, int t) {
  const KVLayer& c = op.cache;
  const Span& span = spans_[task.span];
  const int group = op.heads / c.heads, queries = task.rows * group;
  constexpr int kMost = 64;
  const float* q[kMost];
  float* out[kMost];
  int first[kMost], last[kMost];
  float peak[kMost], total[kMost], run_peak[kMost], run_total[kMost] = {};
  Scratch& s = scratch_[t];
  size_t need = (size_t)queries * (2 * c.v_pad + c.k_pad);
  if (s.run.size() < need) s.run.resize(need);
  float *run = s.run.data(), *part = run + (size_t)queries * c.v_pad, *padded = part + (size_t)queries * c.v_pad;
  int begin = last_visible(op, span, in_->position[task.row0]), end = 0;
  for (int i = 0; i < queries; ++i) {
    int row = task.row0 + i / group, head = task.head * group + i % group;
    float* from = buffers_[op.q].row(row) + (size_t)head * c.k_dim;
    q[i] = from;
    if (c.k_dim != c.k_pad) {
      float* to = padded + (size_t)i * c.k_pad;
      memset(to, 0, c.k_pad * sizeof(float));
      memcpy(to, from, c.k_dim * sizeof(float));
      q[i] = to;
    }
    out[i] = part + (size_t)i * c.v_pad;
    last[i] = last_visible(op, span, in_->position[row]);
    first[i] = first_visible(op, span, in_->position[row]);
    begin = first[i] < begin ? first[i] : begin;
    end = last[i] > end ? last[i] : end;
  }
  place_head_[t] = task.head;
  int from = task.split < 0 ? begin / kSplit : task.split, to = task.split < 0 ? end / kSplit : task.split;
  if (task.split >= 0 && (task.split < begin / kSplit || task.split > end / kSplit)) return;
  for (int split = from; split <= to; ++split) {
    KVBlock blocks[kSplit / kBlock];
    int low = split * kSplit;
    for (int b = 0; b < kSplit / kBlock && low + b * kBlock <= end; ++b) block_of(op, span, task.row0, low / kBlock + b, b, t, blocks[b]);
    const uint8_t* after[2] = {nullptr, nullptr};
    for (int b = 0; b < 2; ++b) {
      if (split < to) after[b] = keys_of(op, task, (low + kSplit) / kBlock + b);
      else if (next) after[b] = keys_of(op, *next, (next->split < 0 ? first_visible(op, spans_[next->span], in_->position[next->row0]) / kSplit : next->split) * (kSplit / kBlock) + b);
    }
    kernels().attend({q, queries, first, last, low, blocks, c.k_pad, c.v_pad, c.int8, op.scale, op.softcap, out, peak, total, {after[0], after[1]}});
    for (int i = 0; i < queries; ++i) {
      int row = task.row0 + i / group, head = task.head * group + i % group;
      if (task.split < 0) {
        kernels().merge(run + (size_t)i * c.v_pad, &run_peak[i], &run_total[i], out[i], peak[i], total[i], c.v_pad);
        continue;
      }
      size_t cell = (size_t)row * op.heads + head;
      Partial& p = partials_[split];
      p.peak[cell] = peak[i];
      p.total[cell] = total[i];
      memcpy(p.out.data() + cell * round_up(kMaxHeadDim, kGroup), out[i], c.v_pad * sizeof(float));
    }
  }
  if (task.split >= 0) return;
  for (int i = 0; i < queries; ++i) finish(op, task.row0 + i / group, task.head * group + i % group, run + (size_t)i * c.v_pad, run_total[i]);
}

void Executor::run_write(const WriteOp& op, int t) {
  auto [u0, u1] = share(in_->rows * op.cache.heads, t);
  for (int u = u0; u < u1; ++u) {
    const int row = u / op.cache.heads, head = u % op.cache.heads, position = in_->position[row];
    float* k = buffers_[op.k].row(row) + head * op.cache.k_dim;
    if (op.k_norm) kernels().rmsnorm(k, op.k_norm, op.eps, 1, op.cache.k_dim, k);
    kernels().rope(k, op.cosine + (size_t)position * op.half, op.sine + (size_t)position * op.half, op.half);
    kernels().kv_write(op.cache, in_->slot[row], head, k, buffers_[op.v].row(row) + head * op.cache.v_dim);
  }
}

void Executor::run_attention(const AttentionOp& op, int instruction, int t) {
  const KVLayer& c = op.cache;
  if (separate_) {  // no task reads what another one writes, so nobody has to wait
    take_tasks(instruction, [&](const AttentionTask& task, const AttentionTask* next) {
      if (next) fetch_slot(op, *next);
      rotate_and_write(op, task.row0, task.head);
      attend(op, task, next, t);
    });
    return;
  }
  auto [u0, u1] = share(in_->rows * c.heads, t);
  for (int u = u0; u < u1; ++u) rotate_and_write(op, u / c.heads, u % c.heads);
  pool_.barrier();
  take_tasks(instruction, [&](const AttentionTask& task, const AttentionTask* next) { attend(op, task, next, t); });
  if (!split_parallel_) return;
  pool_.barrier();
  // Splits that ran apart are joined in order. A split that a window hides kept total 0 from the plan; clear after use.
  constexpr int stride = (kMaxHeadDim + kGroup - 1) / kGroup * kGroup;
  std::vector<float>& run = scratch_[t].run;
  if ((int)run.size() < c.v_pad) run.resize(c.v_pad);
  auto [c0, c1] = share(in_->rows * op.heads, t);
  for (int cell = c0; cell < c1; ++cell) {
    float peak = 0, total = 0;
    for (Partial& p : partials_) {
      if ((int)p.total.size() <= cell || p.total[cell] == 0) continue;
      kernels().merge(run.data(), &peak, &total, p.out.data() + (size_t)cell * stride, p.peak[cell], p.total[cell], c.v_pad);
      p.total[cell] = 0;
    }
    if (total > 0) finish(op, cell / op.heads, cell % op.heads, run.data(), total);
  }
}

}  // namespace slip
