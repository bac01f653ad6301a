#!/usr/bin/env bash
# Compiles the variants that tools/bench_sm90.py names into build/sm90 (cubins, facts.json). No GPU needed.
# Leaves out variants with spills or compiler messages that mean serialised products (C75xx, C76xx).
# Arguments: folder, folder of the kernels (another state of them, say).
# VARIANTS=EXPRESSION: only those that match.
# SLEEPS=1: with random sleeps at every barrier (spills are then allowed), to be run with --no-time --repeat 1000.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=${1:-build/sm90}
export kernels=${2:-cc/kernels}
jobs=${JOBS:-2}
export faults='C7[56][0-9][0-9]|[1-9][0-9]* bytes spill'
if [ -n "${SLEEPS:-}" ]; then
  faults='C7[56][0-9][0-9]'
  mkdir -p "$folder/include/base"
  sed 's/= false/= true/' "$kernels"/base/sleeps.cuh >"$folder/include/base/sleeps.cuh"
  export includes="-I$folder/include"
fi
# What was built for the other purpose is built again.
mkdir -p "$folder"
if [ "$(cat "$folder/sleeps" 2>/dev/null)" != "${SLEEPS:-}" ]; then rm -f "$folder"/*.cubin; fi
echo "${SLEEPS:-}" >"$folder/sleeps"
python3 tools/bench_sm90.py --folder "$folder" --write-units --variants "${VARIANTS:-}"

compile() {
  local unit=$1 cubin=${1%.cu}.cubin log=${1%.cu}.log
  [ -f "$cubin" ] && [ -z "$(find "$unit" "$kernels" -newer "$cubin" -print -quit)" ] && return
  if [[ $unit == *_nvrtc.cu ]]; then
    python3 tools/compile_nvrtc.py "$unit" "$cubin" "$kernels" >"$log" 2>&1 || { cat "$log"; return 1; }
    return
  fi
  nvcc -cubin -std=c++20 ${includes:-} -O3 -gencode=arch=compute_90a,code=sm_90a -Xptxas -v -I"$kernels" -o "$cubin" "$unit" >"$log" 2>&1 ||
    { cat "$log"; rm -f "$cubin"; return 1; }
  if grep -E "$faults" "$log"; then
    echo "left out: $unit"
    rm "$cubin"
  fi
}
export -f compile
printf '%s\0' "$folder"/*.cu | xargs -0 -P "$jobs" -I{} bash -c 'compile {}'
g++ -std=c++20 -I"$kernels" -o "$folder/facts" "$folder/facts.cc"
"$folder/facts" >"$folder/facts.json"
echo "$(find "$folder" -name '*.cubin' | wc -l) cubins, $(du -sh "$folder" | cut -f1), in $folder"
