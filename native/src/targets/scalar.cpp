// Kernels in plain C++, for any processor.
#include "../kernels.hpp"
using namespace slip;
#define SLIP_PREFETCH 0
#define SLIP_PREFETCH_ROWS 0
#define SLIP_ROWS 4
#define SLIP_ROWS_OF_TWO 0
#define SLIP_LEAST_OF_TWO 0
#include "../vec/scalar.hpp"
#include "../kernels/math.inl"
#include "../kernels/rows.inl"
#include "../kernels/dots_scalar.inl"
#include "../kernels/linear.inl"
#include "../kernels/burn.inl"
#include "../kernels/attention.inl"
#include "../kernels/sample.inl"
#define SLIP_TABLE kScalarKernels
#define SLIP_NAME "scalar"
#include "../kernels/table.inl"
