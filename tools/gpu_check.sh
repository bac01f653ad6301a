#!/usr/bin/env bash
# Checks a checkout on a machine with a GPU, without a network: builds it, runs the gpu tier, a memory and a race checker,
# benchmarks and the demo. One summary table comes last.
#
#   tools/gpu_check.sh FOLDER [STAGE...]     stages: build tests memcheck racecheck bench bench-f32 demo (default: all)
#
# Of the tier, each EVERYth case of a test runs: all of them by default, which take 5 to 10 minutes with 16 cores, but
# with fewer than 8 cores each sixth. All stages together are given 16 minutes with 16 cores, 9 minutes with EVERY=6.
#
# FOLDER gets log.txt (of all stages), summary.json, the JSON of the benchmarks and what the demo writes. Every stage has its
# own time limit (seconds, LIMIT_<STAGE> overrides it), and none hides a
# later one; only a failed build stops the rest. Needs: python3 with jax for CUDA, flax, optax, pytest, pytest-xdist, cmake,
# ninja, nanobind and scikit-build-core; nvcc; compute-sanitizer. Exit status: 0 if every stage passed.
set -uo pipefail

if [ $# -lt 1 ]; then
  sed -n '2,13p' "$0" >&2
  exit 2
fi
mkdir -p "$1"
out=$(cd "$1" && pwd)
shift
stages=("$@")
[ ${#stages[@]} -gt 0 ] || stages=(build tests memcheck racecheck bench bench-f32 demo)
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
cores=$(nproc)
workers=$((cores < 16 ? cores : 16))  # they share one GPU and its memory; more were not tried
every=${EVERY:-$((cores < 8 ? 6 : 1))}
limit_build=${LIMIT_BUILD:-110}
limit_tests=${LIMIT_TESTS:-$((60 + 9000 / (every * workers)))}
limit_memcheck=${LIMIT_MEMCHECK:-45}
limit_racecheck=${LIMIT_RACECHECK:-45}
limit_bench=${LIMIT_BENCH:-120}
limit_bench_f32=${LIMIT_BENCH_F32:-30}
limit_demo=${LIMIT_DEMO:-100}
deadline=$((SECONDS + ${LIMIT_TOTAL:-$((340 + limit_tests))}))

# Test workers, torch and JAX share one GPU; by default JAX takes three quarters of its memory at once.
export XLA_PYTHON_CLIENT_PREALLOCATE=false
export CMAKE_BUILD_PARALLEL_LEVEL=${CMAKE_BUILD_PARALLEL_LEVEL:-$(nproc)}
export PIP_DISABLE_PIP_VERSION_CHECK=1

logs=$(mktemp -d)
: >"$out/log.txt"
summary=()   # "stage|result|seconds|note"
build_failed=false

# stage NAME LIMIT NOTE_COMMAND COMMAND...: runs COMMAND under the limit, its output goes to log.txt; NOTE_COMMAND is
# given its output and prints one line for the table.
stage() {
  local name=$1 limit=$2 note_command=$3
  shift 3
  local left=$((deadline - SECONDS)) begin=$SECONDS status result
  if [ "$left" -lt 5 ]; then
    summary+=("$name|not run|0|no time left")
    return 1
  fi
  [ "$limit" -le "$left" ] || limit=$left
  echo "== $name (at most $limit s): $*"
  timeout --foreground --signal=INT --kill-after=20 "$limit" "$@" >"$logs/$name" 2>&1 </dev/null  # pytest tells failures so far
  status=$?
  { echo "== $name"; cat "$logs/$name"; } >>"$out/log.txt"
  case $status in
    0) result=passed ;;
    124 | 137) result="TIMED OUT" ;;
    *) result="FAILED ($status)" ;;
  esac
  [ "$status" -eq 0 ] || tail -n 25 "$logs/$name"
  summary+=("$name|$result|$((SECONDS - begin))|$($note_command "$logs/$name")")
  return "$status"
}

