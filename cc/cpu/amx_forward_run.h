// The forward pass over a run of whole tiles of keys on the matrix unit, bfloat16 alone, where nothing but a band hides
// keys: the products of one part of the run overlap with the softmax of another.
//
// Facts that shaped it, measured on a Xeon of the fourth generation (docs/design/0006-cpu-kernel.md has the numbers):
// - A product and vector instructions run side by side, if no instruction in program order waits for the product. A tile
//   store does, so sums are stored one stripe late: two pairs of accumulators take turns.
// - While tile instructions are in flight, multiplications, maxima and conversions have one port of the vector unit
//   instead of two; additions, integers, logic and permutations keep theirs. Hence the exponential of this file.
// - A panel's output is 16 to 32 KiB: it is loaded and stored once for a run of up to kRunTiles tiles.
#pragma once

#include "cpu/amx_tiles.h"
#include "cpu/online_softmax.h"
#include "cpu/visibility.h"

namespace jattn::cpu {
namespace {

constexpr int64_t kRunTiles = 4;
constexpr int64_t kRunKeys = kRunTiles * kTile;
constexpr int64_t kHalfLanes = 32;    // queries of one stripe: a pair of tile registers
constexpr int64_t kStripeRows = 16;   // keys, or elements of the values, of one stripe
constexpr int64_t kRingStripes = 4;   // scores of a stripe are read two stripes later
constexpr int64_t kStripeFloats = kStripeRows * kHalfLanes;

// 2^(i / 32).
alignas(64) constexpr float kPowersOfTwo[32] = {
    1.0f,         1.02189715f,  1.04427378f, 1.0671404f,  1.09050773f, 1.11438674f, 1.13878863f, 1.16372486f,
    1.18920712f,  1.21524736f,  1.24185781f, 1.26905096f, 1.29683955f, 1.32523664f, 1.35425555f, 1.38390988f,
    1.41421356f,  1.44518081f,  1.47682615f, 1.50916443f, 1.54221083f, 1.57598085f, 1.61049033f, 1.64575548f,
    1.68179283f,  1.7186193f,   1.75625216f, 1.79470908f, 1.83400809f, 1.87416763f, 1.91520656f, 1.95714412f};

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
    const auto power = reinterpret_cast<Vec<float>>(
        _mm512_permutex2var_ps(reinterpret_cast<__m512>(low_), reinterpret_cast<__m512i>(shifted),
                               reinterpret_cast<__m512>(high_)));
    const Vec<float> mantissa = (kSquare * rest + kLinear) * (power * rest) + power;
    return _mm512_maskz_scalef_ps(kEveryLane, mantissa, nearest);
  }

 private:
  Vec<float> low_, high_;
};

// One step over the inner dimension of a stripe: a pair of sums += one left tile * two right tiles.
template <bool kSecondPair>
inline __attribute__((always_inline)) void multiply_stripe(const BFloat16* left, int64_t left_stride_bytes,
                                                           const BFloat16* right, int64_t right_stride_bytes) {
  _tile_loadd(4, left, left_stride_bytes);
  _tile_loadd(5, right, right_stride_bytes);
  if constexpr (kSecondPair) {
    _tile_dpbf16ps(2, 4, 5);
  } else {
    _tile_dpbf16ps(0, 4, 5);
  }
  _tile_loadd(6, right + kAmxInner, right_stride_bytes);
  if constexpr (kSecondPair) {
    _tile_dpbf16ps(3, 4, 6);
  } else {
    _tile_dpbf16ps(1, 4, 6);
  }
}

template <bool kSecondPair>
inline __attribute__((always_inline)) void clear_stripe() {
  if constexpr (kSecondPair) {
    _tile_zero(2);
    _tile_zero(3);
  } else {
    _tile_zero(0);
    _tile_zero(1);
  }
}

template <bool kSecondPair>
inline __attribute__((always_inline)) void load_stripe(const float* from, int64_t stride_bytes) {
  if constexpr (kSecondPair) {
    _tile_loadd(2, from, stride_bytes);
    _tile_loadd(3, from + kAmxRows, stride_bytes);
  } else {
    _tile_loadd(0, from, stride_bytes);
    _tile_loadd(1, from + kAmxRows, stride_bytes);
  }
}

template <bool kSecondPair>
inline __attribute__((always_inline)) void store_stripe(float* to, int64_t stride_bytes) {
  if constexpr (kSecondPair) {
    _tile_stored(2, to, stride_bytes);
    _tile_stored(3, to + kAmxRows, stride_bytes);
  } else {
    _tile_stored(0, to, stride_bytes);
    _tile_stored(1, to + kAmxRows, stride_bytes);
  }
}

// GCC's tile loads do not say that they read memory: everything stored so far must be there before them.
inline void stored_for_tiles() { asm volatile("" ::: "memory"); }

