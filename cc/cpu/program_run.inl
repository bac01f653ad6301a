// The interpreter of score functions (program.h), of the instruction set of the file that includes this.
#pragma once

#include <cstring>

#include "cpu/plan.h"
#include "cpu/program_operations.inl"

namespace jattn::cpu {
namespace {

template <typename T>
inline void spread_lanes(const T* from, int64_t stride, int64_t rows, T* to) {
  for (int64_t row = 0; row < rows; ++row) memcpy(to + row * stride, from, static_cast<size_t>(stride) * sizeof(T));
}

// from[row] to all lanes of that row.
template <typename T>
inline void spread_rows(const T* from, int64_t stride, int64_t rows, T* to) {
  for (int64_t row = 0; row < rows; ++row) {
    const T value = from[row];
    for (int64_t i = 0; i < (stride & ~int64_t{15}); ++i) to[row * stride + i] = value;
  }
}

template <ProgramSet kSet>
class ProgramRun {
 public:
  ProgramRun(const Problem& problem, const ProgramTile& tile)
      : program_(*tile.program),
        tile_(tile),
        frame_{static_cast<char*>(tile.registers), program_.slot_bytes, 0, &problem, &program_} {}

  void run() {
    const int64_t rows_of_block = min_of(kProgramLanes / tile_.stride, tile_.rows);
    run_section(kUniform, max_of(rows_of_block * tile_.stride, kTile));
    if (tile_.sums == nullptr) load_argument(kHeadRegister, tile_.heads);
    load_argument(kQueryRegister, tile_.queries);
    load_argument(kKeyRegister, tile_.keys);
    run_section(kOfQuery, kTile);
    run_section(kOfKey, kTile);
    const auto& of_lanes = tile_.keys_in_lanes ? program_.key_spreads : program_.query_spreads;
    const auto& of_rows = tile_.keys_in_lanes ? program_.query_spreads : program_.key_spreads;
    spread(of_lanes, [&](auto* from, auto* to) { spread_lanes(from, tile_.stride, rows_of_block, to); });
    for (int64_t row = 0; row < tile_.rows; row += rows_of_block) {
      const int64_t rows = min_of(rows_of_block, tile_.rows - row);
      spread(of_rows, [&](auto* from, auto* to) { spread_rows(from + row, tile_.stride, rows, to); });
      const size_t unit = program_.is_double ? sizeof(double) : sizeof(float);
      const size_t bytes = static_cast<size_t>(rows * tile_.stride) * unit;
      char* const scores = static_cast<char*>(tile_.scores) + static_cast<size_t>(row * tile_.stride) * unit;
      memcpy(slot(kScoreRegister), scores, bytes);
      run_section(kOfPair, rows * tile_.stride);
      if (tile_.sums != nullptr) {
        program_.is_double ? add_gradients<double>(row, rows) : add_gradients<float>(row, rows);
        continue;
      }
      memcpy(scores, slot(program_.result), bytes);
      if (program_.slope >= 0 && tile_.slopes != nullptr) {
        char* const slopes = static_cast<char*>(tile_.slopes) + static_cast<size_t>(row * tile_.stride) * unit;
        memcpy(slopes, slot(program_.slope), bytes);
      }
    }
  }

 private:
  char* slot(int32_t number) const { return frame_.registers + number * frame_.slot_bytes; }

  void load_argument(int32_t number, const int32_t* from) const { memcpy(slot(number), from, kTile * sizeof(int32_t)); }

  void fill_argument(int32_t number, int32_t value) {
    int32_t* const to = lanes_of<int32_t>(frame_, number);
    for (int64_t i = 0; i < num_lanes(frame_); ++i) to[i] = value;
  }

  void run_section(ProgramSection section, int64_t lanes) {
    frame_.lanes = lanes;
    if (section == kUniform) {
      fill_argument(kBatchRegister, tile_.batch);
      if (tile_.sums != nullptr) fill_argument(kHeadRegister, tile_.heads[0]);
    }
    const List<Instruction>& instructions = program_.sections[section];
    for (int64_t i = 0; i < instructions.count; ++i) instructions.items[i].run[kSet](frame_, instructions.items[i]);
  }

  // Of a block of rows.
  template <typename Acc>
  void add_gradients(int64_t first_row, int64_t rows) const {
    const int32_t last = last_place<int32_t>(tile_.num_sums);
    for (int64_t i = 0; i < program_.reads.count; ++i) {
      const CaptureRead& read = program_.reads.items[i];
      const int32_t* const places = lanes_of<int32_t>(frame_, read.place);
      const Acc* const derivatives = lanes_of<Acc>(frame_, read.derivative);
      double of_key[kTile] = {};  // what all rows add to one place, where that depends on no query
      for (int64_t row = 0; row < rows; ++row) {
        double summands[kTile];
        const Acc* const ds = static_cast<const Acc*>(tile_.ds) + (first_row + row) * tile_.stride;
        multiply(ds, derivatives + row * tile_.stride, summands);
        if (read.section == kOfPair) {
          const int32_t* const of_row = places + row * tile_.stride;
          for (int64_t lane = 0; lane < tile_.lanes; ++lane) tile_.sums[held(of_row[lane], last)] += summands[lane];
        } else if (read.section == kOfQuery) {
          tile_.sums[held(places[first_row + row], last)] += sum_of_lanes(summands);
        } else {
          for (int64_t lane = 0; lane < kTile; ++lane) of_key[lane] += summands[lane];
        }
      }
      if (read.section == kOfKey) {
        for (int64_t lane = 0; lane < tile_.lanes; ++lane) tile_.sums[held(places[lane], last)] += of_key[lane];
      } else if (read.section == kUniform) {
        tile_.sums[held(places[0], last)] += sum_of_lanes(of_key);
      }
    }
  }

  // Of one row. A pair without weight adds nothing, whatever its derivative.
  template <typename Acc>
  void multiply(const Acc* ds, const Acc* derivatives, double (&summands)[kTile]) const {
    for (int64_t lane = 0; lane < kTile; ++lane) {
      const bool counts = lane < tile_.lanes && ds[lane] != 0;
      summands[lane] = counts ? static_cast<double>(ds[lane]) * static_cast<double>(derivatives[lane]) : 0.0;
    }
  }

  // In eight chains: compilers keep the order of a sum.
  static double sum_of_lanes(const double (&x)[kTile]) {
    constexpr int64_t kChains = 8;
    double chains[kChains] = {};
    for (int64_t first = 0; first < kTile; first += kChains) {
      for (int64_t i = 0; i < kChains; ++i) chains[i] += x[first + i];
    }
    double sum = 0;
    for (const double chain : chains) sum += chain;
    return sum;
  }

  template <typename Use>
  void spread(const List<Spread>& spreads, const Use& use) const {
    const auto use_as = [&]<typename T>(const Spread& spread, T*) {
      use(lanes_of<T>(frame_, spread.from), lanes_of<T>(frame_, spread.to));
    };
    for (int64_t i = 0; i < spreads.count; ++i) {
      const Spread& spread = spreads.items[i];
      switch (spread.lane_bytes) {
        case 1: use_as(spread, static_cast<int8_t*>(nullptr)); break;
        case 2: use_as(spread, static_cast<int16_t*>(nullptr)); break;
        case 4: use_as(spread, static_cast<int32_t*>(nullptr)); break;
        default: use_as(spread, static_cast<int64_t*>(nullptr)); break;
      }
    }
  }

  const Program& program_;
  const ProgramTile& tile_;
  Frame frame_;
};

}  // namespace
}  // namespace jattn::cpu
