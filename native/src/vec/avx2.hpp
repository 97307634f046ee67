// Vectors of 8 lanes on AVX2, FMA and F16C.
#pragma once
#include <immintrin.h>
#include <cstring>
#include "../base.hpp"

namespace {

constexpr int W = 8;
struct F { __m256 v; };
struct I { __m256i v; };

inline F loadf(const float* p) { return {_mm256_loadu_ps(p)}; }
inline void storef(float* p, F a) { _mm256_storeu_ps(p, a.v); }
inline I loadi(const void* p) { return {_mm256_loadu_si256((const __m256i*)p)}; }
inline void storei(void* p, I a) { _mm256_storeu_si256((__m256i*)p, a.v); }
inline F set1f(float x) { return {_mm256_set1_ps(x)}; }
inline I set1i(int32_t x) { return {_mm256_set1_epi32(x)}; }
inline F operator+(F a, F b) { return {_mm256_add_ps(a.v, b.v)}; }
inline F operator-(F a, F b) { return {_mm256_sub_ps(a.v, b.v)}; }
inline F operator*(F a, F b) { return {_mm256_mul_ps(a.v, b.v)}; }
inline F operator/(F a, F b) { return {_mm256_div_ps(a.v, b.v)}; }
inline F fma(F a, F b, F c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
inline F maxf(F a, F b) { return {_mm256_max_ps(a.v, b.v)}; }
inline F minf(F a, F b) { return {_mm256_min_ps(a.v, b.v)}; }
inline F absf(F a) { return {_mm256_andnot_ps(_mm256_set1_ps(-0.0f), a.v)}; }
inline I operator+(I a, I b) { return {_mm256_add_epi32(a.v, b.v)}; }
inline I operator-(I a, I b) { return {_mm256_sub_epi32(a.v, b.v)}; }
inline I operator&(I a, I b) { return {_mm256_and_si256(a.v, b.v)}; }
inline I operator|(I a, I b) { return {_mm256_or_si256(a.v, b.v)}; }
inline I operator^(I a, I b) { return {_mm256_xor_si256(a.v, b.v)}; }
template <int n> I shl(I a) { return {_mm256_slli_epi32(a.v, n)}; }
template <int n> I shr(I a) { return {_mm256_srli_epi32(a.v, n)}; }
inline void mul_wide(I a, uint32_t b, I& low, I& high) {
  __m256i m = _mm256_set1_epi32((int)b);
  __m256i even = _mm256_mul_epu32(a.v, m), odd = _mm256_mul_epu32(_mm256_srli_epi64(a.v, 32), m);
  low.v = _mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xAA);
  high.v = _mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xAA);
}
inline F to_float(I a) { return {_mm256_cvtepi32_ps(a.v)}; }
inline I to_int(F a) { return {_mm256_cvtps_epi32(a.v)}; }
inline F as_float(I a) { return {_mm256_castsi256_ps(a.v)}; }
inline I as_int(F a) { return {_mm256_castps_si256(a.v)}; }
inline F less(F a, F b, F x, F y) { return {_mm256_blendv_ps(y.v, x.v, _mm256_cmp_ps(a.v, b.v, _CMP_LT_OQ))}; }
inline F load_half(const void* p) { return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p))}; }
inline I load_u8(const void* p) { return {_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p))}; }
inline I load_i8(const void* p) { return {_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p))}; }
inline void store_i8(void* p, I a) {
  const __m256i low = _mm256_setr_epi8(0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, 0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1);
  __m256i four = _mm256_shuffle_epi8(a.v, low);
  _mm_storel_epi64((__m128i*)p, _mm_unpacklo_epi32(_mm256_castsi256_si128(four), _mm256_extracti128_si256(four, 1)));
}
inline float max_of(F a) {
  __m128 m = _mm_max_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
  m = _mm_max_ps(m, _mm_movehl_ps(m, m));
  return _mm_cvtss_f32(_mm_max_ss(m, _mm_shuffle_ps(m, m, 1)));
}
inline float first_of_all(F a) { return _mm256_cvtss_f32(a.v); }
inline int32_t sum_of(I a) {
  __m128i s = _mm_add_epi32(_mm256_castsi256_si128(a.v), _mm256_extracti128_si256(a.v, 1));
  s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4E));
  return _mm_cvtsi128_si32(_mm_add_epi32(s, _mm_shuffle_epi32(s, 0xB1)));
}
inline void load_i8_pairs(const void* p, F& even, F& odd) {
  __m256i pairs = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p));
  even.v = _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(pairs, 16), 16));
  odd.v = _mm256_cvtepi32_ps(_mm256_srai_epi32(pairs, 16));
}

}  // namespace
