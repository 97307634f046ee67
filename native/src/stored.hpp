// Stored blocks, read one superblock of one row at a time.
#pragma once
#include <cstring>

#include "pack.hpp"

namespace slip {

// One lane's superblock: up to 256 numbers with their scales.
struct Unit {
  int q[256];
  uint16_t scale, minimum;  // half floats
  uint8_t sub[8][2];        // per group: (scale, minimum) or the scales of its halves
};

inline uint16_t read16(const uint8_t* p) {
  uint16_t v;
  memcpy(&v, p, 2);
  return v;
}

// Superblock number `index` of a stored row of an integer type.
void read_unit(Stored type, const uint8_t* row, int index, Unit& u);

}  // namespace slip
