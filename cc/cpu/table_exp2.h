// An exponential for loops that share the vector unit with tile instructions.
#pragma once

#include "cpu/vec.h"

namespace jattn::cpu {
namespace {

// 2^(i / 32).
alignas(64) constexpr float kPowersOfTwo[32] = {
    1.0f,        1.02189715f, 1.04427378f, 1.0671404f,  1.09050773f, 1.11438674f, 1.13878863f, 1.16372486f,
    1.18920712f, 1.21524736f, 1.24185781f, 1.26905096f, 1.29683955f, 1.32523664f, 1.35425555f, 1.38390988f,
    1.41421356f, 1.44518081f, 1.47682615f, 1.50916443f, 1.54221083f, 1.57598085f, 1.61049033f, 1.64575548f,
    1.68179283f, 1.7186193f,  1.75625216f, 1.79470908f, 1.83400809f, 1.87416763f, 1.91520656f, 1.95714412f};

// 2^x within 2 ulp (the fit's error is 5.3e-8): the nearest 32nd from a table, the rest from a parabola. 5 of its 9
// instructions need the port that tile instructions leave; exp2 takes 8 of 8. Infinity gives NaN.
class TableExp2 {
 public:
  TableExp2() : low_(load(kPowersOfTwo)), high_(load(kPowersOfTwo + kWidth<float>)) {}

  inline __attribute__((always_inline)) Vec<float> operator()(Vec<float> x) const {
    constexpr float kRoundTo32nds = 1.5f * (1 << 18);  // the low 5 bits of the sum number the table's entry
    constexpr float kLinear = 0.693157344f, kSquare = 0.240228855f;
    const Vec<float> shifted = x + kRoundTo32nds;
    const Vec<float> nearest = shifted - kRoundTo32nds;
    const Vec<float> rest = x - nearest;
    const auto power = reinterpret_cast<Vec<float>>(_mm512_permutex2var_ps(
        reinterpret_cast<__m512>(low_), reinterpret_cast<__m512i>(shifted), reinterpret_cast<__m512>(high_)));
    const Vec<float> mantissa = (kSquare * rest + kLinear) * (power * rest) + power;
    return _mm512_maskz_scalef_ps(kEveryLane, mantissa, nearest);
  }

 private:
  Vec<float> low_, high_;
};

}  // namespace
}  // namespace jattn::cpu
