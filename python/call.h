// One call of a C entry on Torch's tensors, which are read through the DLPack C exchange API (torch
// since 2.10): nothing of Torch is included or linked, and of Python only the stable ABI
// since 3.10.
//
// A Call fills the struct of its entry, and runs it. It knows no field by name: Entry of invoke.py
// says which keyword goes where.
#ifndef MOIRE_PYTHON_CALL_H_
#define MOIRE_PYTHON_CALL_H_
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030a0000
#include <Python.h>
#include <moire.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace moire_python {

// References are counted by functions: the macros of this ABI would count those of objects that
// live for ever since Python 3.12 as well.
inline PyObject* new_reference(PyObject* object) {
  Py_IncRef(object);
  return object;
}

// ---- DLPack 1.x (github.com/dmlc/dlpack, Apache licence 2.0), as far as it is read here ----

struct DLDevice {
  int32_t kind, index;  // kCpu, kCuda
};
constexpr int32_t kCpu = 1, kCuda = 2;

struct DLTensor {
  void* data;
  DLDevice device;
  int32_t rank;
  uint8_t type, bits;
  uint16_t lanes;
  int64_t *shape, *strides;
  uint64_t byte_offset;
};

struct DLExchange {
  uint32_t major, minor;
  void *previous, *allocator, *managed_from_object, *managed_to_object;
  int (*view)(void* object, DLTensor* out);
  int (*current_work_stream)(int32_t kind, int32_t index, void** out);
};

// ---- what start() and entry() were told ----

constexpr int kTypes = 32, kBits = 65;
inline const DLExchange* exchange;
inline uint8_t dtypes[kTypes][kBits];  // moire_dtype of DLPack's; 0: not known
inline PyObject *plain_types[2], *is_neg, *context_on, *scratch_on, *settings_now, *no_settings,
    *num_threads, *device_name, *offsets_name, *num_groups_name, *capacity_name, *multiplier_name,
    *no_zero_name;

enum class How { kTensor, kScales, kWeight, kQuantized, kBytes, kOutputs, kNumbers };

struct Field {
  PyObject* keyword;
  size_t at;
  How how;
  char numbers[16];  // types of kNumbers, as Python's struct module writes them
};

constexpr size_t kMostBytes = 4096, kMostFields = 96, kMostLists = 8, kMostNotes = 1280;
constexpr Py_ssize_t kMostOutputs = 8;

struct Entry {
  int32_t (*function)(const void* context, const void* args);
  int32_t (*workspace)(const void* context, const void* args, size_t* bytes);
  size_t size, workspace_at, groups_at;  // 0: has none
  size_t num_fields;
  Field fields[kMostFields];
};

// ---- one call ----

inline bool is_contiguous(const DLTensor& t) {
  int64_t step = 1;
  bool follows = true;
  for (int i = t.rank - 1; i >= 0; --i) {
    if (t.shape[i] == 0) return true;
    if (t.shape[i] != 1 && t.strides[i] != step) follows = false;
    step *= t.shape[i];
  }
  return follows;
}

inline int64_t count_of(const DLTensor& t) {
  int64_t count = 1;
  for (int i = 0; i < t.rank; ++i) count *= t.shape[i];
  return count;
}

inline int32_t dtype_of(const DLTensor& t) {
  return t.type < kTypes && t.bits < kBits ? dtypes[t.type][t.bits] : 0;
}

inline void* address_of(const DLTensor& t) { return static_cast<char*>(t.data) + t.byte_offset; }

// A tensor whose memory is all there is to it, in order.
inline bool view(PyObject* array, DLTensor* out) {
  PyObject* type = reinterpret_cast<PyObject*>(Py_TYPE(array));
  if (type != plain_types[0] && type != plain_types[1]) return false;
  if (exchange->view(array, out) != 0) return false;
  if (out->device.kind != kCpu && out->device.kind != kCuda) return false;
  if (out->lanes != 1 || dtype_of(*out) == MOIRE_NONE || !is_contiguous(*out)) return false;
  if (out->data == nullptr && count_of(*out) != 0) return false;  // zeros without memory
  PyObject* negated = PyObject_CallFunctionObjArgs(is_neg, array, nullptr);
  Py_DecRef(negated);
  return negated == Py_False;
}

inline bool is_same(DLDevice a, DLDevice b) { return a.kind == b.kind && a.index == b.index; }

// The context of calls on the CPU that no settings of moire's change, and its number of threads.
struct UsualContext {
  long threads;
  const void* context;
};
inline UsualContext usual;

