#include "tape.h"

#include <cstddef>

namespace moire_python {
namespace {

constexpr size_t kMostKey = size_t{1} << 15, kMostTensors = 640;  // of 300 experts, two lists
constexpr const char* kStep = "moire.Step";
PyObject *made_of, *requires_grad_name;

// ---- sign ----

// The arguments of a call, one after the other, in bytes.
class Signature {
 public:
  Signature(PyObject* tensors, bool has_gradients)
      : tensors_(tensors), has_gradients_(has_gradients) {
    put(has_gradients);  // what is no plain tensor may want one as well
  }

  bool value(PyObject* v) {
    PyTypeObject* type = Py_TYPE(v);
    auto* object = reinterpret_cast<PyObject*>(type);
    if (v == Py_None || type == &PyBool_Type) return address(v);
    if (object == plain_types[0] || object == plain_types[1]) return tensor(v);
    if (type == &PyLong_Type) return number(PyLong_AsLongLong(v), object);
    if (type == &PyFloat_Type) return number(PyFloat_AsDouble(v), object);
    if (type == &PyUnicode_Type) return text(v);
    if (type == &PyList_Type || type == &PyTuple_Type) return sequence(v, object);
    if (type == &PyDict_Type) return mapping(v, object);
    PyObject* names = PyDict_GetItemWithError(made_of, object);
    return names != nullptr && attributes(v, object, names);
  }

  PyObject* key() const {
    return PyBytes_FromStringAndSize(bytes_, static_cast<Py_ssize_t>(size_));
  }

 private:
  template <typename T>
  bool put(const T& item) {
    return raw(&item, sizeof(item));
  }

  bool address(const void* object) { return put(reinterpret_cast<uintptr_t>(object)); }

  bool raw(const void* from, size_t size) {
    if (size > kMostKey - size_) return false;
    std::memcpy(bytes_ + size_, from, size);
    size_ += size;
    return true;
  }

  template <typename T>
  bool number(T number, PyObject* type) {
    return !PyErr_Occurred() && address(type) && put(number);
  }

  bool text(PyObject* v) {
    Py_ssize_t size;
    const char* characters = PyUnicode_AsUTF8AndSize(v, &size);
    return characters != nullptr && put(size) && raw(characters, static_cast<size_t>(size));
  }

  bool sequence(PyObject* v, PyObject* type) {
    const bool is_list = type == reinterpret_cast<PyObject*>(&PyList_Type);
    const Py_ssize_t size = is_list ? PyList_Size(v) : PyTuple_Size(v);
    if (!address(type) || !put(size)) return false;
    for (Py_ssize_t i = 0; i < size; ++i) {
      if (!value(is_list ? PyList_GetItem(v, i) : PyTuple_GetItem(v, i))) return false;
    }
    return true;
  }

  bool mapping(PyObject* v, PyObject* type) {
    if (!address(type) || !put(PyDict_Size(v))) return false;
    Py_ssize_t at = 0;
    PyObject *name, *item;
    while (PyDict_Next(v, &at, &name, &item)) {
      if (!value(name) || !value(item)) return false;
    }
    return true;
  }

  bool attributes(PyObject* v, PyObject* type, PyObject* names) {
    if (PyTuple_Size(names) == 0) return address(v);
    if (!address(type)) return false;
    for (Py_ssize_t i = 0; i < PyTuple_Size(names); ++i) {
      PyObject* item = PyObject_GetAttr(v, PyTuple_GetItem(names, i));
      const bool is_put = item != nullptr && (item == v ? listed(v) : value(item));
      Py_DecRef(item);
      if (!is_put) return false;
    }
    return true;
  }

  // One of the tensors, whose memory is that of others.
  bool listed(PyObject* v) {
    uint16_t& number = number_of(v);
    if (number == 0) {
      if (count_ == kMostTensors || PyList_Append(tensors_, v) != 0) return false;
      seen_[count_++] = v;
      number = static_cast<uint16_t>(count_);
    }
    return put(number);
  }

  // Its type, and which of the tensors it is, if it came before.
  bool tensor(PyObject* v) {
    uint16_t& number = number_of(v);
    if (number != 0) return address(plain_types[0]) && put(number);
    DLTensor t;
    if (count_ == kMostTensors || !view(v, &t)) return false;
    if (count_ != 0 && !is_same(t.device, device_)) return false;
    device_ = t.device;
    seen_[count_++] = v;
    number = static_cast<uint16_t>(count_);
    const uint64_t about = static_cast<uint64_t>(dtype_of(t)) << 16 |
                           static_cast<uint64_t>(t.rank) << 8 | (wants_gradient(v) ? 1 : 0);
    return address(Py_TYPE(v)) && put(about) && put(t.device) &&
           raw(t.shape, sizeof(int64_t) * static_cast<size_t>(t.rank)) && !PyErr_Occurred() &&
           PyList_Append(tensors_, v) == 0;
  }

