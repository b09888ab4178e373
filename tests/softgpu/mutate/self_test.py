"""Does the generator find the sites it should, and nothing that is none?"""

from . import sites

KERNEL = """
__global__ void kernel(Args args) {
  __shared__ float values[32];  // not this: __syncthreads();
  if (threadIdx.x < args.rows) values[threadIdx.x] = args.x[threadIdx.x];
  __syncthreads();
  if (row >= args.count) return;
  if (leader) barrier_wait(shared_address(&full[stage(v)]), phase(v));
  else wgmma_wait<1>();
  async_fence();
  for (int i = 0; i < kSteps; ++i) step<D / 2>(i);
  if constexpr (Rows < most) rest();
  if (of(x) - item.first < item.tokens) next();  // the left side is more than what stands next to the sign
}
void launch(cudaStream_t stream) {
  launch_kernel(kernel, {blocks, 128, 0, stream}, args);
  check(cudaMemsetAsync(p, 0, sizeof(float), stream), "memset");
}
"""
HOST = """
void f(const Exec& exec) {
  slot[i].copied.record(exec);
  if (used) cuda::wait_on_stream(event.get(), exec.stream);
  if (count >= most) return;
}
"""


def run() -> int:
    failures = []

    def expect(name, got, wanted):
        if got != wanted:
            failures.append(f"{name}: {got} instead of {wanted}")

    kernel = [(s.kind, s.text) for s in sites.sites_of("src/a/kernel.cu", KERNEL)]
    expect("a kernel's sites", kernel, [
        ("bound", "threadIdx.x < args.rows"), ("barrier", "__syncthreads()"), ("bound", "row >= args.count"),
        ("wait", "barrier_wait(shared_address(&full[stage(v)]), phase(v))"), ("wait", "wgmma_wait<1>()"),
        ("fence", "async_fence()"), ("stream", "stream"), ("stream", "stream")])
    host = [(s.kind, s.text) for s in sites.sites_of("src/a/host.cpp", HOST)]
    expect("a host file's sites", host, [("event", "slot[i].copied.record(exec)"),
                                         ("event", "cuda::wait_on_stream(event.get(), exec.stream)")])
    found = sites.sites_of("src/a/kernel.cu", KERNEL)
    text = sites.with_switches(KERNEL, found)
    expect("a switched barrier", f"(mutant::is({found[1].number}) ? (void)0 : (void)(__syncthreads()));" in text, True)
    expect("a switched bound", f"(mutant::is({found[2].number}) ? row > args.count : row >= args.count)" in text, True)
    expect("a switched stream", f"{{blocks, 128, 0, mutant::stream({found[6].number}, stream)}}" in text, True)
    moved = [s.key for s in sites.sites_of("src/a/kernel.cu", "\n\n" + KERNEL)]
    expect("keys after lines were added above", moved, [s.key for s in found])
    for failure in failures:
        print("FAILED:", failure)
    print("mutate-gpu: self-test", "failed" if failures else "passed")
    return 1 if failures else 0
