// Matrix times rows of activations. Every row's floats are folded in the same order whatever M is:
//   integer formats   per superblock: part = sum over groups of dot * scale(x); then acc += part * scale(w)
//   bfloat16          per 32 inputs: a chain of the even and one of the odd ones; then acc += even + odd
//   float16, float32  one chain
namespace {

template <IntShape S, int M, int H>
void int_panel(const uint8_t* w, int units, const Acts& a, int r0, int lane0, float* y, size_t ldy) {
  const int height = a.height(r0);
  size_t at = a.tile(r0) + r0 % kTileRows;
  F acc[M][H];
  for (auto& row : acc) for (F& v : row) v = set1f(0.0f);
  for (int u = 0; u < units; ++u, w += S.bytes()) {
    F part[M][H], low[M][H];
    const uint8_t* sub = w + S.head_bytes();
    for (int g = 0; g < S.groups; ++g, sub += S.group_bytes(), at += height) {
      if constexpr (M <= SLIP_PREFETCH_ROWS)
        for (int line = 0; line < S.group_bytes(); line += 64) __builtin_prefetch(sub + SLIP_PREFETCH + line);
      F d[M][H];
      dots<S, M, H>(sub, sub + S.sub_bytes(), lane0, a.q + at * kGroup, a.sum + at, a.pair + at, d);
      for (int m = 0; m < M; ++m) {
        F scale = set1f(a.scale[at + m]), mean = set1f(a.mean[at + m]);
        for (int h = 0; h < H; ++h) {
          part[m][h] = g ? fma(d[m][h], scale, part[m][h]) : d[m][h] * scale;
          if constexpr (S.minimum && S.sub == Sub::ScaleMin) {
            F least = to_float(load_u8(sub + 16 + lane0 + h * W));
            low[m][h] = g ? fma(least, mean, low[m][h]) : least * mean;
          } else if constexpr (S.minimum) {
            low[m][h] = g ? low[m][h] + mean : mean;
          }
        }
      }
    }
    for (int h = 0; h < H; ++h) {
      int lane = lane0 + h * W;
      F scale = load_half(w + lane * 2);
      for (int m = 0; m < M; ++m) acc[m][h] = fma(part[m][h], scale, acc[m][h]);
      if constexpr (S.minimum) {
        F minimum = load_half(w + 32 + lane * 2);
        for (int m = 0; m < M; ++m) acc[m][h] = fma(low[m][h], minimum, acc[m][h]);
      }
    }
  }
  for (int m = 0; m < M; ++m)
    for (int h = 0; h < H; ++h) storef(y + m * ldy + lane0 + h * W, acc[m][h]);
}

template <Format T, int M>
void float_panel(const uint8_t* w, int units, const float* x, size_t ldx, int lane, float* y, size_t ldy) {
  F acc[M];
  for (F& v : acc) v = set1f(0.0f);
  for (int u = 0; u < units; ++u, w += unit_bytes(T), x += kGroup) {
    if constexpr (T == Format::BF16) {
      F even[M], odd[M];
      for (int pair = 0; pair < kGroup / 2; ++pair) {
        I both = loadi(w + pair * 64 + lane * 4);
        F first = first_of(both), second = second_of(both);
        for (int m = 0; m < M; ++m) {
          F a = set1f(x[m * ldx + pair * 2]), b = set1f(x[m * ldx + pair * 2 + 1]);
          even[m] = pair ? fma(a, first, even[m]) : a * first;
          odd[m] = pair ? fma(b, second, odd[m]) : b * second;
        }
      }
      for (int m = 0; m < M; ++m) acc[m] = acc[m] + (even[m] + odd[m]);
    } else {
      for (int k = 0; k < kGroup; ++k) {
        F v;
        if constexpr (T == Format::F16) v = load_half(w + k * 32 + lane * 2);
        else v = loadf((const float*)w + k * kPanel + lane);
        for (int m = 0; m < M; ++m) acc[m] = fma(set1f(x[m * ldx + k]), v, acc[m]);
      }
    }
  }
  for (int m = 0; m < M; ++m) storef(y + m * ldy + lane, acc[m]);
}

template <Format T, int M>
inline void panel_rows(const Matrix& w, int p, const Acts& a, int r, float* y, size_t ldy) {
  float* out = y + (size_t)r * ldy + p * kPanel;
  if constexpr (is_int(T)) {
    constexpr int H = M <= 2 ? kPanel / W : 1;
    for (int lane = 0; lane < kPanel; lane += H * W) int_panel<int_shape(T), M, H>(w.panel(p), w.units(), a, r, lane, out, ldy);
  } else {
    size_t ldx = (size_t)a.groups * kGroup;
    const float* x = (T == Format::BF16 ? a.bf16 : a.f32) + r * ldx;
    for (int lane = 0; lane < kPanel; lane += W) float_panel<T, M>(w.panel(p), w.units(), x, ldx, lane, out, ldy);
  }
}

// Rows that a panel takes at once: what the registers hold. K-quants keep small scales there as well.
template <Format T> constexpr int most_rows() {
  if constexpr (is_int(T))
    if (int_shape(T).sub != Sub::None) return SLIP_ROWS < 6 ? SLIP_ROWS : 6;
  return SLIP_ROWS;
}

// Never across a tile of activations.
template <Format T, int M>
inline void row_block(int rows, const Matrix& w, int p, const Acts& a, int r, float* y, size_t ldy) {
  if constexpr (M > 1)
    if (rows < M) return row_block<T, M - 1>(rows, w, p, a, r, y, ldy);
  panel_rows<T, M>(w, p, a, r, y, ldy);
}

template <Format T>
void linear_format(const Matrix& w, int p0, int p1, const Acts& a, int r0, int r1, float* y, size_t ldy) {
  constexpr int kRows = 64;  // rows whose activations stay in the second-level cache meanwhile
  for (int top = r0; top < r1; top += kRows) {
    int end = top + kRows < r1 ? top + kRows : r1;
    for (int p = p0; p < p1; ++p)
      for (int r = top; r < end;) {
        int stop = (r / kTileRows + 1) * kTileRows, left = (stop < end ? stop : end) - r;
        constexpr int most = most_rows<T>();
        if (left > most) left = most;
        row_block<T, most>(left, w, p, a, r, y, ldy);
        r += left;
      }
  }
}

void linear(const Matrix& w, int p0, int p1, const Acts& a, int r0, int r1, float* y, size_t ldy) {
  switch (w.format) {
#define CASE(T) case Format::T: return linear_format<Format::T>(w, p0, p1, a, r0, r1, y, ldy);
    CASE(I4S) CASE(I4S64) CASE(I4S128) CASE(I4M) CASE(I4M64) CASE(I4M128) CASE(I4K)
    CASE(I5S) CASE(I5M) CASE(I5K) CASE(I6K) CASE(I8) CASE(BF16) CASE(F16) CASE(F32)
#undef CASE
  }
}

}  // namespace