  // Of a tensor among those seen, from 1; 0: it is to be given one.
  uint16_t& number_of(PyObject* v) {
    constexpr uint64_t kSpread = 0x9E3779B97F4A7C15;
    size_t at = (reinterpret_cast<uintptr_t>(v) >> 4) * kSpread >> (64 - kTableBits);
    while (numbers_[at] != 0 && seen_[numbers_[at] - 1] != v) at = (at + 1) % (1 << kTableBits);
    return numbers_[at];
  }

  bool wants_gradient(PyObject* v) const {
    if (!has_gradients_) return false;
    PyObject* found = PyObject_GetAttr(v, requires_grad_name);
    Py_DecRef(found);
    return found == Py_True;
  }

  static constexpr int kTableBits = 11;
  static_assert(kMostTensors < 1 << kTableBits, "the table has room behind every tensor");

  PyObject* tensors_;
  bool has_gradients_;
  DLDevice device_{};
  size_t count_ = 0, size_ = 0;
  uint16_t numbers_[1 << kTableBits] = {};  // by a tensor's address, or behind it
  PyObject* seen_[kMostTensors];
  char bytes_[kMostKey];
};

// ---- step ----

// A struct that is filled but for the addresses of tensors, which it has by their numbers. Behind
// it lie these, and the struct.
struct Step {
  struct Pointer {
    uint32_t at;  // bytes of the struct, or of all lists
    uint16_t tensor;
    bool is_of_list;
  };
  struct List {
    size_t at, begin;  // bytes of the struct; of all lists
  };

  Pointer* pointers() { return reinterpret_cast<Pointer*>(this + 1); }
  unsigned char* args() { return reinterpret_cast<unsigned char*>(pointers() + num_pointers); }

  const Entry* entry;
  Scratch scratch;
  size_t num_pointers, num_lists;
  List lists[kMostLists];
};

void destroy(PyObject* capsule) { PyMem_Free(PyCapsule_GetPointer(capsule, kStep)); }

bool number_of(PyObject* tensor, PyObject* tensors, uint16_t* out) {
  const size_t count = static_cast<size_t>(PyList_Size(tensors));
  for (size_t i = 0; i < count && i <= UINT16_MAX; ++i) {
    *out = static_cast<uint16_t>(i);
    if (PyList_GetItem(tensors, static_cast<Py_ssize_t>(i)) == tensor) return true;
  }
  return false;
}

size_t bytes_of(const Entry& entry, const Notes& notes) {
  return sizeof(Step) + notes.count * sizeof(Step::Pointer) + entry.size;
}

bool write(const Entry& entry, const Call& call, PyObject* tensors, Step* out) {
  const Notes& notes = call.notes();
  out->entry = &entry;
  out->scratch = call.scratch();
  out->num_pointers = notes.count;
  out->num_lists = notes.num_lists;
  size_t end = 0;
  for (size_t i = 0; i < notes.num_lists; ++i) {
    out->lists[i] = {notes.list_at[i], end};
    end += notes.list_size[i] * sizeof(void*);
  }
  for (size_t i = 0; i < notes.count; ++i) {
    const Notes::Note& note = notes.notes[i];
    const bool is_of_list = note.list >= 0;
    const size_t at = is_of_list ? out->lists[note.list].begin + note.at * sizeof(void*) : note.at;
    Step::Pointer& pointer = out->pointers()[i];
    pointer = {static_cast<uint32_t>(at), 0, is_of_list};
    if (!number_of(note.array, tensors, &pointer.tensor)) return false;
  }
  std::memcpy(out->args(), call.args(), entry.size);
  return notes.is_whole;
}

// ---- replay ----

PyObject* make(Step& step, void* const* addresses, const void* context, PyObject* device) {
  alignas(16) unsigned char args[kMostBytes];
  alignas(16) unsigned char lists[kMostNotes * sizeof(void*)];
  std::memcpy(args, step.args(), step.entry->size);
  for (size_t i = 0; i < step.num_pointers; ++i) {
    const Step::Pointer& pointer = step.pointers()[i];
    unsigned char* to = pointer.is_of_list ? lists : args;
    std::memcpy(to + pointer.at, &addresses[pointer.tensor], sizeof(void*));
  }
  for (size_t i = 0; i < step.num_lists; ++i) {
    const void* list = lists + step.lists[i].begin;
    std::memcpy(args + step.lists[i].at, &list, sizeof(list));
  }
  return run_entry(*step.entry, args, context, device, &step.scratch);
}

// The address of a tensor that sign() took or that was just made, which is plain, or has none of
// its own; false with an exception of Python's.
bool find(PyObject* tensor, void** out, DLDevice* device) {
  DLTensor t;
  auto* type = reinterpret_cast<PyObject*>(Py_TYPE(tensor));
  if (type != plain_types[0] && type != plain_types[1]) return *out = nullptr, true;
  if (exchange->view(tensor, &t) != 0) return false;
  *out = address_of(t);
  *device = t.device;
  return true;
}

// The addresses of a call's tensors, of those that it makes as well.
class Addresses {
 public:
  explicit Addresses(Py_ssize_t most)
      : all_(static_cast<void**>(PyMem_Malloc(static_cast<size_t>(most) * sizeof(void*)))) {
    if (all_ == nullptr) PyErr_NoMemory();
  }
  ~Addresses() { PyMem_Free(all_); }
  Addresses(const Addresses&) = delete;
  Addresses& operator=(const Addresses&) = delete;

