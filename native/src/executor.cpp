// The executor: planning a step and running the instructions that are not attention.
#include "executor.hpp"

#include "pack.hpp"

#include <algorithm>
#include <chrono>
#include <ctime>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>

namespace slip {
namespace {

constexpr int kPrivateRows = 8;  // up to here every thread quantises all rows itself, which saves two barriers

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// Seconds that the calling thread has run.
double cpu_now() {
  timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

void wait_until(double end) {
  while (now() < end) {
  }
}

Acts make_acts(int rows, Needs n, std::vector<uint8_t>& q, std::vector<float>& floats, std::vector<int32_t>& sums) {
  Acts a{rows, n.groups, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr};
  size_t groups = (size_t)rows * a.groups, numbers = groups * kGroup;
  // A tile of 8, 12 or 16 rows reads past the rows there are, into what follows, and drops what comes of it.
  const size_t slack = kTileRows * kGroup;
  size_t need = groups * 2 + (n.f32 ? numbers : 0) + (n.bf16 ? numbers : 0) + slack;
  if (floats.size() < need) floats.resize(need);
  if (n.ints && q.size() < numbers + slack + 64) q.resize(numbers + slack + 64);
  if (n.ints && sums.size() < groups * 2 + slack) sums.resize(groups * 2 + slack);
  float* at = floats.data();
  a.scale = at;
  a.mean = at + groups;
  at += groups * 2;
  if (n.ints) {
    a.q = (int8_t*)(((uintptr_t)q.data() + 63) & ~(uintptr_t)63);
    a.sum = sums.data();
    a.pair = sums.data() + groups;
  }
  if (n.f32) {
    a.f32 = at;
    at += numbers;
  }
  if (n.bf16) a.bf16 = at;
  return a;
}

}  // namespace

Executor::Executor(int threads, int max_rows, Executor* share)
    : owned_(share ? share->owned_ : std::make_shared<Pool>(threads)), pool_(*owned_), max_rows_(max_rows), scratch_(pool_.most()), stolen_(pool_.most()), best_(pool_.most()), best_index_(pool_.most()), place_head_(pool_.most()) {}

void Executor::tap(int x) {
  push(Instruction::Tap, taps_ops_, TapOp{x, tap_width_});
  tap_width_ += buffers_[x].width;
}

int Executor::buffer(int width) {
  Buffer b{width, round_up(width, kGroup), {}};
  b.data.assign((size_t)max_rows_ * b.stride, 0.0f);
  buffers_.push_back(std::move(b));
  return (int)buffers_.size() - 1;
}

void Executor::check(const StepInput& in) const {
  auto fail = [](const char* what, int row) { throw std::runtime_error(std::string(what) + " (row " + std::to_string(row) + ")"); };
  if (in.rows < 1 || in.rows > max_rows_) throw std::runtime_error("a step takes 1 to " + std::to_string(max_rows_) + " rows, not " + std::to_string(in.rows));
  for (int r = 0; r < in.rows; ++r) {
    if (in.sequence[r] < 0 || in.sequence[r] >= in.sequences) fail("sequence outside the block tables", r);
    if (in.position[r] < 0 || in.position[r] / kBlock >= in.table_width) fail("position past the block table", r);
    if (in.parent[r] >= r || (in.parent[r] >= 0 && in.sequence[in.parent[r]] != in.sequence[r])) fail("parent is no earlier row of the sequence", r);
    if (embeds_.size() && (in.token[r] < 0 || in.token[r] >= embeds_[0].table.n)) fail("token outside the vocabulary", r);
    if (in.slot[r] < 0) fail("negative slot", r);
    if (!(attentions_.empty() && writes_.empty()) && in.slot[r] / kBlock >= blocks_limit_) fail("slot outside the cache", r);
  }
  for (const InputOp& op : inputs_ops_)
    if (inputs_.size() != (size_t)in.rows * buffers_[op.out].width) throw std::runtime_error("a step's input has rows * width numbers");
  for (int i = 0; i < in.logits; ++i)
    if (in.logit_rows[i] < 0 || in.logit_rows[i] >= in.rows) fail("logit row outside the step", i);
}

void Executor::plan_spans(const StepInput& in) {
  spans_.clear();
  span_of_.assign(in.rows, 0);
  paths_.resize(in.rows);
  for (int r = 0; r < in.rows; ++r) {
    bool starts = r == 0 || in.sequence[r] != in.sequence[r - 1];
    if (starts) spans_.push_back({r, 0, in.sequence[r], in.position[r], true});
    Span& s = spans_.back();
    int i = s.rows++, position = in.position[r];
    int slot = in.tables[(size_t)s.sequence * in.table_width + position / kBlock] * kBlock + position % kBlock;
    if (in.parent[r] != (i ? r - 1 : -1) || position != s.base + i || in.slot[r] != slot) s.linear = false;
    span_of_[r] = (int)spans_.size() - 1;
  }
  for (const Span& s : spans_) {
    int last = 0;
    for (int r = s.row0; r < s.row0 + s.rows; ++r) {
      last = in.position[r] > last ? in.position[r] : last;
      if (s.linear) continue;
      paths_[r].clear();
      for (int at = r; at >= 0; at = in.parent[at]) paths_[r].insert(paths_[r].begin(), in.slot[at]);
      if (in.position[r] - s.base + 1 != (int)paths_[r].size()) throw std::runtime_error("positions and parents disagree (row " + std::to_string(r) + ")");
    }
    int cached = s.linear ? last + 1 : s.base;
    for (int b = 0; b * kBlock < cached; ++b) {
      int block = in.tables[(size_t)s.sequence * in.table_width + b];
      if (block < 0 || block >= blocks_limit_) throw std::runtime_error("block table entry " + std::to_string(block) + " is outside the cache");
    }
  }
}

OpClass Executor::class_of(const Instruction& c) const {
  switch (c.kind) {
    case Instruction::Embed: case Instruction::Input: return OpClass::Embed;
    case Instruction::Norm: return OpClass::Norm;
    case Instruction::Linear: return linears_[c.index].op_class;
    case Instruction::Attention: case Instruction::Write: return OpClass::Attention;
    case Instruction::Logits: return OpClass::Logits;
    default: return OpClass::Other;
  }
}

static void clear(const SampleInput& draws, SampleOutput& drawn) {
  std::fill_n(drawn.tokens, (size_t)draws.rows * drawn.width, -1);
  std::fill_n(drawn.logprobs, (size_t)draws.rows * drawn.width, std::numeric_limits<float>::quiet_NaN());
}

void Executor::step(const StepInput& in, const SampleInput* draws, SampleOutput* drawn) {
  const double begun = now();
  check(in);
  if (crowded_ > 0) pool_.use(crowded_);
  else pool_.use_sensibly();
  in_ = &in;
  plan_spans(in);
  plan_attention();
  if (!logits_ops_.empty() && in.logits) {
    logits_stride_ = round_up(vocabulary(), kGroup);
    if (logits_.size() < logits_stride_ * in.logits) logits_.resize(logits_stride_ * in.logits);
  }
  logits_rows_ = logits_ops_.empty() ? 0 : in.logits;
  taps_.resize((size_t)in.rows * tap_width_);
  if (!next_) next_ = std::make_unique<std::atomic<int>[]>(code_.size() * 2 + 1);
  for (size_t i = 0; i < code_.size() * 2 + 1; ++i) next_[i].store(0, std::memory_order_relaxed);
  seconds_.by_class.fill(0);
  if (draws) clear(*draws, *drawn);
  double last = now();
  seconds_.by_class[(int)OpClass::Plan] = last - begun;
  pool_.run([&](int t) {
    const double wall = now(), cpu = cpu_now();
    run_thread(t);
    if (draws) {
      double start = t == 0 ? now() : 0;
      sample(*draws, *drawn, t);
      pool_.barrier();
      if (t == 0) seconds_.by_class[(int)OpClass::Sample] = now() - start;
    }
    stolen_[t] = (now() - wall) - (cpu_now() - cpu);
  });
  in_ = nullptr;
  seconds_.begun = begun;
  seconds_.total = now() - begun;
  const double stolen = *std::max_element(stolen_.begin(), stolen_.begin() + pool_.size());
  pool_.note(seconds_.total, stolen, begun);
  seconds_.stolen = std::max(stolen, lost_to_company(in.rows, stolen));
}

// What a step has lost by having fewer threads than there are, going by those that nobody disturbed.
double Executor::lost_to_company(int rows, double stolen) {
  if (rows >= (int)quiet_.size()) return 0;
  double& quiet = quiet_[rows];
  if (pool_.size() < pool_.most()) return quiet > 0 ? seconds_.total - quiet : 0;
  if (stolen < 0.05 * seconds_.total) quiet = quiet > 0 ? quiet + 0.1 * (seconds_.total - quiet) : seconds_.total;
  return 0;
}

void Executor::sample(const SampleInput& draws, SampleOutput& drawn, int t) {
  if (delays_[(int)OpClass::Sample] > 0) wait_until(now() + delays_[(int)OpClass::Sample]);
  if (draws.rows != 1 || !ids_.empty() || !sliceable(draws, 0)) {
    const int32_t* ids = ids_.empty() ? nullptr : ids_.data();
    for (int r; (r = next_[code_.size() * 2].fetch_add(1)) < draws.rows;) sample_row(logits_.data() + r * logits_stride_, vocabulary(), ids, draws, r, drawn);
    return;
  }
  auto [a, b] = share(vocabulary() / 64, t);
  int from = a * 64, to = t == pool_.size() - 1 ? vocabulary() : b * 64;
  best_index_[t] = -1;
  if (to > from) sample_slice(logits_.data(), from, to - from, draws, 0, &best_[t], &best_index_[t]);
  pool_.barrier();
  if (t != 0) return;
  int winner = -1;
  for (int i = 0; i < pool_.size(); ++i)
    if (best_index_[i] >= 0 && (winner < 0 || best_[i] > best_[winner])) winner = i;
  drawn.tokens[0] = best_index_[winner];
}

void Executor::redraw(const int32_t* rows, const SampleInput& draws, SampleOutput& drawn) const {
  clear(draws, drawn);
  for (int r = 0; r < draws.rows; ++r) {
    if (rows[r] < 0 || rows[r] >= logits_rows_) throw std::invalid_argument("the last step had no logit row " + std::to_string(rows[r]));
    sample_row(logits_.data() + rows[r] * logits_stride_, vocabulary(), ids_.empty() ? nullptr : ids_.data(), draws, r, drawn);
  }
}

void Executor::copy_blocks(const int32_t* pairs, int count) {
  for (int i = 0; i < 2 * count; ++i)
    if (pairs[i] < 0 || pairs[i] >= arena_blocks_) throw std::runtime_error("copied block " + std::to_string(pairs[i]) + " is outside the cache");
  for (int i = 0; i < count; ++i) memmove(arena_ + pairs[2 * i + 1] * block_bytes_, arena_ + pairs[2 * i] * block_bytes_, block_bytes_);
}

size_t Executor::weight_bytes() const {
  size_t total = 0;
  for (const LinearOp& op : linears_)
    for (const LinearPart& part : op.parts) total += part.w.bytes();
  for (const LogitsOp& op : logits_ops_) total += op.w.bytes();
  return total;
}

size_t Executor::buffer_bytes() const {
  size_t total = (size_t)max_rows_ * round_up(vocabulary(), kGroup) * sizeof(float);
  for (const Buffer& b : buffers_) total += b.data.size() * sizeof(float);
  return total;
}

std::array<double, kOpClasses> Executor::class_bytes() const {
  std::array<double, kOpClasses> bytes{};
  for (const LinearOp& op : linears_)
    for (const LinearPart& part : op.parts) bytes[(int)op.op_class] += (double)part.w.bytes();
  for (const LogitsOp& op : logits_ops_) bytes[(int)OpClass::Logits] += (double)op.w.bytes();
  return bytes;
}

double Executor::read_weights(int threads) {
  if (threads != pool_.most() && (!readers_ || readers_->most() != threads)) readers_ = std::make_unique<Pool>(threads);
  Pool& pool = threads == pool_.most() ? pool_ : *readers_;
  pool.use(threads);
  std::atomic<uint32_t> sink{0};
  double start = now();
  pool.run([&](int t) {
    uint32_t sum = 0;
    auto read = [&](const Matrix& w) {
      int p0 = (int)((long)w.panels() * t / threads), p1 = (int)((long)w.panels() * (t + 1) / threads);
      sum ^= kernels().read(w.panel(p0), (p1 - p0) * w.panel_bytes());
    };
    for (const LinearOp& op : linears_)
      for (const LinearPart& part : op.parts) read(part.w);
    for (const LogitsOp& op : logits_ops_) read(op.w);
    sink ^= sum;
  });
  return now() - start;
}

void Executor::run_thread(int t) {
  double start = now();
  for (size_t i = 0; i < code_.size(); ++i) {
    const Instruction& c = code_[i];
    switch (c.kind) {
      case Instruction::Embed: run_embed(embeds_[c.index], t); break;
      case Instruction::Norm: run_norm(norms_[c.index], t); break;
      case Instruction::Linear: run_linear(linears_[c.index], t); break;
      case Instruction::Attention: run_attention(attentions_[c.index], (int)i, t); break;
      case Instruction::Logits:
        if (in_->logits) run_logits(logits_ops_[c.index], t);
        break;
      case Instruction::Add: {
        const AddOp& op = adds_[c.index];
        auto [r0, r1] = share(in_->rows, t);
        for (int r = r0; r < r1; ++r) kernels().add(buffers_[op.a].row(r), buffers_[op.b].row(r), buffers_[op.out].row(r), buffers_[op.out].width);
        break;
      }
      case Instruction::Gated: {
        const GatedOp& op = gateds_[c.index];
        auto [r0, r1] = share(in_->rows, t);
        for (int r = r0; r < r1; ++r) kernels().gated(op.kind, buffers_[op.gate].row(r), buffers_[op.up].row(r), buffers_[op.out].row(r), buffers_[op.out].width);
        break;
      }
      case Instruction::Input: {
        Buffer& out = buffers_[inputs_ops_[c.index].out];
        auto [r0, r1] = share(in_->rows, t);
        for (int r = r0; r < r1; ++r) memcpy(out.row(r), inputs_.data() + (size_t)r * out.width, out.width * sizeof(float));
        break;
      }
      case Instruction::Concat: {
        const ConcatOp& op = concats_[c.index];
        Buffer &a = buffers_[op.a], &b = buffers_[op.b], &out = buffers_[op.out];
        auto [r0, r1] = share(in_->rows, t);
        for (int r = r0; r < r1; ++r) {
          memcpy(out.row(r), a.row(r), a.width * sizeof(float));
          memcpy(out.row(r) + a.width, b.row(r), b.width * sizeof(float));
        }
        break;
      }
      case Instruction::Write: run_write(writes_[c.index], t); break;
      case Instruction::Tap: {
        const TapOp& op = taps_ops_[c.index];
        Buffer& x = buffers_[op.x];
        auto [r0, r1] = share(in_->rows, t);
        for (int r = r0; r < r1; ++r) memcpy(taps_.data() + (size_t)r * tap_width_ + op.at, x.row(r), x.width * sizeof(float));
        break;
      }
    }
    const int op_class = (int)class_of(c);
    if (delays_[op_class] > 0) wait_until(now() + delays_[op_class]);
    pool_.barrier();
    if (t == 0) {
      double end = now();
      seconds_.by_class[op_class] += end - start;
      start = end;
    }
  }
}

void Executor::run_embed(const EmbedOp& op, int t) {
  Buffer& out = buffers_[op.out];
  auto [r0, r1] = share(in_->rows, t);
  for (int r = r0; r < r1; ++r) {
    unpack_row(op.table, in_->token[r], out.row(r));
    if (op.scale != 1.0f) kernels().scale(out.row(r), op.scale, out.width);
  }
}

void Executor::run_norm(const NormOp& op, int t) {
  Buffer &x = buffers_[op.x], &out = buffers_[op.out];
  auto [r0, r1] = share(in_->rows, t);
  for (int r = r0; r < r1; ++r) {
    kernels().rmsnorm(x.row(r), op.w, op.eps, op.heads, x.width / op.heads, out.row(r));
    if (op.add_to >= 0) kernels().add(buffers_[op.add_to].row(r), out.row(r), buffers_[op.add_to].row(r), x.width);
  }
}

void Executor::prepare(const Acts& a, const Buffer& x, const int32_t* map, const float* norm, float eps, int r0, int r1, float* scratch) {
  for (int r = r0; r < r1; ++r) {
    const float* row = x.data.data() + (size_t)(map ? map[r] : r) * x.stride;
    if (norm) {
      kernels().rmsnorm(row, norm, eps, 1, x.width, scratch);
      row = scratch;
    }
    kernels().prepare(row, x.width, r, a);
  }
}

// Few rows: every thread prepares all of them for itself. Many: they share the work, and wait for one another.
Acts Executor::activations(const Buffer& x, int rows, const int32_t* map, const float* norm, float eps, Needs n, int t) {
  Scratch& own = scratch_[t];
  if ((int)own.run.size() < x.stride) own.run.resize(x.stride);
  if (rows <= kPrivateRows) {
    Acts a = make_acts(rows, n, own.q, own.acts, own.sums);
    prepare(a, x, map, norm, eps, 0, rows, own.run.data());
    return a;
  }
  auto shared = [&] { return make_acts(rows, n, shared_.q, shared_.acts, shared_.sums); };
  if (t == 0) shared();  // grows once; after the barrier there are only pointers to take
  pool_.barrier();
  Acts a = shared();
  auto [r0, r1] = share(rows, t);
  prepare(a, x, map, norm, eps, r0, r1, own.run.data());
  pool_.barrier();
  return a;
}

void Executor::run_linear(const LinearOp& op, int t) {
  const int rows = in_->rows;
  Needs n;
  for (const LinearPart& p : op.parts) n.of(p.w);
  Acts a = activations(buffers_[op.x], rows, nullptr, op.norm, op.eps, n, t);
  for (const LinearPart& part : op.parts) {
    Buffer& out = buffers_[part.out];
    auto [p0, p1] = share(part.w.panels(), t);
    kernels().linear(part.w, p0, p1, a, 0, rows, out.row(0), out.stride);
    int c0 = p0 * kPanel, c1 = p1 * kPanel < out.width ? p1 * kPanel : out.width;
    if (part.bias && c1 > c0)
      for (int r = 0; r < rows; ++r) kernels().add(out.row(r) + c0, part.bias + c0, out.row(r) + c0, c1 - c0);
  }
  if (op.epilogue == Epilogue::Store) return;
  Buffer &first = buffers_[op.parts[0].out], &to = buffers_[op.target];
  auto [p0, p1] = share(op.parts[0].w.panels(), t);
  int c0 = p0 * kPanel, c1 = p1 * kPanel < first.width ? p1 * kPanel : first.width;
  for (int r = 0; r < rows && c1 > c0; ++r) {
    if (op.epilogue == Epilogue::AddTo) kernels().add(to.row(r) + c0, first.row(r) + c0, to.row(r) + c0, c1 - c0);
    else kernels().gated(op.kind, first.row(r) + c0, buffers_[op.parts[1].out].row(r) + c0, to.row(r) + c0, c1 - c0);
  }
}

void Executor::run_logits(const LogitsOp& op, int t) {
  const int rows = in_->logits;
  Needs n;
  n.of(op.w);
  Acts a = activations(buffers_[op.x], rows, in_->logit_rows, op.norm, op.eps, n, t);
  auto [p0, p1] = share(op.w.panels(), t);
  kernels().linear(op.w, p0, p1, a, 0, rows, logits_.data(), logits_stride_);
  int c0 = p0 * kPanel, c1 = p1 * kPanel < op.w.n ? p1 * kPanel : op.w.n;
  for (int r = 0; r < rows && c1 > c0; ++r) {
    float* y = logits_.data() + r * logits_stride_ + c0;
    if (op.bias) kernels().add(y, op.bias + c0, y, c1 - c0);
    if (op.softcap > 0) kernels().softcap(y, op.softcap, c1 - c0);
  }
}

}  // namespace slip
