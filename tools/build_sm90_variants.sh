#!/usr/bin/env bash
# Compiles the variants that tools/bench_sm90.py names into build/sm90 (cubins, facts.json). No GPU needed.
# Fails on compiler messages that mean serialised products (C75xx, C76xx) and on spills.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=${1:-build/sm90}
jobs=${JOBS:-2}
python3 tools/bench_sm90.py --folder "$folder" --write-units

compile() {
  local unit=$1 cubin=${1%.cu}.cubin log=${1%.cu}.log
  [ -f "$cubin" ] && [ -z "$(find "$unit" cc/kernels/{sm90,base,attn,config.cuh,params.cuh} -newer "$cubin" -print -quit)" ] && return
  if [[ $unit == *_nvrtc.cu ]]; then
    python3 tools/compile_nvrtc.py "$unit" "$cubin" cc/kernels >"$log" 2>&1 || { cat "$log"; return 1; }
    return
  fi
  nvcc -cubin -std=c++20 -O3 -gencode=arch=compute_90a,code=sm_90a -Xptxas -v -Icc/kernels -o "$cubin" "$unit" >"$log" 2>&1 ||
    { cat "$log"; rm -f "$cubin"; return 1; }
  if grep -E 'C7[56][0-9][0-9]|[1-9][0-9]* bytes spill' "$log"; then
    echo "in $unit"
    return 1
  fi
}
export -f compile
printf '%s\0' "$folder"/*.cu | xargs -0 -P "$jobs" -I{} bash -c 'compile {}'
g++ -std=c++20 -Icc/kernels -o "$folder/facts" "$folder/facts.cc"
"$folder/facts" >"$folder/facts.json"
python3 tools/bench_sm90.py --folder "$folder" --check-layout
echo "$(find "$folder" -name '*.cubin' | wc -l) cubins, $(du -sh "$folder" | cut -f1), in $folder"
