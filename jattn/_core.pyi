"""The native module. Importing it opens no library and starts no JAX backend.

A wrong argument raises ValueError; what the machine lacks (a library, a driver) raises RuntimeError.
"""

from collections.abc import Sequence
from typing import Literal, TypedDict

class StoredKernel(TypedDict):
    """One kernel variant: its canonical key and where its machine code came from."""

    key: str
    origin: Literal["embedded", "disk", "nvrtc", ""]
    num_bytes: int
    loaded: bool

class HotKernel(TypedDict):
    """One kernel variant that was compiled ahead of time, with what the compiler said about it."""

    key: str
    cubin: bytes
    log: str

class CacheInfo(TypedDict):
    """The kernel cache on disk, and the kernels this process has asked for.

    ``problem`` says why the folder is not used (empty: it is, or the first write will make it), ``write_problem`` why
    the latest write failed. ``num_compilations`` counts runs of the compiler for calls.
    """

    folder: str
    enabled: bool
    offline: bool
    problem: str
    write_problem: str
    num_entries: int
    num_bytes: int
    num_compilations: int
    kernels: list[StoredKernel]

def registrations(platform: Literal["cpu", "cuda"]) -> dict[str, dict[str, object]]:
    """Returns target -> stage -> capsule, as ``jax.ffi.register_ffi_target`` takes them."""

def configure(
    *, cache_dir: str = "", cache_enabled: bool = True, nvrtc_path: str = "", offline: bool = False
) -> None:
    """Sets the facts of the machine: an absolute cache folder, the NVRTC library, and whether compiling is allowed."""

# Kernel variants

def kernel_unit_text(key: str) -> str:
    """Returns the translation unit of a kernel key: what both compilers are given."""

def register_program(text: str) -> str:
    """Remembers the text of a score program, for keys that name it by ``digest``. Returns that digest."""

def canonical_kernel_key(key: str) -> str:
    """Returns the one spelling of a kernel key, with every member written out."""

def kernel_families() -> list[str]:
    """Returns the names that the word ``family`` of a key may have."""

def config_members() -> dict[str, str]:
    """Returns the other words of a key, each with its legal values in words."""

def kernel_headers() -> dict[str, str]:
    """Returns the embedded device headers: name as included -> text."""

def compile_kernel(key: str) -> tuple[bytes, str]:
    """Compiles a variant with NVRTC, past every cache. Returns the machine code and the compiler's log."""

def prepare_kernel(key: str) -> None:
    """Gets the machine code of a variant as a call would: embedded, else from disk, else compiled and kept."""

def hot_set() -> list[HotKernel]:
    """Returns the variants compiled ahead of time."""

def hot_set_cuda_version() -> int:
    """Returns the CUDA version that compiled them, as 1000 * major + 10 * minor; 0 if there are none."""

# The kernel cache on disk

def cache_info() -> CacheInfo:
    """Describes the configured cache and the kernels of this process."""

def cache_clear() -> int:
    """Removes every entry of the configured cache folder; returns how many there were."""

def cache_entry_name(key: str) -> str:
    """Returns the name of a variant's entry: a SHA-256 over all that goes into the compilation. Needs NVRTC."""

def cache_write(folder: str, name: str, cubin: bytes) -> str:
    """Writes an entry into a cache folder; returns why that was not possible, or an empty string."""

def cache_read(folder: str, name: str) -> bytes | None:
    """Reads an entry of a cache folder; None if there is no sound one."""

def forget_unloaded_kernels() -> None:
    """Drops the machine code that no device has loaded, so that the next call looks for it again."""

# Libraries of the machine

def driver_status() -> str:
    """Says which NVIDIA driver there is, or why there is none."""

def cuda_executions() -> int:
    """Returns how often a CUDA handler has executed; one that is replayed from a command buffer does not."""

def driver_cuda_version() -> int:
    """Returns the CUDA version of the driver as 1000 * major + 10 * minor, or 0."""

def nvrtc_status() -> str:
    """Says which NVRTC there is and where, or why there is none. Opens it."""

# The CPU kernel

def cpu_instruction_sets() -> list[str]:
    """Returns the instruction sets that this machine can run, best first."""

def cpu_force_instruction_set(name: str) -> bool:
    """Forces one of them for the process; False if it cannot run here.

    With ``""`` the best one runs again what no other runs faster.
    """

def cpu_active_instruction_set() -> str:
    """Returns the instruction set in use."""

def cpu_instruction_set_of(*, q_len: int, kv_len: int, dtype: str) -> str:
    """Returns the instruction set that runs both passes of problems of these lengths and type."""

def cpu_program_operations() -> list[str]:
    """The operations of score functions that the CPU kernel has, as its programs name them."""

def cpu_scratch_bytes(
    *,
    backward: bool,
    wants_dbias: bool,
    batch: int,
    q_len: int,
    kv_len: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    head_dim_v: int,
    dtype: str,
    bias_shape: Sequence[int],
    capture_elements: int = 0,
) -> int:
    """Returns the bytes of scratch a pass of the CPU kernel needs. A ``bias_shape`` with a zero means no bias."""

# The CUDA kernels

def cuda_scratch_bytes(
    *,
    backward: bool,
    kernels: str,
    wants: Sequence[bool],
    batch: int,
    q_len: int,
    kv_len: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    head_dim_v: int,
    dtype: str,
    bias_shape: Sequence[int],
    mask_shape: Sequence[int] = ...,
    segments: bool,
) -> int:
    """Returns the bytes of scratch a pass needs with these kernels (the plan's attribute, keys joined by ``;``).

    ``wants``: which of dq, dk, dv, dbias, dslopes the backward computes; not read for the forward.
    """
