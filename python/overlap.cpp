#include "overlap.h"

#include <algorithm>

namespace moire_python {
namespace {

struct Extent {
  uintptr_t begin, end;
  bool is_written;
};

// Adds that of a tensor, if it has elements; false where DLPack does not take it.
bool add_extent(PyObject* tensor, bool is_written, Extent* extents, size_t* count) {
  DLTensor t;
  if (exchange->view(tensor, &t) != 0) return false;
  if (t.device.kind != kCpu && t.device.kind != kCuda) return false;
  if (count_of(t) == 0) return true;
  int64_t last = 0;
  for (int i = 0; i < t.rank; ++i) last += (t.shape[i] - 1) * t.strides[i];
  const auto begin = reinterpret_cast<uintptr_t>(address_of(t));
  const auto bytes = static_cast<uintptr_t>(last + 1) * ((t.bits * size_t{t.lanes} + 7) / 8);
  extents[(*count)++] = {begin, begin + bytes, is_written};
  return true;
}

// Those of the tensors in lists, tuples and dicts; others than plain ones have no memory that could
// be compared. Without `extents` it counts how many there may be.
bool add_extents(PyObject* v, bool are_written, Extent* extents, size_t* count) {
  auto* type = reinterpret_cast<PyObject*>(Py_TYPE(v));
  const bool is_list = PyList_Check(v);
  if (type == plain_types[0] || type == plain_types[1]) {
    return extents == nullptr ? ++*count != 0 : add_extent(v, are_written, extents, count);
  }
  if (PyDict_Check(v)) {
    Py_ssize_t at = 0;
    PyObject *name, *item;
    while (PyDict_Next(v, &at, &name, &item)) {
      if (!add_extents(item, are_written, extents, count)) return false;
    }
  } else if (is_list || PyTuple_Check(v)) {
    const Py_ssize_t size = is_list ? PyList_Size(v) : PyTuple_Size(v);
    for (Py_ssize_t i = 0; i < size; ++i) {
      PyObject* item = is_list ? PyList_GetItem(v, i) : PyTuple_GetItem(v, i);
      if (!add_extents(item, are_written, extents, count)) return false;
    }
  }
  return true;
}

// Whether one that is written overlaps another.
bool do_overlap(Extent* extents, size_t count) {
  std::sort(extents, extents + count,
            [](const Extent& a, const Extent& b) { return a.begin < b.begin; });
  uintptr_t end = 0, end_written = 0;  // of what reaches furthest so far
  for (const Extent* e = extents; e != extents + count; ++e) {
    if (e->begin < (e->is_written ? end : end_written)) return true;
    end = std::max(end, e->end);
    if (e->is_written) end_written = std::max(end_written, e->end);
  }
  return false;
}

}  // namespace

PyObject* overlap(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (count != 2) {
    return PyErr_Format(PyExc_TypeError, "overlap() takes 2 arguments, got %zd", count);
  }
  size_t most = 0, found = 0;
  for (int i = 0; i < 2; ++i) add_extents(args[i], i == 0, nullptr, &most);
  auto* extents = static_cast<Extent*>(PyMem_Malloc(most * sizeof(Extent)));
  if (extents == nullptr) return PyErr_NoMemory();
  const bool are_known =
      add_extents(args[0], true, extents, &found) && add_extents(args[1], false, extents, &found);
  const bool is_clear = are_known && !do_overlap(extents, found);
  PyMem_Free(extents);
  PyErr_Clear();
  return new_reference(is_clear ? Py_False : Py_True);
}

}  // namespace moire_python
