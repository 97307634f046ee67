// amx.cpp with its instructions emulated on AVX2, for tests.
#define SLIP_EMULATE
#include "amx.cpp"
