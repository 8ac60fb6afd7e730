// invoke.py, compiled: one call of a C entry on Torch's tensors, which are read through the DLPack
// C exchange API (torch since 2.10). Optional: nothing of Torch is included or linked, and of
// Python only the stable ABI since 3.10.
//
// It knows no field by name: Entry of invoke.py says which keyword goes where. And it has no errors
// of its own: a call with anything in it that is not plain is declined before anything runs, and
// invoke.py takes it, with its copies, its checks and its messages. Begin at call().
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030a0000
#include <Python.h>
#include <moire.h>

#include <cstdint>
#include <cstring>

namespace {

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
const DLExchange* exchange;
uint8_t dtypes[kTypes][kBits];  // moire_dtype of DLPack's; 0: not known
PyObject *plain_types[2], *is_neg, *context_on, *scratch_on, *device_name, *offsets_name,
    *num_groups_name, *capacity_name, *multiplier_name, *no_zero_name;

enum class How { kTensor, kScales, kWeight, kQuantized, kBytes, kOutputs, kNumbers };

struct Field {
  PyObject* keyword;
  size_t at;
  How how;
  char numbers[16];  // types of kNumbers, as Python's struct module writes them
};

constexpr size_t kMostBytes = 4096, kMostFields = 96, kMostLists = 8;
constexpr Py_ssize_t kMostOutputs = 8;

struct Entry {
  int32_t (*function)(const void* context, const void* args);
  int32_t (*workspace)(const void* context, const void* args, size_t* bytes);
  size_t size, workspace_at, groups_at;  // 0: has none
  size_t num_fields;
  Field fields[kMostFields];
};

// ---- one call ----

bool is_contiguous(const DLTensor& t) {
  int64_t step = 1;
  bool follows = true;
  for (int i = t.rank - 1; i >= 0; --i) {
    if (t.shape[i] == 0) return true;
    if (t.shape[i] != 1 && t.strides[i] != step) follows = false;
    step *= t.shape[i];
  }
  return follows;
}

int64_t count_of(const DLTensor& t) {
  int64_t count = 1;
  for (int i = 0; i < t.rank; ++i) count *= t.shape[i];
  return count;
}

class Call {
 public:
  Call(const Entry& entry, PyObject* values) : entry_(entry), values_(values) {
    std::memset(args_, 0, entry.size);
    std::memcpy(args_, &entry.size, sizeof(entry.size));
  }
  ~Call() {
    for (size_t i = 0; i < num_lists_; ++i) PyMem_Free(lists_[i]);
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
    if (device == nullptr) return nullptr;
    PyObject* found = PyObject_CallFunctionObjArgs(context_on, device, nullptr);
    PyObject *code = nullptr, *memory = nullptr;
    if (found != nullptr) {
      const void* context = PyLong_AsVoidPtr(found);
      code = sized(context, device, &memory);
      if (code == nullptr && !PyErr_Occurred()) {
        int32_t returned;
        Py_BEGIN_ALLOW_THREADS;
        returned = entry_.function(context, args_);
        Py_END_ALLOW_THREADS;
        code = PyLong_FromLong(returned);
      }
    }
    Py_XDECREF(memory);
    Py_XDECREF(found);
    Py_DECREF(device);
    return code;
  }

 private:
  // Scratch of the size that the entry asks for; its code where it fails, null where all is well.
  PyObject* sized(const void* context, PyObject* device, PyObject** memory) {
    size_t bytes = 0;
    if (entry_.workspace == nullptr) return nullptr;
    const int32_t code = entry_.workspace(context, args_, &bytes);
    if (code != MOIRE_OK) return PyLong_FromLong(code);
    if (bytes == 0) return nullptr;
    PyObject* size = PyLong_FromSize_t(bytes);
    if (size == nullptr) return nullptr;
    *memory = PyObject_CallFunctionObjArgs(scratch_on, device, size, nullptr);
    Py_DECREF(size);
    if (*memory == nullptr) return nullptr;
    const moire_workspace scratch{PyLong_AsVoidPtr(PyTuple_GetItem(*memory, 1)), bytes};
    std::memcpy(args_ + entry_.workspace_at, &scratch, sizeof(scratch));
    return nullptr;
  }

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

  // A tensor whose memory is all there is to it, in order, and on the device of the others.
  bool view(PyObject* array, DLTensor* out) {
    PyObject* type = reinterpret_cast<PyObject*>(Py_TYPE(array));
    if (type != plain_types[0] && type != plain_types[1]) return false;
    if (exchange->view(array, out) != 0) return false;
    const DLDevice device = out->device;
    if (first_ == nullptr) {
      if (device.kind != kCpu && device.kind != kCuda) return false;
      first_ = array, device_ = device;
    }
    if (device.kind != device_.kind || device.index != device_.index) return false;
    if (out->lanes != 1 || dtype_of(*out) == MOIRE_NONE || !is_contiguous(*out)) return false;
    if (out->data == nullptr && count_of(*out) != 0) return false;  // zeros without memory
    PyObject* negated = PyObject_CallFunctionObjArgs(is_neg, array, nullptr);
    Py_XDECREF(negated);
    return negated == Py_False;
  }

