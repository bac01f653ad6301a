"""CMake's build of the CPU kernel and of the program that checks it (check_cpu_kernel.cc), for this machine or another.

Nothing here names a source or a flag of the kernel: the lists are those of CMakeLists.txt.
"""

import dataclasses
import fcntl
import importlib.util
import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

GNU = "aarch64-linux-gnu-g++"
CROSS_COMPILERS = ("ziglang", GNU)


def require_program(*names: str, remedy: str) -> str:
    """Path of the first of the programs that is on PATH or beside this Python; skips the test without one."""
    folders = os.pathsep.join([str(Path(sys.executable).parent), *os.get_exec_path()])
    for name in names:
        if path := shutil.which(name, path=folders):
            return path
    return pytest.skip(f"needs {' or '.join(names)}: {remedy}")


def _zig() -> Path:
    found = importlib.util.find_spec("ziglang")
    if found is None or not found.submodule_search_locations:
        pytest.skip("needs clang for aarch64: pip install ziglang")
    return Path(found.submodule_search_locations[0]) / "zig"


def _write_script(path: Path, command: str) -> Path:
    path.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
    path.chmod(0o755)
    return path


def cross_definitions(compiler: str, folder: Path) -> list[str]:
    """What tells CMake to build for aarch64; skips the test without the compiler."""
    if compiler == GNU:
        program = require_program(GNU, remedy="apt-get install g++-aarch64-linux-gnu")
        settings = {"CXX_COMPILER": program}
    else:
        # CMake wants programs without arguments. Of the two C libraries this one can be linked statically.
        zig = shlex.quote(str(_zig()))
        settings = {
            name: str(_write_script(folder / name.lower(), f"{zig} {command}"))
            for name, command in {"CXX_COMPILER": "c++", "AR": "ar", "RANLIB": "ranlib"}.items()
        }
        settings["CXX_COMPILER_TARGET"] = settings["ASM_COMPILER_TARGET"] = "aarch64-linux-musl"
    return [
        "-DCMAKE_SYSTEM_NAME=Linux",
        "-DCMAKE_SYSTEM_PROCESSOR=aarch64",
        "-DCMAKE_EXE_LINKER_FLAGS=-static",  # an emulator then needs no libraries
        # CMake tries compilers without linking: ziglang builds its C++ library first, which takes a minute.
        "-DCMAKE_TRY_COMPILE_TARGET_TYPE=STATIC_LIBRARY",
        *(f"-DCMAKE_{name}={value}" for name, value in settings.items()),
    ]


# The same program as everywhere, sooner: what vectors the compiler makes is not asked of it.
NATIVE_DEFINITIONS = (
    "-DCMAKE_BUILD_TYPE=RelWithDebInfo",
    "-DCMAKE_CXX_FLAGS_RELWITHDEBINFO=-O1 -DNDEBUG",
)


@dataclasses.dataclass(frozen=True)
class Build:
    """A folder that CMake has configured. Processes of one test run share it, one at a time."""

    folder: Path

    def configure(self, *definitions: str) -> None:
        """Does nothing where it has been done."""
        with self._alone():
            if (self.folder / "build.ninja").exists():
                return
            ninja = require_program("ninja", remedy="pip install ninja")
            self._cmake(
                *("-S", str(ROOT), "-B", str(self.folder), "-G", "Ninja"),
                *("-DJATTN_MODULE=OFF", "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON"),
                f"-DCMAKE_MAKE_PROGRAM={ninja}",
                *definitions,
            )

    def make(self, target: str) -> None:
        """Builds a target; what is there already is not built again."""
        with self._alone():
            self._cmake("--build", str(self.folder), "--target", target, "--parallel", "1")

    def objects(self) -> dict[str, Path]:
        """Source of the CPU kernel, by its path in the repository -> its object file."""
        return {
            source: self.folder / command[command.index("-o") + 1]
            for source, command in self._commands().items()
        }

    def listing(self, source: str) -> str:
        """The machine code of a source of the CPU kernel as text."""
        file = self.folder / f"{Path(source).name}.s"
        command = self._commands()[source]
        command[command.index("-c")] = "-S"
        command[command.index("-o") + 1] = str(file)
        # Clang as ziglang has it describes what it compiles, and gets a flag that does not go with -S.
        command += ["-g0", "-Wno-unused-command-line-argument"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return file.read_text()

    def _commands(self) -> dict[str, list[str]]:
        entries = json.loads((self.folder / "compile_commands.json").read_text())
        return {
            source: shlex.split(entry["command"])
            for entry in entries
            if (source := os.path.relpath(entry["file"], ROOT)).startswith("cc/cpu/")
        }

    def _alone(self) -> "Lock":
        self.folder.mkdir(parents=True, exist_ok=True)
        return Lock(self.folder / "lock")

    @staticmethod
    def _cmake(*arguments: str) -> None:
        cmake = require_program("cmake", remedy="pip install cmake")
        done = subprocess.run(
            [cmake, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout


class Lock:
    """Held by one process at a time."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w")

    def __enter__(self) -> None:
        fcntl.flock(self._file, fcntl.LOCK_EX)

    def __exit__(self, *_: object) -> None:
        self._file.close()
