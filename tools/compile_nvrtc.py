"""Compiles one unit for sm_90a with NVRTC as the package does at run time, and prints the compiler's log.

Needs libnvrtc.so.13 on the library path.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
from collections.abc import Sequence
from pathlib import Path


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the machine code; returns 1 if the compilation fails."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("unit", type=Path, help="source of the unit")
    parser.add_argument("cubin", type=Path, help="the machine code to write")
    parser.add_argument("include", type=Path, help="folder of the headers: cc/kernels")
    options = parser.parse_args(arguments)
    library = ctypes.CDLL("libnvrtc.so.13")
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    library.nvrtcCreateProgram(
        ctypes.byref(program), options.unit.read_bytes(), b"unit.cu", 0, None, None
    )
    flags = [
        "--gpu-architecture=sm_90a",
        "-std=c++20",
        "-default-device",
        "--ptxas-options=-v",
        f"-I{options.include}",
    ]
    values = (ctypes.c_char_p * len(flags))(*(flag.encode() for flag in flags))
    status = library.nvrtcCompileProgram(program, len(flags), values)
    library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    library.nvrtcGetProgramLog(program, log)
    print(log.value.decode())
    if status:
        return 1
    library.nvrtcGetCUBINSize(program, ctypes.byref(size))
    code = ctypes.create_string_buffer(size.value)
    library.nvrtcGetCUBIN(program, code)
    options.cubin.write_bytes(code.raw)
    return 0


if __name__ == "__main__":
    sys.exit(main())
