// Packed weight formats: panels of 16 output rows, the inputs in groups of 32.
//
// A panel is a run of superblocks. A superblock is a head (one scale per output row, perhaps a
// minimum), then `groups` groups; a group is a sub-head (small integer scales, K-quants only) and its
// planes. In every plane a 64-byte vector holds, for 16 output rows, 4 consecutive inputs each: the
// shape both dpbusd and AMX tiles read.
//   nibbles   4 vectors; vector j: low nibbles are inputs 8j..8j+3, high ones 8j+4..8j+7
//   bit 5     1 vector;  bit q of a byte belongs to inputs 4q..4q+3
//   bits 5-6  2 vectors; vector i, bits 2(q%4).. of a byte belong to inputs 4q..4q+3, q/4 == i
//   bytes     8 vectors; vector q: inputs 4q..4q+3
#pragma once
#include "base.hpp"

namespace slip {

enum class Format : int { I4S, I4S64, I4S128, I4M, I4M64, I4M128, I4K, I5S, I5M, I5K, I6K, I8, BF16, F16, F32 };
constexpr int kFormats = 15;

enum class Sub : int {
  None,        // the head's scale holds for all inputs
  ScaleMin,    // u8 scale and u8 minimum per 32 inputs
  HalfScale,   // i8 scale per 16 inputs
};

// Shape of an integer format. `zero` is subtracted from the stored unsigned number.
struct IntShape {
  int bits;
  bool minimum;
  Sub sub;
  int groups;
  int zero;
  constexpr int plane_bytes() const { return bits * 64; }
  constexpr int sub_bytes() const { return sub == Sub::None ? 0 : 32; }
  constexpr int head_bytes() const { return minimum ? 64 : 32; }
  constexpr int group_bytes() const { return sub_bytes() + plane_bytes(); }
  constexpr int bytes() const { return head_bytes() + groups * group_bytes(); }
  constexpr int inputs() const { return groups * kGroup; }
};

constexpr IntShape int_shape(Format f) {
  switch (f) {
    case Format::I4S: return {4, false, Sub::None, 1, 8};
    case Format::I4S64: return {4, false, Sub::None, 2, 8};
    case Format::I4S128: return {4, false, Sub::None, 4, 8};
    case Format::I4M: return {4, true, Sub::None, 1, 0};
    case Format::I4M64: return {4, true, Sub::None, 2, 0};
    case Format::I4M128: return {4, true, Sub::None, 4, 0};
    case Format::I4K: return {4, true, Sub::ScaleMin, 8, 0};
    case Format::I5S: return {5, false, Sub::None, 1, 16};
    case Format::I5M: return {5, true, Sub::None, 1, 0};
    case Format::I5K: return {5, true, Sub::ScaleMin, 8, 0};
    case Format::I6K: return {6, false, Sub::HalfScale, 8, 32};
    default: return {8, false, Sub::None, 1, 0};
  }
}

constexpr bool is_int(Format f) { return f <= Format::I8; }

// Inputs that a panel's smallest unit covers; a matrix's inputs are padded to it with zeros.
constexpr int unit_inputs(Format f) { return is_int(f) ? int_shape(f).inputs() : kGroup; }

constexpr int unit_bytes(Format f) {
  if (is_int(f)) return int_shape(f).bytes();
  return kPanel * kGroup * (f == Format::F32 ? 4 : 2);
}

// A packed matrix [n, k]; panels lie one after the other.
struct Matrix {
  Format format;
  int n, k;
  const uint8_t* data;
  int panels() const { return (n + kPanel - 1) / kPanel; }
  int units() const { return (k + unit_inputs(format) - 1) / unit_inputs(format); }
  size_t panel_bytes() const { return (size_t)units() * unit_bytes(format); }
  size_t bytes() const { return panels() * panel_bytes(); }
  const uint8_t* panel(int p) const { return data + p * panel_bytes(); }
};

}  // namespace slip
