// The one kind of exception the host code throws, and the one macro that throws it.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace jattn {

// Whose fault a failure is; the FFI layer turns it into the error code that the user sees.
enum class Fault {
  kCaller,   // a value that the caller passed: INVALID_ARGUMENT
  kMachine,  // a library, a file or a device that is missing or too old: FAILED_PRECONDITION
  kMemory,   // the host has not as much: RESOURCE_EXHAUSTED
  kJattn,    // anything else: INTERNAL
};

class Error : public std::runtime_error {
 public:
  Error(Fault fault, const std::string& text) : std::runtime_error(text), fault_(fault) {}
  Fault fault() const { return fault_; }

 private:
  Fault fault_;
};

// Writes its arguments one after another into one string.
template <typename... Parts>
std::string concat(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  return text.str();
}

[[noreturn]] void fail(Fault fault, const std::string& text);

}  // namespace jattn

// JATTN_REQUIRE(head_dim % 8 == 0, "head_dim is ", head_dim, ", must be a multiple of 8") throws Fault::kCaller.
#define JATTN_REQUIRE(condition, ...)                                                       \
  do {                                                                                      \
    if (!(condition)) ::jattn::fail(::jattn::Fault::kCaller, ::jattn::concat(__VA_ARGS__)); \
  } while (false)
