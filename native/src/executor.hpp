// The executor: a program compiled to fused instructions, replayed by all threads once per step.
#pragma once
#include <array>
#include <atomic>
#include <memory>
#include <vector>

#include "kernels.hpp"
#include "pool.hpp"
#include "sampler.hpp"

namespace slip {

// Classes of work whose seconds are accounted for separately; they add up to the step.
enum class OpClass : int { Plan, Embed, Norm, Qkv, Attention, AttentionOut, GateUp, Down, Linear, Logits, Sample, Other };
constexpr int kOpClasses = 12;
constexpr const char* kOpClassNames[kOpClasses] = {"plan", "embed", "norm", "qkv", "attention", "attention_out", "gate_up", "down", "linear", "logits", "sample", "other"};

// Seconds of a step on its critical path: by class, exclusive; all of it; and the most that any of its threads stood
// still while it could have run (the processor was taken away; part of the classes' seconds).
struct StepSeconds {
  std::array<double, kOpClasses> by_class{};
  double total = 0, stolen = 0;
  double begun = 0;  // when it began, by the steady clock
};

struct Buffer {
  int width, stride;
  std::vector<float> data;
  float* row(int r) { return data.data() + (size_t)r * stride; }
};

// Where in the step a span's rows are and what they see.
struct Span {
  int row0, rows, sequence, base;  // base: position of the first row, the number of cached ones
  bool linear;                     // a chain whose slots are those of the block table
};

// A step's input; arrays are [rows] unless said otherwise.
struct StepInput {
  int rows;
  const int32_t *sequence, *token, *position, *slot, *parent;
  const int32_t* tables;  // [sequences, table_width]
  int sequences, table_width;
  const int32_t* logit_rows;
  int logits;
};

enum class Epilogue : int { Store, AddTo, Gated };

struct LinearPart {
  Matrix w;
  const float* bias;
  int out;
};

struct EmbedOp { int out; Matrix table; float scale; };
struct NormOp { int x, out, add_to; const float* w; float eps; int heads; };  // add_to >= 0: buffer += norm(x)
struct AddOp { int a, b, out; };
struct GatedOp { int gate, up, out; Activation kind; };
struct InputOp { int out; };  // rows that the step was handed
struct ConcatOp { int a, b, out; };
struct LinearOp {
  int x;
  const float* norm;  // null: x as it is
  float eps;
  std::vector<LinearPart> parts;
  Epilogue epilogue;
  int target;  // AddTo: the buffer added to; Gated: the output
  Activation kind;
  OpClass op_class;
};
struct AttentionOp {
  int q, k, v, out, heads;
  const float *q_norm, *k_norm;
  float eps;
  const float *cosine, *sine;  // [positions, half]
  int half;
  KVLayer cache;
  float scale, softcap;
  int window;  // 0: none
  int start;   // positions before it are never seen
  bool block;  // every row sees all rows of its span
  bool anchored;  // the window is that of the span's first row
};
// Keys and values are written, and nobody attends to them in this program.
struct WriteOp {
  int k, v;
  const float* k_norm;
  float eps;
  const float *cosine, *sine;
  int half;
  KVLayer cache;
};
// The values of x are handed out; they begin at column `at` of all taps side by side.
struct TapOp { int x, at; };
struct LogitsOp { int x; const float* norm; float eps; Matrix w; const float* bias; float softcap; };

struct Instruction {
  enum Kind { Embed, Norm, Add, Gated, Linear, Attention, Tap, Logits, Input, Concat, Write } kind;
  int index;
};

// In which forms some matrices want their activations, and how many groups of 32 their units reach over.
struct Needs {
  bool ints = false, f32 = false, bf16 = false;
  int groups = 0;
  void of(const Matrix& w) {
    groups = std::max(groups, w.units() * (unit_inputs(w.format) / kGroup));
    if (is_int(w.format)) ints = true;
    else if (w.format == Format::BF16) bf16 = true;
    else f32 = true;
  }
};

class Executor {
 public:
  // With `share` the threads are those of another executor, which never runs at the same time.
  Executor(int threads, int max_rows, Executor* share = nullptr);

