// The AVX-512 and AMX operations that the kernels use, on AVX2: so that those paths are tested on any machine.
// Development builds only. Names are those of the intrinsics, behind macros.
#pragma once
#include <immintrin.h>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace {
namespace emulated {

struct Floats { __m256 low, high; };
struct Ints { __m256i low, high; };

#define EMU inline
EMU Floats loadf(const void* p) { return {_mm256_loadu_ps((const float*)p), _mm256_loadu_ps((const float*)p + 8)}; }
EMU void storef(void* p, Floats a) { _mm256_storeu_ps((float*)p, a.low); _mm256_storeu_ps((float*)p + 8, a.high); }
EMU Ints loadi(const void* p) { return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)p + 1)}; }
EMU void storei(void* p, Ints a) { _mm256_storeu_si256((__m256i*)p, a.low); _mm256_storeu_si256((__m256i*)p + 1, a.high); }
template <class Fn> EMU Floats ff(Floats a, Floats b, Fn fn) { return {fn(a.low, b.low), fn(a.high, b.high)}; }
template <class Fn> EMU Ints ii(Ints a, Ints b, Fn fn) { return {fn(a.low, b.low), fn(a.high, b.high)}; }
#define BINARY_F(name, op) EMU Floats name(Floats a, Floats b) { return {op(a.low, b.low), op(a.high, b.high)}; }
#define BINARY_I(name, op) EMU Ints name(Ints a, Ints b) { return {op(a.low, b.low), op(a.high, b.high)}; }
BINARY_F(add_ps, _mm256_add_ps) BINARY_F(sub_ps, _mm256_sub_ps) BINARY_F(mul_ps, _mm256_mul_ps) BINARY_F(div_ps, _mm256_div_ps)
BINARY_F(max_ps, _mm256_max_ps) BINARY_F(min_ps, _mm256_min_ps)
BINARY_I(add_epi32, _mm256_add_epi32) BINARY_I(sub_epi32, _mm256_sub_epi32) BINARY_I(mul_epu32, _mm256_mul_epu32)
BINARY_I(and_si512, _mm256_and_si256) BINARY_I(or_si512, _mm256_or_si256) BINARY_I(xor_si512, _mm256_xor_si256)
#undef BINARY_F
#undef BINARY_I
EMU Floats fmadd_ps(Floats a, Floats b, Floats c) { return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)}; }
EMU Floats set1_ps(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
EMU Ints set1_epi32(int x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
EMU Ints set1_epi8(char x) { return {_mm256_set1_epi8(x), _mm256_set1_epi8(x)}; }
EMU Floats abs_ps(Floats a) { return ff(a, a, [](__m256 x, __m256) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x); }); }
EMU Ints slli_epi32(Ints a, int n) { return {_mm256_slli_epi32(a.low, n), _mm256_slli_epi32(a.high, n)}; }
EMU Ints srli_epi32(Ints a, int n) { return {_mm256_srli_epi32(a.low, n), _mm256_srli_epi32(a.high, n)}; }
EMU Ints srai_epi32(Ints a, int n) { return {_mm256_srai_epi32(a.low, n), _mm256_srai_epi32(a.high, n)}; }
EMU Ints slli_epi16(Ints a, int n) { return {_mm256_slli_epi16(a.low, n), _mm256_slli_epi16(a.high, n)}; }
EMU Ints srli_epi16(Ints a, int n) { return {_mm256_srli_epi16(a.low, n), _mm256_srli_epi16(a.high, n)}; }
EMU Ints slli_epi64(Ints a, int n) { return {_mm256_slli_epi64(a.low, n), _mm256_slli_epi64(a.high, n)}; }
EMU Ints srli_epi64(Ints a, int n) { return {_mm256_srli_epi64(a.low, n), _mm256_srli_epi64(a.high, n)}; }
EMU Floats cvtepi32_ps(Ints a) { return {_mm256_cvtepi32_ps(a.low), _mm256_cvtepi32_ps(a.high)}; }
EMU Ints cvtps_epi32(Floats a) { return {_mm256_cvtps_epi32(a.low), _mm256_cvtps_epi32(a.high)}; }
EMU Floats castsi512_ps(Ints a) { return {_mm256_castsi256_ps(a.low), _mm256_castsi256_ps(a.high)}; }
EMU Ints castps_si512(Floats a) { return {_mm256_castps_si256(a.low), _mm256_castps_si256(a.high)}; }
EMU Ints mask_blend_epi32(int, Ints a, Ints b) { return ii(a, b, [](__m256i x, __m256i y) { return _mm256_blend_epi32(x, y, 0xAA); }); }
struct Mask { __m256 low, high; };
EMU Mask less_mask(Floats a, Floats b) { return {_mm256_cmp_ps(a.low, b.low, _CMP_LT_OQ), _mm256_cmp_ps(a.high, b.high, _CMP_LT_OQ)}; }
EMU Floats mask_blend_ps(Mask m, Floats a, Floats b) { return {_mm256_blendv_ps(a.low, b.low, m.low), _mm256_blendv_ps(a.high, b.high, m.high)}; }
EMU Floats cvtph_ps(__m256i h) { return {_mm256_cvtph_ps(_mm256_castsi256_si128(h)), _mm256_cvtph_ps(_mm256_extracti128_si256(h, 1))}; }
EMU Ints cvtepu8_epi32(__m128i b) { return {_mm256_cvtepu8_epi32(b), _mm256_cvtepu8_epi32(_mm_srli_si128(b, 8))}; }
EMU Ints cvtepi8_epi32(__m128i b) { return {_mm256_cvtepi8_epi32(b), _mm256_cvtepi8_epi32(_mm_srli_si128(b, 8))}; }
EMU Ints cvtepi8_epi16(__m256i b) { return {_mm256_cvtepi8_epi16(_mm256_castsi256_si128(b)), _mm256_cvtepi8_epi16(_mm256_extracti128_si256(b, 1))}; }
EMU __m128i cvtepi32_epi8(Ints a) {
  int32_t wide[16];
  int8_t narrow[16];
  storei(wide, a);
  for (int i = 0; i < 16; ++i) narrow[i] = (int8_t)wide[i];
  return _mm_loadu_si128((const __m128i*)narrow);
}
EMU float reduce_max_ps(Floats a) {
  float lanes[16];
  storef(lanes, a);
  for (int i = 1; i < 16; ++i) lanes[0] = lanes[i] > lanes[0] ? lanes[i] : lanes[0];
  return lanes[0];
}
EMU float cvtss_f32(Floats a) { return _mm256_cvtss_f32(a.low); }
EMU int32_t reduce_add_epi32(Ints a) {
  uint32_t lanes[16], total = 0;
  storei(lanes, a);
  for (uint32_t lane : lanes) total += lane;
  return (int32_t)total;
}
EMU Ints ternarylogic_epi32(Ints a, Ints b, Ints c, int table) {
  uint32_t x[16], y[16], z[16];
  storei(x, a); storei(y, b); storei(z, c);
  for (int i = 0; i < 16; ++i) {
    uint32_t r = 0;
    for (int bit = 0; bit < 32; ++bit) r |= (uint32_t)(table >> ((x[i] >> bit & 1) << 2 | (y[i] >> bit & 1) << 1 | (z[i] >> bit & 1)) & 1) << bit;
    x[i] = r;
  }
  return loadi(x);
}
EMU Ints dpbusd_epi32(Ints sum, Ints a, Ints b) {
  int32_t s[16];
  uint8_t u[64];
  int8_t v[64];
  storei(s, sum); storei(u, a); storei(v, b);
  for (int i = 0; i < 64; ++i) s[i / 4] += u[i] * v[i];
  return loadi(s);
}

