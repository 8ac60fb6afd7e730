// StagedCall: runs a call whose memory is on the host on a CUDA context. Every piece of memory that
// the arguments name is copied to the device, with guards around it, the call runs on pointers into
// the copies, and what it wrote comes back. A call that wrote into a guard or into an input is an
// error, as is what its kernels found wrong.
//
// With MOIRE_STAGING=apart in the environment every piece has an allocation of its own, no larger
// than it is, and scratch is not written before the call: so that compute-sanitizer sees accesses
// past the end of a piece, and reads of scratch that nobody wrote.
#pragma once

#include <moire/context.h>
#include <moire/fields.h>

#include <cstddef>
#include <deque>
#include <functional>
#include <string>
#include <vector>

#include "staging/device_memory.h"

namespace moire::staging {

// A visitor of moire/fields.h that hands every pointer, with the bytes behind it, to a function and
// puts what that returns in its place.
class PointerWalk : public MemoryVisitor {
 public:
  using Act = std::function<void*(void* pointer, int64_t bytes, Role role)>;
  explicit PointerWalk(Act act) : act_(std::move(act)) {}

  void field(const char* name, moire_tensor& tensor, Role role, const char* sizes);
  void field(const char* name, moire_weight& weight, Role role, const char* sizes);
  void field(const char* name, moire_quantized& quantized, Role role, const char* sizes);
  void field(const char* name, const uint8_t*& bytes, Role role, int64_t count);
  void field(const char* name, const moire_offsets_output*& outputs, Role role, int64_t count);
  void field(const char* name, moire_groups& groups);
  void field(const char* name, moire_workspace& workspace);

 private:
  Act act_;
  // What arguments point at that is read on the host.
  std::deque<std::vector<const void*>> lists_;
  std::deque<std::vector<moire_offsets_output>> outputs_;
};

class StagedCall {
 public:
  template <class A, class Op>
  Status run(const Context& context, const A& args, const Op& op) {
    clear();
    add(args);
    if (Status status = upload(); !status.ok()) return status;
    const Status status = op(context, on_device(args));
    const Status found = context.check();  // waits, and leaves nothing for the next call to report
    if (!status.ok()) return status;
    if (found.code() == Code::kDevice) return found;
    const Status damage = download();
    return damage.ok() && !is_of_data(found) ? found : damage;
  }

  // The same in steps, for calls that share memory or are repeated: add each call's arguments, then
  // upload() as often as the host's bytes change; the addresses on the device stay.
  void clear();
  template <class A>
  void add(A args) {
    PointerWalk walk([this](void* p, int64_t bytes, Role role) { return add(p, bytes, role); });
    visit_fields(args, walk);
  }
  Status upload();
  // The arguments with pointers to the device; what they point at on the host lives until clear().
  template <class A>
  A on_device(A args) {
    auto& walk =
        walks_.emplace_back([this](void* p, int64_t bytes, Role) { return on_device(p, bytes); });
    visit_fields(args, walk);
    return args;
  }
  // What was written comes back; an error if that is more than the outputs.
  Status download();

 private:
  // What quantising met in its data, which fails no call.
  static bool is_of_data(const Status& found) {
    return found.message().find(" is infinite or NaN: ") != std::string::npos;
  }
  // Host memory and where its copy is; pieces that overlap become one in upload().
  struct Piece {
    std::byte* begin;
    size_t bytes;
    Role role;
    size_t offset;      // in memory_, where all lie together
    std::byte* device;  // the copy
  };

  void* add(void* pointer, int64_t bytes, Role role);
  void* on_device(void* pointer, int64_t bytes) const;
  void merge_pieces();
  Status upload_apart();
  Status download_apart();

  std::vector<Piece> pieces_;
  std::deque<PointerWalk> walks_;
  std::vector<std::byte> before_, after_;  // the device's memory
  DeviceMemory memory_;
  std::deque<DeviceMemory> apart_;
};

}  // namespace moire::staging
