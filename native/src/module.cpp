// Python bindings: matrices, packing, the executor. Arrays stay alive as long as what refers to them.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <deque>
#include <stdexcept>

#include "bindings.hpp"
#include "executor.hpp"
#include "pack.hpp"
#include "runner.hpp"

namespace nb = nanobind;
using namespace slip;

namespace {

template <class T> using Array = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <class T> using Table = nb::ndarray<const T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
template <class T> using Out = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <class T> using OutTable = nb::ndarray<T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Bytes = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Floats = Array<float>;

constexpr const char* kNames[kFormats] = {"i4s", "i4s64", "i4s128", "i4m", "i4m64", "i4m128", "i4k", "i5s", "i5m", "i5k", "i6k", "i8", "bf16", "f16", "f32"};

Format format_of(const std::string& name) {
  for (int i = 0; i < kFormats; ++i)
    if (name == kNames[i]) return (Format)i;
  throw std::invalid_argument("unknown packed format " + name);
}

struct PyMatrix {
  Matrix m;
  Bytes data;
};

size_t packed_bytes(const std::string& format, int n, int k) { return Matrix{format_of(format), n, k, nullptr}.bytes(); }

class Packer {
 public:
  explicit Packer(int threads) : pool_(threads) {}
  void pack(int stored, Array<uint8_t> base, size_t stride, size_t offset, Array<int64_t> rows, PyMatrix& to) {
    const Matrix& m = to.m;
    if ((int)rows.shape(0) != m.n) throw std::invalid_argument("one source row for every row of the matrix");
    if (!packs((Stored)stored, m.format)) throw std::invalid_argument("this stored type cannot be packed into this format");
    for (int i = 0; i < m.n; ++i)
      if (rows.data()[i] < 0 || ((size_t)rows.data()[i] + 1) * stride > base.size()) throw std::invalid_argument("a source row lies outside the stored tensor");
    Source from{(Stored)stored, base.data(), stride, offset, rows.data()};
    uint8_t* out = to.data.data();
    nb::gil_scoped_release release;
    std::atomic<int> next{0};
    pool_.run([&](int) {
      for (int p; (p = next.fetch_add(8)) < m.panels();) pack_panels(from, m, p, p + 8 < m.panels() ? p + 8 : m.panels(), out);
    });
  }

 private:
  Pool pool_;
};

class PyExecutor {
 public:
  PyExecutor(int threads, int max_rows, PyExecutor* share) : e(threads, max_rows, share ? &share->e : nullptr) {}
  Executor e;
  std::vector<nb::object> keep;
  // The arrays of the submitted steps, oldest first. The runner, which uses them, is stopped before they go.
  std::deque<std::vector<nb::object>> flying;
  std::unique_ptr<Runner> runner;  // made when the first step is submitted

  const float* hold(const std::optional<Floats>& a) {
    if (!a) return nullptr;
    keep.push_back(nb::cast(*a));
    return a->data();
  }
  const float* hold(const nb::ndarray<const float, nb::c_contig, nb::device::cpu>& a) {
    keep.push_back(nb::cast(a));
    return a.data();
  }
  const Matrix& hold(const PyMatrix& m) {
    keep.push_back(nb::cast(m.data));
    return m.m;
  }
};

// Columns sequence, token, position, slot, parent of [5, rows].
StepInput step_input(const Table<int32_t>& columns, const Table<int32_t>& tables, const Array<int32_t>& logit_rows) {
  if (columns.shape(0) != 5) throw std::invalid_argument("rows are five columns");
  const int rows = (int)columns.shape(1);
  const int32_t* c = columns.data();
  return {rows, c, c + rows, c + 2 * rows, c + 3 * rows, c + 4 * rows, tables.data(), (int)tables.shape(0), (int)tables.shape(1),
          logit_rows.data(), (int)logit_rows.shape(0)};
}

void step(PyExecutor& self, Table<int32_t> columns, Table<int32_t> tables, Array<int32_t> logit_rows) {
  StepInput in = step_input(columns, tables, logit_rows);
  nb::gil_scoped_release release;
  self.e.step(in, nullptr, nullptr);
}

void check_tokens(const Array<int32_t>& start, const Array<int32_t>& token, int rows, int vocabulary) {
  bool ok = (int)start.shape(0) == rows + 1 && start.data()[0] == 0 && start.data()[rows] == (int)token.shape(0);
  for (int i = 0; ok && i < rows; ++i) ok = start.data()[i] <= start.data()[i + 1];
  for (size_t i = 0; ok && i < token.shape(0); ++i) ok = token.data()[i] >= 0 && token.data()[i] < vocabulary;
  if (!ok) throw std::invalid_argument("adjusted tokens are outside the vocabulary or out of order");
}

// Where what is drawn goes.
struct Outcome {
  OutTable<int32_t>& tokens;
  OutTable<float>& logprobs;
  SampleOutput output() const { return {(int)tokens.shape(1), tokens.data(), logprobs.data()}; }
};

// The draws of a step. `ints` is [5, draws]: top_k, choice, position, stream, logprobs; `floats` is [3, draws]:
// temperature, top_p, min_p; `adjust_value` [2, adjusted]: multiplier, addend; `masks` [masks, words], see SampleInput.
struct Draws {
  Table<int32_t> ints;
  Table<float> floats;
  Array<uint64_t> seed;
  Array<int32_t> adjust_start, adjust_token;
  Table<float> adjust_value;
  Array<int32_t> mask_of;
  Table<uint32_t> masks;

