// Attention over one split of 256 positions, and the writing of keys and values.
// Order of the sums: scores in AMX's order over each 32 numbers of a head; weights over 16 lanes; values in
// AMX's order over the 32 positions of each block. Masked positions count with weight 0.
namespace {

inline void load_pairs(const uint8_t* p, bool int8, F& even, F& odd) {
  if (int8) return load_i8_pairs(p, even, odd);
  I both = loadi(p);
  even = first_of(both);
  odd = second_of(both);
}

// Vectors of keys or values that a query's numbers are multiplied with once they are in a register.
constexpr int kSide = W == 16 ? 2 : 1;

// scores[m][32] of M queries against one block; meanwhile the lines at `ahead` are fetched, one for each that is used.
template <int M> void scores(const SplitTask& t, int m0, const KVBlock& block, float (*out)[kSplit], int at, const uint8_t* ahead) {
  size_t size = t.int8 ? 1 : 2;
  for (int lane = 0; lane < kBlock; lane += kSide * W) {
    F acc[M][kSide];
    for (auto& row : acc) for (F& v : row) v = set1f(0.0f);
    for (int d = 0; d < t.k_pad; d += kGroup) {
      F even[M][kSide], odd[M][kSide];
      for (int i = 0; i < kGroup; i += 2) {
        F a[kSide], b[kSide];
        for (int j = 0; j < kSide; ++j) {
          __builtin_prefetch(ahead, 0, 2);
          ahead += 2 * W * size;
          load_pairs(block.k + ((size_t)(d + i) / 2 * kBlock + lane + j * W) * 2 * size, t.int8, a[j], b[j]);
        }
        for (int m = 0; m < M; ++m) {
          const float* q = t.q[m0 + m] + d + i;
          F first = set1f(q[0]), second = set1f(q[1]);
          for (int j = 0; j < kSide; ++j) {
            even[m][j] = i ? fma(first, a[j], even[m][j]) : first * a[j];
            odd[m][j] = i ? fma(second, b[j], odd[m][j]) : second * b[j];
          }
        }
      }
      for (int m = 0; m < M; ++m)
        for (int j = 0; j < kSide; ++j) acc[m][j] = acc[m][j] + (even[m][j] + odd[m][j]);
    }
    for (int m = 0; m < M; ++m)
      for (int j = 0; j < kSide; ++j) {
        F s = acc[m][j] * set1f(t.scale);
        if (t.int8) s = s * loadf(block.k_scale + lane + j * W);
        if (t.softcap > 0) s = vtanh(s * set1f(1.0f / t.softcap)) * set1f(t.softcap);
        storef(out[m0 + m] + at + lane + j * W, s);
      }
  }
}

// out[m] += weights[m][32] @ values[32, v_pad]. Of the block's positions some query sees [from, to). The others may hold
// what another request left there, and a weight of 0 does not silence an infinity: they are read as zeros.
template <int M, bool Partly> void weighted(const SplitTask& t, int m0, const KVBlock& block, float (*w)[kSplit], int at, int from, int to, const uint8_t* ahead) {
  size_t size = t.int8 ? 1 : 2;
  for (int d = 0; d < t.v_pad; d += kSide * W) {
    F even[M][kSide], odd[M][kSide];
    for (int i = 0; i < kBlock; i += 2) {
      F a[kSide], b[kSide];
      for (int j = 0; j < kSide; ++j) {
        __builtin_prefetch(ahead, 0, 2);
        ahead += 2 * W * size;
        load_pairs(block.v + ((size_t)i / 2 * t.v_pad + d + j * W) * 2 * size, t.int8, a[j], b[j]);
        if constexpr (Partly) {
          if (i < from || i >= to) a[j] = set1f(0.0f);
          if (i + 1 < from || i + 1 >= to) b[j] = set1f(0.0f);
        }
      }
      for (int m = 0; m < M; ++m) {
        const float* p = w[m0 + m] + at + i;
        F first = set1f(p[0]), second = set1f(p[1]);
        for (int j = 0; j < kSide; ++j) {
          even[m][j] = i ? fma(first, a[j], even[m][j]) : first * a[j];
          odd[m][j] = i ? fma(second, b[j], odd[m][j]) : second * b[j];
        }
      }
    }
    for (int m = 0; m < M; ++m)
      for (int j = 0; j < kSide; ++j) {
        float* o = t.out[m0 + m] + d + j * W;
        storef(o, loadf(o) + (even[m][j] + odd[m][j]));
      }
  }
}

constexpr int kAhead = 2;  // blocks between a fetch and the use

// Queries together: two sums each, and what is broadcast, must fit into the registers.
constexpr int kTogether = W == 16 ? 6 : 4;

template <class Fn, int M> inline void by_rows_left(int left, int m, Fn& fn) {
  if constexpr (M > 0) {
    if (left == M) fn.template operator()<M>(m);
    else by_rows_left<Fn, M - 1>(left, m, fn);
  }
}

template <class Fn> inline void by_rows(int queries, Fn fn) {
  int m = 0;
  for (; m + kTogether <= queries; m += kTogether) fn.template operator()<kTogether>(m);
  by_rows_left<Fn, kTogether - 1>(queries - m, m, fn);
}

// The largest of s[from..to), s aligned.
inline float largest(const float* s, int from, int to) {
  float peak = s[from];
  int i = from;
  for (; i < to && i % W; ++i) peak = s[i] > peak ? s[i] : peak;
  F top = set1f(peak);
  for (; i + W <= to; i += W) top = maxf(loadf(s + i), top);
  for (; i < to; ++i) peak = s[i] > peak ? s[i] : peak;
  alignas(64) float lanes[W];
  storef(lanes, top);
  for (float v : lanes) peak = v > peak ? v : peak;
  return peak;
}

// Scores to weights, rounded to bfloat16, over the positions a query sees; returns nothing of the others.
inline void soften(const SplitTask& t, int m, float* s, int blocks) {
  int from = t.first[m] - t.begin, to = t.last[m] - t.begin + 1;
  if (from < 0) from = 0;
  if (to > kSplit) to = kSplit;
  int n = blocks * kBlock;
  if (from >= to) {
    memset(s, 0, n * sizeof(float));
    t.peak[m] = 0;
    t.total[m] = 0;
    return;
  }
  float peak = largest(s, from, to);
  Sum16 total;
  for (int i = 0; i < n; i += kPanel)
    for (int j = 0; j < kPanel / W; ++j) {
      float* p = s + i + j * W;
      F w = vround_bf16(vexp(loadf(p) - set1f(peak)));
      storef(p, w);
      int at = i + j * W;
      if (at < from || at + W > to)
        for (int k = 0; k < W; ++k)
          if (at + k < from || at + k >= to) p[k] = 0;
      total.v[j] = total.v[j] + loadf(p);
    }
  t.peak[m] = peak;
  t.total[m] = total.total();
}

// Weights times the scales of int8 values; of positions that the query does not see the scale may be anything.
inline void scale_values(const SplitTask& t, int m, float* s, int blocks) {
  const int from = t.first[m] - t.begin, to = t.last[m] + 1 - t.begin;
  for (int b = 0, at = 0; b < blocks; ++b)
    for (int i = 0; i < kBlock; i += W, at += W) {
      storef(s + at, vround_bf16(loadf(s + at) * loadf(t.blocks[b].v_scale + i)));
      if (at < from || at + W > to)
        for (int k = 0; k < W; ++k)
          if (at + k < from || at + k >= to) s[at + k] = 0;
    }
}

void attend(const SplitTask& t) {
  alignas(64) static thread_local float s[64][kSplit];
  int first = t.first[0], last = 0;
  for (int m = 0; m < t.queries; ++m) {
    first = t.first[m] < first ? t.first[m] : first;
    last = t.last[m] > last ? t.last[m] : last;
  }
  int blocks = (last - t.begin) / kBlock + 1;
  if (blocks > kSplit / kBlock) blocks = kSplit / kBlock;
  // The weights have evicted the cache since the last step: what comes kAhead blocks later is fetched during the work.
  for (int b = 0; b < blocks; ++b) {
    const uint8_t* ahead = b + kAhead < blocks ? t.blocks[b + kAhead].k : t.blocks[b + kAhead - blocks < blocks ? b + kAhead - blocks : b].v;
    by_rows(t.queries, [&]<int M>(int m) { scores<M>(t, m, t.blocks[b], s, b * kBlock, m ? t.blocks[b].k : ahead); });
  }
  for (int m = 0; m < t.queries; ++m) {
    soften(t, m, s[m], blocks);
    memset(t.out[m], 0, t.v_pad * sizeof(float));
    if (t.int8) scale_values(t, m, s[m], blocks);
  }
  for (int b = 0; b < blocks; ++b) {
    const uint8_t* after = b + kAhead < blocks ? t.blocks[b + kAhead].v : t.next[b + kAhead - blocks];
    const uint8_t* ahead = after ? after : t.blocks[b].v;
    const int from = first - t.begin - b * kBlock, to = last + 1 - t.begin - b * kBlock;
    by_rows(t.queries, [&]<int M>(int m) {
      const uint8_t* fetched = m ? t.blocks[b].v : ahead;
      if (from <= 0 && to >= kBlock) weighted<M, false>(t, m, t.blocks[b], s, b * kBlock, from, to, fetched);
      else weighted<M, true>(t, m, t.blocks[b], s, b * kBlock, from, to, fetched);
    });
  }
}

void merge(float* run_out, float* run_peak, float* run_total, const float* out, float peak, float total, int n) {
  if (total == 0) return;
  if (*run_total == 0) {
    memcpy(run_out, out, n * sizeof(float));
    *run_peak = peak;
    *run_total = total;
    return;
  }
  float top = peak > *run_peak ? peak : *run_peak;
  alignas(64) float e[kPanel] = {*run_peak - top, peak - top};
  for (int i = 0; i < kPanel; i += W) storef(e + i, vexp(loadf(e + i)));
  for (int i = 0; i < n; i += W) storef(run_out + i, fma(loadf(run_out + i), set1f(e[0]), loadf(out + i) * set1f(e[1])));
  *run_total = __builtin_fmaf(*run_total, e[0], total * e[1]);
  *run_peak = top;
}

inline uint16_t to_bf16(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

// Quantise one head to int8; returns its scale.
inline float head_int8(const float* x, int n, int8_t* q) {
  float peak = 0;
  for (int i = 0; i < n; ++i) {
    float a = __builtin_fabsf(x[i]);
    peak = a > peak ? a : peak;
  }
  float inverse = peak > 0 ? 127.0f / peak : 0.0f;
  alignas(64) int32_t v[W];
  alignas(64) float in[W];
  for (int i = 0; i < n; i += W) {
    int left = n - i < W ? n - i : W;
    memset(in, 0, sizeof in);
    memcpy(in, x + i, left * sizeof(float));
    storei(v, to_int(loadf(in) * set1f(inverse)));
    for (int j = 0; j < left; ++j) q[i + j] = (int8_t)v[j];
  }
  return peak / 127.0f;
}

void kv_write(const KVLayer& c, int slot, int head, const float* k, const float* v) {
  int block = slot / kBlock, at = slot % kBlock;
  if (c.int8) {
    int8_t q[kMaxHeadDim];
    int8_t* to = (int8_t*)c.k_block(block, head);
    c.k_scales(block, head)[at] = head_int8(k, c.k_dim, q);
    for (int d = 0; d < c.k_dim; ++d) to[(d / 2 * kBlock + at) * 2 + d % 2] = q[d];
    to = (int8_t*)c.v_block(block, head);
    c.v_scales(block, head)[at] = head_int8(v, c.v_dim, q);
    for (int d = 0; d < c.v_dim; ++d) to[(at / 2 * c.v_pad + d) * 2 + at % 2] = q[d];
    return;
  }
  uint16_t* to = (uint16_t*)c.k_block(block, head);
  for (int d = 0; d < c.k_dim; ++d) to[(d / 2 * kBlock + at) * 2 + d % 2] = to_bf16(k[d]);
  to = (uint16_t*)c.v_block(block, head);
  for (int d = 0; d < c.v_dim; ++d) to[(at / 2 * c.v_pad + d) * 2 + at % 2] = to_bf16(v[d]);
}

}  // namespace
