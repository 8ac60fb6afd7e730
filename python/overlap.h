// Whether tensors share memory, where one of them is written: see check_memory() of wgrad.py, whose
// part this is that has to be fast.
#ifndef MOIRE_PYTHON_OVERLAP_H_
#define MOIRE_PYTHON_OVERLAP_H_
#include "call.h"

namespace moire_python {

// overlap(written, others): False where no tensor in `written` shares memory with another of both,
// whatever holds them; True where one does or may.
PyObject* overlap(PyObject*, PyObject* const* args, Py_ssize_t count);

}  // namespace moire_python

#endif  // MOIRE_PYTHON_OVERLAP_H_
