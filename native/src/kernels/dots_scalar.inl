// Dot products of one group in plain C++: whole numbers below 2^24, so exact as floats.
namespace {

template <IntShape S> inline int stored_weight(const uint8_t* planes, int lane, int k) {
  int quad = k / 4, byte = lane * 4 + k % 4;
  if (S.bits == 8) return (int8_t)planes[quad * 64 + byte];
  int v = planes[quad / 2 * 64 + byte] >> (quad % 2 * 4) & 15;
  if (S.bits == 5) v |= (planes[256 + byte] >> quad & 1) << 4;
  if (S.bits == 6) v |= (planes[256 + quad / 4 * 64 + byte] >> (quad % 4 * 2) & 3) << 4;
  return v;
}

template <IntShape S, int M, int H>
inline void dots(const uint8_t* sub, size_t, int, const int8_t* q, const int32_t*, const int32_t*, F (&out)[M][H]) {
  const uint8_t* planes = sub + S.sub_bytes();
  for (int lane = 0; lane < W; ++lane) {
    int w[kGroup];
    for (int k = 0; k < kGroup; ++k) w[k] = stored_weight<S>(planes, lane, k) - S.zero;
    for (int m = 0; m < M; ++m) {
      int half[2] = {0, 0};
      for (int k = 0; k < kGroup; ++k) half[k / 16] += w[k] * q[m * kGroup + k];
      if (S.sub == Sub::ScaleMin) out[m][0].v[lane] = (float)(sub[lane] * (half[0] + half[1]));
      else if (S.sub == Sub::HalfScale)
        out[m][0].v[lane] = (float)((int8_t)sub[lane] * half[0] + (int8_t)sub[16 + lane] * half[1]);
      else out[m][0].v[lane] = (float)(half[0] + half[1]);
    }
  }
}

}  // namespace

namespace {

double burn_int8(long rounds) {
  volatile int8_t a = 3, b = 5;
  volatile int32_t sink = 0;
  int32_t sums[8] = {};
  for (long i = 0; i < rounds; ++i)
    for (int& sum : sums) sum += a * b;
  for (int sum : sums) sink = sink + sum;
  return rounds * 16.0;
}

}  // namespace
