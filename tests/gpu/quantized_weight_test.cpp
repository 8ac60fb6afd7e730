// QuantizedWeight on a GPU: memory of its own there, filled from a weight that lies there, with the
// bytes that prepare_weight makes; versions are followed at one address.
#include <moire/grouped_tensor.h>

#include <cstring>
#include <vector>

#include "tests/gpu/gpu.h"
#include "tests/mlp/prepared_weight.h"

namespace moire::test {
namespace {

class QuantizedWeightOnGpu : public Gpu {
 protected:
  // The same weight in memory of the device.
  Weight upload(const TestWeight& w) {
    const TensorView host = Weight(w).tensor;
    const auto bytes =
        static_cast<size_t>(host.num_rows() * host.stride() * dtype_size(host.type()));
    if (memory_.bytes() != bytes) memory_ = Buffer(context(), bytes);
    EXPECT_TRUE(memory_.ok());
    EXPECT_EQ(cudaMemcpy(memory_.data(), host.data, bytes, cudaMemcpyHostToDevice), cudaSuccess);
    Weight out(w);
    out.tensor.data = memory_.data();
    return out;
  }
  void expect_holds(const QuantizedWeight& kept, const RecipeCase& c, const TestWeight& w) {
    const Prepared want = prepare(prepare_args(c, w), Tested::alone(context()));
    std::vector<char> got(want.memory->bytes());
    ASSERT_TRUE(succeeds(context().check()));
    ASSERT_EQ(cudaMemcpy(got.data(), kept.prepared().memory.data, got.size(), cudaMemcpyDefault),
              cudaSuccess);
    EXPECT_EQ(std::memcmp(got.data(), want.memory->data(), got.size()), 0);
  }

 private:
  Buffer memory_;
};

TEST_F(QuantizedWeightOnGpu, OwnsWhatProductsRead) {
  for (const RecipeCase& c : recipes()) {
    SCOPED_TRACE(c);
    Random random;
    TestWeight w(DType::kBF16, 3, 128, 256);
    w.randomize(random);
    const Weight there = upload(w);
    QuantizedWeight kept = QuantizedWeight::create(context(), prepare_args(c, there)).value();
    void* const address = kept.prepared().memory.data;
    // What lies between rows is not written.
    const auto bytes = static_cast<size_t>(kept.prepared().memory.shape[0]);
    ASSERT_EQ(cudaMemset(address, 0xFF, bytes), cudaSuccess);
    ASSERT_TRUE(succeeds(kept.update(context(), there, 1)));
    expect_holds(kept, c, w);
    const TestWeight before = w;
    w.randomize(random);
    ASSERT_TRUE(succeeds(kept.update(context(), upload(w), 1)));
    expect_holds(kept, c, before);
    ASSERT_TRUE(succeeds(kept.update(context(), upload(w), 2)));
    expect_holds(kept, c, w);
    EXPECT_EQ(kept.prepared().memory.data, address);
  }
}

}  // namespace
}  // namespace moire::test
