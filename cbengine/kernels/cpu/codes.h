// Finding the codes of weights that once were quantised.
#pragma once

#include <cmath>
#include <cstdint>

namespace cb {

// Scale and offset of a group of weights, such that every weight is offset + scale * code.
struct Coding {
  float scale, offset;
};

// The coding of `count` weights by whole numbers from 0 to `most`; false if there is none that gives them back bit by bit.
// `codes`: where they go.
bool find_coding(const float* weights, int count, int most, Coding* coding, uint8_t* codes);

}  // namespace cb
