// Experts over ranks: which tokens go where, there and back, and what a rank knows of the others.
// Structs and formulas: moire.h.
#pragma once

#include <moire/context.h>
#include <moire/ops.h>
#include <moire/tensor.h>

#include <memory>
#include <vector>

namespace moire {

MOIRE_DECLARE_OP_WITH_WORKSPACE(dispatch_plan, DispatchPlanArgs)
MOIRE_DECLARE_OP(dispatch, DispatchArgs)
MOIRE_DECLARE_OP(combine, CombineArgs)

using CommunicatorOptions = Args<moire_communicator_options>;

struct Peers;  // ranks, their windows and who keeps them; internal, an engine derives from it

// One rank of several, given to contexts as ContextOptions::communicator. One call at a time.
class MOIRE_API Communicator {
 public:
  // Ranks that are threads of this process, rank 0 first. Each has a window of so many bytes and
  // waits so long for another; 0: ten minutes.
  static Result<std::vector<std::shared_ptr<Communicator>>> threads(int num_ranks,
                                                                    size_t window_bytes,
                                                                    int64_t timeout_ms = 0);
  // The same with every option: on the CPU, or on CUDA devices.
  static Result<std::vector<std::shared_ptr<Communicator>>> threads(
      const CommunicatorOptions& options);
  // This rank of several that NCCL connects: a call of all of them.
  static Result<std::shared_ptr<Communicator>> nccl(const CommunicatorOptions& options);
  explicit Communicator(std::unique_ptr<Peers> peers);
  ~Communicator();  // leaves

  Device device() const;
  int index() const;  // of the device
  int rank() const;
  int size() const;
  // This rank's own: zeroed at first, 256-byte aligned.
  Workspace window() const;
  // Calls of all ranks fail from now on.
  void leave();
  const Peers& peers() const { return *peers_; }

 private:
  std::unique_ptr<Peers> peers_;
};

}  // namespace moire
