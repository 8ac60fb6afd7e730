// Calls that were made before, for what their shapes and types alone decide: see tapes.py, whose
// part this is that has to be fast.
#ifndef MOIRE_PYTHON_TAPE_H_
#define MOIRE_PYTHON_TAPE_H_
#include "call.h"

namespace moire_python {

// learn({type: names}): instances of a type are what their attributes `names` are; where there are
// none of these, themselves, and live for ever.
PyObject* learn(PyObject*, PyObject* const* args, Py_ssize_t count);

// sign(values, has_gradients): (key, [tensor, ...]) of a mapping or sequence of arguments, None
// where a tensor in it is not plain or anything else is not known. Calls of one key differ in the
// memory of their tensors alone.
PyObject* sign(PyObject*, PyObject* const* args, Py_ssize_t count);

// step(entry, fields, tensors): a call of an entry whose tensors are all of this list, as replay()
// takes it; None where they are not.
PyObject* step(PyObject*, PyObject* const* args, Py_ssize_t count);

// replay(steps, device, tensors): makes the steps, appending to the list of tensors what they make,
// and returns the code of the one that failed, or 0. A step is step()'s, or (function, args,
// keywords) or (function, which of the tensors, argument), which make a tensor.
PyObject* replay(PyObject*, PyObject* const* args, Py_ssize_t count);

// picker(result, tensors): a function that takes `result`, tensors of this list in whatever holds
// them and what is none, from another such list, its first argument; None where one is not there.
PyObject* picker(PyObject*, PyObject* const* args, Py_ssize_t count);

}  // namespace moire_python

#endif  // MOIRE_PYTHON_TAPE_H_
