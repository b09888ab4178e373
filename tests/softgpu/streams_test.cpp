// What a program does not order may come in another order.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <thread>
#include <tuple>
#include <vector>

#include "softgpu/interface/options.h"
#include "softgpu/runtime/scheduler.h"

namespace softgpu {
namespace {

class SoftgpuStreams : public testing::Test {
 protected:
  void SetUp() override {
    for (cudaStream_t* stream : {&first_, &second_})
      ASSERT_EQ(cudaStreamCreateWithFlags(stream, cudaStreamNonBlocking), cudaSuccess);
    ASSERT_EQ(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming), cudaSuccess);
    ASSERT_EQ(cudaMalloc(reinterpret_cast<void**>(&a_), 4), cudaSuccess);
    ASSERT_EQ(cudaMalloc(reinterpret_cast<void**>(&b_), 4), cudaSuccess);
    ASSERT_EQ(cudaHostAlloc(reinterpret_cast<void**>(&locked_), 4, 0), cudaSuccess);
    cudaMemset(a_, 0, 4);
    cudaMemset(b_, 0, 4);
    cudaDeviceSynchronize();
    *locked_ = -1;
  }
  void TearDown() override {
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    for (cudaStream_t stream : {first_, second_}) cudaStreamDestroy(stream);
    cudaEventDestroy(event_);
    for (int* memory : {a_, b_}) cudaFree(memory);
    cudaFreeHost(locked_);
  }
  static void write(int* to, int value, cudaStream_t stream) {
    Kernel kernel;
    kernel.body = [=] { *to = value; };
    kernel.library_name = "write";
    kernel.grid = kernel.block = dim3(1);
    kernel.stream = stream;
    ASSERT_EQ(enqueue_kernel(std::move(kernel)), cudaSuccess);
  }
  // After what is in the stream.
  static int read(const int* from, cudaStream_t stream) {
    int value = -1;
    cudaMemcpyAsync(&value, from, 4, cudaMemcpyDeviceToHost, stream);
    cudaStreamSynchronize(stream);
    return value;
  }
  static bool late() { return options().streams == When::late; }

