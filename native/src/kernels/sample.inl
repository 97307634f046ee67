// Sampling kernels: arg max, Gumbel noise from Philox4x32-10 (Salmon et al. 2011), sums of exponentials.
namespace {

inline void best_of(const float* value, const int* index, int n, float* best, int* at) {
  for (int i = 0; i < n; ++i)
    if (*at < 0 || value[i] > *best || (value[i] == *best && index[i] < *at)) {
      *best = value[i];
      *at = index[i];
    }
}

// Running per-lane maximum of a strip of vectors: `first` counts the strip's first index.
struct LaneBest {
  F value = set1f(-__builtin_inff());
  F index = set1f(-1.0f);  // exact up to 2^24 tokens
  void see(F x, F at) {
    index = less(value, x, at, index);
    value = less(value, x, x, value);
  }
  void into(float* best, int* at) const {
    alignas(64) float v[W], f[W];
    int i[W];
    storef(v, value);
    storef(f, index);
    for (int k = 0; k < W; ++k) i[k] = (int)f[k];
    for (int k = 0; k < W; ++k)
      if (i[k] >= 0) best_of(v + k, i + k, 1, best, at);
  }
};

inline F lane_numbers() {
  alignas(64) float n[W];
  for (int i = 0; i < W; ++i) n[i] = (float)i;
  return loadf(n);
}

void argmax(const float* x, int n, float* best, int* index) {
  LaneBest lanes;
  F lane = lane_numbers();
  *index = -1;
  *best = -__builtin_inff();
  int i = 0;
  for (; i + W <= n; i += W) lanes.see(loadf(x + i), set1f((float)i) + lane);
  lanes.into(best, index);
  for (; i < n; ++i) best_of(x + i, &i, 1, best, index);
  if (*index < 0) *index = 0;
}

// Random words for tokens 4 * counter + (0..3), counters in W lanes.
inline void philox(I counter, const Noise& noise, I (&c)[4]) {
  c[0] = counter;
  c[1] = set1i((int32_t)noise.position);
  c[2] = set1i((int32_t)noise.choice);
  c[3] = set1i((int32_t)noise.stream);
  uint32_t k0 = (uint32_t)noise.seed, k1 = (uint32_t)(noise.seed >> 32);
  for (int round = 0; round < 10; ++round) {
    I low0, high0, low1, high1;
    mul_wide(c[0], 0xD2511F53u, low0, high0);
    mul_wide(c[2], 0xCD9E8D57u, low1, high1);
    c[0] = high1 ^ c[1] ^ set1i((int32_t)k0);
    c[1] = low1;
    c[2] = high0 ^ c[3] ^ set1i((int32_t)k1);
    c[3] = low0;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
}

// -log(-log(u)) for u = (word + 0.5) / 2^32, accurate at both ends.
inline F gumbel(I word) {
  // The nearer distance to an end, as a float: words of the upper half count down from 2^32.
  F upper = to_float(shr<31>(word));                 // 0 or 1
  I flipped = word ^ (set1i(0) - shr<31>(word));     // distance from the nearer end, below 2^31
  F w = fma(to_float(flipped), set1f(0x1p-32f), set1f(0x1p-33f));
  F y = set1f(1.0f) - w;
  F gap = set1f(1.0f) - y;
  // upper: -log(1 - w), by log(y) * w / (1 - y) where y is 1 - w rounded
  F far = less(set1f(0.0f), gap, (set1f(0.0f) - vlog(y)) * w / maxf(gap, set1f(1e-30f)), w);
  F near = set1f(0.0f) - vlog(w);
  return set1f(0.0f) - vlog(less(set1f(0.5f), upper, far, near));
}

// What the random word of a token has to exceed, in its upper 24 bits, if a score is to reach `best`: noise is at most
// -log(1 - u), since -log u >= 1 - u. 0.01 is more than all rounding. Nothing is hopeless if the result is negative.
inline float needed(float score, float best) {
  return 16777216.0f * (1.0f - first_of_all(vexp(set1f(score + 0.01f - best)))) - 2.0f;
}

void token_noise(const int32_t* tokens, int n, const Noise& noise, float* out) {
  alignas(64) int32_t counters[W], words[4][W], own[W];
  alignas(64) float value[W];
  for (int i = 0; i < n; i += W) {
    const int count = n - i < W ? n - i : W;
    for (int k = 0; k < W; ++k) counters[k] = tokens[i + (k < count ? k : 0)] >> 2;
    I c[4];
    philox(loadi(counters), noise, c);
    for (int j = 0; j < 4; ++j) storei(words[j], c[j]);
    for (int k = 0; k < W; ++k) own[k] = words[tokens[i + (k < count ? k : 0)] & 3][k];
    storef(value, gumbel(loadi(own)));
    for (int k = 0; k < count; ++k) out[i + k] = value[k];
  }
}

void argmax_noise(const float* x, float inverse_temperature, int first, int n, const Noise& noise, float* best, int* index) {
  constexpr int kStrip = 4 * W;
  const F scale = set1f(inverse_temperature), never = set1f(-__builtin_inff());
  *index = -1;
  *best = -__builtin_inff();
  auto see = [&](int from, const I (&words)[4], bool whole) {
    alignas(64) float value[4][W], scores[kStrip];
    for (int j = 0; j < 4; ++j) storef(value[j], gumbel(words[j]));
    for (int i = 0; i < W; ++i)
      for (int j = 0; j < 4; ++j) scores[4 * i + j] = value[j][i];
    for (int i = 0; i < kStrip; i += W) {
      if (whole) {
        storef(scores + i, fma(loadf(x + from - first + i), scale, loadf(scores + i)));
        continue;
      }
      for (int k = i; k < i + W; ++k) {
        int t = from + k;
        scores[k] = t >= first && t < first + n ? __builtin_fmaf(x[t - first], inverse_temperature, scores[k]) : -__builtin_inff();
      }
    }
    for (int i = 0; i < kStrip; ++i)
      if (scores[i] > *best || (scores[i] == *best && *index > from + i)) {
        *best = scores[i];
        *index = from + i;
      }
  };
  auto words_of = [&](int from, I (&words)[4]) {
    alignas(64) int32_t counters[W];
    for (int i = 0; i < W; ++i) counters[i] = from / 4 + i;
    philox(loadi(counters), noise, words);
  };
  auto is_whole = [&](int from) { return from >= first && from + kStrip <= first + n; };
  // The strip of the largest score first: few others can win then, and the logarithms of the rest need not be taken.
  float peak;
  int at;
  argmax(x, n, &peak, &at);
  const int begin = first / 4 * 4, likely = begin + (first + at - begin) / kStrip * kStrip;
  I words[4];
  words_of(likely, words);
  see(likely, words, is_whole(likely));
  for (int from = begin; from < first + n; from += kStrip) {
    words_of(from, words);
    const bool whole = is_whole(from);
    if (whole) {
      const float* own = x + from - first;
      F top = never, word = set1f(0.0f);
      for (int j = 0; j < 4; ++j) {
        top = maxf(top, loadf(own + j * W));
        word = maxf(word, to_float(shr<8>(words[j])));
      }
      if (max_of(word) < needed(max_of(top) * inverse_temperature, *best)) continue;
    }
    see(from, words, whole);
  }
  if (*index < 0) *index = first;
}

double sum_exp(const float* x, float peak, int n) {
  double total = 0;
  int i = 0;
  for (; i + kPanel <= n; i += kPanel) {
    Sum16 part;
    for (int j = 0; j < kPanel / W; ++j) part.v[j] = vexp(loadf(x + i + j * W) - set1f(peak));
    total += part.total();
  }
  alignas(64) float last[kPanel];
  for (int k = 0; k < kPanel; ++k) last[k] = i + k < n ? x[i + k] : -__builtin_inff();
  Sum16 part;
  for (int j = 0; j < kPanel / W; ++j) part.v[j] = vexp(loadf(last + j * W) - set1f(peak));
  return total + part.total();
}

}  // namespace