  bool add(PyObject* tensor) { return all_ != nullptr && find(tensor, &all_[count_++], &device_); }
  void* const* data() const { return all_; }
  DLDevice device() const { return device_; }  // of all

 private:
  void** all_;
  size_t count_ = 0;
  DLDevice device_{};
};

// What a step of Python's makes: (function, args, keywords), or of one of the tensors (function,
// which, argument).
PyObject* call_of(PyObject* step, PyObject* tensors) {
  PyObject *function = PyTuple_GetItem(step, 0), *second = PyTuple_GetItem(step, 1);
  PyObject* third = PyTuple_GetItem(step, 2);
  if (PyTuple_Check(second)) return PyObject_Call(function, second, third);
  PyObject* tensor = PyList_GetItem(tensors, PyLong_AsSsize_t(second));
  return tensor == nullptr ? nullptr
                           : PyObject_CallFunctionObjArgs(function, tensor, third, nullptr);
}

// ---- picker ----

// What a dict, list or tuple holds, and what these hold, as `leaf` makes it of each, in the same;
// null where that is null.
template <typename Leaf>
PyObject* mapped(PyObject* v, Leaf leaf) {
  if (PyDict_Check(v)) {
    PyObject* made = PyDict_New();
    Py_ssize_t at = 0;
    PyObject *name, *value;
    while (made != nullptr && PyDict_Next(v, &at, &name, &value)) {
      PyObject* item = mapped(value, leaf);
      if (item == nullptr || PyDict_SetItem(made, name, item) != 0) Py_CLEAR(made);
      Py_DecRef(item);
    }
    return made;
  }
  const bool is_list = PyList_Check(v);
  if (!is_list && !PyTuple_Check(v)) return leaf(v);
  const Py_ssize_t size = is_list ? PyList_Size(v) : PyTuple_Size(v);
  PyObject* made = is_list ? PyList_New(size) : PyTuple_New(size);
  for (Py_ssize_t i = 0; made != nullptr && i < size; ++i) {
    PyObject* item = mapped(is_list ? PyList_GetItem(v, i) : PyTuple_GetItem(v, i), leaf);
    if (item == nullptr) {
      Py_CLEAR(made);
    } else if (is_list) {
      PyList_SetItem(made, i, item);
    } else {
      PyTuple_SetItem(made, i, item);
    }
  }
  auto* type = reinterpret_cast<PyObject*>(Py_TYPE(v));
  if (made == nullptr || is_list || Py_TYPE(v) == &PyTuple_Type) return made;
  const bool is_named = PyObject_HasAttrString(type, "_make") != 0;
  PyObject* found = is_named ? PyObject_CallMethod(type, "_make", "(O)", made)
                             : PyObject_CallFunctionObjArgs(type, made, nullptr);
  Py_DecRef(made);
  return found;
}

// Of a tensor its place among others, as a slice that begins there; null where it has none.
PyObject* place_of(PyObject* v, PyObject* tensors) {
  const int is_tensor = PyObject_IsInstance(v, plain_types[0]);
  if (is_tensor == 0) return Py_TYPE(v) == &PySlice_Type ? nullptr : new_reference(v);
  uint16_t at;
  if (is_tensor < 0 || !number_of(v, tensors, &at)) return nullptr;
  PyObject* begin = PyLong_FromLong(at);
  PyObject* place = begin == nullptr ? nullptr : PySlice_New(begin, nullptr, nullptr);
  Py_DecRef(begin);
  return place;
}

PyObject* pick(PyObject* pattern, PyObject* const* args, Py_ssize_t count) {
  if (count < 1 || !PyList_Check(args[0])) {
    return PyErr_Format(PyExc_TypeError, "pick() takes a list first, got %zd arguments", count);
  }
  return mapped(pattern, [&](PyObject* v) -> PyObject* {
    if (Py_TYPE(v) != &PySlice_Type) return new_reference(v);
    Py_ssize_t begin, end, step;
    if (PySlice_Unpack(v, &begin, &end, &step) != 0) return nullptr;
    PyObject* tensor = PyList_GetItem(args[0], begin);
    return tensor == nullptr ? nullptr : new_reference(tensor);
  });
}

PyMethodDef pick_method = {"pick",
                           reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&pick)),
                           METH_FASTCALL, "A result of these tensors."};

}  // namespace

