// Packing: stored blocks or floats into panels, and back to floats.
//
// A lane (one output row of a panel) is packed superblock by superblock: its numbers go into a small Unit
// first, from there into the interleaved planes.
#include "pack.hpp"

#include "stored.hpp"

#include <cmath>
#include <cstring>
#include <initializer_list>

namespace slip {
namespace {

// Place floats on the grid of a scale and a base; returns the squared error.
float place_on_grid(const IntShape& s, const float* x, int k, float step, float base, int* q) {
  const float inverse = step > 0 ? 1.0f / step : 0.0f;
  const int least = s.bits == 8 ? -127 : 0, most = s.bits == 8 ? 127 : (1 << s.bits) - 1;
  float error = 0;
  for (int i = 0; i < s.inputs(); ++i) {
    const float v = i < k ? x[i] : 0.0f;
    const int n = (int)std::lrint((v - base) * inverse) + s.zero;
    q[i] = n < least ? least : n > most ? most : n;
    const float off = base + step * (float)(q[i] - s.zero) - v;
    error += off * off;
  }
  return error;
}

// Quantise `k` floats (k <= inputs of a superblock; the rest count as 0) to the nearest numbers of a plain format. With
// few bits a finer grid that cuts off the largest number is often nearer to all the others: take the best of some.
void quantize_unit(const IntShape& s, const float* x, int k, Unit& u) {
  float low = 0, high = 0;
  for (int i = 0; i < k; ++i) {
    low = x[i] < low ? x[i] : low;
    high = x[i] > high ? x[i] : high;
  }
  float peak = -low > high ? -low : high;
  int top = (1 << s.bits) - 1;
  const float widest = s.minimum ? (high - low) / (float)top : s.bits == 8 ? peak / 127.0f : peak / (float)(s.zero - 0.5f);
  u.minimum = s.minimum ? float_to_half(low) : 0;
  const float base = s.minimum ? half_to_float(u.minimum) : 0.0f;
  float best = -1;
  for (float share : {1.0f, 0.94f, 0.88f, 0.82f, 0.76f, 0.7f}) {
    int q[sizeof(u.q) / sizeof(u.q[0])];
    const uint16_t scale = float_to_half(widest * share);
    const float error = place_on_grid(s, x, k, half_to_float(scale), base, q);
    if (best < 0 || error < best) {
      best = error;
      u.scale = scale;
      for (int i = 0; i < s.inputs(); ++i) u.q[i] = q[i];
    }
    if (s.minimum || s.bits == 8) return;
  }
}

// Place one lane's superblock; `out` was cleared before.
void write_unit(const IntShape& s, const Unit& u, int lane, uint8_t* out) {
  memcpy(out + lane * 2, &u.scale, 2);
  if (s.minimum) memcpy(out + 32 + lane * 2, &u.minimum, 2);
  uint8_t* group = out + s.head_bytes();
  for (int g = 0; g < s.groups; ++g, group += s.group_bytes()) {
    if (s.sub != Sub::None) {
      group[lane] = u.sub[g][0];
      group[16 + lane] = u.sub[g][1];
    }
    uint8_t* plane = group + s.sub_bytes();
    for (int k = 0; k < kGroup; ++k) {
      int q = u.q[g * kGroup + k], quad = k / 4, byte = lane * 4 + k % 4;
      if (s.bits == 8) {
        plane[quad * 64 + byte] = (uint8_t)q;
        continue;
      }
      plane[quad / 2 * 64 + byte] |= (q & 15) << (quad % 2 * 4);
      if (s.bits == 5) plane[256 + byte] |= (q >> 4) << quad;
      if (s.bits == 6) plane[256 + quad / 4 * 64 + byte] |= (q >> 4) << (quad % 4 * 2);
    }
  }
}

int read_weight(const IntShape& s, const uint8_t* plane, int lane, int k) {
  int quad = k / 4, byte = lane * 4 + k % 4;
  if (s.bits == 8) return (int8_t)plane[quad * 64 + byte];
  int v = plane[quad / 2 * 64 + byte] >> (quad % 2 * 4) & 15;
  if (s.bits == 5) v |= (plane[256 + byte] >> quad & 1) << 4;
  if (s.bits == 6) v |= (plane[256 + quad / 4 * 64 + byte] >> (quad % 4 * 2) & 3) << 4;
  return v - s.zero;
}

float read_float(Stored type, const uint8_t* p) {
  if (type == Stored::F32) {
    float f;
    memcpy(&f, p, 4);
    return f;
  }
  if (type == Stored::F16) return half_to_float(read16(p));
  uint32_t bits = (uint32_t)read16(p) << 16;
  float f;
  memcpy(&f, &bits, 4);
  return f;
}

uint16_t float_to_bf16(float f) {
  uint32_t bits;
  memcpy(&bits, &f, 4);
  return (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

// Offset of number (lane, k) inside a panel of floats, in elements.
size_t float_place(Format f, int lane, int k) {
  if (f == Format::BF16) return (size_t)k / kGroup * kPanel * kGroup + (k % kGroup / 2 * kPanel + lane) * 2 + k % 2;
  return (size_t)k * kPanel + lane;
}

void pack_float_lane(Stored type, const uint8_t* row, const Matrix& to, int lane, uint8_t* out) {
  int size = type == Stored::F32 ? 4 : 2;
  for (int k = 0; k < to.k; ++k) {
    size_t at = float_place(to.format, lane, k);
    if (to.format == Format::F32) {
      float f = read_float(type, row + (size_t)k * 4);
      memcpy(out + at * 4, &f, 4);
    } else {
      uint16_t h = type != Stored::F32 ? read16(row + (size_t)k * size)
                   : to.format == Format::F16 ? float_to_half(read_float(type, row + (size_t)k * 4))
                                              : float_to_bf16(read_float(type, row + (size_t)k * 4));
      memcpy(out + at * 2, &h, 2);
    }
  }
}

}  // namespace

float half_to_float(uint16_t h) {
  uint32_t sign = (uint32_t)(h & 0x8000) << 16, e = (h >> 10) & 31, m = h & 1023, bits;
  float f;
  if (e == 0) {
    f = std::ldexp((float)m, -24);
    return sign ? -f : f;
  }
  bits = sign | (e == 31 ? 0x7F800000u : (e + 112) << 23) | m << 13;
  memcpy(&f, &bits, 4);
  return f;
}

uint16_t float_to_half(float f) {
  uint32_t bits;
  memcpy(&bits, &f, 4);
  uint16_t sign = (uint16_t)(bits >> 16 & 0x8000);
  float a = std::fabs(f);
  if (!(a < 65520.0f)) return sign | (a != a ? 0x7E00 : 0x7C00);
  if (a < 6.103515625e-05f) return sign | (uint16_t)std::lrint(a * 16777216.0f);
  uint32_t magnitude = bits & 0x7FFFFFFF;
  magnitude += 0xFFF + (magnitude >> 13 & 1);
  return sign | (uint16_t)((magnitude >> 13) - (112u << 10));
}

bool packs(Stored from, Format to) {
  switch (from) {
    case Stored::F32: return to != Format::I4K && to != Format::I5K && to != Format::I6K;
    case Stored::F16: return to == Format::F16;
    case Stored::BF16: return to == Format::BF16;
    case Stored::Q4_0: return to == Format::I4S;
    case Stored::Q4_1: return to == Format::I4M;
    case Stored::Q5_0: return to == Format::I5S;
    case Stored::Q5_1: return to == Format::I5M;
    case Stored::Q8_0: case Stored::IQ4_NL: case Stored::MXFP4: return to == Format::I8;
    case Stored::Q4_K: return to == Format::I4K;
    case Stored::Q5_K: return to == Format::I5K;
    case Stored::Q3_K: case Stored::Q6_K: return to == Format::I6K;
  }
  return false;
}

void pack_panels(const Source& from, const Matrix& to, int p0, int p1, uint8_t* out) {
  const bool ints = is_int(to.format);
  const IntShape s = int_shape(to.format);
  for (int p = p0; p < p1; ++p) {
    uint8_t* panel = out + p * to.panel_bytes();
    memset(panel, 0, to.panel_bytes());
    for (int lane = 0; lane < kPanel && p * kPanel + lane < to.n; ++lane) {
      const uint8_t* row = from.base + (size_t)from.row[p * kPanel + lane] * from.stride + from.offset;
      if (!ints) {
        pack_float_lane(from.type, row, to, lane, panel);
        continue;
      }
      for (int u = 0; u < to.units(); ++u) {
        Unit unit;
        if (from.type == Stored::F32) {
          int left = to.k - u * s.inputs();
          quantize_unit(s, (const float*)row + (size_t)u * s.inputs(), left < s.inputs() ? left : s.inputs(), unit);
        } else {
          read_unit(from.type, row, u, unit);
        }
        write_unit(s, unit, lane, panel + (size_t)u * s.bytes());
      }
    }
  }
}

void unpack_row(const Matrix& m, int row, float* out) {
  const uint8_t* panel = m.panel(row / kPanel);
  int lane = row % kPanel;
  if (!is_int(m.format)) {
    Stored type = m.format == Format::F32 ? Stored::F32 : m.format == Format::F16 ? Stored::F16 : Stored::BF16;
    for (int k = 0; k < m.k; ++k) out[k] = read_float(type, panel + float_place(m.format, lane, k) * (m.format == Format::F32 ? 4 : 2));
    return;
  }
  const IntShape s = int_shape(m.format);
  for (int k = 0; k < m.k; ++k) {
    const uint8_t* unit = panel + (size_t)(k / s.inputs()) * s.bytes();
    const uint8_t* group = unit + s.head_bytes() + k % s.inputs() / kGroup * s.group_bytes();
    float scale = half_to_float(read16(unit + lane * 2)), minimum = s.minimum ? half_to_float(read16(unit + 32 + lane * 2)) : 0.0f;
    int at = k % kGroup;
    if (s.sub == Sub::ScaleMin) {
      scale *= group[lane];
      minimum *= group[16 + lane];
    } else if (s.sub == Sub::HalfScale) {
      scale *= (int8_t)group[at / 16 * 16 + lane];
    }
    out[k] = scale * (float)read_weight(s, group + s.sub_bytes(), lane, at) + minimum;
  }
}

}  // namespace slip
