// Kernels for AVX2 with FMA and F16C.
#include "../kernels.hpp"
using namespace slip;
#define SLIP_PREFETCH 4096
#define SLIP_PREFETCH_ROWS 2
#define SLIP_ROWS 4
#define SLIP_ROWS_OF_TWO 0
#define SLIP_LEAST_OF_TWO 0
#include "../vec/avx2.hpp"
#include "../kernels/math.inl"
#include "../kernels/rows.inl"
#include "../kernels/dots_avx2.inl"
#include "../kernels/linear.inl"
#include "../kernels/burn.inl"
#include "../kernels/attention.inl"
#include "../kernels/sample.inl"
#define SLIP_TABLE kAvx2Kernels
#define SLIP_NAME "avx2"
#include "../kernels/table.inl"
