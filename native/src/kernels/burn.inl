// Peak arithmetic: multiply-adds in registers and nothing else.
namespace {

double burn_floats(long rounds) {
  volatile float factor = 0.75f;  // unknown to the compiler, which would otherwise compute the loop itself
  F a = set1f(factor), b = set1f(factor), sums[12];
  for (F& sum : sums) sum = b;
  for (long i = 0; i < rounds; ++i) {
#pragma GCC unroll 12
    for (F& sum : sums) sum = fma(sum, a, b);
  }
  volatile float sink = 0;
  alignas(64) float lanes[W];
  for (F& sum : sums) {
    storef(lanes, sum);
    sink = sink + lanes[0];
  }
  return rounds * 12.0 * W * 2;
}

double burn(Arithmetic kind, long rounds) { return kind == Arithmetic::Int8 ? burn_int8(rounds) : burn_floats(rounds); }

}  // namespace
