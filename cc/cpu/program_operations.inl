// What programs do to vectors of numbers: a loop for each operation and type, which the compiler makes vectors of.
// Mathematics as on GPUs (program_math.cuh).
#pragma once

#include "attn/program_math.cuh"
#include "cpu/program.h"
#include "cpu/vec.h"

namespace jattn::cpu {
namespace {

using Bool = int32_t;  // 0 or 1

template <typename T>
inline T* lanes_of(const Frame& frame, int32_t number) {
  return static_cast<T*>(__builtin_assume_aligned(frame.registers + number * frame.slot_bytes, 64));
}

// A multiple of 16, as the compiler shall know.
inline int64_t num_lanes(const Frame& frame) { return frame.lanes & ~int64_t{15}; }

template <auto kFunction, typename To, typename A>
void map_one(const Frame& frame, const Instruction& instruction) {
  To* __restrict to = lanes_of<To>(frame, instruction.to);
  const A* __restrict a = lanes_of<A>(frame, instruction.from[0]);
  for (int64_t i = 0; i < num_lanes(frame); ++i) to[i] = static_cast<To>(kFunction(a[i]));
}

template <auto kFunction, typename To, typename A, typename B>
void map_two(const Frame& frame, const Instruction& instruction) {
  To* __restrict to = lanes_of<To>(frame, instruction.to);
  const A* a = lanes_of<A>(frame, instruction.from[0]);
  const B* b = lanes_of<B>(frame, instruction.from[1]);
  for (int64_t i = 0; i < num_lanes(frame); ++i) to[i] = static_cast<To>(kFunction(a[i], b[i]));
}

template <auto kFunction, typename To, typename A, typename B, typename C>
void map_three(const Frame& frame, const Instruction& instruction) {
  To* __restrict to = lanes_of<To>(frame, instruction.to);
  const A* a = lanes_of<A>(frame, instruction.from[0]);
  const B* b = lanes_of<B>(frame, instruction.from[1]);
  const C* c = lanes_of<C>(frame, instruction.from[2]);
  for (int64_t i = 0; i < num_lanes(frame); ++i) to[i] = static_cast<To>(kFunction(a[i], b[i], c[i]));
}

template <typename T>
void fill(const Frame& frame, const Instruction& instruction) {
  T* __restrict to = lanes_of<T>(frame, instruction.to);
  const T value = static_cast<T>(instruction.numbers[0]);
  for (int64_t i = 0; i < num_lanes(frame); ++i) to[i] = value;
}

// Places outside of an array are held to its ends: the program holds them itself, but its text may come from anywhere.
// In the type of the index, so that more of them go into one instruction that gathers.
template <typename Index>
inline Index last_place(int64_t count) {
  return static_cast<Index>(min_of(count - 1, int64_t{program::kGreatest<Index>}));
}
template <typename Index>
inline Index held(Index index, Index last) {
  return index < 0 ? Index{0} : index < last ? index : last;
}

template <typename T>
void look_up(const Frame& frame, const Instruction& instruction) {
  const List<int64_t>& table = frame.program->tables.items[instruction.numbers[0]];
  T* __restrict to = lanes_of<T>(frame, instruction.to);
  const int32_t* index = lanes_of<int32_t>(frame, instruction.from[0]);
  const int32_t last = last_place<int32_t>(table.count);
  for (int64_t i = 0; i < num_lanes(frame); ++i) to[i] = static_cast<T>(table.items[held(index[i], last)]);
}

template <auto kConvert, typename To, typename Stored, typename Index>
void read_capture(const Frame& frame, const Instruction& instruction) {
  const size_t number = static_cast<size_t>(instruction.numbers[0]);
  const Stored* const elements = static_cast<const Stored*>(frame.problem->captures[number]);
  const int64_t count = frame.problem->capture_bytes[number] / static_cast<int64_t>(sizeof(Stored));
  To* __restrict to = lanes_of<To>(frame, instruction.to);
  const Index* index = lanes_of<Index>(frame, instruction.from[0]);
  if (count == 0) {
    for (int64_t i = 0; i < num_lanes(frame); ++i) to[i] = To{};
    return;
  }
  const Index last = last_place<Index>(count);
  for (int64_t i = 0; i < num_lanes(frame); ++i) to[i] = kConvert(elements[held(index[i], last)]);
}

void reduce_precision(const Frame& frame, const Instruction& instruction) {
  float* __restrict to = lanes_of<float>(frame, instruction.to);
  const float* a = lanes_of<float>(frame, instruction.from[0]);
  const int exponent_bits = static_cast<int>(instruction.numbers[0]);
  const int mantissa_bits = static_cast<int>(instruction.numbers[1]);
  for (int64_t i = 0; i < num_lanes(frame); ++i) to[i] = program::reduce_precision(a[i], exponent_bits, mantissa_bits);
}

template <typename T>
struct TypeName;
template <>
struct TypeName<int8_t> {
  static constexpr const char* kText = "int8";
};
template <>
struct TypeName<int16_t> {
  static constexpr const char* kText = "int16";
};
template <>
struct TypeName<int32_t> {
  static constexpr const char* kText = "int32";
};
template <>
struct TypeName<int64_t> {
  static constexpr const char* kText = "int64";
};
template <>
struct TypeName<uint8_t> {
  static constexpr const char* kText = "uint8";
};
template <>
struct TypeName<uint16_t> {
  static constexpr const char* kText = "uint16";
};
template <>
struct TypeName<uint32_t> {
  static constexpr const char* kText = "uint32";
};
template <>
struct TypeName<uint64_t> {
  static constexpr const char* kText = "uint64";
};
template <>
struct TypeName<float> {
  static constexpr const char* kText = "float32";
};
template <>
struct TypeName<double> {
  static constexpr const char* kText = "float64";
};

constexpr int larger(size_t a, size_t b) { return static_cast<int>(a > b ? a : b); }

template <auto kFunction, typename To, typename A>
constexpr ProgramOperation one(const char* name) {
  return {name, TypeName<A>::kText, "", map_one<kFunction, To, A>, 1, 0, larger(sizeof(To), sizeof(A))};
}
template <auto kFunction, typename To, typename A>
constexpr ProgramOperation two(const char* name) {
  return {name, TypeName<A>::kText, "", map_two<kFunction, To, A, A>, 2, 0, larger(sizeof(To), sizeof(A))};
}

// ---- All types ------------------------------------------------------------------------------------------------------

template <typename T>
constexpr ProgramOperation kComparisons[] = {
    two<[](T x, T y) { return x == y; }, Bool, T>("eq"),  two<[](T x, T y) { return x != y; }, Bool, T>("ne"),
    two<[](T x, T y) { return x < y; }, Bool, T>("lt"),   two<[](T x, T y) { return x <= y; }, Bool, T>("le"),
    two<[](T x, T y) { return (x > y); }, Bool, T>("gt"), two<[](T x, T y) { return (x >= y); }, Bool, T>("ge"),
};

// By the size of a lane, whatever it holds.
template <typename T, char kBytes>
struct OfSize {
  static constexpr char kText[] = {kBytes, 0};
  static constexpr ProgramOperation kOperations[] = {
      {"constant", kText, "", fill<T>, 0, 1, sizeof(T)},
      {"lookup", kText, "", look_up<T>, 1, 1, larger(sizeof(T), 4)},
      {"select", kText, "", map_three<[](Bool which, T x, T y) { return which != 0 ? y : x; }, T, Bool, T, T>, 3, 0,
       larger(sizeof(T), 4)},
      {"and", kText, "", map_two<[](T x, T y) { return x & y; }, T, T, T>, 2, 0, sizeof(T)},
      {"or", kText, "", map_two<[](T x, T y) { return x | y; }, T, T, T>, 2, 0, sizeof(T)},
      {"xor", kText, "", map_two<[](T x, T y) { return x ^ y; }, T, T, T>, 2, 0, sizeof(T)},
      {"not", kText, "", map_one<[](T x) { return ~x; }, T, T>, 1, 0, sizeof(T)},
  };
};

// ---- Conversions and reads ------------------------------------------------------------------------------------------

template <typename T>
inline constexpr bool kIsFloat = T(0.5) != T(0);

template <typename To, typename From>
inline To converted(From x) {
  if constexpr (kIsFloat<From> && !kIsFloat<To>) {
    return program::to_integer<To>(x);
  } else {
    return static_cast<To>(x);
  }
}

template <typename To, typename From>
constexpr ProgramOperation conversion() {
  return {"convert",
          TypeName<From>::kText,
          TypeName<To>::kText,
          map_one<[](From x) { return converted<To>(x); }, To, From>,
          1,
          0,
          larger(sizeof(To), sizeof(From))};
}

template <typename From>
constexpr ProgramOperation kConversions[] = {
    conversion<int8_t, From>(),
    conversion<int16_t, From>(),
    conversion<int32_t, From>(),
    conversion<int64_t, From>(),
    conversion<uint8_t, From>(),
    conversion<uint16_t, From>(),
    conversion<uint32_t, From>(),
    conversion<uint64_t, From>(),
    conversion<float, From>(),
    conversion<double, From>(),
    {"convert", TypeName<From>::kText, "bool", map_one<[](From x) { return x != 0; }, Bool, From>, 1, 0,
     larger(sizeof(From), 4)},
};

template <auto kConvert, typename To, typename Stored, typename Index>
constexpr ProgramOperation read_operation(const char* type) {
  return {"read", type, TypeName<Index>::kText,           read_capture<kConvert, To, Stored, Index>,
          1,      1,    larger(sizeof(To), sizeof(Index))};
}

template <typename Index>
struct Reads {
  template <typename T>
  static constexpr ProgramOperation plain() {
    return read_operation<[](T x) { return x; }, T, T, Index>(TypeName<T>::kText);
  }
  static constexpr ProgramOperation kOperations[] = {
      plain<int8_t>(),
      plain<int16_t>(),
      plain<int32_t>(),
      plain<int64_t>(),
      plain<uint8_t>(),
      plain<uint16_t>(),
      plain<uint32_t>(),
      plain<uint64_t>(),
      plain<float>(),
      plain<double>(),
      read_operation<[](uint8_t x) { return Bool{x != 0}; }, Bool, uint8_t, Index>("bool"),
      read_operation<[](uint16_t x) { return program::of_float16(x); }, float, uint16_t, Index>("float16"),
      read_operation<[](uint16_t x) { return program::float_of_bits(uint32_t{x} << 16); }, float, uint16_t, Index>(
          "bfloat16"),
  };
};

// ---- Integers -------------------------------------------------------------------------------------------------------

template <typename T>
constexpr ProgramOperation kIntegers[] = {
    two<[](T x, T y) { return program::add(x, y); }, T, T>("add"),
    two<[](T x, T y) { return program::subtract(x, y); }, T, T>("sub"),
    two<[](T x, T y) { return program::multiply(x, y); }, T, T>("mul"),
    two<[](T x, T y) { return program::quotient(x, y); }, T, T>("quotient"),
    two<[](T x, T y) { return program::remainder(x, y); }, T, T>("remainder"),
    two<[](T x, T y) { return program::max(x, y); }, T, T>("max"),
    two<[](T x, T y) { return program::min(x, y); }, T, T>("min"),
    two<[](T x, T y) { return program::shift_left(x, y); }, T, T>("shift_left"),
    two<[](T x, T y) { return program::shift_right_logical(x, y); }, T, T>("shift_right_logical"),
    two<[](T x, T y) { return program::shift_right_arithmetic(x, y); }, T, T>("shift_right_arithmetic"),
    one<[](T x) { return program::negate(x); }, T, T>("neg"),
    one<[](T x) { return program::abs(x); }, T, T>("abs"),
    one<[](T x) { return program::sign(x); }, T, T>("sign"),
    one<[](T x) { return program::population_count(x); }, T, T>("population_count"),
    one<[](T x) { return program::clz(x); }, T, T>("clz"),
};

constexpr ProgramOperation kSmallIntegers[] = {
    one<[](int32_t x) { return program::small_to_float(x); }, float, int32_t>("small_to_float"),
};

// ---- Floats ---------------------------------------------------------------------------------------------------------

template <typename T>
constexpr ProgramOperation kFloats[] = {
    two<[](T x, T y) { return x + y; }, T, T>("add"),
    two<[](T x, T y) { return x - y; }, T, T>("sub"),
    two<[](T x, T y) { return x * y; }, T, T>("mul"),
    two<[](T x, T y) { return program::divide(x, y); }, T, T>("divide"),
    two<[](T x, T y) { return program::rem(x, y); }, T, T>("rem"),
    two<[](T x, T y) { return program::max(x, y); }, T, T>("max"),
    two<[](T x, T y) { return program::min(x, y); }, T, T>("min"),
    one<[](T x) { return -x; }, T, T>("neg"),
    one<[](T x) { return program::abs(x); }, T, T>("abs"),
    one<[](T x) { return program::sign(x); }, T, T>("sign"),
    one<[](T x) { return program::floor(x); }, T, T>("floor"),
    one<[](T x) { return program::ceil(x); }, T, T>("ceil"),
    one<[](T x) { return program::round_to_even(x); }, T, T>("round_to_even"),
    one<[](T x) { return program::round_away(x); }, T, T>("round_away"),
    one<[](T x) { return program::sqrt(x); }, T, T>("sqrt"),
    one<[](T x) { return program::is_finite(x); }, Bool, T>("is_finite"),
};

constexpr ProgramOperation kFunctions[] = {
    one<[](float x) { return program::round_float16(x); }, float, float>("round_float16"),
    one<[](float x) { return program::round_bfloat16(x); }, float, float>("round_bfloat16"),
    {"reduce_precision", "float32", "", reduce_precision, 1, 2, 4},
    {"divide_by", "float32", "",
     map_three<[](float x, float y, float inverse) { return program::divide(x, y, inverse); }, float, float, float,
               float>,
     3, 0, 4},
    one<[](float x) { return program::log(x) * program::kLog2OfE; }, float, float>("log2"),
    one<[](float x) { return program::acos(x); }, float, float>("acos"),
    one<[](float x) { return program::acosh(x); }, float, float>("acosh"),
    one<[](float x) { return program::asin(x); }, float, float>("asin"),
    one<[](float x) { return program::asinh(x); }, float, float>("asinh"),
    one<[](float x) { return program::atan(x); }, float, float>("atan"),
    two<[](float x, float y) { return program::atan2(x, y); }, float, float>("atan2"),
    one<[](float x) { return program::atanh(x); }, float, float>("atanh"),
    one<[](float x) { return program::cbrt(x); }, float, float>("cbrt"),
    one<[](float x) { return program::cos(x); }, float, float>("cos"),
    one<[](float x) { return program::cosh(x); }, float, float>("cosh"),
    one<[](float x) { return program::erf(x); }, float, float>("erf"),
    one<[](float x) { return program::erfc(x); }, float, float>("erfc"),
    one<[](float x) { return program::exp(x); }, float, float>("exp"),
    one<[](float x) { return program::exp2(x); }, float, float>("exp2"),
    one<[](float x) { return program::expm1(x); }, float, float>("expm1"),
    one<[](float x) { return program::log(x); }, float, float>("log"),
    one<[](float x) { return program::log1p(x); }, float, float>("log1p"),
    one<[](float x) { return program::logistic(x); }, float, float>("logistic"),
    two<[](float x, float y) { return program::pow(x, y); }, float, float>("pow"),
    one<[](float x) { return program::rsqrt(x); }, float, float>("rsqrt"),
    one<[](float x) { return program::sin(x); }, float, float>("sin"),
    one<[](float x) { return program::sinh(x); }, float, float>("sinh"),
    one<[](float x) { return program::tan(x); }, float, float>("tan"),
    one<[](float x) { return program::tanh(x); }, float, float>("tanh"),
};

template <int64_t kCount>
constexpr OperationGroup group_of(const ProgramOperation (&operations)[kCount]) {
  return {operations, kCount};
}

// All operations.
constexpr OperationGroup kGroups[] = {
    group_of(OfSize<int8_t, '1'>::kOperations),
    group_of(OfSize<int16_t, '2'>::kOperations),
    group_of(OfSize<int32_t, '4'>::kOperations),
    group_of(OfSize<int64_t, '8'>::kOperations),
    group_of(Reads<int32_t>::kOperations),
    group_of(Reads<int64_t>::kOperations),
    group_of(kComparisons<int8_t>),
    group_of(kComparisons<int16_t>),
    group_of(kComparisons<int32_t>),
    group_of(kComparisons<int64_t>),
    group_of(kComparisons<uint8_t>),
    group_of(kComparisons<uint16_t>),
    group_of(kComparisons<uint32_t>),
    group_of(kComparisons<uint64_t>),
    group_of(kComparisons<float>),
    group_of(kComparisons<double>),
    group_of(kConversions<int8_t>),
    group_of(kConversions<int16_t>),
    group_of(kConversions<int32_t>),
    group_of(kConversions<int64_t>),
    group_of(kConversions<uint8_t>),
    group_of(kConversions<uint16_t>),
    group_of(kConversions<uint32_t>),
    group_of(kConversions<uint64_t>),
    group_of(kConversions<float>),
    group_of(kConversions<double>),
    group_of(kIntegers<int8_t>),
    group_of(kIntegers<int16_t>),
    group_of(kIntegers<int32_t>),
    group_of(kIntegers<int64_t>),
    group_of(kIntegers<uint8_t>),
    group_of(kIntegers<uint16_t>),
    group_of(kIntegers<uint32_t>),
    group_of(kIntegers<uint64_t>),
    group_of(kSmallIntegers),
    group_of(kFloats<float>),
    group_of(kFloats<double>),
    group_of(kFunctions),
    {nullptr, 0},
};

}  // namespace
}  // namespace jattn::cpu
