// C entries: communicators.
#include <moire/expert_parallel.h>

#include "capi/boundary.h"

using moire::invalid;
using moire::Status;
using moire::capi::guarded;

extern "C" {

int32_t moire_communicator_threads(const moire_communicator_options* given,
                                   moire_communicator** communicators) {
  return guarded([&]() -> Status {
    constexpr std::string_view kEntry = "moire_communicator_threads";
    if (communicators == nullptr) return invalid(kEntry, "communicators is null");
    moire::Args<moire_communicator_options> read;
    MOIRE_RETURN_IF_ERROR(moire::capi::read_args(kEntry, given, &read, "options"));
    auto made = moire::Communicator::threads(read);
    if (!made.ok()) return made.status();
    std::vector<std::unique_ptr<moire_communicator>> owned;
    owned.reserve(made.value().size());
    for (auto& communicator : made.value()) {
      owned.emplace_back(new moire_communicator{std::move(communicator)});
    }
    for (size_t rank = 0; rank < owned.size(); ++rank) communicators[rank] = owned[rank].release();
    return {};
  });
}

int32_t moire_communicator_nccl(const moire_communicator_options* given,
                                moire_communicator** communicator) {
  return guarded([&]() -> Status {
    constexpr std::string_view kEntry = "moire_communicator_nccl";
    if (communicator == nullptr) return invalid(kEntry, "communicator is null");
    moire::Args<moire_communicator_options> read;
    MOIRE_RETURN_IF_ERROR(moire::capi::read_args(kEntry, given, &read, "options"));
    auto made = moire::Communicator::nccl(read);
    if (!made.ok()) return made.status();
    *communicator = new moire_communicator{std::move(made).value()};
    return {};
  });
}

int32_t moire_communicator_window(const moire_communicator* communicator, void** data,
                                  size_t* bytes) {
  return guarded([&]() -> Status {
    if (communicator == nullptr || data == nullptr || bytes == nullptr) {
      return invalid("moire_communicator_window", "communicator, data or bytes is null");
    }
    const moire::Workspace window = communicator->value->window();
    *data = window.data;
    *bytes = window.bytes;
    return {};
  });
}

int32_t moire_communicator_rank(const moire_communicator* communicator, int32_t* rank,
                                int32_t* num_ranks, int32_t* index) {
  return guarded([&]() -> Status {
    if (communicator == nullptr || rank == nullptr || num_ranks == nullptr || index == nullptr) {
      return invalid("moire_communicator_rank", "communicator, rank, num_ranks or index is null");
    }
    const moire::Communicator& of = *communicator->value;
    *rank = of.rank();
    *num_ranks = of.size();
    *index = of.device() == moire::Device::kCuda ? of.index() : -1;
    return {};
  });
}

void moire_communicator_destroy(moire_communicator* communicator) {
  if (communicator != nullptr) communicator->value->leave();
  delete communicator;
}

}  // extern "C"
