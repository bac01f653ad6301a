# Compiles the kernels of cc/core/hot_set.txt ahead of time and embeds their machine code.
#
# emit_hot_set, a small program of the build, writes the translation unit of a key: the text NVRTC would get at run
# time. Compiler commands are written out here instead of making CUDA a language of the project: that would want a
# device runtime to link, and would find no toolkit that came from Python wheels.

include(embed)

add_executable(emit_hot_set cc/tools/emit_hot_set.cc)
target_link_libraries(emit_hot_set PRIVATE jattn_core)

set(JATTN_NVCC_MIN_VERSION 12.8)
set(nvcc_version 0)
if(NOT JATTN_CUDA STREQUAL "OFF")
    find_program(JATTN_NVCC nvcc HINTS /usr/local/cuda/bin)
    if(JATTN_NVCC)
        execute_process(
            COMMAND "${JATTN_NVCC}" --version
            OUTPUT_VARIABLE nvcc_banner
            COMMAND_ERROR_IS_FATAL ANY
        )
        if(nvcc_banner MATCHES "release ([0-9]+\\.[0-9]+)")
            set(nvcc_version "${CMAKE_MATCH_1}")
        endif()
    endif()
    if(nvcc_version VERSION_LESS JATTN_NVCC_MIN_VERSION)
        if(JATTN_CUDA STREQUAL "ON")
            message(
                FATAL_ERROR
                "JATTN_CUDA=ON needs nvcc ${JATTN_NVCC_MIN_VERSION} or newer; found \"${JATTN_NVCC}\" ${nvcc_version}"
            )
        endif()
        set(nvcc_version 0)
    endif()
endif()

set(hot_set_file "${CMAKE_CURRENT_SOURCE_DIR}/cc/core/hot_set.txt")
set_property(
    DIRECTORY
    APPEND
    PROPERTY CMAKE_CONFIGURE_DEPENDS "${hot_set_file}"
)
set(hot_set_keys "")
if(nvcc_version VERSION_GREATER 0)
    file(STRINGS "${hot_set_file}" hot_set_keys REGEX "^[^#]")
    message(
        STATUS
        "jattn: hot set compiled by nvcc ${nvcc_version} (${JATTN_NVCC})"
    )
else()
    message(
        STATUS
        "jattn: no hot set; kernels are compiled at run time by NVRTC"
    )
endif()

set(hot_set_dir "${CMAKE_CURRENT_BINARY_DIR}/hot_set")
file(MAKE_DIRECTORY "${hot_set_dir}")
set(JATTN_NVCC_FLAGS "" CACHE STRING "More flags for nvcc, such as -lineinfo")
separate_arguments(nvcc_flags UNIX_COMMAND "${JATTN_NVCC_FLAGS}")

set(cubins "")
set(logs "")
set(declarations "")
set(rows "")
set(index 0)
foreach(key IN LISTS hot_set_keys)
    if(NOT key MATCHES "arch=(sm_[0-9]+[af]?)")
        message(FATAL_ERROR "${hot_set_file}: no arch=sm_... in \"${key}\"")
    endif()
    set(arch "${CMAKE_MATCH_1}")
    # Named by content, so that inserting a line compiles one kernel and not all that follow.
    string(SHA256 digest "${key}")
    string(SUBSTRING "${digest}" 0 16 digest)
    set(unit "${hot_set_dir}/${digest}.cu")
    set(cubin "${hot_set_dir}/${digest}.cubin")
    add_custom_command(
        OUTPUT "${unit}"
        COMMAND emit_hot_set "${key}" "${unit}"
        DEPENDS emit_hot_set
        COMMENT "Unit ${key}"
        VERBATIM
    )
    add_custom_command(
        OUTPUT "${cubin}" "${cubin}.log"
        COMMAND
            "${CMAKE_COMMAND}" "-DLOG=${cubin}.log" -P
            "${CMAKE_CURRENT_SOURCE_DIR}/cmake/run_logged.cmake" --
            "${JATTN_NVCC}" -cubin -arch=${arch} -std=c++20
            "-I${device_include_dir}" -Xptxas -v -Xptxas -warn-spills
            ${nvcc_flags} -MD -MF "${cubin}.d" -MT "${cubin}" -o "${cubin}"
            "${unit}"
        DEPENDS "${unit}" "${CMAKE_CURRENT_SOURCE_DIR}/cmake/run_logged.cmake"
        DEPFILE "${cubin}.d"
        COMMENT "Kernel ${key}"
        VERBATIM
    )
    list(APPEND cubins "${cubin}")
    list(APPEND logs "${cubin}.log")
    string(
        APPEND declarations
        "extern \"C\" const char jattn_cubin_${index}_begin[], jattn_cubin_${index}_end[];\n"
        "extern \"C\" const char jattn_cubin_log_${index}_begin[], jattn_cubin_log_${index}_end[];\n"
    )
    string(
        APPEND rows
        "    {\"${key}\",\n"
        "     jattn_cubin_${index}_begin, jattn_cubin_${index}_end,\n"
        "     jattn_cubin_log_${index}_begin, jattn_cubin_log_${index}_end},\n"
    )
    math(EXPR index "${index} + 1")
endforeach()
list(LENGTH cubins num_cubins)
if(nvcc_version MATCHES "^([0-9]+)\\.([0-9]+)$")
    math(
        EXPR
        nvcc_version_number
        "1000 * ${CMAKE_MATCH_1} + 10 * ${CMAKE_MATCH_2}"
    )
else()
    set(nvcc_version_number 0)
endif()
file(
    CONFIGURE
    OUTPUT "${CMAKE_CURRENT_BINARY_DIR}/embedded_cubins.cc"
    CONTENT
        [[#include "cuda/embedded.h"

#include <array>

@declarations@
namespace jattn::cuda {

std::span<const EmbeddedCubin> embedded_cubins() {
  static const std::array<EmbeddedCubin, @num_cubins@> cubins{{
@rows@  }};
  return cubins;
}

int embedded_cuda_version() { return @nvcc_version_number@; }

}  // namespace jattn::cuda
]]
    @ONLY
)
add_library(
    jattn_hot_set
    STATIC
    "${CMAKE_CURRENT_BINARY_DIR}/embedded_cubins.cc"
)
target_link_libraries(jattn_hot_set PUBLIC jattn_options)
jattn_embed(TARGET jattn_hot_set SYMBOL jattn_cubin FILES ${cubins})
jattn_embed(TARGET jattn_hot_set SYMBOL jattn_cubin_log FILES ${logs})