  int buffer(int width);
  void add(const EmbedOp& op) { push(Instruction::Embed, embeds_, op); }
  void add(const NormOp& op) { push(Instruction::Norm, norms_, op); }
  void add(const AddOp& op) { push(Instruction::Add, adds_, op); }
  void add(const GatedOp& op) { push(Instruction::Gated, gateds_, op); }
  void add(const LinearOp& op) { push(Instruction::Linear, linears_, op); }
  void add(const AttentionOp& op) { push(Instruction::Attention, attentions_, op); }
  void tap(int x);
  void add(const LogitsOp& op) { push(Instruction::Logits, logits_ops_, op); }
  void add(const InputOp& op) { push(Instruction::Input, inputs_ops_, op); }
  void add(const ConcatOp& op) { push(Instruction::Concat, concats_, op); }
  void add(const WriteOp& op) { push(Instruction::Write, writes_, op); }
  // The numbers [rows, width] that the next step's input instruction takes.
  void set_inputs(const float* values, size_t count) { inputs_.assign(values, values + count); }

  // One step. Throws std::runtime_error if the rows are not valid.
  void step(const StepInput& in, const SampleInput* draws, SampleOutput* drawn);

  // Seconds that `threads` threads need to read every weight of a one-row step when nothing is computed.
  double read_weights(int threads);
  size_t weight_bytes() const;
  // Bytes of the activations' buffers, for the most rows; what attention and logits take besides grows with use.
  size_t buffer_bytes() const;
  std::array<double, kOpClasses> class_bytes() const;
  // Make every instruction of a class (or the sampling) take this much longer: how the accounting is tested.
  void set_delay(OpClass c, double seconds) { delays_[(int)c] = seconds; }
  // The cache that steps read and write: `blocks` of the arena's blocks; copies may also go to `spare` ones after them.
  void set_cache(uint8_t* arena, size_t block_bytes, int blocks, int spare) {
    arena_ = arena, block_bytes_ = block_bytes, blocks_limit_ = blocks, arena_blocks_ = blocks + spare;
  }
  // The head's rows stand for these tokens: drawn ones are given by them, and so is their noise. Ascending.
  void set_vocabulary(std::vector<int32_t> ids) { ids_ = std::move(ids); }
  // Draw logit rows of the last step again, otherwise. Throws std::invalid_argument for a row that it did not have.
  void redraw(const int32_t* rows, const SampleInput& draws, SampleOutput& drawn) const;
  // Copy whole blocks, pairs [count, 2] of (from, to), in order. Throws std::runtime_error for one outside the arena.
  void copy_blocks(const int32_t* pairs, int count);
  // Copy single slots of all layers, pairs [count, 2] of (from, to), in order. Throws std::runtime_error for one outside the cache.
  void copy_slots(const int32_t* pairs, int count);
  int threads() const { return pool_.most(); }
  // Run steps with so many threads, as if other processes kept the rest from running; 0: as many as is sensible.
  void crowd(int threads) { crowded_ = threads; }
  int max_rows() const { return max_rows_; }
  int vocabulary() const { return logits_ops_.empty() ? 0 : logits_ops_[0].w.n; }
  const float* logits() const { return logits_.data(); }
  size_t logits_stride() const { return logits_stride_; }
  // The last step's taps side by side, [rows, all their widths].
  const std::vector<float>& taps() const { return taps_; }
  const StepSeconds& seconds() const { return seconds_; }

 private:
  struct AttentionTask { int span, row0, rows, head, split; };  // split < 0: all splits, one after the other
  struct Partial { std::vector<float> out, peak, total; };
  struct Scratch {
    std::vector<float> acts, gathered_scales, run;
    std::vector<uint8_t> q, gathered;
    std::vector<int32_t> sums;
  };

