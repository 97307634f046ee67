// Vectors of 16 lanes on AVX-512 (F, BW, DQ, VL).
#pragma once
#include <immintrin.h>
#include <cstring>
#include "../base.hpp"

namespace {

constexpr int W = 16;
struct F { __m512 v; };
struct I { __m512i v; };

inline F loadf(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void storef(float* p, F a) { _mm512_storeu_ps(p, a.v); }
inline I loadi(const void* p) { return {_mm512_loadu_si512(p)}; }
inline void storei(void* p, I a) { _mm512_storeu_si512(p, a.v); }
inline F set1f(float x) { return {_mm512_set1_ps(x)}; }
inline I set1i(int32_t x) { return {_mm512_set1_epi32(x)}; }
inline F operator+(F a, F b) { return {_mm512_add_ps(a.v, b.v)}; }
inline F operator-(F a, F b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline F operator*(F a, F b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline F operator/(F a, F b) { return {_mm512_div_ps(a.v, b.v)}; }
inline F fma(F a, F b, F c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline F maxf(F a, F b) { return {_mm512_max_ps(a.v, b.v)}; }
inline F minf(F a, F b) { return {_mm512_min_ps(a.v, b.v)}; }
inline F absf(F a) { return {_mm512_abs_ps(a.v)}; }
inline I operator+(I a, I b) { return {_mm512_add_epi32(a.v, b.v)}; }
inline I operator-(I a, I b) { return {_mm512_sub_epi32(a.v, b.v)}; }
inline I operator&(I a, I b) { return {_mm512_and_si512(a.v, b.v)}; }
inline I operator|(I a, I b) { return {_mm512_or_si512(a.v, b.v)}; }
inline I operator^(I a, I b) { return {_mm512_xor_si512(a.v, b.v)}; }
template <int n> I shl(I a) { return {_mm512_slli_epi32(a.v, n)}; }
template <int n> I shr(I a) { return {_mm512_srli_epi32(a.v, n)}; }
inline void mul_wide(I a, uint32_t b, I& low, I& high) {
  __m512i m = _mm512_set1_epi32((int)b);
  __m512i even = _mm512_mul_epu32(a.v, m), odd = _mm512_mul_epu32(_mm512_srli_epi64(a.v, 32), m);
  low.v = _mm512_mask_blend_epi32(0xAAAA, even, _mm512_slli_epi64(odd, 32));
  high.v = _mm512_mask_blend_epi32(0xAAAA, _mm512_srli_epi64(even, 32), odd);
}
inline F to_float(I a) { return {_mm512_cvtepi32_ps(a.v)}; }
inline I to_int(F a) { return {_mm512_cvtps_epi32(a.v)}; }
inline F as_float(I a) { return {_mm512_castsi512_ps(a.v)}; }
inline I as_int(F a) { return {_mm512_castps_si512(a.v)}; }
inline F less(F a, F b, F x, F y) {
  return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ), y.v, x.v)};
}
inline F load_half(const void* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p))}; }
inline I load_u8(const void* p) { return {_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p))}; }
inline I load_i8(const void* p) { return {_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p))}; }
inline void store_i8(void* p, I a) { _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(a.v)); }
inline float max_of(F a) { return _mm512_reduce_max_ps(a.v); }
inline float first_of_all(F a) { return _mm512_cvtss_f32(a.v); }
inline int32_t sum_of(I a) {
#ifdef SLIP_EMULATE
  return _mm512_reduce_add_epi32(a.v);
#else  // the intrinsic adds signed numbers, which must not overflow
  __m256i half = _mm256_add_epi32(_mm512_castsi512_si256(a.v), _mm512_extracti64x4_epi64(a.v, 1));
  __m128i s = _mm_add_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
  s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4E));
  return _mm_cvtsi128_si32(_mm_add_epi32(s, _mm_shuffle_epi32(s, 0xB1)));
#endif
}
inline void load_i8_pairs(const void* p, F& even, F& odd) {
  __m512i pairs = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)p));
  even.v = _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(pairs, 16), 16));
  odd.v = _mm512_cvtepi32_ps(_mm512_srai_epi32(pairs, 16));
}

}  // namespace
