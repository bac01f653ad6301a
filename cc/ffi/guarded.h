// Handlers whose exceptions become errors of the call: none may leave a handler.
#pragma once

#include <exception>
#include <new>
#include <string>
#include <utility>

#include "core/require.h"
#include "xla/ffi/api/ffi.h"

namespace jattn::ffi_handlers {

inline xla::ffi::ErrorCode error_code(Fault fault) {
  switch (fault) {
    case Fault::kCaller: return xla::ffi::ErrorCode::kInvalidArgument;
    case Fault::kMachine: return xla::ffi::ErrorCode::kFailedPrecondition;
    case Fault::kMemory: return xla::ffi::ErrorCode::kResourceExhausted;
    case Fault::kJattn: return xla::ffi::ErrorCode::kInternal;
  }
  return xla::ffi::ErrorCode::kUnknown;
}

template <auto kBody>
struct Guarded;

template <typename... Args, xla::ffi::Error (*kBody)(Args...)>
struct Guarded<kBody> {
  static xla::ffi::Error run(Args... args) {
    try {
      return kBody(std::move(args)...);
    } catch (const Error& error) {
      return xla::ffi::Error(error_code(error.fault()), concat("jattn: ", error.what()));
    } catch (const std::bad_alloc&) {
      return xla::ffi::Error(error_code(Fault::kMemory), "jattn: no memory on the host");
    } catch (const std::exception& error) {
      return xla::ffi::Error(error_code(Fault::kJattn), concat("jattn: ", error.what()));
    } catch (...) {
      return xla::ffi::Error(error_code(Fault::kJattn), "jattn: an exception of an unknown type");
    }
  }
};

// What XLA calls in the place of a function that decodes and delegates.
template <auto kBody>
constexpr auto* guarded = &Guarded<kBody>::run;

}  // namespace jattn::ffi_handlers
