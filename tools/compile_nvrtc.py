"""Compiles one unit with NVRTC as the package does at run time: python3 tools/compile_nvrtc.py UNIT CUBIN INCLUDE.

Needs libnvrtc.so.13 on the library path. Prints the compiler's log.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path


def main() -> int:
    """Writes the machine code; returns 1 if the compilation fails."""
    unit, cubin, include = sys.argv[1:4]
    library = ctypes.CDLL("libnvrtc.so.13")
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    library.nvrtcCreateProgram(
        ctypes.byref(program), Path(unit).read_bytes(), b"unit.cu", 0, None, None
    )
    options = [
        "--gpu-architecture=sm_90a",
        "-std=c++20",
        "-default-device",
        "--ptxas-options=-v",
        f"-I{include}",
    ]
    values = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    status = library.nvrtcCompileProgram(program, len(options), values)
    library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    library.nvrtcGetProgramLog(program, log)
    print(log.value.decode())
    if status:
        return 1
    library.nvrtcGetCUBINSize(program, ctypes.byref(size))
    code = ctypes.create_string_buffer(size.value)
    library.nvrtcGetCUBIN(program, code)
    Path(cubin).write_bytes(code.raw)
    return 0


if __name__ == "__main__":
    sys.exit(main())