  static int32_t dtype_of(const DLTensor& t) {
    return t.type < kTypes && t.bits < kBits ? dtypes[t.type][t.bits] : 0;
  }

  bool tensor(PyObject* array, unsigned char* at, bool bytes_are_e8m0) {
    DLTensor t;
    if (!view(array, &t) || t.rank < 1 || t.rank > 3) return false;
    moire_tensor made{static_cast<char*>(t.data) + t.byte_offset, dtype_of(t), t.rank, {}, 0};
    if (bytes_are_e8m0 && made.dtype == MOIRE_UINT8) made.dtype = MOIRE_E8M0;
    std::memcpy(made.shape, t.shape, sizeof(int64_t) * static_cast<size_t>(t.rank));
    std::memcpy(at, &made, sizeof(made));
    return true;
  }

  bool element(PyObject* list, Py_ssize_t i, unsigned char* at, bool bytes_are_e8m0) {
    PyObject* array = PySequence_GetItem(list, i);
    const bool is_written = array != nullptr && tensor(array, at, bytes_are_e8m0);
    Py_XDECREF(array);
    return is_written;
  }

  // One packed tensor, or matrices that are alike.
  bool weight(PyObject* arrays, unsigned char* at) {
    const Py_ssize_t count = PyList_Check(arrays) ? PyList_Size(arrays) : -1;
    if (count <= 0) return count == 0;
    DLTensor first, other;
    if (!view(PyList_GetItem(arrays, 0), &first)) return false;
    if (count == 1 && first.rank == 3) return tensor(PyList_GetItem(arrays, 0), at, false);
    if (first.rank != 2 || num_lists_ == kMostLists) return false;
    const size_t bytes = static_cast<size_t>(count) * sizeof(void*);
    void** list = static_cast<void**>(PyMem_Malloc(bytes));
    if (list == nullptr) return false;
    lists_[num_lists_++] = list;
    moire_weight made{};
    made.tensor = {nullptr, dtype_of(first), 3, {count, first.shape[0], first.shape[1]}, 0};
    for (Py_ssize_t i = 0; i < count; ++i) {
      if (!view(PyList_GetItem(arrays, i), &other) || other.rank != 2 ||
          dtype_of(other) != made.tensor.dtype || other.shape[0] != made.tensor.shape[1] ||
          other.shape[1] != made.tensor.shape[2]) {
        return false;
      }
      list[i] = static_cast<char*>(other.data) + other.byte_offset;
    }
    std::memcpy(at, &made.tensor, sizeof(made.tensor));
    std::memcpy(at + offsetof(moire_weight, list), &list, sizeof(list));
    return true;
  }

