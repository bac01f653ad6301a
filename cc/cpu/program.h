// Score functions on CPUs: programs that an interpreter runs over tiles of scores (program_run.inl).
// jattn/cpu_program.py writes them as text.
//
// Registers are vectors of kProgramLanes numbers. A program has four sections, by what its numbers depend on, so that
// nothing is computed for every pair that is the same for many:
//   U  the same in a whole tile: constants, and what depends on the batch entry alone
//   Q  of a query and its head     K  of a key     P  of a pair
// U and P fill all lanes, Q and K have a lane for each query or key of the tile; what P reads of them is spread over
// pairs first.
//
// Statements end in ';' and are words with a space between them:
//   score TYPE REGISTERS RESULT SLOPE    first; SLOPE is -1 where all slopes are 1
//   table BYTES NUMBER...                an array of constants, as the bits of their lanes
//   q BYTES TO FROM                      spreads a register of Q over pairs; k: of K
//   SECTION OPERATION TO FROM... NUMBER...
//   gradient SECTION PLACE DERIVATIVE    of an element that a pair reads: its place among all elements whose gradients
//                                        are wanted, an int32 of that section, and the derivative of the score, of a
//                                        pair
// Registers 0 to 4 are the arguments: score, batch, head, query, key. Bools have lanes of 32 bits, 0 or 1; float16 and
// bfloat16 those of float, rounded.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/problem.h"

namespace jattn::cpu {

inline constexpr int64_t kProgramLanes = 256;

// Instruction sets that have an interpreter of their own.
#if defined(__x86_64__)
inline constexpr int kNumProgramSets = 3;
#else
inline constexpr int kNumProgramSets = 1;
#endif
enum ProgramSet : int { kProgramBaseline, kProgramAvx2, kProgramAvx512 };

enum ProgramArgument : int32_t { kScoreRegister, kBatchRegister, kHeadRegister, kQueryRegister, kKeyRegister };
enum ProgramSection : int { kUniform, kOfQuery, kOfKey, kOfPair };

struct Program;
struct Instruction;

// What instructions work on.
struct Frame {
  char* registers;  // 64-byte aligned
  int64_t slot_bytes;
  int64_t lanes;  // a multiple of 16
  const Problem* problem;
  const Program* program;
};

using InstructionKernel = void (*)(const Frame&, const Instruction&);

struct Instruction {
  InstructionKernel run[kNumProgramSets];
  int32_t to, from[3];
  int64_t numbers[2];
};

// An operation that programs may name: name.type.second_type, as many of these words as are not empty.
struct ProgramOperation {
  const char *name, *type, *second_type;
  InstructionKernel run;
  int num_operands, num_numbers;
  int lane_bytes;  // of the largest register that it touches
};

// Of one instruction set; all have the same. Ends in a group of none.
struct OperationGroup {
  const ProgramOperation* operations;
  int64_t count;
};

// Plain data, as all that files of several instruction sets include (plan.h).
struct Spread {
  int32_t to, from, lane_bytes;
};
template <typename T>
struct List {
  const T* items;
  int64_t count;
};
// An element that a pair reads, and whose gradient is wanted.
struct CaptureRead {
  int32_t section;  // of its place
  int32_t place, derivative;
};
struct Program {
  bool is_double;  // the score, the result, the slope and derivatives
  int32_t num_registers, result, slope;
  int32_t num_captures;  // the last one it reads, and one more
  int64_t slot_bytes, registers_bytes;
  List<Instruction> sections[4];
  List<Spread> query_spreads, key_spreads;
  List<List<int64_t>> tables;
  List<CaptureRead> reads;
};

// One tile of scores in natural units, which become the new ones; or, with `sums`, for whose pairs all reads of the
// program are added up.
struct ProgramTile {
  const Program* program;
  void* scores;          // [rows][stride], float or double
  void* slopes;          // likewise, or null
  int64_t rows, stride;  // stride: a multiple of 16, at most kTile
  bool keys_in_lanes;    // else queries
  int32_t batch;
  const int32_t* heads;    // [kTile], of the queries
  const int32_t* queries;  // [kTile], as the program gets them
  const int32_t* keys;     // [kTile], likewise
  void* registers;         // Program::registers_bytes, 64-byte aligned
  // Only with kTile keys in the lanes and queries of one head, which is then of section U: ds * derivative is added to
  // sums[place] for each read of a pair of the first `lanes` lanes whose ds is not 0. Places are held to the ends of
  // the sums.
  const void* ds = nullptr;  // [rows][stride], float or double: gradients of the new scores
  int64_t lanes = 0;
  double* sums = nullptr;  // [num_sums], one at least
  int64_t num_sums = 0;
};

using ProgramKernel = void (*)(const Problem&, const ProgramTile&);
void run_program_baseline(const Problem& problem, const ProgramTile& tile);
extern const OperationGroup* const kBaselineOperations;
#if defined(__x86_64__)
void run_program_avx2(const Problem& problem, const ProgramTile& tile);
void run_program_avx512(const Problem& problem, const ProgramTile& tile);
extern const OperationGroup* const kAvx2Operations;
extern const OperationGroup* const kAvx512Operations;
#endif

// The operations that there are, as programs name them.
std::vector<std::string> program_operations();

// Reads a program, the first time. A text may come from somebody else: whatever it says, nothing outside of registers
// and captures is touched. From any thread; what it returns stays.
// Raises Error (caller): it is no program.
const Program& find_program(std::string_view text);

// Raises Error (caller): the captures of the problem are not those that the program reads.
void check_captures(const Problem& problem, const Program& program);

}  // namespace jattn::cpu