// That number now; -1 where settings change it, or with an exception of Python's.
inline long threads_now() {
  PyObject* settings = PyObject_CallFunctionObjArgs(settings_now, nullptr);
  Py_DecRef(settings);
  if (settings == nullptr || settings != no_settings) return -1;
  PyObject* found = PyObject_CallFunctionObjArgs(num_threads, nullptr);
  const long threads = found == nullptr ? -1 : PyLong_AsLong(found);
  Py_DecRef(found);
  return threads;
}

// The context that calls on a device run on, which stays as long as the process; null with an
// exception of Python's.
inline const void* context_of(PyObject* object, DLDevice device) {
  const long threads = device.kind == kCpu ? threads_now() : -1;
  if (PyErr_Occurred()) return nullptr;
  if (threads > 0 && usual.context != nullptr && usual.threads == threads) return usual.context;
  PyObject* found = PyObject_CallFunctionObjArgs(context_on, object, nullptr);
  const void* context = found == nullptr ? nullptr : PyLong_AsVoidPtr(found);
  Py_DecRef(found);
  if (threads > 0) usual = {threads, context};
  return context;
}

// How much scratch a context asked for last, for structs that differ in their addresses alone.
struct Scratch {
  bool is_on_host;
  const void* context;
  size_t bytes;
};

// Scratch of a call, 256-byte aligned: the host's, or what Torch has of a device.
class Memory {
 public:
  Memory() = default;
  ~Memory() {
    std::free(host_);
    Py_DecRef(torchs_);
  }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  // Into the struct; false with an exception of Python's.
  bool give(const Entry& entry, unsigned char* args, PyObject* device, const Scratch& scratch) {
    moire_workspace made{nullptr, scratch.bytes};
    if (scratch.is_on_host) host_ = std::aligned_alloc(256, (scratch.bytes + 255) / 256 * 256);
    made.data = host_ != nullptr ? host_ : of_torch(device, scratch.bytes);  // says what it lacks
    std::memcpy(args + entry.workspace_at, &made, sizeof(made));
    return made.data != nullptr;
  }

 private:
  void* of_torch(PyObject* device, size_t bytes) {
    PyObject* size = PyLong_FromSize_t(bytes);
    if (size != nullptr) torchs_ = PyObject_CallFunctionObjArgs(scratch_on, device, size, nullptr);
    Py_DecRef(size);
    return torchs_ == nullptr ? nullptr : PyLong_AsVoidPtr(PyTuple_GetItem(torchs_, 1));
  }

  void* host_ = nullptr;
  PyObject* torchs_ = nullptr;
};

// The code of the entry on a struct that is filled, or null with an exception of Python's.
inline PyObject* run_entry(const Entry& entry, unsigned char* args, const void* context,
                           PyObject* device, Scratch* scratch) {
  const bool is_known = scratch->context == context;
  int32_t code = MOIRE_OK;
  if (entry.workspace != nullptr && !is_known) {
    code = entry.workspace(context, args, &scratch->bytes);
    scratch->context = code == MOIRE_OK ? context : nullptr;
  }
  Memory memory;
  if (code == MOIRE_OK) {
    if (scratch->bytes != 0 && !memory.give(entry, args, device, *scratch)) return nullptr;
    Py_BEGIN_ALLOW_THREADS;
    code = entry.function(context, args);
    Py_END_ALLOW_THREADS;
  }
  // Where memory is aligned less, a call may need more than it did, which it said before it ran.
  size_t bytes = 0;
  if (code == MOIRE_OUT_OF_MEMORY && is_known && entry.workspace != nullptr &&
      entry.workspace(context, args, &bytes) == MOIRE_OK && bytes > scratch->bytes) {
    scratch->bytes = bytes;
    return run_entry(entry, args, context, device, scratch);
  }
  return PyLong_FromLong(code);
}

// What of a filled struct is of the tensors, and not of their shapes and types: where it, or a list
// of it, has the address of which.
struct Notes {
  struct Note {
    size_t at;  // bytes of the struct, or which of the list
    int list;   // -1: of the struct
    PyObject* array;
  };

  void add(size_t at, int list, PyObject* array) {
    if (count == kMostNotes) is_whole = false;
    if (is_whole) notes[count++] = {at, list, array};
  }

  bool is_whole = true;  // else there is more than these
  size_t count = 0, num_lists = 0;
  size_t list_at[kMostLists], list_size[kMostLists];
  Note notes[kMostNotes];
};

class Call {
 public:
  Call(const Entry& entry, PyObject* values) : entry_(entry), values_(values) {
    std::memset(args_, 0, entry.size);
    std::memcpy(args_, &entry.size, sizeof(entry.size));
  }
  ~Call() {
    for (size_t i = 0; i < notes_.num_lists; ++i) PyMem_Free(lists_[i]);
  }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  // Every field into the struct; false where the call is not plain.
  bool fill() {
    for (size_t i = 0; i < entry_.num_fields; ++i) {
      const Field& field = entry_.fields[i];
      PyObject* value = PyDict_GetItemWithError(values_, field.keyword);
      if (value != nullptr && value != Py_None && !write(field, value)) return false;
    }
    return (entry_.groups_at == 0 || groups()) && first_ != nullptr;
  }

