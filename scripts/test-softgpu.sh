#!/usr/bin/env bash
# The GPU tests on the software device (docs/testing.md): no GPU and no CUDA toolkit needed. Runs every one of them in the
# plain order, a sample in another order of threads, copies and streams, and a sample under the address sanitizer.
#   --all   every test in every order, on an A100, and under the address and the thread sanitizer: hours
#   --plain the plain order alone
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
build() {
  cmake --preset "$1" >/dev/null
  cmake --build --preset "$1" --target softgpu_tests
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
# Of every kind of kernel and of host code one: small ones, communicators on streams, the portable attention.
sample='^(softgpu_|device_test|comm_device_test|attention_table)'
other=(SOFTGPU_ORDER="random:$seed" SOFTGPU_COPIES="random:$seed" SOFTGPU_STREAMS="random:$seed" SOFTGPU_PATTERN=0x7F)

build softgpu
run softgpu "all, in the plain order" $every
echo "left out: transformers, peft and nccl_one_gpu, which need PyTorch and not the device"
[ $extent = plain ] && exit
if [ $extent = default ]; then
  run softgpu "a sample in another order" "$sample" "${other[@]}"
  build softgpu-asan
  run softgpu-asan "a sample under the address sanitizer" "$sample"
  exit
fi
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
run softgpu-tsan "all under the thread sanitizer" $every TSAN_OPTIONS=halt_on_error=1:report_signal_unsafe=0
