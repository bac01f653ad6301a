// The native module jattn._core: what Python may ask of the C++ core. Importing it opens no library.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <exception>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/broadcast.h"
#include "core/kernel_key.h"
#include "core/kernel_unit.h"
#include "core/program_store.h"
#include "core/require.h"
#include "cpu/attention.h"
#include "cpu/program.h"
#include "cuda/cubin_cache.h"
#include "cuda/dispatch.h"
#include "cuda/driver.h"
#include "cuda/embedded.h"
#include "cuda/kernel_store.h"
#include "cuda/nvrtc.h"
#include "cuda/plan.h"
#include "ffi/handlers.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace jattn {
namespace {

nb::dict registrations(const std::string& platform) {
  JATTN_REQUIRE(platform == "cpu" || platform == "cuda", "platform is \"", platform, "\", must be \"cpu\" or \"cuda\"");
  nb::dict targets;
  for (const ffi_handlers::Handler& row : platform == "cpu" ? ffi_handlers::cpu() : ffi_handlers::cuda()) {
    if (!targets.contains(row.target)) targets[row.target] = nb::dict();
    nb::cast<nb::dict>(targets[row.target])[row.stage] = nb::capsule(reinterpret_cast<void*>(row.handler));
  }
  return targets;
}

nb::bytes to_bytes(std::string_view text) { return nb::bytes(text.data(), text.size()); }

void configure(const std::string& cache_dir, bool cache_enabled, const std::string& nvrtc_path, bool offline) {
  cuda::set_nvrtc_path(nvrtc_path);
  cuda::configure_store({.cache_folder = cache_dir, .cache_enabled = cache_enabled, .offline = offline});
}

nb::dict kernel_headers() {
  nb::dict headers;
  for (const cuda::EmbeddedHeader& header : cuda::embedded_headers()) {
    headers[nb::str(header.name.data(), header.name.size())] = nb::str(header.text().data(), header.text().size());
  }
  return headers;
}

std::pair<nb::bytes, std::string> compile_kernel(const std::string& text) {
  const KernelKey key = parse_kernel_key(text);
  cuda::CompiledKernel compiled;
  {
    nb::gil_scoped_release release;
    compiled = cuda::nvrtc_compile(kernel_unit_text(key), key.arch);
  }
  return {to_bytes(compiled.cubin), compiled.log};
}

void prepare_kernel(const std::string& text) {
  nb::gil_scoped_release release;
  cuda::prepare(text);
}

nb::list kernel_rows(const std::vector<cuda::StoredKernel>& kernels) {
  nb::list rows;
  for (const cuda::StoredKernel& kernel : kernels) {
    nb::dict row;
    row["key"] = kernel.key;
    row["origin"] = kernel.origin;
    row["num_bytes"] = kernel.num_bytes;
    row["loaded"] = kernel.loaded;
    rows.append(row);
  }
  return rows;
}

nb::list hot_set() {
  nb::list rows;
  for (const cuda::EmbeddedCubin& cubin : cuda::embedded_cubins()) {
    nb::dict row;
    row["key"] = to_text(parse_kernel_key(cubin.key));
    row["cubin"] = to_bytes(cubin.code());
    row["log"] = nb::str(cubin.log().data(), cubin.log().size());
    rows.append(row);
  }
  return rows;
}

nb::dict cache_info() {
  cuda::StoreInfo info;
  std::vector<cuda::StoredKernel> kernels;
  {
    nb::gil_scoped_release release;
    info = cuda::store_info();
    kernels = cuda::stored_kernels();
  }
  nb::dict row;
  row["folder"] = info.settings.cache_folder;
  row["enabled"] = info.settings.cache_enabled;
  row["offline"] = info.settings.offline;
  row["problem"] = info.cache.problem;
  row["write_problem"] = info.cache_write_problem;
  row["num_entries"] = info.cache.num_entries;
  row["num_bytes"] = info.cache.num_bytes;
  row["num_compilations"] = info.num_compilations;
  row["kernels"] = kernel_rows(kernels);
  return row;
}

DType dtype_named(const std::string& name) {
  if (name == "float16") return DType::kF16;
  if (name == "bfloat16") return DType::kBF16;
  if (name == "float32") return DType::kF32;
  if (name == "float64") return DType::kF64;
  fail(Fault::kCaller, concat("dtype is \"", name, "\", must be float16, bfloat16, float32 or float64"));
}

// A pointer that is only told from null: sizes depend on what is there, not on where.
template <typename T>
T* present_if(bool present) {
  static T thing{};
  return present ? &thing : nullptr;
}

// A broadcast array of four axes, of which only strides matter.
BroadcastTensor sized_tensor(const std::vector<int64_t>& shape, DType dtype) {
  return broadcast_tensor(present_if<char>(true), dtype, {shape[0], shape[1], shape[2], shape[3]});
}

// What the size of scratch depends on. Empty axes in `bias_shape` mean that there is no bias.
struct Extents {
  int64_t batch, q_len, kv_len, num_heads, num_kv_heads, head_dim, head_dim_v;
};

Problem sized_problem(const Extents& e, const std::string& dtype, const std::vector<int64_t>& bias_shape) {
  for (int64_t extent : {e.batch, e.q_len, e.kv_len, e.num_heads, e.num_kv_heads, e.head_dim, e.head_dim_v}) {
    JATTN_REQUIRE(extent >= 0, "an extent is ", extent, ", must not be negative");
  }
  Problem problem;
  problem.dtype = dtype_named(dtype);
  problem.batch = e.batch, problem.q_len = e.q_len, problem.kv_len = e.kv_len;
  problem.num_heads = e.num_heads, problem.num_kv_heads = e.num_kv_heads;
  problem.head_dim = e.head_dim, problem.head_dim_v = e.head_dim_v;
  JATTN_REQUIRE(bias_shape.size() == 4, "bias_shape has ", bias_shape.size(), " axes, must have 4");
  if (std::ranges::find(bias_shape, 0) != bias_shape.end()) return problem;
  problem.bias = sized_tensor(bias_shape, problem.dtype);
  return problem;
}

int64_t cpu_scratch_bytes(bool backward, bool wants_dbias, int64_t batch, int64_t q_len, int64_t kv_len,
                          int64_t num_heads, int64_t num_kv_heads, int64_t head_dim, int64_t head_dim_v,
                          const std::string& dtype, const std::vector<int64_t>& bias_shape, int64_t capture_elements) {
  const Problem problem =
      sized_problem({batch, q_len, kv_len, num_heads, num_kv_heads, head_dim, head_dim_v}, dtype, bias_shape);
  JATTN_REQUIRE(capture_elements >= 0, "capture_elements is ", capture_elements, ", must be at least 0");
  return backward ? cpu::backward_scratch_bytes(problem, wants_dbias, capture_elements)
                  : cpu::forward_scratch_bytes(problem);
}

std::string cpu_instruction_set_of(int64_t q_len, int64_t kv_len, const std::string& dtype) {
  return cpu::instruction_set_of(sized_problem({1, q_len, kv_len, 1, 1, 1, 1}, dtype, {0, 0, 0, 0}));
}

int64_t cuda_scratch_bytes(bool backward, const std::string& kernels, const std::vector<bool>& wants, int64_t batch,
                           int64_t q_len, int64_t kv_len, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim,
                           int64_t head_dim_v, const std::string& dtype, const std::vector<int64_t>& bias_shape,
                           const std::vector<int64_t>& mask_shape, bool segments, int64_t capture_elements) {
  Problem problem =
      sized_problem({batch, q_len, kv_len, num_heads, num_kv_heads, head_dim, head_dim_v}, dtype, bias_shape);
  problem.q_segments = problem.kv_segments = present_if<int32_t>(segments);
  JATTN_REQUIRE(mask_shape.size() == 4, "mask_shape has ", mask_shape.size(), " axes, must have 4");
  if (std::ranges::find(mask_shape, 0) == mask_shape.end()) problem.mask = sized_tensor(mask_shape, DType::kF32);
  cuda::Plan plan{};
  for (std::string_view key : split_kernel_keys(kernels)) plan.kernels.push_back(&cuda::describe_kernel(key));
  if (!backward) return cuda::planned_forward_scratch_bytes(problem, plan);
  JATTN_REQUIRE(wants.size() == 5, "wants has ", wants.size(), " entries, must have 5: dq, dk, dv, dbias, dslopes");
  JATTN_REQUIRE(capture_elements >= 0, "capture_elements is ", capture_elements, ", must be at least 0");
  BackwardBuffers buffers;
  buffers.dq = present_if<char>(wants[0]);
  buffers.dk = present_if<char>(wants[1]);
  buffers.dv = present_if<char>(wants[2]);
  buffers.dbias = present_if<char>(wants[3]);
  buffers.dslopes = present_if<char>(wants[4]);
  buffers.dcaptures = present_if<char>(capture_elements > 0);
  buffers.dcaptures_elements = capture_elements;
  return cuda::planned_backward_scratch_bytes(problem, buffers, plan);
}

}  // namespace
}  // namespace jattn

