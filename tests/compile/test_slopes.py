"""Slopes and row of the bias of the Hopper forward kernel, run on the host: every score of a warp gets its own term.

The unit is compiled by the host compiler; its threads are one after the other.
"""

import subprocess
from pathlib import Path

from test_document_tiles import SHIM
from toolchain import build_host_program

MORE_SHIM = """
#include "attn/dropout.cuh"

struct float4 { float x, y, z, w; };
namespace jattn {
struct QueryRowDrops {  // only device compilers are shown it
  struct TwoWords {
    PairWords words[2];
  };
  template <class A, class B> QueryRowDrops(const A&, const B&);
  TwoWords two(int) const;
  PairWords words(int) const;
};
}
inline bool __all_sync(unsigned, bool x) { return x; }
inline unsigned __float_as_uint(float x) { unsigned y; std::memcpy(&y, &x, 4); return y; }
inline int __float_as_int(float x) { int y; std::memcpy(&y, &x, 4); return y; }
inline int __vimax3_s32(int a, int b, int c) { return max(a, max(b, c)); }
inline unsigned __vimax3_u32(unsigned a, unsigned b, unsigned c) { return max(a, max(b, c)); }
inline unsigned __vimin3_u32(unsigned a, unsigned b, unsigned c) { return min(a, min(b, c)); }
inline float __fmul_rn(float a, float b) { return a * b; }
"""

MAIN = """
#include "sm90/score.cuh"

using namespace jattn;
using namespace jattn::sm90;

// The greatest error of a score over what rounding may do to it.
template <int kTileKv>
double error_of_warp(int q_begin, int warp_row, int kv_tile, bool lower_right, float slope) {
  constexpr Config kConfig{.tile_q = 128, .tile_kv = kTileKv, .alibi = true};
  static sm90::ForwardParams params{};
  static ForwardControl<kConfig> control{};
  params.problem.scale = 0.125f;
  params.problem.lower_right = lower_right;
  ItemRecord item{};
  item.q_begin = q_begin;
  item.q_length = 700;
  item.kv_length = 900;
  control.numbers[0].slope = slope;
  const int offset = lower_right ? 200 : 0;
  item.upper_offset = offset + 1;
  double worst = 0.0;
  for (int lane = 0; lane < 32; ++lane) {
    const FragmentPlace place{warp_row + lane / 4, lane % 4 * 2};
    const TileContext<kConfig> context{params, control, item, {kv_tile, 0}, 0, 0, place, q_begin + warp_row};
    float s[kTileKv / 2];
    for (int i = 0; i < kTileKv / 2; ++i) s[i] = float(i % 7 - 3) + 0.25f * float(lane);
    float before[kTileKv / 2];
    std::copy(std::begin(s), std::end(s), before);
    add_slopes<kConfig>(s, context);
    for (int i = 0; i < kTileKv / 2; ++i) {
      const int row = q_begin + place.row + i / 2 % 2 * 8;
      const int column = kv_tile * kTileKv + place.column + i / 4 * 8 + i % 2;
      const double product = 0.125 * before[i], term = double(slope) * std::abs(column - row - offset);
      // The distance of the thread's first key, which may be longer, is multiplied by the slope first.
      const double sizes = std::abs(product) + std::abs(term) + std::abs(double(slope)) * kTileKv;
      worst = std::max(worst, std::abs(double(s[i]) - (product - term)) / sizes);
    }
  }
  return worst * 16777216.0;
}

// What the softmax makes of a score whose term is the addend of the exponent, but for the power.
struct Exponents {
  template <class Add>
  void sum_tile(const Add& add) const {
    float sums[2];
    add(sums);
  }
  void merge(float& s, float term, float&) const { s += term; }
};

// Whether every score of a warp gets the number of its column, merged or added.
template <int kTileKv>
bool columns_are_right() {
  constexpr Config kConfig{.tile_q = 128, .tile_kv = kTileKv, .bias = true, .row_bias = true};
  static sm90::ForwardParams params{};
  static ForwardControl<kConfig> control{};
  params.problem.scale = 1.0f;
  for (int column = 0; column < kTileKv; ++column) {
    control.row_bias[1][place_in_row(column)] = float(column);
    control.row_bias[1][kTileKv + place_in_row(column)] = float(-column);
  }
  bool right = true;
  for (int lane = 0; lane < 32; ++lane) {
    const FragmentPlace place{lane / 4, lane % 4 * 2};
    const TileHeader header{0, 1 << kRowPlaceShift};
    const TileContext<kConfig> context{params, control, ItemRecord{}, header, 0, 0, place, 0};
    float added[kTileKv / 2]{}, merged[kTileKv / 2]{};
    Exponents exponents;
    add_terms<kConfig>(added, context, [](int) { return 0u; });
    merge_row_bias<kConfig>(merged, context, exponents);
    for (int i = 0; i < kTileKv / 2; ++i) {
      const float column = float(place.column + i / 4 * 8 + i % 2);
      right = right && added[i] == column && merged[i] == -column;
    }
  }
  return right;
}

int main() {
  const bool wide = columns_are_right<128>() && columns_are_right<96>();
  std::cout << (wide && columns_are_right<64>() && columns_are_right<32>()) << std::endl;
  for (int kv_tile = 0; kv_tile < 7; ++kv_tile) {
    for (int q_begin : {0, 128, 256, 384, 512}) {
      for (int warp_row = 0; warp_row < 128; warp_row += 16) {
        for (bool lower_right : {false, true}) {
          for (float slope : {0.7f, 0.00390625f, -0.3f}) {
            std::cout << error_of_warp<128>(q_begin, warp_row, kv_tile, lower_right, slope) << ' '
                      << error_of_warp<96>(q_begin, warp_row, kv_tile, lower_right, slope) << std::endl;
          }
        }
      }
    }
  }
}
"""


def test_every_score_has_its_distance_and_its_column(tmp_path: Path) -> None:
    program = build_host_program(SHIM + MORE_SHIM + MAIN, tmp_path, "-w")
    done = subprocess.run([program], capture_output=True, text=True, check=True)
    columns, *errors = done.stdout.split()
    assert columns == "1"
    assert len(errors) == 2 * 7 * 5 * 8 * 2 * 3
    # Units of 2^-24: three roundings of half a unit and one of the sum.
    assert max(map(float, errors)) < 2.0