  int count() const { return (int)seed.shape(0); }
  // Throws std::invalid_argument unless there is one draw for each of `logits` rows, all in order, and room for what
  // `steps` of them draw.
  void check(int logits, int vocabulary, const Outcome& out, int steps = 1) const {
    const int n = count();
    if (n != logits || ints.shape(0) != 5 || (int)ints.shape(1) != n || floats.shape(0) != 3 || (int)floats.shape(1) != n ||
        adjust_value.shape(0) != 2 || adjust_value.shape(1) != adjust_token.shape(0) || (int)out.tokens.shape(0) != n * steps ||
        (int)out.logprobs.shape(0) != n * steps || out.tokens.shape(1) != out.logprobs.shape(1) || out.tokens.shape(1) < 1)
      throw std::invalid_argument("one draw for every logit row");
    check_tokens(adjust_start, adjust_token, n, vocabulary);
    if ((int)mask_of.shape(0) != n) throw std::invalid_argument("one mask's number for every draw");
    for (int r = 0; r < n; ++r)
      if (mask_of.data()[r] >= (int)masks.shape(0)) throw std::invalid_argument("there is no such mask");
    for (int r = 0; r < n; ++r)
      if (ints.data()[4 * n + r] >= (int)out.tokens.shape(1)) throw std::invalid_argument("no room for that many log-probabilities");
  }
  SampleInput input() const {
    const int n = count();
    const int32_t* i = ints.data();
    const float *f = floats.data(), *value = adjust_value.data();
    return {n, f, f + n, f + 2 * n, i, i + n, i + 2 * n, i + 3 * n, i + 4 * n, seed.data(), adjust_start.data(), adjust_token.data(),
            value, value + adjust_value.shape(1), mask_of.data(), masks.data(), (int)masks.shape(1)};
  }
};

void step_sampled(PyExecutor& self, Table<int32_t> columns, Table<int32_t> tables, Array<int32_t> logit_rows, Draws& draws, OutTable<int32_t> tokens,
                  OutTable<float> logprobs) {
  StepInput in = step_input(columns, tables, logit_rows);
  const Outcome out{tokens, logprobs};
  draws.check(in.logits, self.e.vocabulary(), out);
  SampleInput wanted = draws.input();
  SampleOutput drawn = out.output();
  nb::gil_scoped_release release;
  self.e.step(in, &wanted, &drawn);
}

void redraw(PyExecutor& self, Array<int32_t> rows, Draws& draws, OutTable<int32_t> tokens, OutTable<float> logprobs) {
  const Outcome out{tokens, logprobs};
  draws.check((int)rows.shape(0), self.e.vocabulary(), out);
  SampleOutput drawn = out.output();
  self.e.redraw(rows.data(), draws.input(), drawn);
}

// Run a row and draw after it; then, in the next slot and a position further, the token that was drawn with what was
// tapped; and so on while there are slots. A token survives with the chance of the class that its probability is in;
// it ends when all survive less likely than `price`. Returns how many were drawn.
int follow(PyExecutor& self, Table<int32_t> columns, Table<int32_t> tables, Array<int32_t> slots, Draws& draws, Table<float> inputs,
           OutTable<int32_t> tokens, OutTable<float> logprobs, Array<double> bounds, Array<double> chances, double alive, double price) {
  const int most = (int)slots.shape(0), width = (int)tokens.shape(1);
  if (columns.shape(0) != 5 || columns.shape(1) != 1 || most < 1 || chances.shape(0) != bounds.shape(0) + 1)
    throw std::invalid_argument("one row, its slots, and a chance for every class");
  const Outcome out{tokens, logprobs};
  draws.check(1, self.e.vocabulary(), out, most);
  int32_t row[5];
  memcpy(row, columns.data(), sizeof row);
  const int32_t logit_row = 0;
  const StepInput in{1, row, row + 1, row + 2, row + 3, row + 4, tables.data(), (int)tables.shape(0), (int)tables.shape(1), &logit_row, 1};
  SampleInput wanted = draws.input();
  int32_t position = *wanted.position;
  wanted.position = &position;
  const double *low = bounds.data(), *high = low + bounds.shape(0);
  nb::gil_scoped_release release;
  self.e.set_inputs(inputs.data(), inputs.size());
  for (int i = 0;;) {
    row[3] = slots.data()[i];
    SampleOutput drawn{width, tokens.data() + (size_t)i * width, logprobs.data() + (size_t)i * width};
    self.e.step(in, &wanted, &drawn);
    alive *= chances.data()[std::upper_bound(low, high, (double)std::exp(*drawn.logprobs)) - low];
    if (++i == most || alive < price) return i;
    if (self.e.taps().size() != inputs.size()) throw std::runtime_error("what is tapped is not what the program takes");
    self.e.set_inputs(self.e.taps().data(), inputs.size());
    row[1] = *drawn.tokens;
    ++row[2], ++position;
  }
}

// Queue a step.
void submit(PyExecutor& self, OutTable<int32_t> columns, Table<int32_t> tables, Array<int32_t> logit_rows, std::optional<Draws> draws,
            OutTable<int32_t> tokens, OutTable<float> logprobs, Table<int32_t> copies) {
  if (columns.shape(0) != 5 || copies.shape(1) != 2) throw std::invalid_argument("rows are five columns, copies two");
  const int rows = (int)columns.shape(1);
  int32_t* c = columns.data();
  Job job{{rows, c, c + rows, c + 2 * rows, c + 3 * rows, c + 4 * rows, tables.data(), (int)tables.shape(0), (int)tables.shape(1), logit_rows.data(), (int)logit_rows.shape(0)},
          c + rows, draws.has_value(), {}, {1, nullptr, nullptr}, copies.data(), (int)copies.shape(0)};
  if (draws) {
    const Outcome out{tokens, logprobs};
    draws->check(job.in.logits, self.e.vocabulary(), out);
    job.draws = draws->input();
    job.drawn = out.output();
  }
  if (!self.runner) self.runner = std::make_unique<Runner>(self.e);
  std::vector<nb::object> arrays{nb::cast(columns), nb::cast(tables), nb::cast(logit_rows), nb::cast(tokens), nb::cast(logprobs), nb::cast(copies)};
  if (draws) arrays.push_back(nb::cast(*draws));
  self.flying.push_back(std::move(arrays));
  self.runner->submit(job);
}

void copy_seconds(const StepSeconds& seconds, Out<double>& out) {
  if (out.size() != kOpClasses + 3) throw std::invalid_argument("seconds are one number per class, the total, what was stolen, and the beginning");
  std::copy(seconds.by_class.begin(), seconds.by_class.end(), out.data());
  out.data()[kOpClasses] = seconds.total;
  out.data()[kOpClasses + 1] = seconds.stolen;
  out.data()[kOpClasses + 2] = seconds.begun;
}

OpClass op_class_of(const std::string& name) {
  for (int i = 0; i < kOpClasses; ++i)
    if (name == kOpClassNames[i]) return (OpClass)i;
  throw std::invalid_argument("unknown class of work " + name);
}

Activation activation_of(const std::string& name) {
  if (name == "silu") return Activation::Silu;
  if (name == "gelu_tanh") return Activation::GeluTanh;
  throw std::invalid_argument("unknown activation " + name);
}

}  // namespace

