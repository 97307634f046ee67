// Dot products of one group with VNNI: unsigned weights times signed activations straight into 32 bits.
// Whole numbers below 2^24, so scaling them by small integers is exact in floats.
namespace {

// What is subtracted from every stored weight: signed bytes are read with 128 added.
template <IntShape S> constexpr int kOffset = S.bits == 8 ? 128 : S.zero;

// H panels, `stride` bytes apart.
template <IntShape S, int M, int H>
inline void dots(const uint8_t* sub, size_t stride, int, const int8_t* q, const int32_t* sum, const int32_t* pair, F (&out)[M][H]) {
  constexpr bool halves = S.sub == Sub::HalfScale;
  __m512i total[M][H], second[M][H];
  for (int m = 0; m < M; ++m)
    for (int h = 0; h < H; ++h) {
      total[m][h] = _mm512_set1_epi32(halves ? -S.zero * (int16_t)pair[m] : (int)((uint32_t)-kOffset<S> * (uint32_t)sum[m]));
      if constexpr (halves) second[m][h] = _mm512_set1_epi32(-S.zero * (pair[m] >> 16));
    }
  Quads<S> weights[H];
  for (int h = 0; h < H; ++h) weights[h].p = sub + h * stride + S.sub_bytes();
#pragma GCC unroll 8
  for (int quad = 0; quad < 8; ++quad) {
    __m512i w[H];
    for (int h = 0; h < H; ++h) w[h] = weights[h](quad);
    for (int m = 0; m < M; ++m) {
      int32_t four;
      memcpy(&four, q + m * kGroup + quad * 4, 4);
      __m512i x = _mm512_set1_epi32(four);
      for (int h = 0; h < H; ++h) {
        if (halves && quad >= 4) second[m][h] = _mm512_dpbusd_epi32(second[m][h], w[h], x);
        else total[m][h] = _mm512_dpbusd_epi32(total[m][h], w[h], x);
      }
    }
  }
  for (int h = 0; h < H; ++h) {
    const uint8_t* small = sub + h * stride;
    for (int m = 0; m < M; ++m) {
      F f{_mm512_cvtepi32_ps(total[m][h])};
      if constexpr (S.sub == Sub::ScaleMin) f = f * to_float(load_u8(small));
      if constexpr (halves) f = fma(F{_mm512_cvtepi32_ps(second[m][h])}, to_float(load_i8(small + 16)), f * to_float(load_i8(small)));
      out[m][h] = f;
    }
  }
}

double burn_int8(long rounds) {
  __m512i w = _mm512_set1_epi8(3), sums[8];
  for (__m512i& sum : sums) sum = _mm512_set1_epi32(0);
  for (long i = 0; i < rounds; ++i) {
    for (__m512i& sum : sums) sum = _mm512_dpbusd_epi32(sum, w, w);
  }
  volatile int sink = 0;
  alignas(64) int32_t lanes[16];
  for (__m512i& sum : sums) {
    storei(lanes, I{sum});
    sink = sink + lanes[0];
  }
  return rounds * 8.0 * 128.0;
}

}  // namespace
