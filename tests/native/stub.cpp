// What PyTorch offers to native checks, without PyTorch: a class of tensors and a table of functions for DLPack.
//
// For runs under sanitizers, into which PyTorch itself is not built.
#define Py_LIMITED_API 0x030b0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstdlib>

#include "dlpack.h"

namespace {

constexpr int kMostDims = 16;
constexpr int64_t kBytes = 256;

struct Tensor {
  PyObject_HEAD
  int64_t shape[kMostDims];
  int64_t strides[kMostDims];
  int32_t ndim;
  DLDataType type;
  DLDevice device;
  int refused;
  void* memory;  // as much as the elements take, where that is little
};

// Tensor(shape, code, bits, lanes, device type, device id, refused)
PyObject* tensor_new(PyTypeObject* type, PyObject* args, PyObject*) {
  PyObject* shape;
  int code, bits, lanes, device, id, refused;
  if (!PyArg_ParseTuple(args, "O!iiiiii", &PyTuple_Type, &shape, &code, &bits, &lanes, &device, &id, &refused)) {
    return nullptr;
  }
  Py_ssize_t ndim = PyTuple_Size(shape);
  if (ndim > kMostDims) {
    PyErr_SetString(PyExc_ValueError, "too many dimensions");
    return nullptr;
  }
  PyObject* self = PyType_GenericAlloc(type, 0);
  if (self == nullptr) return nullptr;
  Tensor* tensor = reinterpret_cast<Tensor*>(self);
  tensor->ndim = static_cast<int32_t>(ndim);
  int64_t stride = 1;
  for (Py_ssize_t i = ndim - 1; i >= 0; i--) {
    tensor->shape[i] = PyLong_AsLongLong(PyTuple_GetItem(shape, i));
    tensor->strides[i] = stride;
    stride = static_cast<int64_t>(static_cast<uint64_t>(stride) * static_cast<uint64_t>(tensor->shape[i]));
  }
  tensor->type = {static_cast<uint8_t>(code), static_cast<uint8_t>(bits), static_cast<uint16_t>(lanes)};
  tensor->device = {static_cast<DLDeviceType>(device), id};
  tensor->refused = refused;
  int64_t bytes = bits / 8;
  for (Py_ssize_t i = 0; i < ndim && bytes > 0 && bytes <= kBytes; i++) {
    bytes = tensor->shape[i] <= kBytes ? bytes * tensor->shape[i] : kBytes + 1;
  }
  tensor->memory = bytes > 0 && bytes <= kBytes ? std::calloc(1, static_cast<size_t>(bytes)) : nullptr;
  return self;
}

void tensor_dealloc(PyObject* self) {
  std::free(reinterpret_cast<Tensor*>(self)->memory);
  PyTypeObject* type = Py_TYPE(self);
  reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free))(self);
  Py_DECREF(type);
}

int read(void* object, DLTensor* out) {
  Tensor* tensor = static_cast<Tensor*>(object);
  if (tensor->refused) {
    PyErr_SetString(PyExc_BufferError, "it is not for you");
    return -1;
  }
  *out = {tensor->memory, tensor->device, tensor->ndim, tensor->type, tensor->shape, tensor->strides, 0};
  return 0;
}

DLPackExchangeAPI table = {};

PyType_Slot slots[] = {{Py_tp_new, reinterpret_cast<void*>(tensor_new)},
                       {Py_tp_dealloc, reinterpret_cast<void*>(tensor_dealloc)},
                       {0, nullptr}};
PyType_Spec spec = {"stub.Tensor", sizeof(Tensor), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, slots};
PyModuleDef module = {PyModuleDef_HEAD_INIT, "stub", "", -1, nullptr, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_stub() {
  PyObject* made = PyModule_Create(&module);
  PyObject* type = PyType_FromSpec(&spec);
  if (made == nullptr || type == nullptr) return nullptr;
  table.header.version = {DLPACK_MAJOR_VERSION, DLPACK_MINOR_VERSION};
  table.dltensor_from_py_object_no_sync = read;
  PyModule_AddObject(made, "Tensor", type);
  PyModule_AddObject(made, "table", PyCapsule_New(&table, "dlpack_exchange_api", nullptr));
  return made;
}
