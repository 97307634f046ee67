// Python bindings of the suffix index.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <tuple>

#include "bindings.hpp"
#include "suffix.hpp"

namespace nb = nanobind;

namespace slip {
namespace {

using Tokens = std::vector<int32_t>;

// A draft after the end of `own`, from it or from `learned`, whichever matches further back: tokens, how many matched at each, shares.
std::optional<std::tuple<Tokens, Tokens, std::vector<float>>> propose(const SuffixIndex& own, const SuffixIndex* learned, int most) {
  int32_t context[SuffixIndex::kMostMatch];
  const int count = own.tail(context);
  SuffixIndex::Proposal best = own.propose(context, count, most);
  if (learned) {
    SuffixIndex::Proposal other = learned->propose(context, count, most);
    if (!other.tokens.empty() && (best.tokens.empty() || other.matched[0] > best.matched[0])) best = std::move(other);
  }
  if (best.tokens.empty()) return std::nullopt;
  return std::make_tuple(best.tokens, best.matched, best.share);
}

}  // namespace

void bind_suffix(nb::module_& m) {
  nb::class_<SuffixIndex>(m, "SuffixIndex")
      .def(nb::init<int, int>(), nb::arg("capacity"), nb::arg("least"))
      .def("append", [](SuffixIndex& s, const Tokens& tokens) { s.append(tokens.data(), (int)tokens.size()); }, nb::arg("tokens"))
      .def("propose", &propose, nb::arg("learned").none(), nb::arg("most"))
      .def_prop_ro("bytes", &SuffixIndex::bytes)
      .def_prop_ro("appended", &SuffixIndex::appended)
      .def("__len__", &SuffixIndex::size);
}

}  // namespace slip
