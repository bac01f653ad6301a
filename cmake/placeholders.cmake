set(ph "${CMAKE_CURRENT_BINARY_DIR}/placeholders")
file(MAKE_DIRECTORY "${ph}/cuda")
set(ph_sources "")
set(S "${CMAKE_CURRENT_SOURCE_DIR}/cc")
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${S}/cuda" "${S}/cpu" "${S}/core")
if(NOT EXISTS "${S}/cuda/forward.h" OR NOT EXISTS "${S}/cuda/forward.cc")
file(CONFIGURE OUTPUT "${ph}/forward_ph.cc" CONTENT [[
#include "cuda/forward.h"
#include "core/require.h"
namespace jattn::cuda {
int64_t forward_scratch_bytes(const Problem&, const Plan&) { fail(Fault::kJattn, "CUDA forward not built"); }
void forward(const Problem&, const ForwardResults&, const Plan&, void*, CUstream) { fail(Fault::kJattn, "CUDA forward not built"); }
}
]] @ONLY)
list(APPEND ph_sources "${ph}/forward_ph.cc")
endif()
if(NOT EXISTS "${S}/cuda/forward.h")
file(CONFIGURE OUTPUT "${ph}/cuda/forward.h" CONTENT [[
#pragma once
#include "core/problem.h"
#include "cuda/plan.h"
namespace jattn::cuda {
int64_t forward_scratch_bytes(const Problem&, const Plan&);
void forward(const Problem&, const ForwardResults&, const Plan&, void* scratch, CUstream);
}
]] @ONLY)
else()
file(REMOVE "${ph}/cuda/forward.h")
endif()
if(NOT EXISTS "${S}/cuda/backward.h" OR NOT EXISTS "${S}/cuda/backward.cc")
file(CONFIGURE OUTPUT "${ph}/backward_ph.cc" CONTENT [[
#include "cuda/backward.h"
#include "core/require.h"
namespace jattn::cuda {
int64_t backward_scratch_bytes(const Problem&, const BackwardBuffers&, const Plan&) { fail(Fault::kJattn, "CUDA backward not built"); }
void backward(const Problem&, const BackwardBuffers&, const Plan&, void*, CUstream) { fail(Fault::kJattn, "CUDA backward not built"); }
}
]] @ONLY)
list(APPEND ph_sources "${ph}/backward_ph.cc")
endif()
if(NOT EXISTS "${S}/cuda/backward.h")
file(CONFIGURE OUTPUT "${ph}/cuda/backward.h" CONTENT [[
#pragma once
#include "core/problem.h"
#include "cuda/plan.h"
namespace jattn::cuda {
int64_t backward_scratch_bytes(const Problem&, const BackwardBuffers&, const Plan&);
void backward(const Problem&, const BackwardBuffers&, const Plan&, void* scratch, CUstream);
}
]] @ONLY)
else()
file(REMOVE "${ph}/cuda/backward.h")
endif()
if(NOT EXISTS "${S}/cpu/targets.cc")
file(CONFIGURE OUTPUT "${ph}/cpu_ph.cc" CONTENT [[
#include "cpu/attention.h"
#include "core/require.h"
namespace jattn::cpu {
int64_t forward_scratch_bytes(const Problem&) { return 0; }
int64_t backward_scratch_bytes(const Problem&, bool) { return 0; }
void forward(const Problem&, const ForwardResults&, void*, const ParallelFor&) { fail(Fault::kJattn, "CPU kernel not built"); }
void backward(const Problem&, const BackwardBuffers&, void*, const ParallelFor&) { fail(Fault::kJattn, "CPU kernel not built"); }
std::vector<std::string> instruction_sets() { return {}; }
bool force_instruction_set(const std::string&) { return false; }
std::string active_instruction_set() { return ""; }
}
]] @ONLY)
set(cpu_sources "${ph}/cpu_ph.cc")
endif()
include_directories("${ph}")
if(ph_sources)
add_library(jattn_placeholders STATIC ${ph_sources})
target_link_libraries(jattn_placeholders PUBLIC jattn_core)
target_link_libraries(jattn_cuda PUBLIC jattn_placeholders)
endif()
