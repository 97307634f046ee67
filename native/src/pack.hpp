// Packing: stored blocks or floats into panels.
#pragma once
#include "formats.hpp"

namespace slip {

// Storage types that are packed without loss; numbers are GGUF's.
enum class Stored : int {
  F32 = 0, F16 = 1, Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q3_K = 11, Q4_K = 12, Q5_K = 13, Q6_K = 14, IQ4_NL = 20, BF16 = 30, MXFP4 = 39,
};

// Where packed rows come from: row i of the matrix is at base + row[i] * stride + offset.
struct Source {
  Stored type;
  const uint8_t* base;
  size_t stride, offset;
  const int64_t* row;
};

// Whether `from` is packed into `to` as it is. Floats (F32) are quantised into any format.
bool packs(Stored from, Format to);
// Pack panels [p0, p1) of `to`, whose data is written through `out` (the start of the whole matrix).
void pack_panels(const Source& from, const Matrix& to, int p0, int p1, uint8_t* out);
// Row `row` of a packed matrix as floats [k].
void unpack_row(const Matrix& m, int row, float* out);

float half_to_float(uint16_t h);
uint16_t float_to_half(float f);

}  // namespace slip
