// avx512.cpp with its instructions emulated on AVX2, for tests.
#define SLIP_EMULATE
#include "avx512.cpp"
