# The native CPU kernel: the same source compiled once per instruction set, each in a file of its own, so that no code of
# a newer set can be chosen by the linker for a machine that lacks it. targets.cc picks one at run time. For the same
# reason nothing is built for the machine that compiles (-march=native).

set(cpu_sources
    cc/cpu/targets.cc
    cc/cpu/plan.cc
    cc/cpu/threads.cc
    cc/cpu/baseline.cc
    cc/cpu/program.cc
    cc/cpu/program_baseline.cc
)
# Scores are infinite where masked: infinities and NaNs must keep their meaning, so there is no -ffast-math.
set(cpu_flags -fno-math-errno -fno-trapping-math)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|amd64|AMD64)$")
    set(avx2_flags -mavx2 -mfma -mf16c)
    set(avx512_flags
        ${avx2_flags}
        -mavx512f
        -mavx512bw
        -mavx512vl
        -mavx512dq
        -mprefer-vector-width=512
    )
    set(avx512_bf16_flags ${avx512_flags} -mavx512bf16)
    set(amx_flags ${avx512_flags} -mamx-tile -mamx-bf16)
    list(
        APPEND cpu_sources
        cc/cpu/avx2.cc
        cc/cpu/avx512.cc
        cc/cpu/avx512_bf16.cc
        cc/cpu/amx.cc
        cc/cpu/program_avx2.cc
        cc/cpu/program_avx512.cc
    )
    set_source_files_properties(
        cc/cpu/avx2.cc
        cc/cpu/program_avx2.cc
        PROPERTIES COMPILE_OPTIONS "${avx2_flags}"
    )
    set_source_files_properties(
        cc/cpu/avx512.cc
        cc/cpu/program_avx512.cc
        PROPERTIES COMPILE_OPTIONS "${avx512_flags}"
    )
    set_source_files_properties(
        cc/cpu/avx512_bf16.cc
        PROPERTIES COMPILE_OPTIONS "${avx512_bf16_flags}"
    )
    set_source_files_properties(
        cc/cpu/amx.cc
        PROPERTIES COMPILE_OPTIONS "${amx_flags}"
    )
elseif(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    # As on x86-64. GCC would load all scalars of a step of a tile product before its multiply-adds, and keep up to three
    # of the 24 sums of a block in memory.
    list(APPEND cpu_flags -fno-schedule-insns)
endif()

add_library(jattn_cpu STATIC ${cpu_sources})
target_compile_options(jattn_cpu PRIVATE ${cpu_flags})
if(CMAKE_BUILD_TYPE STREQUAL "Release")
    target_compile_options(jattn_cpu PRIVATE -O3)
endif()
target_link_libraries(jattn_cpu PUBLIC jattn_core)
