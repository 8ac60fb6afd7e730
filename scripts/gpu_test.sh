#!/usr/bin/env bash
# Builds, tests and benchmarks on a machine with an NVIDIA GPU, in one go; results are left as JSON
# and logs in build/gpu/ (or the folder in OUT). Each part runs even if one before it failed; the
# exit code is 1 if any did.
#
#   scripts/gpu_test.sh              everything
#   scripts/gpu_test.sh build cpp    only these parts, of those in `known`
set -uo pipefail
cd "$(dirname "$0")/.."
build=${BUILD:-build/release}
out=${OUT:-build/gpu}
known="build cpp check jit sanitize ranks python bench host peers kernels"
parts=${*:-$known}
python=$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)
failed=()

# part NAME COMMAND...: the command's output to the screen and to NAME.log.
part() {
  local name=$1
  shift
  echo "== $name: $*"
  "$@" 2>&1 | tee "$out/$name.log" || failed+=("$name")
}

build() {
  cmake --fresh --preset release && cmake --build --preset release  # not with flags of an earlier build
}

# Carried binaries have no CTest beside them, so the suites are named here as in tests/CMakeLists.txt.
suite() {
  local code=0
  MOIRE_TEST_DEVICE=cuda MOIRE_TEST_IMPLEMENTATION=$2 "$build/bin/test_$1" --gtest_brief=1 \
    --gtest_output="json:$out/$1_${2:-fastest}.json" || code=$?
  [ $code -eq 0 ] || [ $code -eq 77 ] # 77: there is no GPU, and it said so
}

cpp() {
  part gpu "$build/bin/test_gpu" --gtest_output="json:$out/gpu.json"
  for folder in ops backend mlp; do
    for implementation in portable sm90 ""; do
      part "${folder}_${implementation:-fastest}" suite $folder "$implementation"
    done
  done
}

check() {
  part check "$build/bin/moire" check --device cuda --random 1000 --dtype fp32,bf16,fp16
  part check_fp8 "$build/bin/moire" check --device cuda --random 1000 \
    --dtype mxfp8,mxfp8_fast,fp8_block
  part check_quantized "$build/bin/moire" check quantize_tiny --device cuda
  part check_fast paths "fast_paths activation_paths"
  part check_fast_fp8 paths fp8_paths
  part check_random "$build/bin/moire" check --device cuda --random 2000 --dtype bf16 \
    --ops fc1,fc1_glu,fc1_dgrad,fc1_wgrad,fc2,fc2_dgrad,fc2_dgrad_glu,fc2_wgrad
}

# As on a GPU that is newer than the build: its kernels are compiled from what PTX there is.
jit() {
  CUDA_FORCE_PTX_JIT=1 "$build/bin/moire" check --device cuda --random 60 --implementation portable \
    --dtype bf16,mxfp8,mxfp8_fast,fp8_block
}

# On Hopper the fast paths are the sm90 kernels', and nothing else may take them.
# paths FILES COMMAND...: checks the files' problems, by the command.
paths() {
  local problems forced=()
  read -ra problems <<<"$1"
  shift
  [[ $(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -1) == 9.0 ]] &&
    forced=(--implementation sm90)
  "$@" "$build/bin/moire" check "${problems[@]}" --device cuda --all-supported "${forced[@]}"
}

# Small cases: racecheck runs them a thousand times slower. Each argument has memory of its own, so
# that a step past its end is seen (staging/staged_call.h).
sanitize() {
  local tool memory_bound=splits_to_offsets,convert_glu,bias_backward,glu,glu_backward,router
  memory_bound+=,router_backward,permute_plan,permute,unpermute,unpermute_backward
  memory_bound+=,quantize,quantize_weight,quantize_grad,dequantize,requantize,convert_scales
  local -x MOIRE_STAGING=apart
  part bad_splits compute-sanitizer --tool memcheck --error-exitcode 9 \
    "$build/bin/test_gpu" --gtest_filter='BadSplits.*:*WrongSplits*'
  part racecheck_spans compute-sanitizer --tool racecheck --error-exitcode 9 \
    "$build/bin/test_gpu" --gtest_filter='GpuQuantize.Spans*:Requantize.OfSpans*'
  part synccheck compute-sanitizer --tool synccheck --error-exitcode 9 \
    "$build/bin/test_gpu" --gtest_filter='Requantize.*'
  for tool in memcheck racecheck; do
    part "${tool}_portable_fp8" compute-sanitizer --tool "$tool" --error-exitcode 9 \
      "$build/bin/moire" check --device cuda --random 12 --implementation portable \
      --dtype mxfp8,mxfp8_fast,fp8_block
    part "${tool}_ranks" compute-sanitizer --tool "$tool" --error-exitcode 9 \
      "$build/bin/moire" check --device cuda --random 12 \
      --ops dispatch_plan,dispatch,combine,exchange
  done
  for tool in memcheck racecheck initcheck; do
    part "$tool" paths fast_paths compute-sanitizer --tool "$tool" --error-exitcode 9
    [ "$tool" = initcheck ] || # which takes stores by TMA, that other kernels read, for none
      part "${tool}_stored" paths "activation_paths fp8_paths" \
        compute-sanitizer --tool "$tool" --error-exitcode 9
    part "${tool}_memory_bound" compute-sanitizer --tool "$tool" --error-exitcode 9 \
      "$build/bin/moire" check --device cuda --random 40 --dtype bf16,fp32 --ops "$memory_bound"
  done
}

python_tests() {
  PYTHONPATH=$PWD/python "$python" -m pytest tests/python tests/examples -p no:warnings \
    -k "cuda" --junitxml="$out/python.xml"
}

# Ranks are spread over the GPUs that there are; what a link costs needs two, and NCCL since 2.29.2.
ranks() {
  part parallel suite parallel ""
  part check_ranks "$build/bin/moire" check --device cuda --random 200 \
    --ops dispatch_plan,dispatch,combine,exchange
  local gpus
  gpus=$(nvidia-smi --list-gpus | wc -l)
  [ "$gpus" -lt 2 ] && echo "one GPU: bench_expert_parallel.py needs two" && return
  PYTHONPATH=$PWD/python part ranks "$python" -m torch.distributed.run --nproc-per-node 2 \
    scripts/bench_expert_parallel.py --json "$out/expert_parallel.json"
}

bench() {
  "$build/bin/moire" bench gpu --device cuda --json >"$out/bench.jsonl"
}

host() {
  PYTHONPATH=$PWD/python "$python" scripts/bench_host.py --device cuda --json "$out/host.json"
}

# In short mode; docs/performance.md has the commands of its tables.
peers() {
  PYTHONPATH=$PWD/python "$python" scripts/bench_peers.py --short --json "$out/peers.json"
  PYTHONPATH=$PWD/python "$python" scripts/bench_decode.py --short --json "$out/decode.json"
}

kernels() {
  PYTHONPATH=$PWD/python "$python" scripts/bench_kernels.py --short --json "$out/kernels.json"
}

for name in $parts; do
  [[ " $known " == *" $name "* ]] && continue
  echo "gpu_test.sh: found part '$name', needed some of: $known" >&2 && exit 2
done
mkdir -p "$out"
nvidia-smi --query-gpu=name,driver_version,clocks.sm,power.draw --format=csv | tee "$out/gpu.csv"
for name in $parts; do
  case $name in
    cpp | check | sanitize | ranks) $name ;;
    python) part python python_tests ;;
    *) part "$name" "$name" ;;
  esac
done
[ ${#failed[@]} -eq 0 ] && echo "all passed; results are in $out" && exit 0
echo "failed: ${failed[*]}; see $out" && exit 1
