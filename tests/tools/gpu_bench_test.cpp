// What a benchmark on a GPU measures of graphs, on a GPU whose calls take a second each.
#include "gpu_bench.h"

#include <gtest/gtest.h>

#include <memory>

namespace moire::tool {
namespace {

class GraphGpu : public Gpu {
 public:
  int captured = 0, enqueued = 0;  // graphs, and calls while they were

  void* stream() const override { return nullptr; }
  std::string bus_id() const override { return ""; }
  int64_t cache_bytes() const override { return 1; }
  int64_t free_bytes() const override { return 1; }
  Graph capture(const std::function<Status()>& enqueue) override {
    const int before = enqueued;
    EXPECT_TRUE(enqueue().ok());
    ++captured;
    return {std::make_shared<int>(enqueued - before)};
  }
  void launch(const Graph& graph) override { time_ += *static_cast<int*>(graph.executable.get()); }
  void* take(int64_t) override { return nullptr; }
  Status copy(void*, const void*, int64_t) override { return {}; }
  double now() override { return time_; }
  void flush() override {}
  Mark mark() override { return std::make_shared<double>(time_); }
  void wait(const Mark&) override {}
  double seconds(const Mark& begin, const Mark& end) override {
    return *static_cast<double*>(end.get()) - *static_cast<double*>(begin.get());
  }

 private:
  double time_ = 0;
};

TEST(GraphVariant, TimesTheGraphsOfOneCallAndOfMany) {
  GraphGpu gpu;
  const auto call = [&] {
    ++gpu.enqueued;
    return Status();
  };
  GraphVariant variant(gpu, "calls", {call, call, call});
  EXPECT_EQ(gpu.captured, 3) << "one of each set of operands";
  EXPECT_EQ(variant.seconds(0, 1), 1);
  EXPECT_EQ(gpu.captured, 3);
  EXPECT_EQ(variant.seconds(0, 5), 5);
  EXPECT_EQ(variant.seconds(5, 5), 5);
  EXPECT_EQ(gpu.captured, 4) << "one of five calls";
}

}  // namespace
}  // namespace moire::tool
