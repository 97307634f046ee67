// Row-wise kernels: norms, activations, rotary embedding, and quantising a row of activations.
// Buffers are padded to 32 floats, so loops run over whole vectors.
namespace {

void rmsnorm(const float* x, const float* w, float eps, int heads, int width, float* out) {
  for (int h = 0; h < heads; ++h, x += width, out += width) {
    int whole = width / kPanel * kPanel;
    Sum16 squares;
    for (int i = 0; i < whole; i += kPanel)
      for (int j = 0; j < kPanel / W; ++j) {
        F v = loadf(x + i + j * W);
        squares.v[j] = fma(v, v, squares.v[j]);
      }
    float total = squares.total();
    for (int i = whole; i < width; ++i) total = __builtin_fmaf(x[i], x[i], total);
    float inverse = 1.0f / __builtin_sqrtf(total / (float)width + eps);
    int i = 0;
    for (; i + W <= width; i += W) storef(out + i, loadf(x + i) * set1f(inverse) * loadf(w + i));
    for (; i < width; ++i) out[i] = x[i] * inverse * w[i];
  }
}

void add(const float* a, const float* b, float* out, int n) {
  int i = 0;
  for (; i + W <= n; i += W) storef(out + i, loadf(a + i) + loadf(b + i));
  for (; i < n; ++i) out[i] = a[i] + b[i];
}

// Run a vector function over n floats; the tail goes through a full vector of its own.
template <class Fn> inline void map(const float* a, const float* b, float* out, int n, Fn fn) {
  int i = 0;
  for (; i + W <= n; i += W) storef(out + i, fn(loadf(a + i), loadf(b + i)));
  if (i == n) return;
  float ta[W] = {}, tb[W] = {}, to[W];
  memcpy(ta, a + i, (n - i) * sizeof(float));
  memcpy(tb, b + i, (n - i) * sizeof(float));
  storef(to, fn(loadf(ta), loadf(tb)));
  memcpy(out + i, to, (n - i) * sizeof(float));
}

void round_bf16(const float* x, float* out, int n) {
  map(x, x, out, n, [](F v, F) { return vround_bf16(v); });
}

void prepare(const float* x, int k, int r, const Acts& a) {
  int padded = a.groups * kGroup, h = a.height(r);
  size_t tile = a.tile(r) + r % kTileRows;
  // What follows input k meets weights of zero, and must be zero too: zero times an infinity left over is not.
  if (a.f32) {
    memcpy(a.f32 + (size_t)r * padded, x, k * sizeof(float));
    memset(a.f32 + (size_t)r * padded + k, 0, (padded - k) * sizeof(float));
  }
  if (a.bf16) {
    round_bf16(x, a.bf16 + (size_t)r * padded, k);
    memset(a.bf16 + (size_t)r * padded + k, 0, (padded - k) * sizeof(float));
  }
  if (!a.q) return;
  alignas(64) float last[kGroup] = {};
  for (int g = 0; g < a.groups; ++g) {
    const float* in = x + g * kGroup;
    if ((g + 1) * kGroup > k) {
      int left = k - g * kGroup;
      memset(last, 0, sizeof last);
      if (left > 0) memcpy(last, in, left * sizeof(float));
      in = last;
    }
    F peaks = set1f(0.0f);
    for (int i = 0; i < kGroup; i += W) peaks = maxf(peaks, absf(loadf(in + i)));
    const float peak = max_of(peaks), inverse = peak > 0 ? 127.0f / peak : 0.0f;
    uint32_t half[2] = {0, 0};  // what is infinite becomes any number, and wraps
    size_t at = tile + (size_t)g * h;
    int8_t* q = a.q + at * kGroup;
    for (int i = 0; i < kGroup; i += W) {
      const I n = to_int(loadf(in + i) * set1f(inverse));
      store_i8(q + i, n);
      half[i / 16] += (uint32_t)sum_of(n);
    }
    float scale = peak / 127.0f;
    a.scale[at] = scale;
    a.sum[at] = (int32_t)(half[0] + half[1]);
    a.mean[at] = scale * (float)a.sum[at];
    a.pair[at] = (int32_t)((uint32_t)(uint16_t)half[0] | (uint32_t)(uint16_t)half[1] << 16);
  }
}

void gated(Activation kind, const float* gate, const float* up, float* out, int n) {
  if (kind == Activation::Silu)
    map(gate, up, out, n, [](F g, F u) { return vsilu(g) * u; });
  else
    map(gate, up, out, n, [](F g, F u) { return vgelu(g) * u; });
}

void scale(float* x, float by, int n) {
  map(x, x, x, n, [by](F v, F) { return v * set1f(by); });
}

void softcap(float* x, float cap, int n) {
  float inverse = 1.0f / cap;
  map(x, x, x, n, [cap, inverse](F v, F) { return vtanh(v * set1f(inverse)) * set1f(cap); });
}

uint32_t read_bytes(const uint8_t* p, size_t n) {
  I part[4] = {set1i(0), set1i(0), set1i(0), set1i(0)};
  constexpr size_t kVector = W * 4;
  for (size_t i = 0; i + 4 * kVector <= n; i += 4 * kVector) {
    for (size_t line = 0; line < 4 * kVector; line += 64) __builtin_prefetch(p + i + 4096 + line);
    for (int j = 0; j < 4; ++j) part[j] = part[j] ^ loadi(p + i + j * kVector);
  }
  alignas(64) uint32_t lanes[W];
  storei(lanes, (part[0] ^ part[1]) ^ (part[2] ^ part[3]));
  uint32_t result = 0;
  for (uint32_t lane : lanes) result ^= lane;
  return result;
}

void rope(float* x, const float* cosine, const float* sine, int half) {
  float* y = x + half;
  int i = 0;
  for (; i + W <= half; i += W) {
    F low = loadf(x + i), high = loadf(y + i), c = loadf(cosine + i), s = loadf(sine + i);
    storef(x + i, low * c - high * s);
    storef(y + i, high * c + low * s);
  }
  for (; i < half; ++i) {
    float low = x[i], high = y[i];
    x[i] = low * cosine[i] - high * sine[i];
    y[i] = high * cosine[i] + low * sine[i];
  }
}

}  // namespace