// The keys that each lane of a panel sees of a run, counted from its first: [first, end).
template <int64_t kPanel>
struct RunBand {
  alignas(64) int32_t first[kPanel], end[kPanel];

  struct Bounds {
    int64_t most_first = 0, least_end = kRunKeys;
    bool hides(int64_t key) const { return key < most_first || key + kStripeRows > least_end; }
  };
  Bounds of_half[kPanel / kHalfLanes];

  RunBand(const QueryRows& rows, int64_t first_key, int64_t key_end) {
    const auto within_run = [&](int64_t key) { return static_cast<int32_t>(min_of(max_of(key - first_key, 0), kRunKeys)); };
    const int32_t run_end = within_run(key_end);
    for (int64_t lane = 0; lane < kPanel; ++lane) {
      first[lane] = 0;
      end[lane] = run_end;
    }
    for (Bounds& bounds : of_half) bounds.least_end = run_end;
    if (rows.most_first <= first_key && rows.least_end >= key_end) return;
    for (int64_t lane = 0; lane < rows.count; ++lane) {
      first[lane] = within_run(rows.first_key[lane]);
      end[lane] = min_of(run_end, within_run(rows.end_key[lane]));
      Bounds& bounds = of_half[lane / kHalfLanes];
      bounds.most_first = max_of(bounds.most_first, first[lane]);
      bounds.least_end = min_of(bounds.least_end, end[lane]);
    }
  }

  // Of one key, for the lanes of one vector.
  __mmask16 sees(int64_t key, int64_t lane) const {
    const __m512i at = _mm512_set1_epi32(static_cast<int32_t>(key));
    return _mm512_cmple_epi32_mask(_mm512_load_si512(first + lane), at) &
           _mm512_cmpgt_epi32_mask(_mm512_load_si512(end + lane), at);
  }
};

// One panel's operands. Layouts are those of AmxForwardProducts; `halves` of 32 lanes each are worked on.
template <int64_t kPanel>
struct RunOperands {
  const BFloat16* q_pairs;  // [row_len / 2][kPanel][2]
  int64_t row_len, row_len_v, halves;
  const BFloat16 *keys[kRunTiles], *values[kRunTiles];  // [kTile][row_len], [row_len_v][kTile]
  int64_t tiles;
  float* ring;        // [kRingStripes][kStripeRows][kHalfLanes]
  BFloat16* p_pairs;  // [kRunKeys / 2][kPanel][2]
  float* out;         // [row_len_v][kPanel]
};

template <int64_t kPanel>
class ForwardRun {
 public:
  ForwardRun(const RunOperands<kPanel>& operands, const RunBand<kPanel>& band, float log2_unit,
             SoftmaxState<float, kPanel>& state)
      : operands_(operands), band_(band), log2_unit_(log2_unit), state_(state) {}

  // Adds the run to the state and to `out`. Returns false, with both as they were but for maxima of lanes that had
  // none, where a score exceeds the maximum too far or is not a number.
  bool attend() {
    stored_for_tiles();
    if (!find_first_maxima()) return false;
    for (int64_t lane = 0; lane < kPanel; lane += kWidth<float>) {
      const Vec<float> row_max = load(state_.row_max + lane);
      constexpr float kMinusInfinity = -__builtin_inff();
      const Vec<float> shift =
          rounded(row_max == broadcast(kMinusInfinity) ? Vec<float>{} : row_max * log2_unit_);
      if (!all_of(at_most(shift, -shift) > -kFusedLimit)) return false;
      store(shift_ + lane, shift);
      store(sum_ + lane, Vec<float>{});
    }
    switch (operands_.row_len / kAmxInner) {
      case 2: find_probabilities<2>(); break;
      case 4: find_probabilities<4>(); break;
      default: find_probabilities<0>(); break;
    }
    // As in continue_softmax; infinity and NaN are not below the limit.
    constexpr float kMostSum = kTile << kSlackLog2;
    const int64_t lanes = operands_.halves * kHalfLanes;
    for (int64_t lane = 0; lane < lanes; lane += kWidth<float>) {
      if (!all_of(load(sum_ + lane) <= kMostSum)) return false;
    }
    for (int64_t lane = 0; lane < lanes; lane += kWidth<float>) {
      store(state_.row_sum + lane, load(state_.row_sum + lane) + load(sum_ + lane));
    }
    add_values();
    return true;
  }

 private:
  static constexpr int64_t kPairBytes = kPanel * 4;  // a row of q_pairs, p_pairs and out

