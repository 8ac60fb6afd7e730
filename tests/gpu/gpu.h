// What tests of the GPU itself share: a CUDA context, or a skip that says why there is none.
#pragma once

#include <cuda_runtime.h>
#include <gtest/gtest.h>
#include <moire/context.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tests/support/expect.h"
#include "tests/support/tested.h"

namespace moire::test {

class Gpu : public testing::Test {
 protected:
  void SetUp() override {
    ContextOptions options;
    options.device = Device::kCuda;
    Result<Context> context = Context::create(options);
    if (!context.ok()) GTEST_SKIP() << context.status().message();
    context_.emplace(std::move(context).value());
  }
  const Context& context() const { return *context_; }
  // Whether this is a GPU that the sm90 kernels are for.
  bool has_sm90() const {
    int major = 0, minor = 0;
    const int index = context_->options().index;
    EXPECT_EQ(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, index),
              cudaSuccess);
    EXPECT_EQ(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, index),
              cudaSuccess);
    return major == 9 && minor == 0;
  }

 private:
  std::optional<Context> context_;
};

// Tests of what is captured on a stream and replayed.
class Captures : public Gpu {
 protected:
  void SetUp() override {
    Gpu::SetUp();
    if (IsSkipped()) return;
    ASSERT_EQ(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), cudaSuccess);
    ContextOptions options = context().options();
    options.stream = stream_;
    on_stream_.emplace(context().sharing(options).value());
  }
  void TearDown() override {
    destroy_graph();
    if (stream_ != nullptr) cudaStreamDestroy(stream_);
  }
  const Context& on_stream() const { return *on_stream_; }

  // Captures what `work` launches; ops must neither allocate nor wait for that.
  template <class Work>
  void capture(const Work& work) {
    destroy_graph();
    ASSERT_EQ(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeGlobal), cudaSuccess);
    const Status status = work();
    ASSERT_EQ(cudaStreamEndCapture(stream_, &graph_), cudaSuccess);
    ASSERT_TRUE(succeeds(status));
    ASSERT_EQ(cudaGraphInstantiate(&executable_, graph_, 0), cudaSuccess);
  }
  void replay() { ASSERT_EQ(cudaGraphLaunch(executable_, stream_), cudaSuccess); }
  // Nodes of the captured graph, all of them and those that are kernels.
  std::pair<size_t, size_t> count_nodes() const {
    size_t count = 0;
    EXPECT_EQ(cudaGraphGetNodes(graph_, nullptr, &count), cudaSuccess);
    std::vector<cudaGraphNode_t> nodes(count);
    EXPECT_EQ(cudaGraphGetNodes(graph_, nodes.data(), &count), cudaSuccess);
    size_t kernels = 0;
    for (cudaGraphNode_t node : nodes) {
      cudaGraphNodeType type;
      EXPECT_EQ(cudaGraphNodeGetType(node, &type), cudaSuccess);
      kernels += type == cudaGraphNodeTypeKernel ? 1 : 0;
    }
    return {count, kernels};
  }

 private:
  void destroy_graph() {
    if (executable_ != nullptr) cudaGraphExecDestroy(executable_);
    if (graph_ != nullptr) cudaGraphDestroy(graph_);
    executable_ = nullptr;
    graph_ = nullptr;
  }

  cudaStream_t stream_ = nullptr;
  cudaGraph_t graph_ = nullptr;
  cudaGraphExec_t executable_ = nullptr;
  std::optional<Context> on_stream_;
};

// Tests of the kernels for compute capability 9.0.
class Hopper : public Gpu {
 protected:
  void SetUp() override {
    Gpu::SetUp();
    if (!IsSkipped() && !has_sm90()) GTEST_SKIP() << "the kernels are for compute capability 9.0";
  }
  Tested alone() const { return Tested::alone(context()); }
  // With which words explain says how a call runs.
  template <class A>
  std::string policy(const A& args) const {
    const Context explaining = context().explaining();
    EXPECT_TRUE(succeeds(run(explaining, args)));
    return explaining.explanation().empty() ? "" : explaining.explanation()[0].policy;
  }
};

}  // namespace moire::test