// AMX: eight tiles of up to 16 rows of 64 bytes.
struct Tiles {
  uint8_t rows[8], data[8][1024];
  uint16_t colsb[8];
};
EMU Tiles& tiles() { static thread_local Tiles t; return t; }
EMU void loadconfig(const void* p) {
  for (int i = 0; i < 8; ++i) {
    memcpy(&tiles().colsb[i], (const uint8_t*)p + 16 + 2 * i, 2);
    tiles().rows[i] = ((const uint8_t*)p)[48 + i];
  }
}
EMU void zero(int t) { memset(tiles().data[t], 0, 1024); }
EMU void loadd(int t, const void* p, long stride) {
  zero(t);
  for (int r = 0; r < tiles().rows[t]; ++r) memcpy(tiles().data[t] + r * 64, (const uint8_t*)p + r * stride, tiles().colsb[t]);
}
EMU void stored(int t, void* p, long stride) {
  for (int r = 0; r < tiles().rows[t]; ++r) memcpy((uint8_t*)p + r * stride, tiles().data[t] + r * 64, tiles().colsb[t]);
}
EMU void dot_bytes(int c, int a, int b, bool is_signed) {
  Tiles& t = tiles();
  for (int m = 0; m < t.rows[c]; ++m)
    for (int n = 0; n < t.colsb[c] / 4; ++n) {
      int32_t sum;
      memcpy(&sum, t.data[c] + m * 64 + n * 4, 4);
      for (int k = 0; k < t.colsb[a]; ++k) {
        uint8_t w = t.data[b][k / 4 * 64 + n * 4 + k % 4];
        sum += (int8_t)t.data[a][m * 64 + k] * (is_signed ? (int)(int8_t)w : (int)w);
      }
      memcpy(t.data[c] + m * 64 + n * 4, &sum, 4);
    }
}
EMU float bf16(const uint8_t* p) {
  uint32_t bits = (uint32_t)(p[0] | p[1] << 8) << 16;
  float f;
  memcpy(&f, &bits, 4);
  return f;
}
// Intel's definition of TDPBF16PS: two chains of fused multiply-adds from zero, their sum added to the tile.
EMU void dot_bf16(int c, int a, int b) {
  Tiles& t = tiles();
  for (int m = 0; m < t.rows[c]; ++m)
    for (int n = 0; n < t.colsb[c] / 4; ++n) {
      float even = 0, odd = 0, sum;
      for (int k = 0; k < t.colsb[a] / 4; ++k) {
        even = std::fma(bf16(t.data[a] + m * 64 + k * 4), bf16(t.data[b] + k * 64 + n * 4), even);
        odd = std::fma(bf16(t.data[a] + m * 64 + k * 4 + 2), bf16(t.data[b] + k * 64 + n * 4 + 2), odd);
      }
      memcpy(&sum, t.data[c] + m * 64 + n * 4, 4);
      sum += even + odd;
      memcpy(t.data[c] + m * 64 + n * 4, &sum, 4);
    }
}
#undef EMU

}  // namespace emulated
}  // namespace

