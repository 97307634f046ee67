// Kernels for AVX-512 with VNNI.
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
#include "../kernels/quads_avx512.inl"
#include "../kernels/dots_avx512.inl"
#include "../kernels/linear.inl"
#include "../kernels/burn.inl"
#include "../kernels/attention.inl"
#include "../kernels/sample.inl"
#ifdef SLIP_EMULATE
#define SLIP_TABLE kAvx512EmulatedKernels
#define SLIP_NAME "avx512-emulated"
#else
#define SLIP_TABLE kAvx512Kernels
#define SLIP_NAME "avx512"
#endif
#include "../kernels/table.inl"
