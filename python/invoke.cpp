// invoke.py, compiled: one call of a C entry on Torch's tensors (call.h), and calls that were made
// before (tape.h). Optional: nothing of Torch is included or linked, and of Python only the stable
// ABI since 3.10.
//
// It has no errors of its own: a call with anything in it that is not plain is declined before
// anything runs, and invoke.py takes it, with its copies, its checks and its messages. Begin at
// call().
#include "call.h"
#include "overlap.h"
#include "tape.h"

namespace {

using namespace moire_python;

// ---- the module ----

PyObject* call(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (count != 2 || !PyDict_Check(args[1])) return new_reference(Py_None);
  const auto* entry = static_cast<const Entry*>(PyCapsule_GetPointer(args[0], "moire.Entry"));
  if (entry == nullptr) return nullptr;
  Call made(*entry, args[1]);
  if (made.fill()) return made.run();
  PyErr_Clear();
  return new_reference(Py_None);
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
  for (size_t i = 0; i < entry->num_fields; ++i) Py_DecRef(entry->fields[i].keyword);
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
    Py_IncRef(field.keyword);
    field.at = static_cast<size_t>(at);
    made->num_fields = static_cast<size_t>(i) + 1;
  }
  return capsule;
}

PyObject* start(PyObject*, PyObject* args) {
  PyObject *capsule, *samples, *objects[8];
  if (!PyArg_ParseTuple(args, "OOOOOOOOOO!", &capsule, &objects[0], &objects[1], &objects[2],
                        &objects[3], &objects[4], &objects[5], &objects[6], &objects[7],
                        &PyDict_Type, &samples)) {
    return nullptr;
  }
  void* found = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
  if (found == nullptr) return nullptr;
  exchange = static_cast<const DLExchange*>(found);
  if (exchange->major != 1 || exchange->view == nullptr) return new_reference(Py_False);
  for (PyObject* object : objects) Py_IncRef(object);
  plain_types[0] = objects[0], plain_types[1] = objects[1], is_neg = objects[2];
  context_on = objects[3], scratch_on = objects[4];
  settings_now = objects[5], no_settings = objects[6], num_threads = objects[7];
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
  return new_reference(PyErr_Occurred() ? nullptr : Py_True);
}

PyObject* forget(PyObject*, PyObject*) {
  usual = {};
  return new_reference(Py_None);
}

using Method = PyObject*(PyObject*, PyObject* const*, Py_ssize_t);

PyCFunction as_method(Method& method) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&method));
}

PyMethodDef functions[] = {
    {"start", start, METH_VARARGS, "Takes what the calls need; whether it is all there."},
    {"entry", entry, METH_VARARGS, "A C entry as call() takes it."},
    {"call", as_method(call), METH_FASTCALL,
     "The code of a call of an entry on a mapping of fields; None where it is declined."},
    {"forget", forget, METH_NOARGS, "Knows no context any more, in a forked child."},
    {"learn", as_method(learn), METH_FASTCALL, "Takes what signatures need."},
    {"sign", as_method(sign), METH_FASTCALL,
     "What a call's arguments are; None where that varies."},
    {"step", as_method(step), METH_FASTCALL, "A call of an entry that can be made again, or None."},
    {"replay", as_method(replay), METH_FASTCALL, "Makes steps again, on other tensors."},
    {"picker", as_method(picker), METH_FASTCALL, "Takes a result from a tape's tensors."},
    {"overlap", as_method(overlap), METH_FASTCALL, "Whether tensors may share memory."},
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
