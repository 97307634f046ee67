// Python bindings of what measures the machine: arithmetic in registers, memory, barriers.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <sys/mman.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

#include "bindings.hpp"
#include "kernels.hpp"
#include "pool.hpp"

namespace nb = nanobind;

namespace slip {
namespace {

Arithmetic arithmetic_of(const std::string& name) {
  if (name == "int8") return Arithmetic::Int8;
  if (name == "bf16") return Arithmetic::Bf16;
  if (name == "f32") return Arithmetic::F32;
  throw std::invalid_argument("unknown arithmetic " + name);
}

// Operations a second of arithmetic in registers, over all threads together.
double peak_ops(const std::string& kind, int threads, double seconds) {
  const Arithmetic arithmetic = arithmetic_of(kind);
  Pool pool(threads);
  long rounds = 64;
  for (;;) {
    std::vector<double> ops(threads);
    auto start = std::chrono::steady_clock::now();
    pool.run([&](int t) { ops[t] = kernels().burn(arithmetic, rounds); });
    double took = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count(), total = 0;
    for (double o : ops) total += o;
    if (took >= seconds) return total / took;
    rounds *= 2;
  }
}

// Bytes a second that `threads` threads read from buffers of `bytes` each, past the first pass.
double read_rate(int threads, size_t bytes, double seconds, bool huge_pages) {
  const size_t size = (bytes + 4095) / 4096 * 4096, huge = (size_t)2 << 20;
  uint8_t* raw = (uint8_t*)mmap(nullptr, size * threads + huge, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (raw == MAP_FAILED) throw std::bad_alloc();
  uint8_t* base = (uint8_t*)(((uintptr_t)raw + huge - 1) / huge * huge);
  madvise(base, size * threads, huge_pages ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
  Pool pool(threads);
  std::atomic<uint32_t> sink{0};
  pool.run([&](int t) { memset(base + t * size, t + 1, size); });
  double rate = 0;
  for (long passes = 1;; passes *= 2) {
    auto start = std::chrono::steady_clock::now();
    pool.run([&](int t) {
      uint32_t sum = 0;
      for (long i = 0; i < passes; ++i) sum ^= kernels().read(base + t * size, size);
      sink ^= sum;
    });
    double took = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    rate = (double)size * threads * passes / took;
    if (took >= seconds) break;
  }
  munmap(raw, size * threads + huge);
  return rate;
}

// Seconds that all threads need to meet once, in the middle of work.
double barrier_seconds(int threads, int count) {
  Pool pool(threads);
  auto start = std::chrono::steady_clock::now();
  pool.run([&](int) {
    for (int i = 0; i < count; ++i) pool.barrier();
  });
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() / count;
}

}  // namespace

void bind_instruments(nb::module_& m) {
  m.def("peak_ops", &peak_ops, nb::arg("kind"), nb::arg("threads"), nb::arg("seconds"), nb::call_guard<nb::gil_scoped_release>());
  m.def("read_rate", &read_rate, nb::arg("threads"), nb::arg("bytes"), nb::arg("seconds"), nb::arg("huge_pages") = true,
        nb::call_guard<nb::gil_scoped_release>());
  m.def("barrier_seconds", &barrier_seconds, nb::arg("threads"), nb::arg("count"), nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace slip
