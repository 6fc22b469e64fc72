#include "reading.h"

namespace llm_op_guard {

Connection connection;

namespace {

PyObject* tables[3];  // "_parameters", "_buffers", "_modules"

int32_t dtype_of(DLDataType type) {
  if (type.code == kDLFloat4_e2m1fn) return type.bits == 4 && type.lanes == 2 ? 9 : -1;
  if (type.lanes != 1) return -1;
  switch (type.code) {
    case kDLFloat: return type.bits == 64 ? 0 : type.bits == 32 ? 1 : type.bits == 16 ? 2 : -1;
    case kDLBfloat: return type.bits == 16 ? 3 : -1;
    case kDLFloat8_e4m3fn: return 4;
    case kDLFloat8_e4m3fnuz: return 5;
    case kDLFloat8_e5m2: return 6;
    case kDLFloat8_e5m2fnuz: return 7;
    case kDLFloat8_e8m0fnu: return 8;
    // Of eight bits PyTorch shows narrower integers too.
    case kDLInt: return type.bits == 64 ? 10 : type.bits == 32 ? 11 : type.bits == 16 ? 12 : -1;
    case kDLUInt: return type.bits == 64 ? 13 : type.bits == 32 ? 14 : type.bits == 16 ? 15 : -1;
    case kDLBool: return type.bits == 8 ? 16 : -1;
    case kDLComplex: return type.bits == 128 ? 17 : type.bits == 64 ? 18 : type.bits == 32 ? 19 : -1;
    default: return -1;
  }
}

// Those whose name in PyTorch is known: cpu, cuda (of NVIDIA and AMD), mps, xpu.
constexpr int64_t kDevices = 1 << kDLCPU | 1 << kDLCUDA | 1 << kDLROCM | 1 << kDLMetal | 1 << kDLOneAPI;

// The items of a tuple (or of torch.Size, which is one) as sizes, if they are integers.
Answer sizes_of(Frame& frame, PyObject* tuple, Value& into) {
  Py_ssize_t count = PyTuple_Size(tuple);
  if (count < 0 || count > kMostDims || frame.arena_used + count > kArena) {
    PyErr_Clear();
    return kCannot;
  }
  int64_t* first = frame.arena + frame.arena_used;
  for (Py_ssize_t i = 0; i < count; i++) {
    PyObject* item = PyTuple_GetItem(tuple, i);
    if (!PyLong_CheckExact(item) || integer_of(item, first[i]) != kGoOn) return kCannot;
  }
  frame.arena_used += static_cast<int>(count);
  into = sizes(first, static_cast<int32_t>(count));
  return kGoOn;
}

// A value of a plain dict; null where there is none. Keys are texts: looking one up runs no code.
PyObject* looked_up(PyObject* dict, PyObject* name) {
  PyObject* found = PyDict_GetItemWithError(dict, name);
  if (found == nullptr) PyErr_Clear();
  return found;
}

bool reads_plainly(Reader& reader, PyTypeObject* type) {
  if (reader.type == type) return reader.plainly;
  PyObject* said = PyObject_CallFunctionObjArgs(connection.reads_plainly, reinterpret_cast<PyObject*>(type), nullptr);
  bool plainly = said == Py_True;
  if (said == nullptr) PyErr_Clear();
  Py_XDECREF(said);
  PyTypeObject* before = reader.type;
  Py_INCREF(reinterpret_cast<PyObject*>(type));
  reader.type = type;
  reader.plainly = plainly;
  Py_XDECREF(reinterpret_cast<PyObject*>(before));
  return plainly;
}

}  // namespace

bool make_names() {
  const char* names[] = {"_parameters", "_buffers", "_modules"};
  for (int i = 0; i < 3; i++) {
    tables[i] = PyUnicode_InternFromString(names[i]);
    if (tables[i] == nullptr) return false;
  }
  return true;
}

Loaded load(Tensor& tensor, const Value& value, bool with_strides) {
  if (value.tag != kObject) return kNoTensor;
  if (tensor.of == value.object) return kTensor;
  PyTypeObject* type = Py_TYPE(value.object);
  if (type != connection.tensor && type != connection.parameter) {
    if (connection.tensor == nullptr) return kUnknown;
    return PyType_IsSubtype(type, connection.tensor) ? kUnknown : kNoTensor;
  }
  DLTensor seen;
  if (connection.read(value.object, &seen) != 0) {
    PyErr_Clear();
    return kRefused;
  }
  int32_t dtype = dtype_of(seen.dtype);
  if (dtype < 0 || seen.ndim > kMostDims || !has(kDevices, seen.device.device_type) ||
      (seen.ndim > 0 && seen.strides == nullptr)) {
    return kUnknown;
  }
  tensor.of = value.object;
  tensor.ndim = seen.ndim;
  tensor.dtype = dtype;
  tensor.device = seen.device;
  for (int i = 0; i < seen.ndim; i++) tensor.shape[i] = seen.shape[i];
  if (with_strides) {
    for (int i = 0; i < seen.ndim; i++) tensor.strides[i] = seen.strides[i];
  }
  return kTensor;
}

int64_t device_number(DLDevice device) {
  // A CPU has no index.
  int64_t index = device.device_type == kDLCPU ? 0 : device.device_id;
  return (static_cast<int64_t>(device.device_type) << 32) | static_cast<uint32_t>(index);
}

// What stands in arithmetic and comparisons. Tensors do not: the rule has nothing to say of the call then.
Answer plain(Frame& frame, const Value& from, Value& into) {
  if (from.tag != kObject) {
    into = from;
    return kGoOn;
  }
  PyObject* o = from.object;
  PyTypeObject* type = Py_TYPE(o);
  if (PyLong_CheckExact(o)) {
    int64_t n = 0;
    if (integer_of(o, n) != kGoOn) return kCannot;
    into = number(n);
  } else if (o == Py_None) {
    into = {kNone, 0, {0}};
  } else if (o == Py_True || o == Py_False) {
    into = truth(o == Py_True);
  } else if (PyFloat_CheckExact(o)) {
    into = {kFloat, 0, {0}};
    into.real = PyFloat_AsDouble(o);
  } else if (PyUnicode_CheckExact(o)) {
    into = {kText, 0, {0}};
    into.object = o;
  } else if (PyTuple_CheckExact(o) || (type == connection.size)) {
    return sizes_of(frame, o, into);
  } else if (type == connection.tensor || type == connection.parameter) {
    into = absent();
  } else {
    return kCannot;
  }
  return kGoOn;
}

PyObject* keep(Frame& frame, PyObject* owned) {
  if (frame.kept_count == kMostKept) {
    Py_DECREF(owned);
    return nullptr;
  }
  return frame.kept[frame.kept_count++] = owned;
}

// An attribute as `reading.optional_attribute` reads it: from the dict of an instance, from the tables of nn.Module;
// that function is asked for anything else.
Answer read(Frame& frame, Reader& reader, const Value& owner, PyObject* name, Value& into) {
  if (is_nothing(owner)) {
    into = absent();
    return kGoOn;
  }
  if (owner.tag != kObject) return kCannot;
  PyTypeObject* type = Py_TYPE(owner.object);
  if (connection.tensor == nullptr || PyType_IsSubtype(type, connection.tensor) || PyType_Check(owner.object)) {
    return kCannot;
  }
  if (reads_plainly(reader, type)) {
    PyObject* dict = PyObject_GenericGetDict(owner.object, nullptr);
    if (dict == nullptr) PyErr_Clear();
    if (dict != nullptr && PyDict_CheckExact(dict)) {
      PyObject* found = looked_up(dict, name);
      if (found == nullptr && looked_up(dict, tables[0]) != nullptr) {
        for (int i = 0; i < 3 && found == nullptr; i++) {
          PyObject* table = looked_up(dict, tables[i]);
          if (table != nullptr && PyDict_CheckExact(table)) found = looked_up(table, name);
        }
      }
      if (found != nullptr) {
        Py_INCREF(found);
        Py_DECREF(dict);
        if (keep(frame, found) == nullptr) return kCannot;
        into = object(found);
        return kGoOn;
      }
    }
    Py_XDECREF(dict);
  }
  PyObject* found = PyObject_CallFunctionObjArgs(connection.attribute, owner.object, name, nullptr);
  if (found == nullptr) {
    PyErr_Clear();
    return kCannot;
  }
  if (keep(frame, found) == nullptr) return kCannot;
  into = found == connection.unset ? absent() : object(found);
  return kGoOn;
}

// An item of a plain dict, list or tuple.
Answer item(const Value& owner, PyObject* key, Value& into) {
  into = absent();
  if (is_nothing(owner)) return kGoOn;
  if (owner.tag != kObject) return kCannot;
  if (PyDict_CheckExact(owner.object)) {
    if (PyObject* found = looked_up(owner.object, key)) into = object(found);
    return kGoOn;
  }
  bool list = PyList_CheckExact(owner.object);
  if ((!list && !PyTuple_CheckExact(owner.object)) || !PyLong_CheckExact(key)) return kCannot;
  int64_t index = 0;
  if (integer_of(key, index) != kGoOn) return kCannot;
  Py_ssize_t length = list ? PyList_Size(owner.object) : PyTuple_Size(owner.object);
  if (index < 0) index += length;
  if (index < 0 || index >= length) return kGoOn;
  into = object(list ? PyList_GetItem(owner.object, index) : PyTuple_GetItem(owner.object, index));
  return kGoOn;
}

// Whether a scalar is of a declared kind; kCannot for classes of which only Python knows.
Answer is_kind(PyObject* o, int32_t kind) {
  if (kind == 0) return o == Py_None ? kYes : kNo;
  bool is_int = PyLong_CheckExact(o) || PyBool_Check(o);
  switch (kind) {
    case 1: if (is_int) return kYes; break;
    case 2: if (is_int || PyFloat_CheckExact(o)) return kYes; break;
    case 3: if (PyBool_Check(o)) return kYes; break;
    case 4: if (PyUnicode_CheckExact(o)) return kYes; break;
    case 5: if (PyDict_CheckExact(o)) return kYes; break;
    default: return kCannot;
  }
  PyTypeObject* type = Py_TYPE(o);
  bool known = o == Py_None || is_int || PyFloat_CheckExact(o) || PyUnicode_CheckExact(o) || PyDict_CheckExact(o) ||
               PyList_CheckExact(o) || PyTuple_CheckExact(o) || type == connection.tensor ||
               type == connection.parameter;
  return known ? kNo : kCannot;
}

}  // namespace llm_op_guard
