// Stored blocks to numbers and scales. Block layouts are facts of the GGUF format.
#include "stored.hpp"

#include <cmath>

namespace slip {
namespace {

uint16_t negated(uint16_t half) { return half ^ 0x8000; }

void k_sub_scales(const uint8_t* s, Unit& u) {
  for (int j = 0; j < 8; ++j) {
    u.sub[j][0] = j < 4 ? s[j] & 63 : (s[j + 4] & 15) | (s[j - 4] >> 6) << 4;
    u.sub[j][1] = j < 4 ? s[j + 4] & 63 : s[j + 4] >> 4 | (s[j] >> 6) << 4;
  }
}

void read_nibble_block(const uint8_t* nibbles, uint32_t high, Unit& u) {
  for (int i = 0; i < 16; ++i) {
    u.q[i] = (nibbles[i] & 15) | (high >> i & 1) << 4;
    u.q[i + 16] = nibbles[i] >> 4 | (high >> (i + 16) & 1) << 4;
  }
}

void read_k_nibbles(const uint8_t* nibbles, const uint8_t* high, Unit& u) {
  for (int j = 0; j < 4; ++j)
    for (int l = 0; l < 32; ++l) {
      int low = nibbles[j * 32 + l] & 15, top = nibbles[j * 32 + l] >> 4;
      if (high) {
        low |= (high[l] >> (2 * j) & 1) << 4;
        top |= (high[l] >> (2 * j + 1) & 1) << 4;
      }
      u.q[j * 64 + l] = low;
      u.q[j * 64 + 32 + l] = top;
    }
}

// The 16 scales of Q3_K: low nibbles, then pairs of high bits; stored with 32 added.
void q3_k_scales(const uint8_t* s, Unit& u) {
  for (int i = 0; i < 16; ++i) {
    int low = i < 8 ? s[i] & 15 : s[i - 8] >> 4, high = s[8 + i % 4] >> (i / 4 * 2) & 3;
    u.sub[i / 2][i % 2] = (uint8_t)(int8_t)((low | high << 4) - 32);
  }
}

// Numbers -4..3 fit the 6-bit format as they are, 32 added.
void read_q3_k(const uint8_t* b, Unit& u) {
  for (int n = 0; n < 2; ++n)
    for (int j = 0; j < 4; ++j)
      for (int l = 0; l < 32; ++l) {
        int low = b[32 + n * 32 + l] >> (2 * j) & 3, high = b[l] >> (4 * n + j) & 1;
        u.q[n * 128 + j * 32 + l] = low - (high ? 0 : 4) + 32;
      }
  q3_k_scales(b + 96, u);
  u.scale = read16(b + 108);
}

void read_q6_k(const uint8_t* b, Unit& u) {
  for (int n = 0; n < 2; ++n)
    for (int l = 0; l < 32; ++l) {
      const uint8_t *low = b + n * 64, *high = b + 128 + n * 32;
      int at = n * 128 + l;
      u.q[at] = (low[l] & 15) | (high[l] & 3) << 4;
      u.q[at + 32] = (low[l + 32] & 15) | (high[l] >> 2 & 3) << 4;
      u.q[at + 64] = low[l] >> 4 | (high[l] >> 4 & 3) << 4;
      u.q[at + 96] = low[l + 32] >> 4 | (high[l] >> 6) << 4;
    }
  for (int g = 0; g < 8; ++g) memcpy(u.sub[g], b + 192 + 2 * g, 2);
  u.scale = read16(b + 208);
}

// Twice the FP4 (E2M1) numbers; the block's scale is 2^(e - 128).
constexpr int8_t kFp4[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

constexpr int8_t kIq4[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

}  // namespace

void read_unit(Stored type, const uint8_t* row, int index, Unit& u) {
  switch (type) {
    case Stored::Q4_0: {
      const uint8_t* b = row + index * 18;
      u.scale = read16(b);
      return read_nibble_block(b + 2, 0, u);
    }
    case Stored::Q4_1: {
      const uint8_t* b = row + index * 20;
      u.scale = read16(b);
      u.minimum = read16(b + 2);
      return read_nibble_block(b + 4, 0, u);
    }
    case Stored::Q5_0:
    case Stored::Q5_1: {
      bool minimum = type == Stored::Q5_1;
      const uint8_t* b = row + index * (minimum ? 24 : 22);
      u.scale = read16(b);
      if (minimum) u.minimum = read16(b + 2);
      b += minimum ? 4 : 2;
      uint32_t high;
      memcpy(&high, b, 4);
      return read_nibble_block(b + 4, high, u);
    }
    case Stored::Q8_0: {
      const uint8_t* b = row + index * 34;
      u.scale = read16(b);
      for (int i = 0; i < 32; ++i) u.q[i] = (int8_t)b[2 + i];
      return;
    }
    case Stored::IQ4_NL: {
      const uint8_t* b = row + index * 18;
      u.scale = read16(b);
      read_nibble_block(b + 2, 0, u);
      for (int i = 0; i < 32; ++i) u.q[i] = kIq4[u.q[i]];
      return;
    }
    case Stored::MXFP4: {
      const uint8_t* b = row + index * 17;
      u.scale = float_to_half(std::ldexp(1.0f, b[0] - 128));  // outside float16's range: 0 or infinity
      read_nibble_block(b + 1, 0, u);
      for (int i = 0; i < 32; ++i) u.q[i] = kFp4[u.q[i]];
      return;
    }
    case Stored::Q3_K: return read_q3_k(row + index * 110, u);
    case Stored::Q4_K:
    case Stored::Q5_K: {
      bool five = type == Stored::Q5_K;
      const uint8_t* b = row + index * (five ? 176 : 144);
      u.scale = read16(b);
      u.minimum = negated(read16(b + 2));  // stored blocks subtract it, the kernels add
      k_sub_scales(b + 4, u);
      return read_k_nibbles(b + (five ? 48 : 16), five ? b + 16 : nullptr, u);
    }
    default: return read_q6_k(row + index * 210, u);
  }
}

}  // namespace slip