  template <class T> void push(Instruction::Kind kind, std::vector<T>& list, const T& op) {
    list.push_back(op);
    code_.push_back({kind, (int)list.size() - 1});
  }
  void check(const StepInput& in) const;
  void plan_spans(const StepInput& in);
  double lost_to_company(int rows, double stolen);
  void plan_attention();
  int chunk_of(int rows, int most, int columns) const;
  OpClass class_of(const Instruction& c) const;
  void run_thread(int t);
  void sample(const SampleInput& draws, SampleOutput& drawn, int t);
  void run_embed(const EmbedOp&, int t);
  void run_norm(const NormOp&, int t);
  void run_linear(const LinearOp&, int t);
  void run_logits(const LogitsOp&, int t);
  void run_attention(const AttentionOp&, int instruction, int t);
  void run_write(const WriteOp&, int t);
  // First and last position that a row at `position` of a span sees.
  int first_visible(const AttentionOp&, const Span&, int position) const;
  int last_visible(const AttentionOp& op, const Span& s, int position) const { return op.block ? s.base + s.rows - 1 : position; }
  void rotate_and_write(const AttentionOp&, int row, int head);
  // `next`: the task after this one on the same thread, if it is known; its first keys are fetched meanwhile.
  void attend(const AttentionOp&, const AttentionTask&, const AttentionTask* next, int t);
  template <class Fn> void take_tasks(int instruction, Fn fn);
  const uint8_t* keys_of(const AttentionOp&, const AttentionTask&, int block) const;
  void fetch_slot(const AttentionOp&, const AttentionTask&) const;
  void block_of(const AttentionOp&, const Span&, int row, int block, int place, int t, KVBlock& out);
  void finish(const AttentionOp&, int row, int head, const float* out, float total);
  // Quantise rows [r0, r1) of x (normed first, if norm is given), gathered through `map` if it is not null.
  void prepare(const Acts& a, const Buffer& x, const int32_t* map, const float* norm, float eps, int r0, int r1, float* scratch);
  Acts activations(const Buffer& x, int rows, const int32_t* map, const float* norm, float eps, Needs n, int t);
  std::pair<int, int> share(int n, int t) const { return {(int)((long)n * t / pool_.size()), (int)((long)n * (t + 1) / pool_.size())}; }

  std::shared_ptr<Pool> owned_;
  Pool& pool_;
  int max_rows_;
  std::vector<Buffer> buffers_;
  std::vector<Instruction> code_;
  std::vector<EmbedOp> embeds_;
  std::vector<NormOp> norms_;
  std::vector<AddOp> adds_;
  std::vector<GatedOp> gateds_;
  std::vector<LinearOp> linears_;
  std::vector<AttentionOp> attentions_;
  std::vector<TapOp> taps_ops_;
  std::vector<LogitsOp> logits_ops_;
  std::vector<InputOp> inputs_ops_;
  std::vector<ConcatOp> concats_;
  std::vector<WriteOp> writes_;
  std::vector<float> inputs_;

  const StepInput* in_ = nullptr;
  std::vector<Span> spans_;
  std::vector<int> span_of_;                 // [rows]
  std::vector<std::vector<int32_t>> paths_;  // [rows] slots of positions base.. of a tree's row
  std::vector<AttentionTask> tasks_;
  bool split_parallel_ = false;
  bool separate_ = false;                    // every span is one row: its tasks write and read on their own
  std::vector<Partial> partials_;            // [splits], each [rows * heads]
  std::unique_ptr<std::atomic<int>[]> next_; // [instructions] next task to take
  Scratch shared_;
  std::vector<Scratch> scratch_;             // [threads]
  std::vector<int32_t> ids_;                 // [vocabulary] tokens of the head's rows; empty: the rows' own numbers
  std::vector<float> logits_;
  size_t logits_stride_ = 0;
  int logits_rows_ = 0;
  std::vector<float> taps_;
  int tap_width_ = 0;
  StepSeconds seconds_;
  std::array<double, kOpClasses> delays_{};
  std::vector<double> stolen_;               // [threads]
  std::array<double, 65> quiet_{};           // [rows] seconds of steps with all threads, lately
  int crowded_ = 0;
  std::vector<float> best_;                  // [threads] best score of a thread's share of the vocabulary
  std::vector<int> best_index_;
  std::unique_ptr<Pool> readers_;            // as many threads as the last read asked for, if not those of the step
  std::vector<int> place_head_;              // [threads] head whose blocks a thread reads
  int task_heads_ = 0, task_group_ = 0, blocks_limit_ = 0, arena_blocks_ = 0;
  uint8_t* arena_ = nullptr;
  size_t block_bytes_ = 0;
};

}  // namespace slip