#define __m512 emulated::Floats
#define __m512i emulated::Ints
#define _mm512_loadu_ps emulated::loadf
#define _mm512_storeu_ps emulated::storef
#define _mm512_loadu_si512 emulated::loadi
#define _mm512_storeu_si512 emulated::storei
#define _mm512_set1_ps emulated::set1_ps
#define _mm512_set1_epi32 emulated::set1_epi32
#define _mm512_set1_epi8 emulated::set1_epi8
#define _mm512_add_ps emulated::add_ps
#define _mm512_sub_ps emulated::sub_ps
#define _mm512_mul_ps emulated::mul_ps
#define _mm512_div_ps emulated::div_ps
#define _mm512_max_ps emulated::max_ps
#define _mm512_min_ps emulated::min_ps
#define _mm512_abs_ps emulated::abs_ps
#define _mm512_fmadd_ps emulated::fmadd_ps
#define _mm512_add_epi32 emulated::add_epi32
#define _mm512_sub_epi32 emulated::sub_epi32
#define _mm512_mul_epu32 emulated::mul_epu32
#define _mm512_and_si512 emulated::and_si512
#define _mm512_or_si512 emulated::or_si512
#define _mm512_xor_si512 emulated::xor_si512
#define _mm512_slli_epi32 emulated::slli_epi32
#define _mm512_srli_epi32 emulated::srli_epi32
#define _mm512_srai_epi32 emulated::srai_epi32
#define _mm512_slli_epi16 emulated::slli_epi16
#define _mm512_srli_epi16 emulated::srli_epi16
#define _mm512_slli_epi64 emulated::slli_epi64
#define _mm512_srli_epi64 emulated::srli_epi64
#define _mm512_cvtepi32_ps emulated::cvtepi32_ps
#define _mm512_cvtps_epi32 emulated::cvtps_epi32
#define _mm512_castsi512_ps emulated::castsi512_ps
#define _mm512_castps_si512 emulated::castps_si512
#define _mm512_mask_blend_epi32 emulated::mask_blend_epi32
#undef _mm512_cmp_ps_mask
#define _mm512_cmp_ps_mask(a, b, op) emulated::less_mask(a, b)
#define _mm512_mask_blend_ps emulated::mask_blend_ps
#define _mm512_cvtph_ps emulated::cvtph_ps
#define _mm512_cvtepu8_epi32 emulated::cvtepu8_epi32
#define _mm512_cvtepi8_epi32 emulated::cvtepi8_epi32
#define _mm512_cvtepi8_epi16 emulated::cvtepi8_epi16
#define _mm512_cvtepi32_epi8 emulated::cvtepi32_epi8
#define _mm512_cvtss_f32 emulated::cvtss_f32
#define _mm512_reduce_max_ps emulated::reduce_max_ps
#define _mm512_reduce_add_epi32 emulated::reduce_add_epi32
#undef _mm512_ternarylogic_epi32
#define _mm512_ternarylogic_epi32 emulated::ternarylogic_epi32
#define _mm512_dpbusd_epi32 emulated::dpbusd_epi32
#undef _tile_loadconfig
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbssd
#undef _tile_dpbsud
#undef _tile_dpbf16ps
#undef _tile_release
#define _tile_loadconfig emulated::loadconfig
#define _tile_zero emulated::zero
#define _tile_loadd emulated::loadd
#define _tile_stored emulated::stored
#define _tile_dpbssd(c, a, b) emulated::dot_bytes(c, a, b, true)
#define _tile_dpbsud(c, a, b) emulated::dot_bytes(c, a, b, false)
#define _tile_dpbf16ps emulated::dot_bf16
#define _tile_release() (void)0