  cudaStream_t first_{}, second_{};
  cudaEvent_t event_{};
  int *a_ = nullptr, *b_ = nullptr, *locked_ = nullptr;
};

TEST_F(SoftgpuStreams, AMissingEventChangesTheResult) {
  if (!late()) GTEST_SKIP() << "the order is another one";
  write(a_, 1, first_);
  cudaMemcpyAsync(b_, a_, 4, cudaMemcpyDefault, second_);
  EXPECT_EQ(read(b_, second_), 0);
  // The other way round: what is read later than it was meant to be.
  write(a_, 2, first_);
  EXPECT_EQ(read(a_, first_), 2);
  cudaMemcpyAsync(b_, a_, 4, cudaMemcpyDefault, first_);
  write(a_, 3, second_);
  EXPECT_EQ(read(a_, second_), 3);
  EXPECT_EQ(read(b_, first_), 3);
}

TEST_F(SoftgpuStreams, AnEventOrders) {
  write(a_, 1, first_);
  cudaEventRecord(event_, first_);
  cudaStreamWaitEvent(second_, event_, 0);
  cudaMemcpyAsync(b_, a_, 4, cudaMemcpyDefault, second_);
  EXPECT_EQ(read(b_, second_), 1);
}

// The wait is for what was recorded when it was called.
TEST_F(SoftgpuStreams, ALaterRecordIsAnotherOne) {
  if (!late()) GTEST_SKIP() << "the order is another one";
  EXPECT_EQ(cudaStreamWaitEvent(second_, event_, 0), cudaSuccess);  // nothing yet: no wait
  write(a_, 1, first_);
  cudaEventRecord(event_, first_);
  cudaStreamWaitEvent(second_, event_, 0);
  write(a_, 2, first_);
  cudaEventRecord(event_, first_);
  cudaMemcpyAsync(b_, a_, 4, cudaMemcpyDefault, second_);
  EXPECT_EQ(read(b_, second_), 1);
}

TEST_F(SoftgpuStreams, NothingIsDoneBeforeSomebodyWaits) {
  if (!late()) GTEST_SKIP() << "the order is another one";
  cudaMemcpyAsync(locked_, a_, 4, cudaMemcpyDefault, first_);
  EXPECT_EQ(*locked_, -1);
  cudaStreamSynchronize(second_);
  EXPECT_EQ(*locked_, -1);
  cudaStreamSynchronize(first_);
  EXPECT_EQ(*locked_, 0);
}

// Page-locked memory is read when the stream comes to it; pageable memory has been read when the call returns.
TEST_F(SoftgpuStreams, PageLockedSourcesMustStay) {
  if (!late()) GTEST_SKIP() << "the order is another one";
  int pageable = 5;
  *locked_ = 5;
  cudaMemcpyAsync(a_, &pageable, 4, cudaMemcpyDefault, first_);
  cudaMemcpyAsync(b_, locked_, 4, cudaMemcpyDefault, first_);
  pageable = *locked_ = 6;
  EXPECT_EQ(read(a_, first_), 5);
  EXPECT_EQ(read(b_, first_), 6);
}

TEST_F(SoftgpuStreams, ACopyToPageableMemoryIsThereWhenTheCallReturns) {
  int pageable = -1;
  write(a_, 7, first_);
  cudaMemcpyAsync(&pageable, a_, 4, cudaMemcpyDefault, first_);
  EXPECT_EQ(pageable, 7);
}

// Whoever asks again and again gets there, an operation at a time.
TEST_F(SoftgpuStreams, AskingMovesOn) {
  for (int i = 0; i < 3; ++i) write(a_, i, first_);
  cudaEventRecord(event_, first_);
  int asked = 1;
  for (; cudaEventQuery(event_) == cudaErrorNotReady; ++asked) {
    EXPECT_EQ(cudaGetLastError(), cudaErrorNotReady);
    ASSERT_LT(asked, 1000);
  }
  if (late()) EXPECT_EQ(asked, 4);
  EXPECT_EQ(cudaEventSynchronize(event_), cudaSuccess);
}

// Streams that were not created as non-blocking and the default one follow each other.
TEST_F(SoftgpuStreams, TheDefaultStreamOrdersBlockingOnes) {
  cudaStream_t blocking;
  cudaStreamCreate(&blocking);
  write(a_, 1, blocking);
  cudaMemcpyAsync(b_, a_, 4, cudaMemcpyDefault, nullptr);
  write(a_, 2, blocking);
  EXPECT_EQ(read(b_, nullptr), 1);
  EXPECT_EQ(read(a_, blocking), 2);
  if (late()) {  // and the others not
    write(a_, 3, first_);
    EXPECT_EQ(read(a_, nullptr), 2);
  }
  cudaStreamDestroy(blocking);
}

TEST_F(SoftgpuStreams, ADestroyedStreamStillDoesWhatIsInIt) {
  cudaStream_t gone;
  cudaStreamCreateWithFlags(&gone, cudaStreamNonBlocking);
  write(a_, 4, gone);
  cudaEventRecord(event_, gone);
  cudaStreamDestroy(gone);
  EXPECT_EQ(cudaEventSynchronize(event_), cudaSuccess);
  EXPECT_EQ(read(a_, first_), 4);
  EXPECT_DEATH(cudaStreamSynchronize(gone), "is no stream, or none any more");
}

// Whatever stream is captured: an allocation could wait for all of the device. With other modes threads differ.
TEST_F(SoftgpuStreams, NobodyAllocatesOrWaitsForAllWhileAStreamIsCaptured) {
  cudaGraph_t graph;
  void* memory = nullptr;
  const auto allocated = [&] {
    const cudaError_t error = cudaMalloc(&memory, 4);
    if (error == cudaSuccess) cudaFree(memory);
    return error;
  };
  for (const auto& [mode, here, elsewhere] :
       {std::tuple{cudaStreamCaptureModeGlobal, cudaErrorStreamCaptureUnsupported, cudaErrorStreamCaptureUnsupported},
        {cudaStreamCaptureModeThreadLocal, cudaErrorStreamCaptureUnsupported, cudaSuccess},
        {cudaStreamCaptureModeRelaxed, cudaSuccess, cudaSuccess}}) {
    SCOPED_TRACE(mode);
    ASSERT_EQ(cudaStreamBeginCapture(first_, mode), cudaSuccess);
    EXPECT_EQ(cudaDeviceSynchronize(), cudaErrorStreamCaptureUnsupported);
    EXPECT_EQ(allocated(), here);
    cudaError_t there = cudaSuccess;
    std::thread([&] { there = cudaMalloc(&memory, 4); }).join();
    EXPECT_EQ(there, elsewhere);
    ASSERT_EQ(cudaStreamEndCapture(first_, &graph), cudaSuccess);
    cudaGraphDestroy(graph);
    if (there == cudaSuccess) cudaFree(memory);
    cudaGetLastError();
  }
}

TEST_F(SoftgpuStreams, GraphsAreReplayed) {
  cudaGraph_t graph;
  cudaGraphExec_t executable;
  cudaStream_t blocking;
  cudaStreamCreate(&blocking);
  ASSERT_EQ(cudaStreamBeginCapture(blocking, cudaStreamCaptureModeGlobal), cudaSuccess);
  cudaMemcpyAsync(b_, a_, 4, cudaMemcpyDefault, blocking);
  EXPECT_EQ(cudaStreamSynchronize(blocking), cudaErrorStreamCaptureUnsupported);
  EXPECT_EQ(cudaMemcpy(b_, a_, 4, cudaMemcpyDefault), cudaErrorStreamCaptureImplicit);
  void* memory = nullptr;
  EXPECT_EQ(cudaMalloc(&memory, 4), cudaErrorStreamCaptureUnsupported);
  ASSERT_EQ(cudaStreamEndCapture(blocking, &graph), cudaSuccess);
  ASSERT_EQ(cudaGraphInstantiate(&executable, graph, 0), cudaSuccess);
  for (int i = 1; i < 3; ++i) {
    write(a_, i, blocking);
    EXPECT_EQ(read(b_, blocking), i - 1);
    ASSERT_EQ(cudaGraphLaunch(executable, blocking), cudaSuccess);
    EXPECT_EQ(read(b_, blocking), i);
  }
  cudaGraphExecDestroy(executable);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(blocking);
  while (cudaGetLastError() != cudaSuccess) {
  }
}

TEST_F(SoftgpuStreams, TimesNeedEventsThatMeasure) {
  cudaEvent_t begin, end;
  cudaEventCreate(&begin);
  cudaEventCreate(&end);
  float time = -1;
  cudaEventRecord(begin, first_);
  EXPECT_EQ(cudaEventElapsedTime(&time, begin, end), cudaErrorInvalidResourceHandle);
  cudaEventRecord(end, first_);
  cudaEventSynchronize(end);
  EXPECT_EQ(cudaEventElapsedTime(&time, begin, end), cudaSuccess);
  EXPECT_GE(time, 0);
  cudaEventRecord(event_, first_);
  cudaEventSynchronize(event_);
  EXPECT_EQ(cudaEventElapsedTime(&time, begin, event_), cudaErrorInvalidResourceHandle);
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  cudaGetLastError();
}

// --- operations of several streams
// ------------------------------------------------------------------------------------

std::shared_ptr<Meeting> meeting_of(size_t parts, int& performed) {
  auto meeting = std::make_shared<Meeting>();
  meeting->what = "sum";
  meeting->parts.resize(parts);
  meeting->perform = [&] { ++performed; };
  return meeting;
}
void join(const std::shared_ptr<Meeting>& meeting, size_t part, cudaStream_t handle) {
  const Scheduler::Turn turn;
  Stream* stream = Scheduler::get().of(handle);
  meeting->parts[part].stream = stream;
  Scheduler::get().put(*stream, {.meets = meeting, .part = part});
}

TEST_F(SoftgpuStreams, AMeetingHappensOnceAllHaveComeToIt) {
  int performed = 0;
  const auto meeting = meeting_of(2, performed);
  write(a_, 1, first_);
  join(meeting, 0, first_);
  cudaEventRecord(event_, first_);
  EXPECT_EQ(cudaEventQuery(event_), cudaErrorNotReady);
  std::thread other([&] { join(meeting, 1, second_); });
  EXPECT_EQ(cudaStreamSynchronize(first_), cudaSuccess);
  EXPECT_EQ(performed, 1);
  other.join();
  EXPECT_EQ(cudaStreamSynchronize(second_), cudaSuccess);
  EXPECT_EQ(performed, 1);
  cudaGetLastError();
}

TEST_F(SoftgpuStreams, MeetingsInAnotherOrderAreADeadlockThatIsNamed) {
  int performed = 0;
  const auto one = meeting_of(2, performed), two = meeting_of(2, performed);
  const auto all = [&] {
    join(one, 0, first_);
    join(two, 0, first_);
    join(two, 1, second_);
    join(one, 1, second_);
    cudaStreamSynchronize(first_);
  };
  EXPECT_DEATH(all(), "a deadlock: streams wait for each other");
}

}  // namespace
}  // namespace softgpu
