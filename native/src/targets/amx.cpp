// Kernels for AMX (int8 and bfloat16 tiles), with AVX-512 for everything else.
#include <cstdlib>

#include "../kernels.hpp"
using namespace slip;
#define SLIP_PREFETCH 4608
#define SLIP_PREFETCH_ROWS 8
#define SLIP_ROWS 8
#define SLIP_ROWS_OF_TWO 4
#define SLIP_LEAST_OF_TWO 24
#ifdef SLIP_EMULATE
#include "../vec/emulated.hpp"
#endif
#include "../vec/avx512.hpp"
#include "../kernels/math.inl"
#include "../kernels/rows.inl"
#include "../kernels/dots_avx512.inl"
#include "../kernels/linear.inl"
#include "../kernels/burn.inl"
#include "../kernels/linear_amx.inl"
#include "../kernels/attention.inl"
#include "../kernels/sample.inl"
#define SLIP_LINEAR ::linear_amx
#define SLIP_BURN ::burn_amx
#ifdef SLIP_EMULATE
#define SLIP_TABLE kAmxEmulatedKernels
#define SLIP_NAME "amx-emulated"
#else
#define SLIP_TABLE kAmxKernels
#define SLIP_NAME "amx"
#endif
#include "../kernels/table.inl"