NB_MODULE(_native, m) {
  m.def("available_isas", [] {
    int n;
    const char* const* names = available_kernels(&n);
    return std::vector<std::string>(names, names + n);
  });
  m.def("emulated_isas", [] {
    int n;
    const char* const* names = emulated_kernels(&n);
    return std::vector<std::string>(names, names + n);
  });
  m.def("op_classes", [] { return std::vector<std::string>(kOpClassNames, kOpClassNames + kOpClasses); });
  m.def("isa", [] { return std::string(kernels().name); });
  m.def("select_isa", [](const std::string& name) { select_kernels(name.c_str()); });
  m.def("usable_cores", &usable_cores);
  m.def("cgroup_cores", &cgroup_cores, nb::arg("groups"), nb::arg("root"));
  nb::class_<Crowd>(m, "Crowd")
      .def(nb::init<int>(), nb::arg("threads"))
      .def("note", &Crowd::note, nb::arg("seconds"), nb::arg("stolen"), nb::arg("now"))
      .def_prop_ro("threads", &Crowd::threads);
  m.def("packed_bytes", &packed_bytes, nb::arg("format"), nb::arg("n"), nb::arg("k"));
  m.def("packs", [](int stored, const std::string& format) { return packs((Stored)stored, format_of(format)); });

  nb::class_<PyMatrix>(m, "Matrix")
      .def("__init__", [](PyMatrix* self, const std::string& format, int n, int k, Bytes data) {
        Matrix w{format_of(format), n, k, data.data()};
        if (n < 1 || k < 1 || data.size() != w.bytes()) throw std::invalid_argument("the data of a matrix has packed_bytes(format, n, k) bytes");
        new (self) PyMatrix{w, data};
      }, nb::arg("format"), nb::arg("n"), nb::arg("k"), nb::arg("data"))
      .def_prop_ro("n", [](const PyMatrix& m) { return m.m.n; })
      .def_prop_ro("k", [](const PyMatrix& m) { return m.m.k; })
      .def_prop_ro("format", [](const PyMatrix& m) { return kNames[(int)m.m.format]; })
      .def_prop_ro("nbytes", [](const PyMatrix& m) { return m.m.bytes(); })
      .def("unpack_row", [](const PyMatrix& m, int row, Out<float> out) {
        if (row < 0 || row >= m.m.n || (int)out.shape(0) != m.m.k) throw std::invalid_argument("row or output out of range");
        unpack_row(m.m, row, out.data());
      });

  nb::class_<Packer>(m, "Packer")
      .def(nb::init<int>(), nb::arg("threads"))
      .def("pack", &Packer::pack, nb::arg("stored"), nb::arg("base"), nb::arg("stride"), nb::arg("offset"), nb::arg("rows"), nb::arg("to"));

  bind_memory(m);
  bind_suffix(m);
  bind_instruments(m);

  nb::class_<Draws>(m, "Draws")
      .def(nb::init<Table<int32_t>, Table<float>, Array<uint64_t>, Array<int32_t>, Array<int32_t>, Table<float>, Array<int32_t>, Table<uint32_t>>(),
           nb::arg("ints"), nb::arg("floats"), nb::arg("seed"), nb::arg("adjust_start"), nb::arg("adjust_token"), nb::arg("adjust_value"),
           nb::arg("mask_of"), nb::arg("masks"));

  nb::class_<PyExecutor>(m, "Executor")
      .def(nb::init<int, int, PyExecutor*>(), nb::arg("threads"), nb::arg("max_rows"), nb::arg("share").none() = nullptr)
      .def("crowd", [](PyExecutor& s, int threads) { s.e.crowd(threads); }, nb::arg("threads"))
      .def("set_vocabulary", [](PyExecutor& s, Array<int32_t> ids) {
        if ((int)ids.shape(0) != s.e.vocabulary()) throw std::invalid_argument("one token for every row of the head");
        s.e.set_vocabulary(std::vector<int32_t>(ids.data(), ids.data() + ids.shape(0)));
      }, nb::arg("ids"))
      .def("buffer", [](PyExecutor& s, int width) { return s.e.buffer(width); })
      .def("set_cache", [](PyExecutor& s, Bytes arena, size_t block_bytes, int blocks, int spare) {
        if (block_bytes * ((size_t)blocks + spare) > arena.size()) throw std::invalid_argument("the arena is smaller than its blocks");
        s.keep.push_back(nb::cast(arena));
        s.e.set_cache(arena.data(), block_bytes, blocks, spare);
      }, nb::arg("arena"), nb::arg("block_bytes"), nb::arg("blocks"), nb::arg("spare"))
      .def("embed", [](PyExecutor& s, int out, const PyMatrix& table, float scale) { s.e.add(EmbedOp{out, s.hold(table), scale}); })
      .def("norm", [](PyExecutor& s, int x, int out, int add_to, Floats w, float eps, int heads) {
        s.e.add(NormOp{x, out, add_to, s.hold(std::optional<Floats>(w)), eps, heads});
      })
      .def("add", [](PyExecutor& s, int a, int b, int out) { s.e.add(AddOp{a, b, out}); })
      .def("gated", [](PyExecutor& s, int gate, int up, int out, const std::string& kind) { s.e.add(GatedOp{gate, up, out, activation_of(kind)}); })
      .def("tap", [](PyExecutor& s, int x) { s.e.tap(x); })
      .def("linear", [](PyExecutor& s, int x, std::optional<Floats> norm, float eps, std::vector<PyMatrix*> weights,
                        std::vector<std::optional<Floats>> biases, std::vector<int> outs, const std::string& epilogue, int target, const std::string& kind,
                        const std::string& op_class) {
        LinearOp op{x, s.hold(norm), eps, {}, Epilogue::Store, target, activation_of(kind), op_class_of(op_class)};
        if (epilogue == "add_to") op.epilogue = Epilogue::AddTo;
        else if (epilogue == "gated") op.epilogue = Epilogue::Gated;
        for (size_t i = 0; i < weights.size(); ++i) op.parts.push_back({s.hold(*weights[i]), s.hold(biases.at(i)), outs.at(i)});
        s.e.add(op);
      }, nb::arg("x"), nb::arg("norm").none(), nb::arg("eps"), nb::arg("weights"), nb::arg("biases"), nb::arg("outs"), nb::arg("epilogue"), nb::arg("target"), nb::arg("kind"), nb::arg("op_class"))
      .def("attention", [](PyExecutor& s, int q, int k, int v, int out, int heads, std::optional<Floats> q_norm, std::optional<Floats> k_norm, float eps,
                           Table<float> cosine, Table<float> sine, Bytes cache, size_t block_bytes, size_t k_at, size_t v_at, size_t k_scale_at, size_t v_scale_at,
                           int kv_heads, int k_dim, int v_dim, bool int8, float scale, float softcap, int window, int start, bool block, bool anchored) {
        uint8_t* base = cache.data();
        KVLayer c{base + k_at, base + v_at, base + k_scale_at, base + v_scale_at, block_bytes, kv_heads, k_dim, v_dim,
                  round_up(k_dim, kGroup), round_up(v_dim, kGroup), int8};
        s.keep.push_back(nb::cast(cache));
        s.keep.push_back(nb::cast(cosine));
        s.keep.push_back(nb::cast(sine));
        s.e.add(AttentionOp{q, k, v, out, heads, s.hold(q_norm), s.hold(k_norm), eps, cosine.data(), sine.data(), (int)cosine.shape(1), c, scale, softcap, window, start, block, anchored});
      }, nb::arg("q"), nb::arg("k"), nb::arg("v"), nb::arg("out"), nb::arg("heads"), nb::arg("q_norm").none(), nb::arg("k_norm").none(), nb::arg("eps"),
         nb::arg("cosine"), nb::arg("sine"), nb::arg("cache"), nb::arg("block_bytes"), nb::arg("k_at"), nb::arg("v_at"), nb::arg("k_scale_at"), nb::arg("v_scale_at"),
         nb::arg("kv_heads"), nb::arg("k_dim"), nb::arg("v_dim"), nb::arg("int8"), nb::arg("scale"), nb::arg("softcap"), nb::arg("window"),
         nb::arg("start"), nb::arg("block"), nb::arg("anchored"))
      .def("write", [](PyExecutor& s, int k, int v, std::optional<Floats> k_norm, float eps, Table<float> cosine, Table<float> sine, Bytes cache,
                       size_t block_bytes, size_t k_at, size_t v_at, size_t k_scale_at, size_t v_scale_at, int kv_heads, int k_dim, int v_dim, bool int8) {
        uint8_t* base = cache.data();
        KVLayer c{base + k_at, base + v_at, base + k_scale_at, base + v_scale_at, block_bytes, kv_heads, k_dim, v_dim,
                  round_up(k_dim, kGroup), round_up(v_dim, kGroup), int8};
        s.keep.push_back(nb::cast(cache));
        s.keep.push_back(nb::cast(cosine));
        s.keep.push_back(nb::cast(sine));
        s.e.add(WriteOp{k, v, s.hold(k_norm), eps, cosine.data(), sine.data(), (int)cosine.shape(1), c});
      }, nb::arg("k"), nb::arg("v"), nb::arg("k_norm").none(), nb::arg("eps"), nb::arg("cosine"), nb::arg("sine"), nb::arg("cache"), nb::arg("block_bytes"),
         nb::arg("k_at"), nb::arg("v_at"), nb::arg("k_scale_at"), nb::arg("v_scale_at"), nb::arg("kv_heads"), nb::arg("k_dim"), nb::arg("v_dim"), nb::arg("int8"))
      .def("input", [](PyExecutor& s, int out) { s.e.add(InputOp{out}); })
      .def("concat", [](PyExecutor& s, int a, int b, int out) { s.e.add(ConcatOp{a, b, out}); })
      .def("set_inputs", [](PyExecutor& s, Table<float> values) { s.e.set_inputs(values.data(), values.size()); }, nb::arg("values"))
      .def("logits", [](PyExecutor& s, int x, std::optional<Floats> norm, float eps, const PyMatrix& w, std::optional<Floats> bias, float softcap) {
        s.e.add(LogitsOp{x, s.hold(norm), eps, s.hold(w), s.hold(bias), softcap});
      }, nb::arg("x"), nb::arg("norm").none(), nb::arg("eps"), nb::arg("w"), nb::arg("bias").none(), nb::arg("softcap"))
      .def("step", &step)
      .def("step_sampled", &step_sampled)
      .def("redraw", &redraw)
      .def("follow", &follow)
      .def("read_weights", [](PyExecutor& s, int threads) { nb::gil_scoped_release r; return s.e.read_weights(threads < 1 ? 1 : threads); }, nb::arg("threads"))
      .def_prop_ro("weight_bytes", [](const PyExecutor& s) { return s.e.weight_bytes(); })
      .def_prop_ro("buffer_bytes", [](const PyExecutor& s) { return s.e.buffer_bytes(); })
      .def_prop_ro("threads", [](const PyExecutor& s) { return s.e.threads(); })
      .def_prop_ro("max_rows", [](const PyExecutor& s) { return s.e.max_rows(); })
      .def("copy_logits", [](PyExecutor& s, OutTable<float> out) {
        for (size_t r = 0; r < out.shape(0); ++r) memcpy(out.data() + r * out.shape(1), s.e.logits() + r * s.e.logits_stride(), out.shape(1) * sizeof(float));
      })
      .def("copy_taps", [](PyExecutor& s, OutTable<float> out) {
        if (out.size() != s.e.taps().size()) throw std::invalid_argument("taps have rows * all their widths numbers");
        memcpy(out.data(), s.e.taps().data(), out.size() * sizeof(float));
      })
      .def("set_delay", [](PyExecutor& s, const std::string& op_class, double seconds) { s.e.set_delay(op_class_of(op_class), seconds); },
           nb::arg("op_class"), nb::arg("seconds"))
      .def_prop_ro("class_bytes", [](const PyExecutor& s) {
        auto bytes = s.e.class_bytes();
        return std::vector<double>(bytes.begin(), bytes.end());
      })
      .def("copy_seconds", [](const PyExecutor& s, Out<double> out) { copy_seconds(s.e.seconds(), out); })
      .def("copy_blocks", [](PyExecutor& s, Table<int32_t> pairs) {
        if (pairs.shape(1) != 2) throw std::invalid_argument("pairs of blocks");
        s.e.copy_blocks(pairs.data(), (int)pairs.shape(0));
      })
      .def("copy_slots", [](PyExecutor& s, Table<int32_t> pairs) {
        if (pairs.shape(1) != 2) throw std::invalid_argument("pairs of slots");
        s.e.copy_slots(pairs.data(), (int)pairs.shape(0));
      })
      .def("submit", &submit, nb::arg("columns"), nb::arg("tables"), nb::arg("logit_rows"), nb::arg("draws").none(), nb::arg("tokens"), nb::arg("logprobs"), nb::arg("copies"))
      .def("wait", [](PyExecutor& s) {
        nb::gil_scoped_release release;
        if (s.runner) s.runner->wait();
      })
      .def("collect", [](PyExecutor& s, Out<double> out) {
        if (!s.runner) throw std::logic_error("no step was submitted");
        StepSeconds seconds;
        std::exception_ptr error;
        {
          nb::gil_scoped_release release;
          try {
            seconds = s.runner->collect();
          } catch (...) {
            error = std::current_exception();
          }
        }
        if (!s.flying.empty()) s.flying.pop_front();
        if (error) std::rethrow_exception(error);
        copy_seconds(seconds, out);
      });
}
