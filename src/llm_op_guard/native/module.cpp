// The fast path of a check: yes, no, or cannot tell.
//
// A program (program.py) is run on the arguments of one call. It reads tensors through the table of functions that
// their class publishes for DLPack, so that nothing here is linked to PyTorch. Whatever it meets that it does not know
// for certain it cannot tell, and the Python check decides. It runs no code of the objects that it is given.
#include <initializer_list>

#include "extremes.h"
#include "operations.h"
#include "program.h"
#include "reading.h"

namespace llm_op_guard {
namespace {

// After so many calls in a row that could not be told, two to this power are left alone at a time, and never more.
constexpr uint32_t kPatience = 4, kMostPatience = 10;

PyTypeObject* program_class;

Program* program_of(PyObject* const* given, Py_ssize_t count) {
  if (count < 1 || Py_TYPE(given[0]) != program_class) {
    PyErr_SetString(PyExc_TypeError, "the first argument is a program");
    return nullptr;
  }
  Program* program = reinterpret_cast<Program*>(given[0]);
  if (count - 1 != program->arguments) {
    PyErr_SetString(PyExc_TypeError, "not as many arguments as the program has");
    return nullptr;
  }
  return program;
}

// accepts(program, *arguments): True for yes; False for anything else, of which the Python check is to be asked.
PyObject* accepts(PyObject*, PyObject* const* given, Py_ssize_t count) {
  Program* program = program_of(given, count);
  if (program == nullptr) return nullptr;
  if (program->skip > 0) {
    program->skip--;
    Py_RETURN_FALSE;
  }
  bool refused = false;
  Answer said = judged(*program, given + 1, refused);
  if (said == kYes) {
    program->streak = 0;
    Py_RETURN_TRUE;
  }
  if (said == kRaised) return nullptr;
  if (said == kCannot) {
    // What can't be told here will hardly be told the next time, and a tensor that can't be read costs a millisecond.
    if (program->streak < kMostPatience) program->streak++;
    if (refused || program->streak >= kPatience) program->skip = uint32_t{1} << program->streak;
  }
  Py_RETURN_FALSE;
}

// judge(program, *arguments): True for yes, False for no, None where it cannot be told. Looks every time.
PyObject* judge(PyObject*, PyObject* const* given, Py_ssize_t count) {
  Program* program = program_of(given, count);
  if (program == nullptr) return nullptr;
  bool refused = false;
  switch (judged(*program, given + 1, refused)) {
    case kYes: Py_RETURN_TRUE;
    case kNo: Py_RETURN_FALSE;
    case kRaised: return nullptr;
    default: Py_RETURN_NONE;
  }
}

// connect(tensor class, parameter class, size class, table, attribute, unset, reads_plainly)
PyObject* connect(PyObject*, PyObject* args) {
  PyObject *tensor, *parameter, *size, *capsule, *attribute, *unset, *plainly;
  if (!PyArg_ParseTuple(args, "O!O!O!OOOO", &PyType_Type, &tensor, &PyType_Type, &parameter, &PyType_Type, &size,
                        &capsule, &attribute, &unset, &plainly)) {
    return nullptr;
  }
  auto* table = static_cast<DLPackExchangeAPI*>(PyCapsule_GetPointer(capsule, "dlpack_exchange_api"));
  if (table == nullptr) return nullptr;
  while (table != nullptr && table->header.version.major != DLPACK_MAJOR_VERSION) {
    table = reinterpret_cast<DLPackExchangeAPI*>(table->header.prev_api);
  }
  if (table == nullptr || table->dltensor_from_py_object_no_sync == nullptr) {
    PyErr_SetString(PyExc_ValueError, "the table is of another version of DLPack, or lacks what is needed");
    return nullptr;
  }
  for (PyObject* kept : {tensor, parameter, size, attribute, unset, plainly}) Py_INCREF(kept);
  connection.tensor = reinterpret_cast<PyTypeObject*>(tensor);
  connection.parameter = reinterpret_cast<PyTypeObject*>(parameter);
  connection.read = table->dltensor_from_py_object_no_sync;
  connection.attribute = attribute;
  connection.unset = unset;
  connection.reads_plainly = plainly;
  connection.size = reinterpret_cast<PyTypeObject*>(size);
  Py_RETURN_NONE;
}

PyMethodDef functions[] = {
    {"accepts", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(accepts)), METH_FASTCALL,
     "accepts(program, *arguments): True for yes, False for no and for what cannot be told."},
    {"judge", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(judge)), METH_FASTCALL,
     "judge(program, *arguments): True for yes, False for no, None where it cannot be told."},
    {"extremes", extremes, METH_O,
     "extremes(tensor): (lowest, highest) of a small one in the CPU's memory, both NaN where one is; else None."},
    {"connect", connect, METH_VARARGS, "connect(tensor, parameter, size, table, attribute, unset, reads_plainly)"},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "_check", "The fast path of checks.", -1, functions,
                      nullptr, nullptr, nullptr, nullptr};

// The names of the operations, in order: whoever writes programs compares.
PyObject* operation_names() {
  PyObject* names = PyTuple_New(kOperations);
  if (names == nullptr) return nullptr;
#define X(name)                                         \
  {                                                     \
    PyObject* text = PyUnicode_FromString(#name);       \
    if (text == nullptr) {                              \
      Py_DECREF(names);                                 \
      return nullptr;                                   \
    }                                                   \
    PyTuple_SetItem(names, name, text);                 \
  }
  OPERATIONS(X)
#undef X
  return names;
}

}  // namespace
}  // namespace llm_op_guard

// What it was built of, as `sources.py` says it; nothing where it was built by hand.
#ifndef LLM_OP_GUARD_SOURCES
#define LLM_OP_GUARD_SOURCES ""
#endif

PyMODINIT_FUNC PyInit__check() {
  using namespace llm_op_guard;
  PyObject* made = PyModule_Create(&module);
  if (made == nullptr) return nullptr;
  PyObject* names = operation_names();
  program_class = make_program_class();
  bool sound = names != nullptr && program_class != nullptr && make_names() &&
               PyModule_AddType(made, program_class) == 0 && PyModule_AddObjectRef(made, "OPERATIONS", names) == 0 &&
               PyModule_AddStringConstant(made, "SOURCES", LLM_OP_GUARD_SOURCES) == 0;
  Py_XDECREF(names);
  if (!sound) Py_CLEAR(made);
  return made;
}
