#include "staging/staged_call.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string>

namespace moire::staging {
namespace {

constexpr size_t kGuardBytes = 4096;
constexpr std::byte kGuard{0xB5};
constexpr size_t kAlignment = 256;  // copies lie as their originals do, modulo this

bool is_apart() {
  static const bool apart = [] {
    const char* staging = std::getenv("MOIRE_STAGING");
    return staging != nullptr && std::strcmp(staging, "apart") == 0;
  }();
  return apart;
}

}  // namespace

Called call_in_turn(const Context& context, const std::function<Status()>& call) {
  static std::mutex launching;
  Called out;
  {
    const std::lock_guard lock(launching);
    out.status = call();
  }
  wait_for(context.options().stream);
  const std::lock_guard lock(launching);
  out.found = context.check();  // leaves nothing for the next call to report
  return out;
}

void PointerWalk::field(const char*, moire_tensor& t, Role role, const char*) {
  t.data = act_(t.data, span_bytes(t), role);
}

void PointerWalk::field(const char*, moire_weight& w, Role role, const char*) {
  auto& list = lists_.emplace_back();
  for_each_matrix(w, [&](int64_t g, void* data, int64_t bytes) {
    void* const copy = act_(data, bytes, role);
    g < 0 ? static_cast<void>(w.tensor.data = copy) : list.push_back(copy);
  });
  if (!list.empty()) w.list = list.data();
}

void PointerWalk::field(const char* name, moire_quantized& q, Role role, const char* sizes) {
  field(name, q.data, role, sizes);
  field(name, q.scales, role, sizes);
}

void PointerWalk::field(const char*, const uint8_t*& bytes, Role role, int64_t count) {
  bytes = static_cast<const uint8_t*>(act_(const_cast<uint8_t*>(bytes), count, role));
}

void PointerWalk::field(const char* name, const moire_offsets_output*& outputs, Role role,
                        int64_t count) {
  if (outputs == nullptr || count <= 0) return;
  auto& copies = outputs_.emplace_back(outputs, outputs + count);
  for (moire_offsets_output& output : copies) field(name, output.offsets, role, "*");
  outputs = copies.data();
}

void PointerWalk::field(const char*, moire_groups& g) {
  const int64_t bytes = g.offsets == nullptr ? 0 : (g.num_groups + 1) * int64_t{sizeof(int64_t)};
  g.offsets = static_cast<const int64_t*>(act_(const_cast<int64_t*>(g.offsets), bytes, Role::kIn));
}

void PointerWalk::field(const char*, moire_workspace& w) {
  w.data = act_(w.data, static_cast<int64_t>(w.bytes), Role::kScratch);
}

void StagedCall::clear() {
  pieces_.clear();
  walks_.clear();
}

void* StagedCall::add(void* pointer, int64_t bytes, Role role) {
  for (const Piece& p : left_out_) {
    if (p.begin <= pointer && pointer < p.begin + p.bytes) return pointer;
  }
  if (role != Role::kScratch) role = is_written(role) ? Role::kOut : Role::kIn;
  if (pointer != nullptr && bytes > 0) {
    pieces_.push_back(
        {static_cast<std::byte*>(pointer), static_cast<size_t>(bytes), role, 0, nullptr});
  }
  return pointer;
}

void* StagedCall::on_device(void* pointer, int64_t bytes) const {
  if (pointer == nullptr || bytes <= 0) return pointer;
  const auto* host = static_cast<std::byte*>(pointer);
  for (const auto* pieces : {&left_out_, &pieces_}) {
    for (const Piece& p : *pieces) {
      if (p.begin <= host && host < p.begin + p.bytes) return p.device + (host - p.begin);
    }
  }
  return nullptr;
}

void StagedCall::merge_pieces() {
  std::sort(pieces_.begin(), pieces_.end(),
            [](const Piece& a, const Piece& b) { return a.begin < b.begin; });
  std::vector<Piece> merged;
  for (const Piece& p : pieces_) {
    if (merged.empty() || merged.back().begin + merged.back().bytes <= p.begin) {
      merged.push_back(p);
      continue;
    }
    Piece& last = merged.back();
    last.bytes = std::max(last.bytes, static_cast<size_t>(p.begin - last.begin) + p.bytes);
    if (p.role != Role::kIn) last.role = Role::kOut;
  }
  pieces_ = std::move(merged);
}

Status StagedCall::upload() {
  merge_pieces();
  if (is_apart()) return upload_apart();
  size_t end = kGuardBytes;
  for (Piece& p : pieces_) {
    p.offset = end + (reinterpret_cast<uintptr_t>(p.begin) - end) % kAlignment;
    end = p.offset + p.bytes + kGuardBytes;
  }
  before_.assign(end, kGuard);
  for (const Piece& p : pieces_) std::memcpy(before_.data() + p.offset, p.begin, p.bytes);
  if (Status status = memory_.reserve(end); !status.ok()) return status;
  for (Piece& p : pieces_) p.device = memory_.data() + p.offset;
  return memory_.write(before_.data(), end);
}

Status StagedCall::upload_apart() {
  apart_.clear();
  for (Piece& p : pieces_) {
    const size_t shift = reinterpret_cast<uintptr_t>(p.begin) % kAlignment;
    DeviceMemory& memory = apart_.emplace_back();
    if (Status status = memory.reserve(shift + p.bytes); !status.ok()) return status;
    p.device = memory.data() + shift;
    if (p.role == Role::kScratch) continue;
    if (Status status = copy_to_device(p.device, p.begin, p.bytes); !status.ok()) return status;
  }
  return {};
}

Status StagedCall::download_apart() {
  for (const Piece& p : pieces_) {
    if (p.role == Role::kScratch) continue;
    after_.resize(p.bytes);
    if (Status status = copy_to_host(after_.data(), p.device, p.bytes); !status.ok()) return status;
    if (p.role == Role::kOut) {
      std::memcpy(p.begin, after_.data(), p.bytes);
    } else if (std::memcmp(p.begin, after_.data(), p.bytes) != 0) {
      return {Code::kInternal, "staging: an input was written"};
    }
  }
  return {};
}

Status StagedCall::download() {
  if (is_apart()) return download_apart();
  after_.resize(before_.size());
  if (Status status = memory_.read(after_.data(), after_.size()); !status.ok()) return status;
  size_t at = 0;  // what lies between outputs has to be what it was
  const auto is_unchanged = [&](size_t until) {
    return std::memcmp(before_.data() + at, after_.data() + at, until - at) == 0;
  };
  for (const Piece& p : pieces_) {
    if (p.role == Role::kIn) continue;
    if (!is_unchanged(p.offset)) break;
    if (p.role == Role::kOut) std::memcpy(p.begin, after_.data() + p.offset, p.bytes);
    at = p.offset + p.bytes;
  }
  if (is_unchanged(before_.size())) return {};
  const auto [was, is] = std::mismatch(before_.begin() + static_cast<ptrdiff_t>(at), before_.end(),
                                       after_.begin() + static_cast<ptrdiff_t>(at));
  const size_t where = static_cast<size_t>(was - before_.begin());
  for (const Piece& p : pieces_) {
    if (where >= p.offset && where < p.offset + p.bytes) {
      return {Code::kInternal, "staging: an input was written, at byte " +
                                   std::to_string(where - p.offset) + " of " +
                                   std::to_string(p.bytes)};
    }
  }
  return {Code::kInternal, "staging: memory outside of every argument was written, at byte " +
                               std::to_string(where) + " of " + std::to_string(before_.size())};
}

}  // namespace moire::staging
