// Vectors of 16 lanes in plain C++: what every other instruction set must agree with, bit for bit.
#pragma once
#include <cmath>
#include <cstring>
#include "../base.hpp"

namespace {

constexpr int W = 16;
struct F { float v[W]; };
struct I { int32_t v[W]; };

#define LANES for (int i = 0; i < W; ++i)
inline F loadf(const float* p) { F r; memcpy(r.v, p, sizeof r.v); return r; }
inline void storef(float* p, F a) { memcpy(p, a.v, sizeof a.v); }
inline I loadi(const void* p) { I r; memcpy(r.v, p, sizeof r.v); return r; }
inline void storei(void* p, I a) { memcpy(p, a.v, sizeof a.v); }
inline F set1f(float x) { F r; LANES r.v[i] = x; return r; }
inline I set1i(int32_t x) { I r; LANES r.v[i] = x; return r; }
inline F operator+(F a, F b) { LANES a.v[i] = a.v[i] + b.v[i]; return a; }
inline F operator-(F a, F b) { LANES a.v[i] = a.v[i] - b.v[i]; return a; }
inline F operator*(F a, F b) { LANES a.v[i] = a.v[i] * b.v[i]; return a; }
inline F operator/(F a, F b) { LANES a.v[i] = a.v[i] / b.v[i]; return a; }
inline F fma(F a, F b, F c) { LANES c.v[i] = std::fma(a.v[i], b.v[i], c.v[i]); return c; }
inline F maxf(F a, F b) { LANES a.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i]; return a; }
inline F minf(F a, F b) { LANES a.v[i] = a.v[i] < b.v[i] ? a.v[i] : b.v[i]; return a; }
inline F absf(F a) { LANES a.v[i] = std::fabs(a.v[i]); return a; }
inline I operator+(I a, I b) { LANES a.v[i] = (int32_t)((uint32_t)a.v[i] + (uint32_t)b.v[i]); return a; }
inline I operator-(I a, I b) { LANES a.v[i] = (int32_t)((uint32_t)a.v[i] - (uint32_t)b.v[i]); return a; }
inline I operator&(I a, I b) { LANES a.v[i] &= b.v[i]; return a; }
inline I operator|(I a, I b) { LANES a.v[i] |= b.v[i]; return a; }
inline I operator^(I a, I b) { LANES a.v[i] ^= b.v[i]; return a; }
template <int n> I shl(I a) { LANES a.v[i] = (int32_t)((uint32_t)a.v[i] << n); return a; }
template <int n> I shr(I a) { LANES a.v[i] = (int32_t)((uint32_t)a.v[i] >> n); return a; }
// Low and high words of 32 x 32 bit unsigned products.
inline void mul_wide(I a, uint32_t b, I& low, I& high) {
  LANES { uint64_t p = (uint64_t)(uint32_t)a.v[i] * b; low.v[i] = (int32_t)p; high.v[i] = (int32_t)(p >> 32); }
}
inline F to_float(I a) { F r; LANES r.v[i] = (float)a.v[i]; return r; }
inline I to_int(F a) { I r; LANES r.v[i] = (int32_t)std::nearbyint(a.v[i]); return r; }
inline F as_float(I a) { F r; memcpy(r.v, a.v, sizeof r.v); return r; }
inline I as_int(F a) { I r; memcpy(r.v, a.v, sizeof r.v); return r; }
// where a < b: x, else y
inline F less(F a, F b, F x, F y) { LANES x.v[i] = a.v[i] < b.v[i] ? x.v[i] : y.v[i]; return x; }
inline F load_half(const void* p) {
  F r;
  uint16_t h[W];
  memcpy(h, p, sizeof h);
  LANES {
    uint32_t sign = (uint32_t)(h[i] & 0x8000) << 16, e = (h[i] >> 10) & 31, m = h[i] & 1023, bits;
    if (e == 0) { float f = std::ldexp((float)m, -24); memcpy(&bits, &f, 4); bits |= sign; }
    else bits = sign | (e == 31 ? 0x7F800000u : (e + 112) << 23) | m << 13;
    memcpy(&r.v[i], &bits, 4);
  }
  return r;
}
inline I load_u8(const void* p) { I r; LANES r.v[i] = ((const uint8_t*)p)[i]; return r; }
inline I load_i8(const void* p) { I r; LANES r.v[i] = ((const int8_t*)p)[i]; return r; }
inline void store_i8(void* p, I a) { LANES ((int8_t*)p)[i] = (int8_t)a.v[i]; }
inline float max_of(F a) { LANES a.v[0] = a.v[i] > a.v[0] ? a.v[i] : a.v[0]; return a.v[0]; }
inline float first_of_all(F a) { return a.v[0]; }
inline int32_t sum_of(I a) { uint32_t s = 0; LANES s += (uint32_t)a.v[i]; return (int32_t)s; }
// 2W int8 as W pairs of (low, high) floats
inline void load_i8_pairs(const void* p, F& even, F& odd) {
  LANES { even.v[i] = ((const int8_t*)p)[2 * i]; odd.v[i] = ((const int8_t*)p)[2 * i + 1]; }
}
#undef LANES

}  // namespace
