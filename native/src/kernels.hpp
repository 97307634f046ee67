// The table of kernels that an instruction set provides; one is chosen at run time.
#pragma once
#include "formats.hpp"

namespace slip {

// Rows of activations as the matrix kernels read them, `rows` rows of `groups` groups of 32 inputs.
// Tiles of up to 16 rows lie one after the other; inside a tile of h rows, everything is [group][h].
struct Acts {
  int rows, groups;
  int8_t* q;      // [32] per group and row: round(x / scale)
  float* scale;   // largest |x| of the group / 127
  float* mean;    // scale * sum of q: what a minimum is multiplied with
  int32_t* sum;   // sum of q
  int32_t* pair;  // sums of the first and the last 16 q, as two int16
  float* f32;     // [rows][groups * 32], as they are
  float* bf16;    // the same, rounded to bfloat16
  size_t tile(int row) const { return (size_t)(row / kTileRows) * kTileRows * groups; }
  int height(int row) const {
    int left = rows - row / kTileRows * kTileRows;
    return left < kTileRows ? left : kTileRows;
  }
};

// Kinds of arithmetic whose peak is measured; bf16 without tiles is done with float32 multiply-adds.
enum class Arithmetic : int { Int8, Bf16, F32 };

enum class Activation : int { Silu, GeluTanh };

// Geometry of one attention layer over its cache: where it lies in block 0, `stride` bytes from one block to the next.
// Inside, it is [heads][...]. A K block of a head is [k_pad / 2][32 positions][2], a V block [32 / 2][v_pad][2]; bfloat16 or int8.
struct KVLayer {
  uint8_t* k;
  uint8_t* v;
  uint8_t* k_scale;  // int8 only: [head][32] floats
  uint8_t* v_scale;
  size_t stride;
  int heads, k_dim, v_dim, k_pad, v_pad;
  bool int8;
  size_t element() const { return int8 ? 1 : 2; }
  size_t k_bytes() const { return (size_t)kBlock * k_pad * element(); }
  size_t v_bytes() const { return (size_t)kBlock * v_pad * element(); }
  uint8_t* k_block(int block, int head) const { return k + block * stride + head * k_bytes(); }
  uint8_t* v_block(int block, int head) const { return v + block * stride + head * v_bytes(); }
  float* k_scales(int block, int head) const { return (float*)(k_scale + block * stride) + head * kBlock; }
  float* v_scales(int block, int head) const { return (float*)(v_scale + block * stride) + head * kBlock; }
};

// One block of keys and values as attention reads it.
struct KVBlock {
  const uint8_t* k;
  const uint8_t* v;
  const float* k_scale;
  const float* v_scale;
};

// Queries of one key-value head that are attended together over one split of 256 positions.
struct SplitTask {
  const float* const* q;  // [queries] -> [k_pad], rounded to bfloat16
  int queries;
  const int* first;       // [queries] first and last position each one sees
  const int* last;
  int begin;              // first position of the split
  const KVBlock* blocks;  // [8] blocks of the split; only those up to the last position are read
  int k_pad, v_pad;
  bool int8;
  float scale, softcap;
  float* const* out;      // [queries] -> [v_pad] weighted sum of values, not normalised
  float* peak;            // [queries] largest score
  float* total;           // [queries] sum of weights
  const uint8_t* next[2]; // keys of the first blocks that are wanted after this split, to be fetched; null: none
};

struct Noise {
  uint64_t seed;
  uint32_t choice, position, stream;
};

struct Kernels {
  const char* name;
  // y[r * ldy + 16 p + lane] for panels [p0, p1) and rows [r0, r1).
  void (*linear)(const Matrix&, int p0, int p1, const Acts&, int r0, int r1, float* y, size_t ldy);
  // Fill the parts of `a` that are not null for row r from x [k]; inputs past k are zero.
  void (*prepare)(const float* x, int k, int r, const Acts& a);
  // Per head of `width`: out = x / sqrt(mean(x^2) + eps) * w.
  void (*rmsnorm)(const float* x, const float* w, float eps, int heads, int width, float* out);
  void (*add)(const float* a, const float* b, float* out, int n);
  void (*gated)(Activation, const float* gate, const float* up, float* out, int n);
  // Rotate the first 2 * half numbers of a head.
  void (*rope)(float* x, const float* cos, const float* sin, int half);
  void (*round_bf16)(const float* x, float* out, int n);
  void (*kv_write)(const KVLayer&, int slot, int head, const float* k, const float* v);
  void (*attend)(const SplitTask&);
  // Fold a split's (peak, total, out) into running ones; the first call of a row sees total == 0.
  void (*merge)(float* run_out, float* run_peak, float* run_total, const float* out, float peak, float total, int n);
  void (*scale)(float* x, float by, int n);
  void (*softcap)(float* x, float cap, int n);
  // Sampling. Largest of x[i] (+ Gumbel noise of token first + i), ties to the lower index.
  void (*argmax)(const float* x, int n, float* best, int* index);
  void (*argmax_noise)(const float* x, float inverse_temperature, int first, int n, const Noise&, float* best, int* index);
  // The Gumbel noise of tokens that need not be neighbours, as argmax_noise adds it.
  void (*token_noise)(const int32_t* tokens, int n, const Noise&, float* out);
  double (*sum_exp)(const float* x, float peak, int n);
  // Read n bytes (a multiple of 256) and fold them into one number: memory bandwidth and nothing else.
  uint32_t (*read)(const uint8_t* p, size_t n);
  // Multiply and add in registers `rounds` times; returns the operations done (a multiply-add is 2).
  double (*burn)(Arithmetic, long rounds);
};

// What AMX does in place of AVX-512, which does the rest.
struct TileKernels {
  const char* name;
  decltype(Kernels::linear) linear;
  decltype(Kernels::burn) burn;
};

// The kernels in use, chosen at load or by `select_kernels`; throws std::runtime_error if `name` is unknown or
// cannot run here.
const Kernels& kernels();
const Kernels& select_kernels(const char* name);
// Names of the instruction sets that can run here, best first.
const char* const* available_kernels(int* count);
// Names that can be selected for tests but are never chosen: other sets, emulated.
const char* const* emulated_kernels(int* count);

extern const Kernels kScalarKernels;
#if defined(__x86_64__)
extern const Kernels kAvx2Kernels;
extern const Kernels kAvx512Kernels;
extern const TileKernels kAmxKernels;
#if defined(SLIP_EMULATED)
extern const Kernels kAvx512EmulatedKernels;
extern const TileKernels kAmxEmulatedKernels;
#endif
#endif

}  // namespace slip