  // Stripes are numbered keys first: those of the same 16 keys follow each other.
  int64_t num_stripes() const { return operands_.tiles * (kTile / kStripeRows) * operands_.halves; }
  struct Stripe {
    int64_t key, half;  // its first key in the run
    const BFloat16 *keys, *queries;
  };
  Stripe stripe(int64_t index) const {
    const int64_t half = index % operands_.halves, key = index / operands_.halves * kStripeRows;
    return {key, half, operands_.keys[key / kTile] + key % kTile * operands_.row_len,
            operands_.q_pairs + half * 2 * kHalfLanes};
  }
  float* scores(int64_t index) const { return operands_.ring + index % kRingStripes * kStripeFloats; }

  // A lane that has no maximum yet takes that of the first 16 keys among which it sees any; sums tell whether it will
  // do. False if one of them is not finite.
  bool find_first_maxima() {
    constexpr float kMinusInfinity = -__builtin_inff();
    const auto lacks = [&](int64_t lane) {
      const auto first = _mm512_load_si512(band_.first + lane), end = _mm512_load_si512(band_.end + lane);
      return _mm512_cmplt_epi32_mask(first, end) &
             _mm512_cmpeq_ps_mask(reinterpret_cast<__m512>(load(state_.row_max + lane)),
                                  _mm512_set1_ps(kMinusInfinity));
    };
    for (int64_t half = 0; half < operands_.halves; ++half) {
      const int64_t lane = half * kHalfLanes, next_lane = lane + kWidth<float>;
      for (int64_t key = 0; (lacks(lane) | lacks(next_lane)) != 0; key += kStripeRows) {
        if (key >= operands_.tiles * kTile) return false;  // NaN
        const Stripe first = stripe(key / kStripeRows * operands_.halves + half);
        clear_stripe<false>();
        for (int64_t k = 0; k < operands_.row_len; k += kAmxInner) {
          multiply_stripe<false>(first.keys + k, operands_.row_len * 2, first.queries + k * kPanel, kPairBytes);
        }
        store_stripe<false>(operands_.ring, kHalfLanes * 4);
        for (int64_t v = 0; v < kHalfLanes; v += kWidth<float>) {
          const __mmask16 wanted = lacks(lane + v);
          Vec<float> maximum = broadcast(kMinusInfinity);
          for (int64_t i = 0; i < kStripeRows; ++i) {
            const auto score = reinterpret_cast<__m512>(load(operands_.ring + i * kHalfLanes + v));
            const __mmask16 sees = wanted & band_.sees(key + i, lane + v);
            maximum = _mm512_mask_max_ps(reinterpret_cast<__m512>(maximum), sees, score,
                                         reinterpret_cast<__m512>(maximum));
          }
          _mm512_mask_storeu_ps(state_.row_max + lane + v, wanted, reinterpret_cast<__m512>(maximum));
        }
      }
    }
    return true;
  }

  // The softmax of one stripe, in parts.
  class StripeSoftmax {
   public:
    StripeSoftmax(const ForwardRun& run, const TableExp2& exp2, const Stripe& stripe, const float* scores, float* sums)
        : run_(run),
          exp2_(exp2),
          scores_(scores),
          to_(run.operands_.p_pairs + stripe.key * kPanel + stripe.half * 2 * kHalfLanes),
          sums_(sums + stripe.half * kHalfLanes),
          key_(stripe.key),
          lane_(stripe.half * kHalfLanes) {
      for (int v = 0; v < 2; ++v) {
        shift_[v] = load(run.shift_ + lane_ + v * kWidth<float>);
        sum_[v] = load(sums_ + v * kWidth<float>);
      }
    }

    // The next two keys.
    template <bool kMasked>
    inline __attribute__((always_inline)) void advance() {
#pragma GCC unroll 2
      for (int v = 0; v < 2; ++v) {
        const int64_t at = v * kWidth<float>;
        Vec<float> even = exp2_(load(scores_ + at) * run_.log2_unit_ - shift_[v]);
        Vec<float> odd = exp2_(load(scores_ + kHalfLanes + at) * run_.log2_unit_ - shift_[v]);
        if constexpr (kMasked) {
          even = _mm512_maskz_mov_ps(run_.band_.sees(key_, lane_ + at), reinterpret_cast<__m512>(even));
          odd = _mm512_maskz_mov_ps(run_.band_.sees(key_ + 1, lane_ + at), reinterpret_cast<__m512>(odd));
        }
        sum_[v] += even + odd;
        store(reinterpret_cast<uint32_t*>(to_ + 2 * at), round_to_pairs(even, odd));
      }
      scores_ += 2 * kHalfLanes;
      to_ += 2 * kPanel;
      key_ += 2;
    }

    void finish() {
      for (int v = 0; v < 2; ++v) store(sums_ + v * kWidth<float>, sum_[v]);
    }

   private:
    const ForwardRun& run_;
    const TableExp2& exp2_;
    const float* scores_;
    BFloat16* to_;
    float* sums_;
    int64_t key_, lane_;
    Vec<float> shift_[2], sum_[2];
  };

