// ShortList: a vector whose first kInline elements lie in the list itself, so that a check of a
// usual call takes nothing from the heap.
#pragma once

#include <cstddef>
#include <memory_resource>
#include <vector>

namespace moire {

template <class T, size_t kInline>
class ShortList {
 public:
  ShortList() { list_.reserve(kInline); }
  ShortList(const ShortList&) = delete;
  ShortList& operator=(const ShortList&) = delete;

  std::pmr::vector<T>& operator*() { return list_; }
  std::pmr::vector<T>* operator->() { return &list_; }

 private:
  alignas(T) std::byte memory_[kInline * sizeof(T)];
  std::pmr::monotonic_buffer_resource resource_{memory_, sizeof(memory_)};
  std::pmr::vector<T> list_{&resource_};
};

}  // namespace moire
