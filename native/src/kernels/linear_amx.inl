// Matrix products on AMX tiles for 6 rows and more; fewer go through VNNI. The same bits either way: integer
// sums inside a group are exact, and the floats are folded in the order of linear.inl.
namespace {

constexpr int kAmxRows = 6;      // from here on tiles win (measured on Sapphire Rapids)
constexpr int kStage = 4;        // groups in flight: one is unpacked while tiles work on the one before

// Memory that grows and keeps its alignment, one per thread and use.
class AlignedBytes {
 public:
  AlignedBytes() = default;
  AlignedBytes(const AlignedBytes&) = delete;
  ~AlignedBytes() { __builtin_free(data_); }
  uint8_t* get(size_t bytes) {
    if (bytes > size_) {
      __builtin_free(data_);
      size_ = (bytes + 4095) / 4096 * 4096;
      data_ = (uint8_t*)aligned_alloc(64, size_);
      if (!data_) __builtin_trap();
    }
    return data_;
  }

 private:
  uint8_t* data_ = nullptr;
  size_t size_ = 0;
};

struct __attribute__((packed)) TileConfig {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t colsb[16] = {};
  uint8_t rows[16] = {};
};

// Tiles 0-3 sums [m][16 x 4 bytes], 4-5 activations [m][a_bytes], 6-7 weights [b_rows][64].
inline void configure(int m, int a_bytes, int b_rows) {
  TileConfig c;
  for (int i = 0; i < 8; ++i) {
    c.rows[i] = (uint8_t)(i < 6 ? m : b_rows);
    c.colsb[i] = (uint16_t)(i < 4 || i > 5 ? 64 : a_bytes);
  }
  _tile_loadconfig(&c);
}

// A group's weights as bytes for a tile: [8 quads][64]. I4S: 16 * (q - 8), signed; 8 bits: signed; others: unsigned.
template <IntShape S> inline void unpack_group(const uint8_t* planes, uint8_t* out) {
  if constexpr (S.bits == 4 && S.zero == 8) {
    const __m512i mask = _mm512_set1_epi8((char)0xF0), sign = _mm512_set1_epi8((char)0x80);
    for (int j = 0; j < 4; ++j) {
      __m512i v = _mm512_loadu_si512(planes + j * 64);
      _mm512_storeu_si512(out + j * 128, _mm512_ternarylogic_epi32(_mm512_slli_epi16(v, 4), mask, sign, 0x6A));
      _mm512_storeu_si512(out + j * 128 + 64, _mm512_ternarylogic_epi32(v, mask, sign, 0x6A));
    }
  } else if constexpr (S.bits == 8) {
    for (int quad = 0; quad < 8; ++quad) _mm512_storeu_si512(out + quad * 64, _mm512_loadu_si512(planes + quad * 64));
  } else {
    Quads<S> weights;
    weights.p = planes;
#pragma GCC unroll 8
    for (int quad = 0; quad < 8; ++quad) _mm512_storeu_si512(out + quad * 64, weights(quad));
  }
}

template <IntShape S> constexpr bool kSigned = S.bits == 8 || (S.bits == 4 && S.zero == 8);
template <IntShape S> constexpr bool kHalves = S.sub == Sub::HalfScale;
constexpr int kGroupBytes = 512;

// Sums of one group into `sums` (of both halves, [2][16][16], if its scales differ). The instructions take
// literal tile numbers; `lane` picks the tiles, so that neighbouring groups overlap.
template <IntShape S, int lane> inline void group_sums(const int8_t* q, const uint8_t* b, int32_t* sums) {
#define SLIP_DOT(c, a, w, from, weights, to)        \
  _tile_zero(c);                                    \
  _tile_loadd(a, from, kGroup);                     \
  _tile_loadd(w, weights, 64);                      \
  if constexpr (kSigned<S>) _tile_dpbssd(c, a, w);  \
  else _tile_dpbsud(c, a, w);                       \
  _tile_stored(c, to, 64);
  if constexpr (kHalves<S> && lane % 2 == 0) {
    SLIP_DOT(0, 4, 6, q, b, sums)
    SLIP_DOT(1, 5, 7, q + 16, b + 256, sums + 256)
  } else if constexpr (kHalves<S>) {
    SLIP_DOT(2, 4, 6, q, b, sums)
    SLIP_DOT(3, 5, 7, q + 16, b + 256, sums + 256)
  } else if constexpr (lane == 0) {
    SLIP_DOT(0, 4, 6, q, b, sums)
  } else if constexpr (lane == 1) {
    SLIP_DOT(1, 5, 7, q, b, sums)
  } else if constexpr (lane == 2) {
    SLIP_DOT(2, 4, 6, q, b, sums)
  } else {
    SLIP_DOT(3, 5, 7, q, b, sums)
  }
#undef SLIP_DOT
}

// Integer sums of row m of a group as floats, scaled by the small integers of K-quants.
template <IntShape S> inline F group_value(const int32_t* sums, int m, const uint8_t* sub, int32_t sum, int32_t pair) {
  I total = loadi(sums + m * 16);
  if constexpr (kHalves<S>) {
    F first = to_float(total - set1i(S.zero * (int16_t)pair));
    F last = to_float(loadi(sums + 256 + m * 16) - set1i(S.zero * (pair >> 16)));
    return fma(last, to_float(load_i8(sub + 16)), first * to_float(load_i8(sub)));
  }
  if constexpr (S.zero != 0 && !kSigned<S>) total = total - set1i(S.zero * sum);
  F f = to_float(total);
  if constexpr (S.sub == Sub::ScaleMin) f = f * to_float(load_u8(sub));
  return f;
}

// One panel for the tile of rows that holds r; `bytes` is the panel unpacked, [groups][512].
template <IntShape S, int M>
void tile_panel(const uint8_t* w, const uint8_t* bytes, int units, const Acts& a, int r, float* y, size_t ldy) {
  const int height = a.height(r);
  const size_t tile = a.tile(r);
  const int groups = units * S.groups;
  constexpr int per_group = kHalves<S> ? 512 : 256;
  alignas(64) int32_t sums[2][kStage * per_group];
  F acc[M], part[M], low[M];
  for (F& v : acc) v = set1f(0.0f);
  auto multiply = [&](int g, int32_t* out) {
    const int8_t* q = a.q + (tile + (size_t)g * height) * kGroup;
    const uint8_t* b = bytes + (size_t)g * kGroupBytes;
    const size_t step = (size_t)height * kGroup;
    if (g < groups) group_sums<S, 0>(q, b, out);
    if (g + 1 < groups) group_sums<S, 1>(q + step, b + kGroupBytes, out + per_group);
    if (g + 2 < groups) group_sums<S, 2>(q + 2 * step, b + 2 * kGroupBytes, out + 2 * per_group);
    if (g + 3 < groups) group_sums<S, 3>(q + 3 * step, b + 3 * kGroupBytes, out + 3 * per_group);
  };
  auto fold = [&](int g, const int32_t* in) {
    const uint8_t* unit = w + (size_t)(g / S.groups) * S.bytes();
    const uint8_t* sub = unit + S.head_bytes() + g % S.groups * S.group_bytes();
    const size_t at = tile + (size_t)g * height;
    const bool first = g % S.groups == 0, last = g % S.groups == S.groups - 1;
    F least = set1f(0.0f);
    if constexpr (S.minimum && S.sub == Sub::ScaleMin) least = to_float(load_u8(sub + 16));
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
      F value = group_value<S>(in, m, sub, a.sum[at + m], a.pair[at + m]), scale = set1f(a.scale[at + m]);
      part[m] = first ? value * scale : fma(value, scale, part[m]);
      if constexpr (S.minimum) {
        F mean = set1f(a.mean[at + m]);
        if constexpr (S.sub == Sub::ScaleMin) low[m] = first ? least * mean : fma(least, mean, low[m]);
        else low[m] = first ? mean : low[m] + mean;
      }
    }
    if (!last) return;
    F scale = load_half(unit);
    if constexpr (S.bits == 4 && S.zero == 8) scale = scale * set1f(1.0f / 16);
    for (int m = 0; m < M; ++m) acc[m] = fma(part[m], scale, acc[m]);
    if constexpr (S.minimum) {
      F minimum = load_half(unit + 32);
      for (int m = 0; m < M; ++m) acc[m] = fma(low[m], minimum, acc[m]);
    }
  };
  multiply(0, sums[0]);
  for (int g = 0; g < groups; g += kStage) {
    int stage = g / kStage % 2;
    if (g + kStage < groups) multiply(g + kStage, sums[1 - stage]);
    for (int i = 0; i < kStage && g + i < groups; ++i) fold(g + i, sums[stage] + i * per_group);
  }
  for (int m = 0; m < height && m < M; ++m) storef(y + m * ldy, acc[m]);
}

