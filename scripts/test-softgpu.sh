#!/usr/bin/env bash
# The GPU tests on the software device (docs/testing.md): no GPU and no CUDA toolkit needed. Runs those of the device itself,
# of operations, of the Hopper kernels and of communication in the plain order, and a few in another order of threads,
# copies and streams: some seven minutes of processor time.
#   --plain every test in the plain order
#   --all   every test in every order, on an A100, and under the address and the thread sanitizer: hours
# Further arguments go to ctest, for example -R ring. SOFTGPU_SEED=N repeats the other order of a day.
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
usual=(device_test ops_test attention_hopper_test attention_select_test comm_device_test eval_test)
# Of those the short ones. (The device's own tests have their orders in CMake.)
sample='^(device_test|ops_test)'
other=(SOFTGPU_ORDER="random:$seed" SOFTGPU_COPIES="random:$seed" SOFTGPU_STREAMS="random:$seed" SOFTGPU_PATTERN=0x7F)

if [ $extent = default ]; then
  build softgpu softgpu_own_tests "${usual[@]}"
  run softgpu "in the plain order" "^(softgpu_|$(IFS='|' && echo "${usual[*]}"))"
  run softgpu "a sample in another order" "$sample" "${other[@]}"
  echo "left out: attention by portable kernels, rings, models and trainings on the software device, and sanitizers:" \
    "scripts/test-softgpu.sh --all"
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
run softgpu-tsan "all under the thread sanitizer" $every