  // The code of the entry, or null with an exception of Python's.
  PyObject* run() {
    PyObject* device = PyObject_GetAttr(first_, device_name);
    const void* context = device == nullptr ? nullptr : context_of(device, device_);
    Scratch scratch = this->scratch();
    PyObject* code =
        context == nullptr ? nullptr : run_entry(entry_, args_, context, device, &scratch);
    Py_DecRef(device);
    return code;
  }

  const unsigned char* args() const { return args_; }
  Scratch scratch() const { return {device_.kind == kCpu, nullptr, 0}; }  // not asked for yet
  const Notes& notes() const { return notes_; }

 private:
  bool write(const Field& field, PyObject* value) {
    switch (field.how) {
      case How::kTensor:
      case How::kScales:
        return tensor(value, args_ + field.at, field.how == How::kScales);
      case How::kWeight:
        return weight(value, args_ + field.at);
      case How::kQuantized:
        return PySequence_Size(value) == 2 && element(value, 0, args_ + field.at, false) &&
               element(value, 1, args_ + field.at + offsetof(moire_quantized, scales), true);
      case How::kBytes:
        return vector(value, MOIRE_UINT8, number_of(num_groups_name), args_ + field.at);
      case How::kOutputs:
        return outputs(value);
      case How::kNumbers:
        return numbers(value, field.numbers, args_ + field.at);
    }
    return false;
  }

  bool groups() {
    PyObject* offsets = PyDict_GetItemWithError(values_, offsets_name);
    if (offsets == nullptr || offsets == Py_None) return true;
    moire_groups groups{nullptr, number_of(num_groups_name), number_of(capacity_name)};
    unsigned char* at = args_ + entry_.groups_at;
    std::memcpy(at, &groups, sizeof(groups));
    return !PyErr_Occurred() && vector(offsets, MOIRE_INT64, groups.num_groups + 1, at);
  }

  // A plain tensor on the device of the others.
  bool plain(PyObject* array, DLTensor* out) {
    if (!view(array, out)) return false;
    if (first_ == nullptr) first_ = array, device_ = out->device;
    return is_same(out->device, device_);
  }

  size_t offset_of(const unsigned char* at) const { return static_cast<size_t>(at - args_); }

  bool tensor(PyObject* array, unsigned char* at, bool bytes_are_e8m0) {
    DLTensor t;
    if (!plain(array, &t) || t.rank < 1 || t.rank > 3) return false;
    moire_tensor made{address_of(t), dtype_of(t), t.rank, {}, 0};
    if (bytes_are_e8m0 && made.dtype == MOIRE_UINT8) made.dtype = MOIRE_E8M0;
    std::memcpy(made.shape, t.shape, sizeof(int64_t) * static_cast<size_t>(t.rank));
    std::memcpy(at, &made, sizeof(made));
    static_assert(offsetof(moire_tensor, data) == 0);
    notes_.add(offset_of(at), -1, array);
    return true;
  }

  bool element(PyObject* list, Py_ssize_t i, unsigned char* at, bool bytes_are_e8m0) {
    PyObject* array = PySequence_GetItem(list, i);
    const bool is_written = array != nullptr && tensor(array, at, bytes_are_e8m0);
    Py_DecRef(array);
    return is_written;
  }

  // One packed tensor, or matrices that are alike.
  bool weight(PyObject* arrays, unsigned char* at) {
    const Py_ssize_t count = PyList_Check(arrays) ? PyList_Size(arrays) : -1;
    if (count <= 0) return count == 0;
    DLTensor first, other;
    if (!plain(PyList_GetItem(arrays, 0), &first)) return false;
    if (count == 1 && first.rank == 3) return tensor(PyList_GetItem(arrays, 0), at, false);
    if (first.rank != 2 || notes_.num_lists == kMostLists) return false;
    const size_t bytes = static_cast<size_t>(count) * sizeof(void*);
    void** list = static_cast<void**>(PyMem_Malloc(bytes));
    if (list == nullptr) return false;
    const size_t which = notes_.num_lists++;
    lists_[which] = list;
    notes_.list_at[which] = offset_of(at) + offsetof(moire_weight, list);
    notes_.list_size[which] = static_cast<size_t>(count);
    moire_weight made{};
    made.tensor = {nullptr, dtype_of(first), 3, {count, first.shape[0], first.shape[1]}, 0};
    for (Py_ssize_t i = 0; i < count; ++i) {
      if (!plain(PyList_GetItem(arrays, i), &other) || other.rank != 2 ||
          dtype_of(other) != made.tensor.dtype || other.shape[0] != made.tensor.shape[1] ||
          other.shape[1] != made.tensor.shape[2]) {
        return false;
      }
      list[i] = address_of(other);
      notes_.add(static_cast<size_t>(i), static_cast<int>(which), PyList_GetItem(arrays, i));
    }
    std::memcpy(at, &made.tensor, sizeof(made.tensor));
    std::memcpy(at + offsetof(moire_weight, list), &list, sizeof(list));
    return true;
  }

