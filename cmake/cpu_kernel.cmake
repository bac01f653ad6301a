# The native CPU kernel.

if(EXISTS "${CMAKE_CURRENT_SOURCE_DIR}/cc/cpu/targets.cc")
file(GLOB cpu_sources CONFIGURE_DEPENDS cc/cpu/*.cc)
else()
set(cpu_sources "${CMAKE_CURRENT_BINARY_DIR}/placeholders/cpu_ph.cc")
endif()
add_library(jattn_cpu STATIC ${cpu_sources})
target_link_libraries(jattn_cpu PUBLIC jattn_core)