  // What splits_to_offsets writes: arrays, with as many numbers beside them, or none.
  bool outputs(PyObject* arrays) {
    const Py_ssize_t count = PyList_Check(arrays) ? PyList_Size(arrays) : -1;
    if (count < 0 || count > kMostOutputs) return false;
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
    if (!view(array, &t) || dtype_of(t) != dtype || t.rank != 1 || t.shape[0] != size) return false;
    const void* data = static_cast<char*>(t.data) + t.byte_offset;
    std::memcpy(at, &data, sizeof(data));
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
      Py_XDECREF(item);
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
  size_t num_lists_ = 0;
  void* lists_[kMostLists];
  alignas(16) unsigned char args_[kMostBytes];
};

// ---- the module ----

PyObject* call(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (count != 2 || !PyDict_Check(args[1])) return Py_NewRef(Py_None);
  const auto* entry = static_cast<const Entry*>(PyCapsule_GetPointer(args[0], "moire.Entry"));
  if (entry == nullptr) return nullptr;
  Call made(*entry, args[1]);
  if (made.fill()) return made.run();
  PyErr_Clear();
  return Py_NewRef(Py_None);
}

bool set_how(Field* field, const char* how) {
  static const char* const kNames[] = {"tensor",    "scales",        "weight",
                                       "quantized", "bytes_pointer", "offsets_outputs"};
  for (int i = 0; i < 6; ++i) {
    if (std::strcmp(how, kNames[i]) == 0) field->how = static_cast<How>(i);
    if (std::strcmp(how, kNames[i]) == 0) return true;
  }
  field->how = How::kNumbers;
  const size_t length = std::strlen(how);
  if (length == 0 || length >= sizeof(field->numbers) || std::strspn(how, "ifq") != length) {
    PyErr_Format(PyExc_ValueError, "moire: no way to write %s", how);
    return false;
  }
  std::memcpy(field->numbers, how, length + 1);
  return true;
}

void destroy(PyObject* capsule) {
  auto* entry = static_cast<Entry*>(PyCapsule_GetPointer(capsule, "moire.Entry"));
  for (size_t i = 0; i < entry->num_fields; ++i) Py_DECREF(entry->fields[i].keyword);
  PyMem_Free(entry);
}

PyObject* entry(PyObject*, PyObject* args) {
  Py_ssize_t size, workspace_at, groups_at;
  PyObject *function, *workspace, *fields;
  if (!PyArg_ParseTuple(args, "OOnnnO!", &function, &workspace, &size, &workspace_at, &groups_at,
                        &PyList_Type, &fields)) {
    return nullptr;
  }
  const Py_ssize_t count = PyList_Size(fields);
  if (static_cast<size_t>(size) > kMostBytes || static_cast<size_t>(count) > kMostFields) {
    return PyErr_Format(PyExc_ValueError,
                        "moire: %zd bytes and %zd fields are more than invoke.cpp has", size,
                        count);
  }
  auto* made = static_cast<Entry*>(PyMem_Calloc(1, sizeof(Entry)));
  if (made == nullptr) return PyErr_NoMemory();
  made->function = reinterpret_cast<decltype(made->function)>(PyLong_AsVoidPtr(function));
  made->workspace = reinterpret_cast<decltype(made->workspace)>(PyLong_AsVoidPtr(workspace));
  made->size = static_cast<size_t>(size);
  made->workspace_at = static_cast<size_t>(workspace_at);
  made->groups_at = static_cast<size_t>(groups_at);
  PyObject* capsule = PyCapsule_New(made, "moire.Entry", destroy);
  for (Py_ssize_t i = 0; capsule != nullptr && i < count; ++i) {
    Field& field = made->fields[i];
    const char* how;
    Py_ssize_t at;
    if (!PyArg_ParseTuple(PyList_GetItem(fields, i), "Uns", &field.keyword, &at, &how) ||
        !set_how(&field, how)) {
      Py_CLEAR(capsule);
      break;
    }
    Py_INCREF(field.keyword);
    field.at = static_cast<size_t>(at);
    made->num_fields = static_cast<size_t>(i) + 1;
  }
  return capsule;
}

PyObject* start(PyObject*, PyObject* args) {
  PyObject *capsule, *samples, *objects[5];
  if (!PyArg_ParseTuple(args, "OOOOOOO!", &capsule, &objects[0], &objects[1], &objects[2],
                        &objects[3], &objects[4], &PyDict_Type, &samples)) {
    return nullptr;
  }
  void* found = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
  if (found == nullptr) return nullptr;
  exchange = static_cast<const DLExchange*>(found);
  if (exchange->major != 1 || exchange->view == nullptr) return Py_NewRef(Py_False);
  for (PyObject* object : objects) Py_INCREF(object);
  plain_types[0] = objects[0], plain_types[1] = objects[1], is_neg = objects[2];
  context_on = objects[3], scratch_on = objects[4];
  Py_ssize_t at = 0;
  PyObject *code, *sample;
  while (PyDict_Next(samples, &at, &code, &sample)) {
    DLTensor t;
    if (exchange->view(sample, &t) != 0) {
      PyErr_Clear();
    } else if (t.type < kTypes && t.bits < kBits) {
      dtypes[t.type][t.bits] = static_cast<uint8_t>(PyLong_AsLong(code));
    }
  }
  return Py_NewRef(PyErr_Occurred() ? nullptr : Py_True);
}

PyMethodDef functions[] = {
    {"start", start, METH_VARARGS, "Takes what the calls need; whether it is all there."},
    {"entry", entry, METH_VARARGS, "A C entry as call() takes it."},
    {"call", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(call)), METH_FASTCALL,
     "The code of a call of an entry on a mapping of fields; None where it is declined."},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef definition = {PyModuleDef_HEAD_INIT,
                          "moire_invoke",
                          nullptr,
                          -1,
                          functions,
                          nullptr,
                          nullptr,
                          nullptr,
                          nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_moire_invoke() {
  device_name = PyUnicode_InternFromString("device");
  offsets_name = PyUnicode_InternFromString("offsets");
  num_groups_name = PyUnicode_InternFromString("num_groups");
  multiplier_name = PyUnicode_InternFromString("outputs_multiplier");
  no_zero_name = PyUnicode_InternFromString("outputs_no_leading_zero");
  capacity_name = PyUnicode_InternFromString("capacity");
  return PyModule_Create(&definition);
}
