// Matrix times rows of activations. Every row's floats are folded in the same order whatever M is:
//   integer formats   per superblock: part = sum over groups of dot * scale(x); then acc += part * scale(w)
//   bfloat16          per 32 inputs: a chain of the even and one of the odd ones; then acc += even + odd
//   float16, float32  one chain
namespace {

// M rows of activations times H vectors of outputs from lane0 on: parts of one panel, or, where a vector is a whole panel,
// panels that lie `stride` bytes apart.
template <IntShape S, int M, int H>
void int_panel(const uint8_t* w, size_t stride, int units, const Acts& a, int r0, int lane0, float* y, size_t ldy) {
  auto place = [&](int h) { return W < kPanel ? lane0 + h * W : 0; };
  auto panel = [&](int h) { return W < kPanel ? 0 : h * stride; };
  const int height = a.height(r0);
  size_t at = a.tile(r0) + r0 % kTileRows;
  F acc[M][H];
  for (auto& row : acc) for (F& v : row) v = set1f(0.0f);
  for (int u = 0; u < units; ++u, w += S.bytes()) {
    F part[M][H], low[M][H];
    const uint8_t* sub = w + S.head_bytes();
    for (int g = 0; g < S.groups; ++g, sub += S.group_bytes(), at += height) {
      if constexpr (M <= SLIP_PREFETCH_ROWS)
        for (int h = 0; h < (W < kPanel ? 1 : H); ++h)
          for (int line = 0; line < S.group_bytes(); line += 64) __builtin_prefetch(sub + panel(h) + SLIP_PREFETCH + line);
      F d[M][H];
      dots<S, M, H>(sub, stride, lane0, a.q + at * kGroup, a.sum + at, a.pair + at, d);
      for (int m = 0; m < M; ++m) {
        F scale = set1f(a.scale[at + m]), mean = set1f(a.mean[at + m]);
        for (int h = 0; h < H; ++h) {
          part[m][h] = g ? fma(d[m][h], scale, part[m][h]) : d[m][h] * scale;
          if constexpr (S.minimum && S.sub == Sub::ScaleMin) {
            F least = to_float(load_u8(sub + panel(h) + 16 + place(h)));
            low[m][h] = g ? fma(least, mean, low[m][h]) : least * mean;
          } else if constexpr (S.minimum) {
            low[m][h] = g ? low[m][h] + mean : mean;
          }
        }
      }
    }
    for (int h = 0; h < H; ++h) {
      const uint8_t* head = w + panel(h) + place(h) * 2;
      F scale = load_half(head);
      for (int m = 0; m < M; ++m) acc[m][h] = fma(part[m][h], scale, acc[m][h]);
      if constexpr (S.minimum) {
        F minimum = load_half(head + 32);
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

// P panels at once, from panel p on.
template <Format T, int M, int P>
inline void panel_rows(const Matrix& w, int p, const Acts& a, int r, float* y, size_t ldy) {
  float* out = y + (size_t)r * ldy + p * kPanel;
  if constexpr (is_int(T)) {
    constexpr int H = W == kPanel ? P : M <= 2 ? kPanel / W : 1;
    for (int lane = 0; lane < P * kPanel; lane += H * W) int_panel<int_shape(T), M, H>(w.panel(p), w.panel_bytes(), w.units(), a, r, lane, out, ldy);
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

// Rows that two panels take at once, which then share what is read of the activations; 0: panels go one by one.
template <Format T> constexpr int most_rows_of_two() {
  if constexpr (is_int(T))
    if (int_shape(T).sub == Sub::None) return SLIP_ROWS_OF_TWO;
  return 0;
}

// Never across a tile of activations.
template <Format T, int M, int P>
inline void row_block(int rows, const Matrix& w, int p, const Acts& a, int r, float* y, size_t ldy) {
  if constexpr (M > 1)
    if (rows < M) return row_block<T, M - 1, P>(rows, w, p, a, r, y, ldy);
  panel_rows<T, M, P>(w, p, a, r, y, ldy);
}

// Rows [r, end) of P panels, `most` at a time and as evenly as they go.
template <Format T, int P, int most>
inline void panels(const Matrix& w, int p, const Acts& a, int r, int end, float* y, size_t ldy) {
  while (r < end) {
    int stop = (r / kTileRows + 1) * kTileRows, left = (stop < end ? stop : end) - r;
    int blocks = (left + most - 1) / most, rows = (left + blocks - 1) / blocks;
    row_block<T, most, P>(rows, w, p, a, r, y, ldy);
    r += rows;
  }
}

template <Format T>
void linear_format(const Matrix& w, int p0, int p1, const Acts& a, int r0, int r1, float* y, size_t ldy) {
  constexpr int kRows = 64;  // rows whose activations stay in the second-level cache meanwhile
  for (int top = r0; top < r1; top += kRows) {
    int end = top + kRows < r1 ? top + kRows : r1, p = p0;
    if constexpr (most_rows_of_two<T>() > 0)
      if (end - top >= SLIP_LEAST_OF_TWO)
        for (; p + 2 <= p1; p += 2) panels<T, 2, most_rows_of_two<T>()>(w, p, a, top, end, y, ldy);
    for (; p < p1; ++p) panels<T, 1, most_rows<T>()>(w, p, a, top, end, y, ldy);
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
