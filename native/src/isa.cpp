// Which instruction sets this processor and this build can run, and which of them is in use.
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

#include "kernels.hpp"
#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace slip {
namespace {

#if defined(__x86_64__)
bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"); }

bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni");
}

// AMX needs the processor's int8 and bf16 tiles and the kernel's leave to use their state, asked for once.
bool has_amx() {
  unsigned a, b, c, d;
  if (!has_avx512() || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  const unsigned kTile = 1u << 24, kInt8 = 1u << 25, kBf16 = 1u << 22;
  if ((d & (kTile | kInt8 | kBf16)) != (kTile | kInt8 | kBf16)) return false;
  const int kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
#endif

struct List {
  Kernels table[4];
  const char* names[4];
  int count = 0;
  void push(const Kernels& k) {
    table[count] = k;
    names[count++] = k.name;
  }
#if defined(__x86_64__)
  void push(const TileKernels& tiles, const Kernels& rest) {
    push(rest);
    Kernels& k = table[count - 1];
    k.name = names[count - 1] = tiles.name;
    k.linear = tiles.linear;
    k.burn = tiles.burn;
  }
#endif
};

const List& available() {
  static const List list = [] {
    List l;
#if defined(__x86_64__)
    if (has_amx()) l.push(kAmxKernels, kAvx512Kernels);
    if (has_avx512()) l.push(kAvx512Kernels);
    if (has_avx2()) l.push(kAvx2Kernels);
#endif
    l.push(kScalarKernels);
    return l;
  }();
  return list;
}

const List& emulated() {
  static const List list = [] {
    List l;
#if defined(SLIP_EMULATED)
    if (has_avx2()) {
      l.push(kAvx512EmulatedKernels);
      l.push(kAmxEmulatedKernels, kAvx512EmulatedKernels);
    }
#endif
    return l;
  }();
  return list;
}

const Kernels*& current() {
  static const Kernels* kernels = nullptr;
  return kernels;
}

}  // namespace

const char* const* available_kernels(int* count) {
  *count = available().count;
  return available().names;
}

const char* const* emulated_kernels(int* count) {
  *count = emulated().count;
  return emulated().names;
}

const Kernels& select_kernels(const char* name) {
  std::string known;
  for (const List* list : {&available(), &emulated()})
    for (int i = 0; i < list->count; ++i) {
      if (!strcmp(list->names[i], name)) return *(current() = &list->table[i]);
      known += std::string(known.empty() ? "" : ", ") + list->names[i];
    }
  throw std::runtime_error("instruction set '" + std::string(name) + "' cannot run here; available: " + known);
}

const Kernels& kernels() {
  if (!current()) {
    const char* forced = std::getenv("SLIPSTREAM_ISA");
    select_kernels(forced && *forced ? forced : available().names[0]);
  }
  return *current();
}

}  // namespace slip
