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
#include <utility>
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

// What a call says once its stream is done, and what its kernels found.
struct Called {
  Status status, found;
};
// One thread at a time gives the device work: the driver has a stream that is idle take any
// hardware queue that seems free, and two at once might take the same, in which a rank's launch
// would lie behind what waits for it.
Called call_in_turn(const Context& context, const std::function<Status()>& call);

class StagedCall {
 public:
  // kHost: of calls that are made while others wait on the device.
  explicit StagedCall(DeviceMemory::Kind kind = DeviceMemory::Kind::kDevice) : memory_(kind) {}
  // Room for so much, so that no call has to make it.
  Status reserve(size_t bytes) { return memory_.reserve(bytes); }
  // Bytes whose copy on the device is its caller's to make and to read: calls get its address.
  void leave_out(std::byte* begin, size_t bytes, std::byte* device) {
    left_out_.push_back({begin, bytes, Role::kIn, 0, device});
  }

  template <class A, class Op>
  Status run(const Context& context, const A& args, const Op& op) {
    clear();
    add(args);
    of_data_ = {};
    if (Status status = upload(); !status.ok()) return status;
    const auto [status, found] =
        call_in_turn(context, [&] { return op(context, on_device(args)); });
    if (!status.ok()) return status;
    if (found.code() == Code::kDevice) return found;
    const Status damage = download();
    if (damage.ok() && !is_of_data(found)) return found;
    of_data_ = found;
    return damage;
  }
  // What check() said of the data of the last such call, or of one elsewhere in its place; once.
  void keep_finding(Status of_data) { of_data_ = std::move(of_data); }
  Status take_finding() { return std::exchange(of_data_, {}); }

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

  Status of_data_;
  std::vector<Piece> pieces_, left_out_;
  std::deque<PointerWalk> walks_;
  std::vector<std::byte> before_, after_;  // the device's memory
  DeviceMemory memory_;
  std::deque<DeviceMemory> apart_;
};

}  // namespace moire::staging
