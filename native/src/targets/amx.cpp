// Matrix products for AMX (int8 and bfloat16 tiles); everything else is AVX-512's.
#include <cstdlib>

#include "../kernels.hpp"
using namespace slip;
#define SLIP_PREFETCH 4608
#ifdef SLIP_EMULATE
#include "../vec/emulated.hpp"
#endif
#include "../vec/avx512.hpp"
#ifdef SLIP_EMULATE
#define SLIP_REST kAvx512EmulatedKernels
#define SLIP_TABLE kAmxEmulatedKernels
#define SLIP_NAME "amx-emulated"
#else
#define SLIP_REST kAvx512Kernels
#define SLIP_TABLE kAmxKernels
#define SLIP_NAME "amx"
#endif
#include "../kernels/quads_avx512.inl"
#include "../kernels/linear_amx.inl"

namespace slip {
const TileKernels SLIP_TABLE = {SLIP_NAME, ::linear_amx, ::burn_amx};
}  // namespace slip
