// Integer dot products of one group on AVX2: unsigned weights times signed activations into 16-bit sums,
// widened as late as they allow (15 * 127 * 16 and 31 * 127 * 8 and 63 * 127 * 4 fit).
namespace {

template <IntShape S, int M, int H>
inline void dots(const uint8_t* sub, size_t, int lane0, const int8_t* q, const int32_t* sum, const int32_t* pair, F (&out)[M][H]) {
  const uint8_t* planes = sub + S.sub_bytes();
  const __m256i nibble = _mm256_set1_epi8(15);
  for (int h = 0; h < H; ++h) {
    int lane = lane0 + h * W;
    const uint8_t* p = planes + lane * 4;
    __m256i total[M], part[M];
    __m256i first, second;  // what 16-bit sums of the first and the last 16 inputs are multiplied with
    if constexpr (S.sub == Sub::ScaleMin) {
      __m256i s = load_u8(sub + lane).v;
      first = second = _mm256_or_si256(s, _mm256_slli_epi32(s, 16));
    } else if constexpr (S.sub == Sub::HalfScale) {
      const __m256i low = _mm256_set1_epi32(0xFFFF);
      __m256i a = load_i8(sub + lane).v, b = load_i8(sub + 16 + lane).v;
      first = _mm256_or_si256(_mm256_and_si256(a, low), _mm256_slli_epi32(a, 16));
      second = _mm256_or_si256(_mm256_and_si256(b, low), _mm256_slli_epi32(b, 16));
      __m256i both = _mm256_or_si256(_mm256_and_si256(a, low), _mm256_slli_epi32(b, 16));
      for (int m = 0; m < M; ++m)  // -32 * (scale * sum) over both halves
        total[m] = _mm256_sub_epi32(_mm256_setzero_si256(), _mm256_slli_epi32(_mm256_madd_epi16(both, _mm256_set1_epi32(pair[m])), 5));
    } else {
      first = second = _mm256_set1_epi16(1);
    }
    if constexpr (S.sub != Sub::HalfScale)
      for (int m = 0; m < M; ++m)
        total[m] = S.zero ? _mm256_sub_epi32(_mm256_setzero_si256(), _mm256_slli_epi32(_mm256_set1_epi32(sum[m]), S.zero == 8 ? 3 : 4))
                          : _mm256_setzero_si256();
    constexpr int run = S.bits == 4 ? 8 : S.bits == 5 ? 4 : S.bits == 6 ? 2 : 1;  // products a 16-bit lane holds, in quads
    __m256i packed, extra;
#pragma GCC unroll 8
    for (int quad = 0; quad < 8; ++quad) {
      __m256i w;
      if constexpr (S.bits == 8) {
        w = _mm256_loadu_si256((const __m256i*)(p + quad * 64));
      } else {
        if (quad % 2 == 0) packed = _mm256_loadu_si256((const __m256i*)(p + quad / 2 * 64));
        w = _mm256_and_si256(quad % 2 ? _mm256_srli_epi16(packed, 4) : packed, nibble);
        if constexpr (S.bits == 5) {
          if (quad == 0) extra = _mm256_loadu_si256((const __m256i*)(p + 256));
          __m256i bit = quad < 4 ? _mm256_slli_epi16(extra, 4 - quad) : _mm256_srli_epi16(extra, quad - 4);
          w = _mm256_or_si256(w, _mm256_and_si256(bit, _mm256_set1_epi8(16)));
        } else if constexpr (S.bits == 6) {
          if (quad % 4 == 0) extra = _mm256_loadu_si256((const __m256i*)(p + 256 + quad / 4 * 64));
          __m256i bits = quad % 4 < 2 ? _mm256_slli_epi16(extra, 4 - quad % 4 * 2) : _mm256_srli_epi16(extra, quad % 4 * 2 - 4);
          w = _mm256_or_si256(w, _mm256_and_si256(bits, _mm256_set1_epi8(48)));
        }
      }
      for (int m = 0; m < M; ++m) {
        int32_t four;
        memcpy(&four, q + m * kGroup + quad * 4, 4);
        __m256i x = _mm256_set1_epi32(four), product;
        if constexpr (S.bits == 8) product = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w));
        else product = _mm256_maddubs_epi16(w, x);
        part[m] = quad % run ? _mm256_add_epi16(part[m], product) : product;
        if (quad % run == run - 1) total[m] = _mm256_add_epi32(total[m], _mm256_madd_epi16(part[m], quad < 4 ? first : second));
      }
    }
    for (int m = 0; m < M; ++m) out[m][h].v = _mm256_cvtepi32_ps(total[m]);
  }
}

}  // namespace

namespace {

double burn_int8(long rounds) {
  __m256i w = _mm256_set1_epi8(3), sums[12];
  for (__m256i& sum : sums) sum = _mm256_setzero_si256();
  for (long i = 0; i < rounds; ++i) {
#pragma GCC unroll 12
    for (__m256i& sum : sums) sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(w, sum));
  }
  volatile int sink = 0;
  for (__m256i& sum : sums) sink = sink + _mm256_extract_epi32(sum, 0);
  return rounds * 12.0 * 64.0;
}

}  // namespace