last_line() { grep -v '^[[:space:]]*$' "$1" | tail -n 1 | cut -c1-150; }
pytest_note() { grep -E '^=+ .*(passed|failed|error|skipped).*=+$|[0-9]+ (passed|failed|skipped).* in ' "$1" | tail -n 1 | tr -d '=' | cut -c1-150; }
sanitizer_note() { { grep -E 'ERROR SUMMARY|RACECHECK SUMMARY' "$1" | tail -n 1 | sed 's/=* *//'; grep -E '^[0-9]+ passed' "$1"; } | paste -sd ';' | cut -c1-150; }
demo_note() { grep -E '^(jattn|ok|FAILED)' "$1" | head -n 1 | cut -c1-150; }
version_note() { $python -c 'import jattn; print("jattn", jattn.__version__)' 2>&1 | tail -n 1; }

# Only our kernels, which all have one entry name: checking those of XLA too would take minutes. Releases of the checker
# spell the filter in different ways, so each spelling is tried on a program that does nothing.
sanitizer_filter() {
  local option
  for option in --kernel-name --kernel-regex; do
    if compute-sanitizer --require-cuda-init no "$option" kns=jattn_kernel true >/dev/null 2>&1; then
      echo "$option kns=jattn_kernel"
      return
    fi
  done
}

sanitize() {
  local filter
  filter=$(sanitizer_filter)
  # shellcheck disable=SC2086  # two words or none
  stage "$1" "$2" sanitizer_note compute-sanitizer --tool "$1" $filter --error-exitcode 9 \
    "$python" tools/run_cases.py --seconds $(($2 - 15))
}

for name in "${stages[@]}"; do
  if $build_failed; then
    summary+=("$name|not run|0|the build failed")
    continue
  fi
  case $name in
    build)
      stage build "$limit_build" version_note \
        "$python" -m pip install --no-build-isolation --no-deps --editable . || build_failed=true
      ;;
    tests)
      stage tests "$limit_tests" pytest_note \
        "$python" -m pytest -q -n "$workers" -p no:benchmark --every "$every" tests/gpu
      ;;
    memcheck) sanitize memcheck "$limit_memcheck" ;;
    racecheck) sanitize racecheck "$limit_racecheck" ;;
    bench)
      stage bench "$limit_bench" last_line "$python" -m benchmarks.run --rounds 5 --seconds 0.06 \
        --rivals jax-cudnn torch-flash --out "$out/bench.json" --case \
        bench-D128-S8192-causal bench-D64-S8192-causal bench-D128-S8192-full bench-D64-S8192-full \
        bench-D128-S2048-causal bench-D64-S2048-causal bench-D128-S2048-full bench-D64-S2048-full
      ;;
    bench-f32)
      NVIDIA_TF32_OVERRIDE=0 stage bench-f32 "$limit_bench_f32" last_line "$python" -m benchmarks.run --rounds 5 \
        --seconds 0.06 --rivals torch-efficient jax-xla --out "$out/bench-f32.json" --case bench-f32
      ;;
    demo)
      stage demo "$limit_demo" demo_note "$python" examples/train_lm.py --steps 100 --compare-steps 8 --layers 4 \
        --out "$out/demo"
      ;;
    *)
      echo "tools/gpu_check.sh: no stage is called $name" >&2
      summary+=("$name|FAILED (2)|0|no such stage")
      ;;
  esac
done

for name in bench bench-f32; do
  if [ -f "$out/$name.json" ]; then
    echo
    "$python" -m benchmarks.report "$out/$name.json"
  fi
done
if [ -f "$logs/demo" ]; then
  echo
  grep -E '^(attention|jattn|jax\.nn|ok|FAILED|entropy)' "$logs/demo"
fi

echo
printf '%-10s  %-12s  %8s  %s\n' stage result seconds note
failures=0
json=""
for row in "${summary[@]}"; do
  IFS='|' read -r name result seconds note <<<"$row"
  printf '%-10s  %-12s  %8s  %s\n' "$name" "$result" "$seconds" "$note"
  [ "$result" = passed ] || failures=$((failures + 1))
  json+="${json:+,}{\"stage\":\"$name\",\"result\":\"$result\",\"seconds\":$seconds}"
done
echo "[$json]" >"$out/summary.json"
echo "$failures of ${#summary[@]} stages did not pass; $SECONDS s in all"
[ "$failures" -eq 0 ]
