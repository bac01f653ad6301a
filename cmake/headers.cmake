# Embeds every device header, under the name by which it is included, so that NVRTC can compile on a machine that has
# neither this repository nor a CUDA toolkit.

include(embed)

set(device_include_dir "${CMAKE_CURRENT_SOURCE_DIR}/cc/kernels")
file(
    GLOB_RECURSE device_headers
    CONFIGURE_DEPENDS
    "${device_include_dir}/*.cuh"
)
list(SORT device_headers)

set(declarations "")
set(rows "")
set(index 0)
foreach(header IN LISTS device_headers)
    file(RELATIVE_PATH name "${device_include_dir}" "${header}")
    string(
        APPEND declarations
        "extern \"C\" const char jattn_header_${index}_begin[], jattn_header_${index}_end[];\n"
    )
    string(
        APPEND rows
        "    {\"${name}\", jattn_header_${index}_begin, jattn_header_${index}_end},\n"
    )
    math(EXPR index "${index} + 1")
endforeach()
list(LENGTH device_headers num_headers)
file(
    CONFIGURE
    OUTPUT "${CMAKE_CURRENT_BINARY_DIR}/embedded_headers.cc"
    CONTENT
        [[#include "cuda/embedded.h"

#include <array>

@declarations@
namespace jattn::cuda {

std::span<const EmbeddedHeader> embedded_headers() {
  static const std::array<EmbeddedHeader, @num_headers@> headers{{
@rows@  }};
  return headers;
}

}  // namespace jattn::cuda
]]
    @ONLY
)
add_library(
    jattn_headers
    STATIC
    "${CMAKE_CURRENT_BINARY_DIR}/embedded_headers.cc"
)
target_link_libraries(jattn_headers PUBLIC jattn_options)
jattn_embed(TARGET jattn_headers SYMBOL jattn_header FILES ${device_headers})
