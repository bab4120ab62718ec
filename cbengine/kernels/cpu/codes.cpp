#include "codes.h"

#include <algorithm>
#include <cstring>

namespace cb {

namespace {

// `x` with `bits` significant bits, rounded.
float round_to(double x, int bits) {
  int exponent;
  const double mantissa = std::frexp(x, &exponent);
  return (float)std::ldexp(std::nearbyint(std::ldexp(mantissa, bits)), exponent - bits);
}

// Whether offset + scale * code gives every weight, and which code. Scale times code has to be exact, so that it makes no
// difference whether the sum is one operation or two.
bool check(const float* weights, int count, int most, float scale, float offset, uint8_t* codes) {
  if (!(std::fabs(scale) > 0) || !std::isfinite(scale) || !std::isfinite(offset)) return false;
  for (int i = 0; i < count; ++i) {
    const double code = std::nearbyint(((double)weights[i] - offset) / scale);
    if (!(code >= 0 && code <= most)) return false;
    const float product = scale * (float)code;
    if ((double)product != (double)scale * code || product + offset != weights[i]) return false;
    codes[i] = (uint8_t)code;
  }
  return true;
}

class Search {
 public:
  Search(const float* weights, int count, int most, Coding* coding, uint8_t* codes)
      : weights(weights), count(count), most(most), coding(coding), codes(codes) {
    low = high = largest = weights[0];
    for (int i = 1; i < count; ++i) {
      low = std::min(low, weights[i]);
      high = std::max(high, weights[i]);
      if (std::fabs(weights[i]) > std::fabs(largest)) largest = weights[i];
    }
  }

  bool run() {
    if (low == high) {  // a single value: any scale will do
      *coding = Coding{0.0f, low};
      std::memset(codes, 0, count);
      return std::isfinite(low);
    }
    return centred() || spanned() || stepped();
  }

 private:
  const float* weights;
  const int count, most;
  Coding* coding;
  uint8_t* codes;
  float low, high, largest;

  bool take(float scale, float offset) {
    *coding = Coding{scale, offset};
    return check(weights, count, most, scale, offset, codes);
  }

  // Formats without an offset, whose largest weight has an extreme code: scale * (code - middle).
  bool centred() {
    const int middle = (most + 1) / 2;
    for (const double steps : {-(double)middle, middle - 1.0, 1.0 - middle, (double)middle}) {
      const float scale = round_to((double)largest / steps, 11);
      if (take(scale, -(float)middle * scale)) return true;
    }
    // The same with fewer codes than there is room for.
    for (int few = 32; few < most; few *= 2) {
      const float scale = round_to(-(double)largest / (few / 2), 18);
      if (take(scale, -(float)(few / 2) * scale)) return true;
    }
    return false;
  }

  // Formats whose smallest weight has code 0 and whose largest has the last one.
  bool spanned() {
    const double step = ((double)high - low) / most;
    const float scale = round_to(step, 11);
    const float ulp = std::ldexp(1.0f, std::ilogb(scale) - 10);
    return take(scale, low) || take(scale + ulp, low) || take(scale - ulp, low);
  }

  // Others: the scale divides every difference, and has few bits. Tried with the smallest difference as 1, 2, … scales.
  bool stepped() {
    float sorted[64];
    std::copy(weights, weights + count, sorted);
    std::sort(sorted, sorted + count);
    float least = high - low;
    for (int i = 1; i < count; ++i)
      if (sorted[i] > sorted[i - 1]) least = std::min(least, sorted[i] - sorted[i - 1]);
    for (int parts = 1; parts <= 16; ++parts) {
      const double guess = (double)least / parts, span = std::nearbyint(((double)high - low) / guess);
      if (span > most) break;
      const float scale = round_to(((double)high - low) / span, 18);
      if (!divides(scale)) continue;
      if (take(scale, low)) return true;
      for (int first = 0; first + span <= most; ++first)
        if (take(scale, round_to((double)low - (double)scale * first, 18))) return true;
    }
    return false;
  }

  // Whether all differences are whole numbers of scales, but for the rounding of the weights.
  bool divides(float scale) const {
    const double noise = 1.2e-7 * std::fabs(largest) / scale + 1e-4;
    for (int i = 0; i < count; ++i) {
      const double steps = ((double)weights[i] - low) / scale;
      if (std::fabs(steps - std::nearbyint(steps)) > 4 * noise) return false;
    }
    return true;
  }
};

}  // namespace

bool find_coding(const float* weights, int count, int most, Coding* coding, uint8_t* codes) {
  return Search(weights, count, most, coding, codes).run();
}

}  // namespace cb
