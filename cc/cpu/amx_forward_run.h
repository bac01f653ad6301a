// The forward pass over a run of whole tiles of keys on the matrix unit, bfloat16 alone, where nothing but a band hides
// keys: the products of one part of the run overlap with the softmax of another.
//
// Facts that shaped it, measured on a Xeon of the fourth generation (docs/kernels/log-cpu.md):
// - A product and vector instructions run side by side, if no instruction in program order waits for the product. A
//   tile store does, so sums are stored one stripe late: two pairs of accumulators take turns.
// - While tile instructions are in flight, multiplications, maxima and conversions have one port of the vector unit
//   instead of two; additions, integers, logic and permutations keep theirs. Hence table_exp2.h.
// - A panel's output is 16 to 32 KiB: it is loaded and stored once for a run of up to kRunTiles tiles.
#pragma once

#include "cpu/amx_tiles.h"
#include "cpu/online_softmax.h"
#include "cpu/table_exp2.h"
#include "cpu/visibility.h"

namespace jattn::cpu {
namespace {

constexpr int64_t kRunTiles = 4;
constexpr int64_t kRunKeys = kRunTiles * kTile;
constexpr int64_t kHalfLanes = 32;   // queries of one stripe: a pair of tile registers
constexpr int64_t kRingStripes = 4;  // scores of a stripe are read two stripes later
constexpr int64_t kStripeFloats = kStripeRows * kHalfLanes;

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
    const auto within_run = [&](int64_t key) {
      return static_cast<int32_t>(min_of(max_of(key - first_key, 0), kRunKeys));
    };
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

  // Adds the run to the state and to `out`. Returns false, with what has been accumulated as it was but for a new
  // maximum, where a score is not finite or too large.
  bool attend() {
    stored_for_tiles();
    if (!find_first_maxima()) return false;
    if (!find_all_probabilities() && !(raise_maxima() && find_all_probabilities())) return false;
    for (int64_t lane = 0; lane < lanes(); lane += kWidth<float>) {
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

  int64_t lanes() const { return operands_.halves * kHalfLanes; }

  // What is subtracted from exponents; 0 for a lane that has seen nothing.
  Vec<float> shift_of(Vec<float> row_max) const {
    constexpr float kMinusInfinity = -__builtin_inff();
    return rounded(row_max == broadcast(kMinusInfinity) ? Vec<float>{} : row_max * log2_unit_);
  }

  // P of the whole run and its sums; false where a maximum will not do.
  bool find_all_probabilities() {
    for (int64_t lane = 0; lane < lanes(); lane += kWidth<float>) {
      const Vec<float> shift = shift_of(load(state_.row_max + lane));
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
    for (int64_t lane = 0; lane < lanes(); lane += kWidth<float>) {
      if (!all_of(load(sum_ + lane) <= kMostSum)) return false;
    }
    return true;
  }

  // Scores of one stripe, at the start of the ring.
  void score_alone(const Stripe& stripe) const {
    clear_stripe<false>();
    for (int64_t k = 0; k < operands_.row_len; k += kAmxInner) {
      multiply_stripe<false>(stripe.keys + k, operands_.row_len * 2, stripe.queries + k * kPanel, kPairBytes);
    }
    store_stripe<false>(operands_.ring, kHalfLanes * 4);
  }
  // The largest of them and of `most` that lanes [lane, lane + kWidth) see. NaN is never the largest.
  Vec<float> most_score(const Stripe& stripe, int64_t lane, Vec<float> most) const {
    for (int64_t i = 0; i < kStripeRows; ++i) {
      const auto score = reinterpret_cast<__m512>(load(operands_.ring + i * kHalfLanes + lane % kHalfLanes));
      most = _mm512_mask_max_ps(reinterpret_cast<__m512>(most), band_.sees(stripe.key + i, lane), score,
                                reinterpret_cast<__m512>(most));
    }
    return most;
  }

  // Maxima of all scores of the run where they exceed the present ones too far, and what has been accumulated rescaled.
  // False, with nothing changed, where one is infinite.
  bool raise_maxima() {
    constexpr float kInfinity = __builtin_inff();
    const float slack = kSlackLog2 / (log2_unit_ > 1e-30f ? log2_unit_ : 1e-30f);
    alignas(64) float most[kPanel], rescale[kPanel];
    memcpy(most, state_.row_max, sizeof(most));
    for (int64_t index = 0; index < num_stripes(); ++index) {
      const Stripe of = stripe(index);
      score_alone(of);
      for (int64_t lane = of.half * kHalfLanes; lane < (of.half + 1) * kHalfLanes; lane += kWidth<float>) {
        store(most + lane, most_score(of, lane, load(most + lane)));
      }
    }
    for (int64_t lane = 0; lane < lanes(); lane += kWidth<float>) {
      if (!all_of(load(most + lane) < broadcast(kInfinity))) return false;
    }
    for (int64_t lane = 0; lane < lanes(); lane += kWidth<float>) {
      const Vec<float> before = load(state_.row_max + lane), largest = load(most + lane);
      const Vec<float> row_max = largest > before + slack ? largest : before;
      const Vec<float> factor = exp2<float>(shift_of(before) - shift_of(row_max));
      store(rescale + lane, factor);
      store(state_.row_max + lane, row_max);
      store(state_.row_sum + lane, load(state_.row_sum + lane) * factor);
    }
    for (int64_t d = 0; d < operands_.row_len_v; ++d) {
      for (int64_t lane = 0; lane < lanes(); lane += kWidth<float>) {
        float* const at = operands_.out + d * kPanel + lane;
        store(at, load(at) * load(rescale + lane));
      }
    }
    stored_for_tiles();
    return true;
  }

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
        score_alone(first);
        for (const int64_t at : {lane, next_lane}) {
          const __mmask16 wanted = lacks(at);
          const Vec<float> most = most_score(first, at, broadcast(kMinusInfinity));
          _mm512_mask_storeu_ps(state_.row_max + at, wanted, reinterpret_cast<__m512>(most));
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
