#!/usr/bin/env bash
# The GPU tests on the software device (docs/testing.md): no GPU and no CUDA toolkit needed. Every test program in the
# plain order, some of their cases (those that are left out are named below); a sample in another order of threads, copies
# and streams, and one under the address sanitizer: some fifteen minutes of processor time, and as many of compiling.
#   --plain every case of every test in the plain order: some forty minutes of processor time
#   --all   every case in every order, on an A100, and under the address and the thread sanitizer: hours
# Further arguments go to ctest with these two, for example --plain -R ring. SOFTGPU_SEED=N repeats the other order of a day.
set -euo pipefail
cd "$(dirname "$0")/.."
export ASAN_OPTIONS=${ASAN_OPTIONS:-detect_stack_use_after_return=0} UBSAN_OPTIONS=print_stacktrace=1
seed=${SOFTGPU_SEED:-$(date +%j)}
extent=default
case ${1:-} in
  --all | --plain) extent=${1#--}; shift ;;
esac
# They carry the label for what else is on machines with a GPU (PyTorch), and need no device.
elsewhere='^(transformers|peft|nccl_one_gpu)$'

scripts/setup.sh test
# build PRESET [TARGET...]: every test without targets.
build() {
  local preset=$1
  shift
  cmake --preset "$preset" >/dev/null
  cmake --build --preset "$preset" --target "${@:-softgpu_tests}"
}

# run PRESET NAME REGEX [VARIABLE=VALUE...]: the tests that a regular expression names.
run() {
  local preset=$1 name=$2 regex=$3
  shift 3
  printf '\n== %s\n' "$name${*:+ ($*)}"
  env "$@" ctest --test-dir "build/$preset" --output-on-failure -j "$(nproc)" -L 'gpu|nccl|softgpu' -E "$elsewhere" \
    -R "$regex" "${more[@]}"
}
more=("$@")
every=.
other=(SOFTGPU_ORDER="random:$seed" SOFTGPU_COPIES="random:$seed" SOFTGPU_STREAMS="random:$seed" SOFTGPU_PATTERN=0x7F)

# cases PRESET PROGRAM FILTER [VARIABLE=VALUE...]: some cases of a test.
cases() {
  local preset=$1 program=$2 filter=$3
  shift 3
  printf '\n== %s: %s\n' "$program" "$filter${*:+ ($*)}"
  env "$@" "$(find "build/$preset/tests" -type f -name "$program")" --gtest_brief=1 --gtest_filter="$filter"
}

if [ $extent = default ]; then
  whole='^(softgpu_|device_test|ops_test|comm_device_test|attention_hopper_test|attention_select_test)'
  build softgpu
  run softgpu "whole, in the plain order" "$whole"
  # Of the longer ones what each is about, the cheaper type where both take the same way.
  cases softgpu eval_test '*cuda*:*Cuda*'
  cases softgpu attention_cuda_test '*Refuses*:*Refused*:*SmallCases*:*Table*'
  cases softgpu model_test '*cuda*:*Cuda*:-*LossCurve*:*AdaptersLearn*:*Pieces*/f32:*SparseAttention/f32:*LayerInputs*/f32'
  cases softgpu cuda_ring_test '*CudaRing.*/bf16:*CudaRingPieces.HaveMany*/bf16:*CudaRingSelections*/bf16_topk*:-*StepsTake*'
  cases softgpu cuda_training_test '*SparseAttention:*Refused'
  cases softgpu cuda_ranks_test 'CudaRuns.GoOn*:CudaRuns.RanksWithoutTokens*:CudaRuns.NcclIsRefused*:CudaRuns.Processes*'
  cases softgpu nccl_ranks_test '*AllCommunicatorCases' SOFTGPU_DEVICES=2
  run softgpu "a sample in another order" '^(device_test|ops_test)' "${other[@]}"
  build softgpu-asan softgpu_own_tests ops_test device_test
  run softgpu-asan "a sample under the address sanitizer" '^(softgpu_|device_test|ops_test)'
  echo "left out: the other cases of these tests (--plain), other orders and the thread sanitizer (--all):" \
    "scripts/test-softgpu.sh"
  exit
fi
build softgpu
run softgpu "all, in the plain order" $every
echo "left out: transformers, peft and nccl_one_gpu, which need PyTorch and not the device"
[ $extent = plain ] && exit
run softgpu "all, the last thread first, copies and streams at once" $every \
  SOFTGPU_ORDER=reverse SOFTGPU_COPIES=eager SOFTGPU_STREAMS=eager
run softgpu "all, the last thread first" $every SOFTGPU_ORDER=reverse
for n in "$seed" $((seed + 1)) $((seed + 2)); do
  run softgpu "all, in another order" $every \
    SOFTGPU_ORDER="random:$n" SOFTGPU_COPIES="random:$n" SOFTGPU_STREAMS="random:$n" SOFTGPU_PATTERN=0x7F
done
run softgpu "all on a device without Hopper's instructions" $every SOFTGPU_DEVICE=a100
build softgpu-asan
run softgpu-asan "all under the address sanitizer" $every
build softgpu-tsan
# More blocks at a time would be more threads than the sanitizer's tables and the system's mappings have room for.
run softgpu-tsan "all under the thread sanitizer" $every SOFTGPU_MULTIPROCESSORS=2