template <Format T> void amx_int(const Matrix& w, int p0, int p1, const Acts& a, int r0, int r1, float* y, size_t ldy) {
  constexpr IntShape S = int_shape(T);
  static thread_local AlignedBytes scratch;
  const int groups = w.units() * S.groups;
  uint8_t* bytes = scratch.get((size_t)groups * kGroupBytes);
  for (int p = p0; p < p1; ++p) {
    const uint8_t* panel = w.panel(p);
    for (int u = 0, g = 0; u < w.units(); ++u)
      for (int i = 0; i < S.groups; ++i, ++g) {
        const uint8_t* group = panel + (size_t)u * S.bytes() + S.head_bytes() + i * S.group_bytes();
        for (int line = 0; line < S.group_bytes(); line += 64) __builtin_prefetch(group + SLIP_PREFETCH + line);
        unpack_group<S>(group + S.sub_bytes(), bytes + (size_t)g * kGroupBytes);
      }
    for (int r = r0; r < r1; r += kTileRows) {
      int height = a.height(r), m = height <= 8 ? 8 : height <= 12 ? 12 : 16;
      configure(m, kHalves<S> ? 16 : 32, kHalves<S> ? 4 : 8);
      float* out = y + (size_t)r * ldy + p * kPanel;
      if (m == 8) tile_panel<S, 8>(panel, bytes, w.units(), a, r, out, ldy);
      else if (m == 12) tile_panel<S, 12>(panel, bytes, w.units(), a, r, out, ldy);
      else tile_panel<S, 16>(panel, bytes, w.units(), a, r, out, ldy);
    }
  }
  _tile_release();
}

