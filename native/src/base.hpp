// Names and constants that every part of the native core shares.
#pragma once
#include <cstddef>
#include <cstdint>

namespace slip {

constexpr int kPanel = 16;       // output rows in a panel of packed weights
constexpr int kGroup = 32;       // inputs that share one activation scale
constexpr int kTileRows = 16;    // rows of activations packed together
constexpr int kBlock = 32;       // KV slots in a cache block
constexpr int kSplit = 256;      // positions whose softmax is computed as one part
constexpr int kMaxHeadDim = 512;

constexpr int round_up(int n, int m) { return (n + m - 1) / m * m; }

}  // namespace slip