NB_MODULE(_core, m) {
  using namespace jattn;

  // A wrong argument is a ValueError; what the machine lacks stays a RuntimeError.
  nb::register_exception_translator([](const std::exception_ptr& thrown, void*) {
    try {
      std::rethrow_exception(thrown);
    } catch (const Error& error) {
      PyErr_SetString(error.fault() == Fault::kCaller ? PyExc_ValueError : PyExc_RuntimeError, error.what());
    }
  });

  m.def("registrations", &registrations, "platform"_a);
  m.def("configure", &configure, nb::kw_only(), "cache_dir"_a = "", "cache_enabled"_a = true, "nvrtc_path"_a = "",
        "offline"_a = false);

  m.def("kernel_unit_text", [](const std::string& key) { return kernel_unit_text(parse_kernel_key(key)); }, "key"_a);
  m.def("canonical_kernel_key", [](const std::string& key) { return to_text(parse_kernel_key(key)); }, "key"_a);
  m.def("register_program", [](const std::string& text) { return register_program(text); }, "text"_a);
  m.def("kernel_families", [] {
    std::vector<std::string> names;
    for (const KernelFamily& family : kernel_families()) names.push_back(family.name);
    return names;
  });
  m.def("config_members", [] {
    nb::dict members;
    for (const MemberRule& rule : config_member_rules()) members[rule.name.c_str()] = rule.legal;
    return members;
  });
  m.def("kernel_headers", &kernel_headers);
  m.def("compile_kernel", &compile_kernel, "key"_a);
  m.def("prepare_kernel", &prepare_kernel, "key"_a);
  m.def("hot_set", &hot_set);

  m.def("cache_info", &cache_info);
  m.def("cache_clear", &cuda::clear_cache, nb::call_guard<nb::gil_scoped_release>());
  m.def(
      "cache_entry_name",
      [](const std::string& key) { return cuda::cubin_digest(parse_kernel_key(key), cuda::nvrtc_version()); }, "key"_a);
  m.def(
      "cache_write",
      [](const std::string& folder, const std::string& name, nb::bytes cubin) {
        return cuda::CubinCache(folder).write(name, {cubin.c_str(), cubin.size()});
      },
      "folder"_a, "name"_a, "cubin"_a);
  m.def(
      "cache_read",
      [](const std::string& folder, const std::string& name) -> std::optional<nb::bytes> {
        const std::optional<std::string> cubin = cuda::CubinCache(folder).read(name);
        return cubin ? std::optional(to_bytes(*cubin)) : std::nullopt;
      },
      "folder"_a, "name"_a);
  m.def("forget_unloaded_kernels", &cuda::forget_unloaded, nb::call_guard<nb::gil_scoped_release>());

  m.def("driver_status", &cuda::driver_status);
  m.def("driver_cuda_version", &cuda::driver_cuda_version);
  m.def("cuda_executions", &ffi_handlers::cuda_executions);
  m.def("nvrtc_status", &cuda::nvrtc_status, nb::call_guard<nb::gil_scoped_release>());
  m.def("hot_set_cuda_version", &cuda::embedded_cuda_version);

  m.def("cpu_instruction_sets", &cpu::instruction_sets);
  m.def("cpu_force_instruction_set", &cpu::force_instruction_set, "name"_a);
  m.def("cpu_active_instruction_set", &cpu::active_instruction_set);
  m.def("cpu_instruction_set_of", &cpu_instruction_set_of, nb::kw_only(), "q_len"_a, "kv_len"_a, "dtype"_a);
  m.def("cpu_program_operations", &cpu::program_operations);
  m.def("cpu_scratch_bytes", &cpu_scratch_bytes, nb::kw_only(), "backward"_a, "wants_dbias"_a, "batch"_a, "q_len"_a,
        "kv_len"_a, "num_heads"_a, "num_kv_heads"_a, "head_dim"_a, "head_dim_v"_a, "dtype"_a, "bias_shape"_a,
        "capture_elements"_a = 0);
  m.def("cuda_scratch_bytes", &cuda_scratch_bytes, nb::kw_only(), "backward"_a, "kernels"_a, "wants"_a, "batch"_a,
        "q_len"_a, "kv_len"_a, "num_heads"_a, "num_kv_heads"_a, "head_dim"_a, "head_dim_v"_a, "dtype"_a, "bias_shape"_a,
        "mask_shape"_a = std::vector<int64_t>(4, 0), "segments"_a, "capture_elements"_a = 0);
}