  // What splits_to_offsets writes: arrays, with as many numbers beside them, or none.
  bool outputs(PyObject* arrays) {
    const Py_ssize_t count = PyList_Check(arrays) ? PyList_Size(arrays) : -1;
    if (count < 0 || count > kMostOutputs) return false;
    notes_.is_whole = false;
    PyObject* multipliers = PyDict_GetItemWithError(values_, multiplier_name);
    PyObject* without_zero = PyDict_GetItemWithError(values_, no_zero_name);
    for (Py_ssize_t i = 0; i < count; ++i) {
      moire_offsets_output& output = outputs_[i];
      auto* at = reinterpret_cast<unsigned char*>(&output.offsets);
      if (!tensor(PyList_GetItem(arrays, i), at, false)) return false;
      at = reinterpret_cast<unsigned char*>(&output.multiplier);
      if (!number_in(multipliers, i, count, 'q', at)) return false;
      at = reinterpret_cast<unsigned char*>(&output.no_leading_zero);
      if (!number_in(without_zero, i, count, 'i', at)) return false;
    }
    moire_splits_to_offsets_args args;
    std::memcpy(&args, args_, sizeof(args));
    args.outputs = outputs_;
    args.num_outputs = count;
    std::memcpy(args_, &args, sizeof(args));
    return true;
  }

  static bool number_in(PyObject* list, Py_ssize_t i, Py_ssize_t count, char type,
                        unsigned char* at) {
    if (list == nullptr || list == Py_None) return true;
    if (!PyList_Check(list)) return false;
    if (PyList_Size(list) == 0) return true;
    return PyList_Size(list) == count && number(PyList_GetItem(list, i), type, &at);
  }

  // The address of a vector of exactly this type and size.
  bool vector(PyObject* array, int32_t dtype, int64_t size, unsigned char* at) {
    DLTensor t;
    if (!plain(array, &t) || dtype_of(t) != dtype || t.rank != 1 || t.shape[0] != size) {
      return false;
    }
    const void* data = address_of(t);
    std::memcpy(at, &data, sizeof(data));
    notes_.add(offset_of(at), -1, array);
    return true;
  }

  // A number, or a sequence of as many as there are types.
  bool numbers(PyObject* value, const char* types, unsigned char* at) {
    if (types[1] == '\0') return number(value, types[0], &at);
    const Py_ssize_t count = PySequence_Size(value);
    if (count == 0) return true;
    if (count != static_cast<Py_ssize_t>(std::strlen(types))) return false;
    for (Py_ssize_t i = 0; i < count; ++i) {
      PyObject* item = PySequence_GetItem(value, i);
      const bool is_written = item != nullptr && number(item, types[i], &at);
      Py_DecRef(item);
      if (!is_written) return false;
    }
    return true;
  }

  template <typename T>
  static bool put(T value, unsigned char** at) {
    std::memcpy(*at, &value, sizeof(value));
    *at += sizeof(value);
    return !PyErr_Occurred();
  }

  static bool number(PyObject* value, char type, unsigned char** at) {
    if (type == 'f') return put(static_cast<float>(PyFloat_AsDouble(value)), at);
    const int64_t found = PyFloat_Check(value) ? static_cast<int64_t>(PyFloat_AsDouble(value))
                                               : PyLong_AsLongLong(value);
    if (type == 'q') return put(found, at);
    return found == static_cast<int32_t>(found) && put(static_cast<int32_t>(found), at);
  }

  int64_t number_of(PyObject* keyword) {
    PyObject* value = PyDict_GetItemWithError(values_, keyword);
    return value == nullptr || value == Py_None ? 0 : PyLong_AsLongLong(value);
  }

  const Entry& entry_;
  PyObject* values_;
  PyObject* first_ = nullptr;  // the tensor that says the device
  DLDevice device_{};
  moire_offsets_output outputs_[kMostOutputs]{};
  void* lists_[kMostLists];
  Notes notes_;
  alignas(16) unsigned char args_[kMostBytes];
};

}  // namespace moire_python

#endif  // MOIRE_PYTHON_CALL_H_