PyObject* picker(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (count != 2 || !PyList_Check(args[1])) {
    return PyErr_Format(PyExc_TypeError, "picker() takes 2 arguments, got %zd", count);
  }
  PyObject* pattern = mapped(args[0], [&](PyObject* v) { return place_of(v, args[1]); });
  if (pattern == nullptr) {
    PyErr_Clear();
    return new_reference(Py_None);
  }
  PyObject* made = PyCFunction_New(&pick_method, pattern);
  Py_DecRef(pattern);
  return made;
}

PyObject* learn(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (count != 1 || !PyDict_Check(args[0])) {
    return PyErr_Format(PyExc_TypeError, "learn() takes a dict, got %zd arguments", count);
  }
  made_of = new_reference(args[0]);
  requires_grad_name = PyUnicode_InternFromString("requires_grad");
  return requires_grad_name == nullptr ? nullptr : new_reference(Py_None);
}

PyObject* sign(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (count != 2) return PyErr_Format(PyExc_TypeError, "sign() takes 2 arguments, got %zd", count);
  PyObject* tensors = PyList_New(0);
  if (tensors == nullptr) return nullptr;
  Signature signature(tensors, args[1] == Py_True);
  PyObject* found = nullptr;
  if (signature.value(args[0]) && PyList_Size(tensors) != 0) {
    PyObject* key = signature.key();
    found = key == nullptr ? nullptr : PyTuple_Pack(2, key, tensors);
    Py_DecRef(key);
  } else {
    PyErr_Clear();
    found = new_reference(Py_None);
  }
  Py_DecRef(tensors);
  return found;
}

PyObject* step(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (count != 3) return PyErr_Format(PyExc_TypeError, "step() takes 3 arguments, got %zd", count);
  const auto* entry = static_cast<const Entry*>(PyCapsule_GetPointer(args[0], "moire.Entry"));
  if (entry == nullptr) return nullptr;
  Call call(*entry, args[1]);
  if (call.fill()) {
    auto* made = static_cast<Step*>(PyMem_Malloc(bytes_of(*entry, call.notes())));
    if (made == nullptr) return PyErr_NoMemory();
    if (write(*entry, call, args[2], made)) return PyCapsule_New(made, kStep, destroy);
    PyMem_Free(made);
  }
  PyErr_Clear();
  return new_reference(Py_None);
}

PyObject* replay(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (count != 3) {
    return PyErr_Format(PyExc_TypeError, "replay() takes 3 arguments, got %zd", count);
  }
  PyObject *steps = args[0], *device = args[1], *tensors = args[2];
  Addresses addresses(PyList_Size(tensors) + PyTuple_Size(steps));
  for (Py_ssize_t i = 0; i < PyList_Size(tensors); ++i) {
    if (!addresses.add(PyList_GetItem(tensors, i))) return nullptr;
  }
  const void* context = context_of(device, addresses.device());
  if (context == nullptr) return nullptr;
  for (Py_ssize_t i = 0; i < PyTuple_Size(steps); ++i) {
    PyObject* item = PyTuple_GetItem(steps, i);
    if (PyTuple_Check(item)) {
      PyObject* tensor = call_of(item, tensors);
      const bool is_kept =
          tensor != nullptr && addresses.add(tensor) && PyList_Append(tensors, tensor) == 0;
      Py_DecRef(tensor);
      if (!is_kept) return nullptr;
      continue;
    }
    auto* step = static_cast<Step*>(PyCapsule_GetPointer(item, kStep));
    PyObject* code = step == nullptr ? nullptr : make(*step, addresses.data(), context, device);
    if (code == nullptr || PyLong_AsLong(code) != MOIRE_OK) return code;
    Py_DecRef(code);
  }
  return PyLong_FromLong(MOIRE_OK);
}

}  // namespace moire_python