  // The scores of stripe `index` and, between their tile instructions, the softmax of the stripe before the last.
  template <int kSteps, bool kSecondPair, bool kMasked>
  inline __attribute__((always_inline)) void stripe_step(const TableExp2& exp2, int64_t index) {
    constexpr int64_t kAdvances = kStripeRows / 2;
    const int64_t steps = kSteps > 0 ? kSteps : operands_.row_len / kAmxInner;
    const Stripe now = stripe(index);
    float* const before = scores(index - 1 + kRingStripes);
    StripeSoftmax softmax(*this, exp2, stripe(index - 2), scores(index - 2), sum_);
    clear_stripe<kSecondPair>();
    int64_t advanced = 0;
#pragma GCC unroll 4
    for (int64_t step = 0; step < steps; ++step) {
      multiply_stripe<kSecondPair>(now.keys + step * kAmxInner, operands_.row_len * 2,
                                   now.queries + step * kAmxInner * kPanel, kPairBytes);
#pragma GCC unroll 4
      for (; advanced < (step + 1) * kAdvances / steps; ++advanced) softmax.template advance<kMasked>();
      if (step == (steps > 1 ? 1 : 0)) store_stripe<!kSecondPair>(before, kHalfLanes * 4);
    }
    softmax.finish();
  }

  template <int kSteps>
  void first_stripe(int64_t index) {
    const int64_t steps = kSteps > 0 ? kSteps : operands_.row_len / kAmxInner;
    const Stripe now = stripe(index);
    const auto multiply = [&](auto second_pair) {
      clear_stripe<second_pair()>();
      for (int64_t step = 0; step < steps; ++step) {
        multiply_stripe<second_pair()>(now.keys + step * kAmxInner, operands_.row_len * 2,
                                       now.queries + step * kAmxInner * kPanel, kPairBytes);
      }
    };
    if (index % 2 == 0) {
      multiply(std::false_type());
    } else {
      multiply(std::true_type());
      store_stripe<false>(scores(index - 1), kHalfLanes * 4);
    }
  }

  bool is_masked(int64_t index) const {
    const Stripe of = stripe(index);
    return band_.of_half[of.half].hides(of.key);
  }

  // P of the whole run and its sums.
  template <int kSteps>
  void find_probabilities() {
    const TableExp2 exp2;
    const int64_t count = num_stripes();
    first_stripe<kSteps>(0);
    first_stripe<kSteps>(1);
    for (int64_t index = 2; index < count; index += 2) {
      if (is_masked(index - 2)) {
        stripe_step<kSteps, false, true>(exp2, index);
      } else {
        stripe_step<kSteps, false, false>(exp2, index);
      }
      if (is_masked(index - 1)) {
        stripe_step<kSteps, true, true>(exp2, index + 1);
      } else {
        stripe_step<kSteps, true, false>(exp2, index + 1);
      }
    }
    store_stripe<true>(scores(count - 1), kHalfLanes * 4);
    for (int64_t index = count - 2; index < count; ++index) {
      StripeSoftmax softmax(*this, exp2, stripe(index), scores(index), sum_);
      for (int64_t i = 0; i < kStripeRows; i += 2) softmax.template advance<true>();
      softmax.finish();
    }
  }

  // out[d * kPanel + lane] += sum over the keys of the run of v * p
  void add_values() const {
    stored_for_tiles();
    const int64_t count = operands_.row_len_v / kStripeRows * operands_.halves;
    float* before = nullptr;
    const auto add = [&](int64_t index, auto second_pair) {
      const int64_t half = index % operands_.halves, row = index / operands_.halves * kStripeRows;
      float* const out = operands_.out + row * kPanel + half * kHalfLanes;
      load_stripe<second_pair()>(out, kPairBytes);
      const BFloat16* p_pairs = operands_.p_pairs + half * 2 * kHalfLanes;
      for (int64_t tile = 0; tile < operands_.tiles; ++tile) {
        const BFloat16* values = operands_.values[tile] + row * kTile;
        multiply_stripe<second_pair()>(values, kTile * 2, p_pairs, kPairBytes);
        multiply_stripe<second_pair()>(values + kAmxInner, kTile * 2, p_pairs + kAmxInner * kPanel, kPairBytes);
        if (tile == 0 && before != nullptr) store_stripe<!second_pair()>(before, kPairBytes);
        p_pairs += kTile * kPanel;
      }
      before = out;
    };
    for (int64_t index = 0; index < count; index += 2) {
      add(index, std::false_type());
      add(index + 1, std::true_type());
    }
    store_stripe<true>(before, kPairBytes);
  }

  const RunOperands<kPanel>& operands_;
  const RunBand<kPanel>& band_;
  float log2_unit_;
  SoftmaxState<float, kPanel>& state_;
  alignas(64) float shift_[kPanel], sum_[kPanel];
};

}  // namespace
}  // namespace jattn::cpu