// bfloat16: a tile product of 32 inputs is a chain of the even ones, one of the odd ones, and their sum.
void amx_bf16(const Matrix& w, int p0, int p1, const Acts& a, int r0, int r1, float* y, size_t ldy) {
  static thread_local AlignedBytes scratch;
  const int k = a.groups * kGroup;
  uint16_t* rows = (uint16_t*)scratch.get((size_t)kTileRows * k * 2);
  alignas(64) float sums[kTileRows * kPanel];
  for (int r = r0; r < r1; r += kTileRows) {
    int height = a.height(r);
    for (int m = 0; m < height; ++m)
      for (int i = 0; i < k; ++i) {
        uint32_t bits;
        memcpy(&bits, a.bf16 + (size_t)(r + m) * k + i, 4);
        rows[(size_t)m * k + i] = (uint16_t)(bits >> 16);
      }
    configure(height, 64, 16);
    for (int p = p0; p < p1; ++p) {
      _tile_zero(0);
      for (int u = 0; u < w.units(); ++u) {
        _tile_loadd(4, rows + (size_t)u * kGroup, k * 2);
        _tile_loadd(6, w.panel(p) + (size_t)u * unit_bytes(Format::BF16), 64);
        _tile_dpbf16ps(0, 4, 6);
      }
      _tile_stored(0, sums, 64);
      for (int m = 0; m < height; ++m) storef(y + (size_t)(r + m) * ldy + p * kPanel, loadf(sums + m * kPanel));
    }
  }
  _tile_release();
}

void linear_amx(const Matrix& w, int p0, int p1, const Acts& a, int r0, int r1, float* y, size_t ldy) {
  if (r1 - r0 < kAmxRows || p1 <= p0 || r0 % kTileRows) return SLIP_REST.linear(w, p0, p1, a, r0, r1, y, ldy);
  switch (w.format) {
#define CASE(T) case Format::T: return amx_int<Format::T>(w, p0, p1, a, r0, r1, y, ldy);
    CASE(I4S) CASE(I4S64) CASE(I4S128) CASE(I4M) CASE(I4M64) CASE(I4M128) CASE(I4K)
    CASE(I5S) CASE(I5M) CASE(I5K) CASE(I6K) CASE(I8)
#undef CASE
    case Format::BF16: return amx_bf16(w, p0, p1, a, r0, r1, y, ldy);
    default: return SLIP_REST.linear(w, p0, p1, a, r0, r1, y, ldy);
  }
}

double burn_amx(Arithmetic kind, long rounds) {
  if (kind == Arithmetic::F32) return SLIP_REST.burn(kind, rounds);
  alignas(64) static const uint8_t bytes[1024] = {};
  configure(16, 64, 16);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  _tile_loadd(4, bytes, 64);
  _tile_loadd(6, bytes, 64);
#define SLIP_BURN_TILES(multiply) \
  for (long i = 0; i < rounds; ++i) { \
    multiply(0, 4, 6); \
    multiply(1, 4, 6); \
    multiply(2, 4, 6); \
    multiply(3, 4, 6); \
  }
  if (kind == Arithmetic::Int8) {
    SLIP_BURN_TILES(_tile_dpbssd)
  } else {
    SLIP_BURN_TILES(_tile_dpbf16ps)
  }
#undef SLIP_BURN_TILES
  _tile_release();
  return rounds * 4.0 * 16 * 16 * (kind == Arithmetic::Int8 ? 64 : 32) * 2;
}

}  // namespace
