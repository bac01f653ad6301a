# The Python module: XLA's handlers, and the CUDA backend with its kernels.

# Without the SABI component nanobind would build a module for one Python version in a wheel that claims all.
find_package(
    Python
    3.11
    REQUIRED
    COMPONENTS Interpreter Development.Module ${SKBUILD_SABI_COMPONENT}
)
execute_process(
    COMMAND "${Python_EXECUTABLE}" -m nanobind --cmake_dir
    OUTPUT_VARIABLE nanobind_ROOT
    OUTPUT_STRIP_TRAILING_WHITESPACE
    COMMAND_ERROR_IS_FATAL ANY
)
find_package(nanobind CONFIG REQUIRED)

# The headers of XLA's foreign function interface are part of jaxlib. Importing jax to find them would be slow.
execute_process(
    COMMAND
        "${Python_EXECUTABLE}" -c
        "import importlib.util as u, os; print(os.path.join(os.path.dirname(u.find_spec('jaxlib').origin), 'include'))"
    OUTPUT_VARIABLE xla_include
    OUTPUT_STRIP_TRAILING_WHITESPACE
    COMMAND_ERROR_IS_FATAL ANY
)

include(headers)
include(hot_set)

file(GLOB cuda_sources CONFIGURE_DEPENDS cc/cuda/*.cc)
add_library(jattn_cuda STATIC ${cuda_sources})
target_link_libraries(
    jattn_cuda
    PUBLIC jattn_core jattn_headers jattn_hot_set ${CMAKE_DL_LIBS}
)

nanobind_add_module(
    _core
    STABLE_ABI
    NB_STATIC
    NOMINSIZE
    cc/ffi/bind.cc
    cc/ffi/cpu_handlers.cc
    cc/ffi/cuda_handlers.cc
    cc/ffi/module.cc
)
target_include_directories(_core SYSTEM PRIVATE "${xla_include}")
target_link_libraries(_core PRIVATE jattn_cuda jattn_cpu)
# Hidden visibility is not enough: templates of the standard library would still leave the module.
target_link_options(
    _core
    PRIVATE
        "LINKER:--version-script=${CMAKE_CURRENT_SOURCE_DIR}/cmake/module.version"
)
set_property(
    TARGET _core
    APPEND
    PROPERTY LINK_DEPENDS "${CMAKE_CURRENT_SOURCE_DIR}/cmake/module.version"
)
install(TARGETS _core LIBRARY DESTINATION jattn)
