// Elementary functions on vectors: the same operations, so the same bits, on every instruction set.
namespace {

// exp(x), relative error below 2^-22; x under -87 gives 0, over 88 is clamped.
inline F vexp(F x) {
  F floor = set1f(-87.0f);
  F c = minf(maxf(x, floor), set1f(88.0f));
  I n = to_int(c * set1f(1.44269504f));
  F nf = to_float(n);
  F r = fma(nf, set1f(-0.693145752f), c);
  r = fma(nf, set1f(-1.42860677e-6f), r);
  F p = set1f(1.98756912e-4f);
  p = fma(p, r, set1f(1.39819995e-3f));
  p = fma(p, r, set1f(8.33345205e-3f));
  p = fma(p, r, set1f(4.16657962e-2f));
  p = fma(p, r, set1f(1.66666657e-1f));
  p = fma(p, r, set1f(0.5f));
  p = fma(p, r * r, r + set1f(1.0f));
  F scaled = p * as_float(shl<23>(n + set1i(127)));
  return less(x, floor, set1f(0.0f), scaled);
}

// log(x) for positive normal x.
inline F vlog(F x) {
  I bits = as_int(x);
  I e = shr<23>(bits) - set1i(126);
  F m = as_float((bits & set1i(0x007FFFFF)) | set1i(0x3F000000));  // [0.5, 1)
  F small = set1f(0.707106781f);
  F ef = to_float(e) - less(m, small, set1f(1.0f), set1f(0.0f));
  m = less(m, small, m + m, m) - set1f(1.0f);
  F z = m * m;
  F p = set1f(7.03768358e-2f);
  p = fma(p, m, set1f(-1.15146101e-1f));
  p = fma(p, m, set1f(1.16769984e-1f));
  p = fma(p, m, set1f(-1.24201402e-1f));
  p = fma(p, m, set1f(1.42493233e-1f));
  p = fma(p, m, set1f(-1.66680574e-1f));
  p = fma(p, m, set1f(2.00007141e-1f));
  p = fma(p, m, set1f(-2.49999940e-1f));
  p = fma(p, m, set1f(3.33333313e-1f));
  p = p * m * z;
  p = fma(ef, set1f(-2.12194440e-4f), p);
  p = fma(z, set1f(-0.5f), p);
  return fma(ef, set1f(0.693359375f), m + p);
}

inline F vtanh(F x) {
  F t = vexp(x + x);
  return set1f(1.0f) - set1f(2.0f) / (t + set1f(1.0f));
}

inline F vsilu(F x) { return x / (set1f(1.0f) + vexp(set1f(0.0f) - x)); }

inline F vgelu(F x) {
  F inner = set1f(0.797884561f) * fma(set1f(0.044715f) * x * x, x, x);
  return set1f(0.5f) * x * (set1f(1.0f) + vtanh(inner));
}

// x rounded to bfloat16, ties to even, kept as float.
inline F vround_bf16(F x) {
  I bits = as_int(x);
  I odd = shr<16>(bits) & set1i(1);
  return as_float((bits + set1i(0x7FFF) + odd) & set1i((int32_t)0xFFFF0000));
}

// Pairs of bfloat16 in 32 bits: the first and the second as floats.
inline F first_of(I pair) { return as_float(shl<16>(pair)); }
inline F second_of(I pair) { return as_float(pair & set1i((int32_t)0xFFFF0000)); }

// Sum of 16 lanes in one fixed tree.
struct Sum16 {
  F v[kPanel / W];
  Sum16() { for (F& x : v) x = set1f(0.0f); }
  float total() const {
    alignas(64) float s[kPanel];
    for (int i = 0; i < kPanel / W; ++i) storef(s + i * W, v[i]);
    for (int step = 8; step; step /= 2)
      for (int i = 0; i < step; ++i) s[i] += s[i + step];
    return s[0];
  }
};

}  // namespace
