#!/usr/bin/env bash
# Runs the CPU kernel under the address and undefined-behaviour sanitizers, on every instruction set of this machine.
#
#   tools/sanitize_cpu.sh [PYTEST ARGUMENT...]     for example: --every 4
#
# Builds an instrumented module in build/sanitized, beside the installed one, and runs the tests that reach the kernel,
# once for each instruction set; those that choose sets themselves run once. SETS="avx2 baseline" chooses sets, PYTHON
# the interpreter of an environment with jattn's tools. Stops at the first finding. Exit status: 0 if nothing was found.
set -euo pipefail
cd "$(dirname "$0")/.."

python=$(realpath --no-symlinks "${PYTHON:-.venv/bin/python}")
build=$PWD/build/sanitized
package=$build/package

cmake -S . -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=RelWithDebInfo -DCMAKE_CXX_FLAGS_RELWITHDEBINFO="-O1 -g1 -DNDEBUG" -DJATTN_SANITIZE=ON -DJATTN_CUDA=OFF \
  -DPython_EXECUTABLE="$python" >/dev/null
cmake --build "$build" --target _core --parallel "${CMAKE_BUILD_PARALLEL_LEVEL:-2}"
rm -rf "$package"
mkdir -p "$package"
cp -r jattn "$package"
rm -f "$package"/jattn/_core*.so
cp "$build"/_core*.so "$package/jattn"
# An editable installation finds its own module before any path does, also in the processes that tests start.
cat >"$package/sitecustomize.py" <<'END'
import sys

sys.meta_path[:] = [finder for finder in sys.meta_path if "ScikitBuild" not in type(finder).__name__]
END

# The checkout comes second: tests need its benchmarks, but not its package.
export PYTHONPATH=$package:$PWD PYTHONSAFEPATH=1 JAX_PLATFORMS=cpu
# Python and JAX free little at exit.
export ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 UBSAN_OPTIONS=print_stacktrace=1
libraries=
for name in asan ubsan stdc++; do libraries+="$("${CXX:-c++}" -print-file-name="lib$name.so") "; done
instrumented() { LD_PRELOAD=$libraries "$python" "$@"; }

every_set=$(instrumented -c "
from jattn import _core

assert _core.__file__.startswith('$package'), _core.__file__
print(*_core.cpu_instruction_sets())")
echo "instruction sets: $every_set"

# Programs that run out of memory: operator new ends an instrumented process.
unwanted="xla or reference or plain_jax or memory_does_not_hold"

tests() {
  local files=()
  for name in $1; do files+=("tests/cpu/test_$name.py"); done
  instrumented -m pytest -q -x -p no:cacheprovider -k "not ($unwanted)" "${files[@]}" "${@:2}"
}

tests "contract cpu_kernel cpu_program few_queries matrix_unit transforms" "$@"
for set in ${SETS:-$every_set}; do
  echo "instruction set: $set"
  tests "backends_sweep composition dropout ragged rows_bias rows_cpu rows_own rows_table" --instruction-set "$set" "$@"
done
echo "the sanitizers found nothing"
