// Large memory: zeroed or mapped from a file, in huge pages where the system has them, and checksums of it.
#include <fcntl.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <new>
#include <stdexcept>
#include <string>

#include "bindings.hpp"

namespace nb = nanobind;

namespace slip {
namespace {

constexpr size_t kHuge = (size_t)2 << 20;
template <class T> using Array = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Memory = nb::ndarray<nb::numpy, uint8_t>;

size_t whole_pages(size_t bytes) { return (bytes + kHuge - 1) / kHuge * kHuge; }

// `size` bytes of address space from a multiple of a huge page on, given back when nobody uses them any more.
struct Region {
  void* raw;
  size_t reserved;
  uint8_t* at;
  explicit Region(size_t size) : reserved(size + kHuge) {
    raw = mmap(nullptr, reserved, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (raw == MAP_FAILED) throw std::bad_alloc();
    at = (uint8_t*)(((uintptr_t)raw + kHuge - 1) / kHuge * kHuge);
  }
  ~Region() { munmap(raw, reserved); }
};

Memory handed_out(Region* region, size_t bytes) {
  nb::capsule owner(region, [](void* r) noexcept { delete (Region*)r; });
  return Memory(region->at, {bytes}, owner);
}

// Zeroed memory that the system commits as it is touched; in huge pages, if wanted and there are any.
Memory allocate(size_t bytes, bool huge_pages) {
  Region* region = new Region(whole_pages(bytes));
  if (huge_pages) madvise(region->at, whole_pages(bytes), MADV_HUGEPAGE);
  return handed_out(region, bytes);
}

// Give memory that was allocated here back to the system; it reads as zeros from now on.
void decommit(nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu> data) {
  if ((uintptr_t)data.data() % kHuge) throw std::invalid_argument("only what was allocated as a whole can be given back");
  madvise(data.data(), whole_pages(data.size()), MADV_DONTNEED);
}

[[noreturn]] void throw_errno(int problem, const std::string& path) {
  errno = problem;
  PyErr_SetFromErrnoWithFilename(PyExc_OSError, path.c_str());
  throw nb::python_error();
}

// A file's bytes from `offset` on, a multiple of a huge page; what is written there stays in memory.
Memory map_file(const std::string& path, size_t offset, size_t bytes) {
  if (offset % kHuge) throw std::invalid_argument("a file is mapped from a multiple of 2 MiB on");
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) throw_errno(errno, path);
  struct stat found {};
  const bool whole = !fstat(fd, &found) && (size_t)found.st_size >= offset + bytes;
  Region* region = new Region(whole_pages(bytes));
  void* at = whole ? mmap(region->at, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED, fd, (off_t)offset) : MAP_FAILED;
  const int problem = whole ? errno : EINVAL;
  close(fd);
  if (at == MAP_FAILED) {
    delete region;
    throw_errno(problem, path);
  }
  madvise(region->at, bytes, MADV_HUGEPAGE);
  return handed_out(region, bytes);
}

// How many bytes of a mapped file that were touched lie in huge pages.
size_t mapped_huge(Array<uint8_t> data) {
  FILE* maps = fopen("/proc/self/smaps", "r");
  if (!maps) return 0;
  char line[4096];
  bool inside = false;
  size_t found = 0;
  while (fgets(line, sizeof line, maps)) {
    unsigned long from, to, kilobytes;
    if (sscanf(line, "%lx-%lx ", &from, &to) == 2) inside = from <= (uintptr_t)data.data() && (uintptr_t)data.data() < to;
    else if (inside && sscanf(line, "FilePmdMapped: %lu kB", &kilobytes) == 1) found = kilobytes * 1024;
  }
  fclose(maps);
  return found;
}

// A 64-bit checksum of an array (multiply and fold over four lanes): finds damage, not malice.
uint64_t checksum(Array<uint8_t> data) {
  uint64_t lane[4] = {1, 2, 3, 4};
  const uint8_t* p = data.data();
  size_t n = data.size(), i = 0;
  for (; i + 32 <= n; i += 32)
    for (int j = 0; j < 4; ++j) {
      uint64_t v;
      memcpy(&v, p + i + 8 * j, 8);
      lane[j] = (lane[j] ^ v) * 0x9E3779B97F4A7C15ull;
      lane[j] ^= lane[j] >> 29;
    }
  for (; i < n; ++i) lane[i % 4] = (lane[i % 4] ^ p[i]) * 0x9E3779B97F4A7C15ull;
  uint64_t sum = n;
  for (uint64_t v : lane) sum = (sum ^ v) * 0xBF58476D1CE4E5B9ull, sum ^= sum >> 31;
  return sum >> 1;
}

}  // namespace

void bind_memory(nb::module_& m) {
  m.def("allocate", &allocate, nb::arg("bytes"), nb::arg("huge_pages") = true);
  m.def("decommit", &decommit, nb::arg("data"));
  m.def("map_file", &map_file, nb::arg("path"), nb::arg("offset"), nb::arg("bytes"));
  m.def("mapped_huge", &mapped_huge, nb::arg("data"));
  m.def("checksum", &checksum, nb::arg("data"), nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace slip
