#include "reading.h"

#include "operations.h"

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

// What an error of Python's comes to: it cannot be told, but what is no Exception goes on to the caller.
Answer failed() {
  if (!PyErr_ExceptionMatches(PyExc_Exception)) return kRaised;
  PyErr_Clear();
  return kCannot;
}

// A value of a plain dict, borrowed; null where there is none. Another key of the same hash may be of any class.
Answer looked_up(PyObject* dict, PyObject* key, PyObject*& found) {
  found = PyDict_GetItemWithError(dict, key);
  return found == nullptr && PyErr_Occurred() ? failed() : kGoOn;
}

// Keeps a reference until the program has run.
Answer keep(Frame& frame, PyObject* owned, Value& into) {
  if (frame.kept_count == kMostValues) {
    Py_DECREF(owned);
    return kCannot;
  }
  frame.kept[frame.kept_count++] = owned;
  into = object(owned);
  return kGoOn;
}

// Yes, no, or raised: whether nothing stands in front of what an object is and holds.
Answer reads_plainly(Reader& reader, PyTypeObject* type) {
  PyObject* cls = reinterpret_cast<PyObject*>(type);
  if (reader.type != nullptr && PyWeakref_GetObject(reader.type) == cls) return reader.plainly ? kYes : kNo;
  PyObject* said = PyObject_CallFunctionObjArgs(connection.reads_plainly, cls, nullptr);
  PyObject* weak = said == nullptr ? nullptr : PyWeakref_NewRef(cls, nullptr);
  if (weak == nullptr) {
    Py_XDECREF(said);
    return failed() == kRaised ? kRaised : kNo;
  }
  bool plainly = said == Py_True;
  Py_DECREF(said);
  PyObject* before = reader.type;
  reader.type = weak;
  reader.plainly = plainly;
  Py_XDECREF(before);
  return plainly ? kYes : kNo;
}

// Whether an object is of one of Python's own classes: no class of its own says what it is.
bool is_own(PyObject* o) {
  return o == Py_None || PyLong_CheckExact(o) || PyBool_Check(o) || PyFloat_CheckExact(o) || PyUnicode_CheckExact(o) ||
         PyDict_CheckExact(o) || PyList_CheckExact(o) || PyTuple_CheckExact(o);
}

// What lies in the dict of an instance, or in the tables of nn.Module there, as a reference of one's own; null where
// it does not.
Answer from_dict(PyObject* dict, PyObject* name, PyObject*& found) {
  Answer said = looked_up(dict, name, found);
  Py_XINCREF(found);
  for (int i = 0; i < 3 && said == kGoOn && found == nullptr; i++) {
    PyObject* table = nullptr;
    said = looked_up(dict, tables[i], table);
    if (table == nullptr && i == 0) break;  // no module
    if (table == nullptr || !PyDict_CheckExact(table)) continue;
    Py_INCREF(table);  // a key's class may take it out of the dict
    said = looked_up(table, name, found);
    Py_XINCREF(found);
    Py_DECREF(table);
  }
  return said;
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

Loaded load(Tensor& tensor, Reader& reader, const Value& value, bool with_strides) {
  if (value.tag != kObject) return kNoTensor;
  if (tensor.of == value.object) return kTensor;
  PyTypeObject* type = Py_TYPE(value.object);
  if (type != connection.tensor && type != connection.parameter) {
    if (connection.tensor == nullptr) return kUnknown;
    if (is_own(value.object)) return kNoTensor;
    if (PyType_IsSubtype(type, connection.tensor)) return kUnknown;
    // A proxy of a tensor is one for `isinstance`.
    Answer said = reads_plainly(reader, type);
    return said == kYes ? kNoTensor : said == kNo ? kUnknown : kInterrupted;
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
  tensor.address = reinterpret_cast<uintptr_t>(seen.data) + seen.byte_offset;
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
  Answer said = reads_plainly(reader, type);
  if (said == kRaised) return kRaised;
  if (said == kYes) {
    PyObject* dict = PyObject_GenericGetDict(owner.object, nullptr);
    if (dict == nullptr) PyErr_Clear();
    PyObject* found = nullptr;
    said = dict != nullptr && PyDict_CheckExact(dict) ? from_dict(dict, name, found) : kGoOn;
    Py_XDECREF(dict);
    if (said != kGoOn) return said;
    if (found != nullptr) return keep(frame, found, into);
  }
  PyObject* found = PyObject_CallFunctionObjArgs(connection.attribute, owner.object, name, nullptr);
  if (found == nullptr) return failed();
  if (keep(frame, found, into) != kGoOn) return kCannot;
  if (found == connection.unset) into = absent();
  return kGoOn;
}

Answer item(Frame& frame, const Value& owner, PyObject* key, Value& into) {
  into = absent();
  if (is_nothing(owner)) return kGoOn;
  if (owner.tag != kObject) return kCannot;
  if (PyDict_CheckExact(owner.object)) {
    PyObject* found = nullptr;
    Answer said = looked_up(owner.object, key, found);
    if (found == nullptr) return said;
    Py_INCREF(found);
    return keep(frame, found, into);
  }
  bool list = PyList_CheckExact(owner.object);
  if ((!list && !PyTuple_CheckExact(owner.object)) || !PyLong_CheckExact(key)) return kCannot;
  int64_t index = 0;
  if (integer_of(key, index) != kGoOn) return kCannot;
  Py_ssize_t length = list ? PyList_Size(owner.object) : PyTuple_Size(owner.object);
  if (index < 0) index += length;
  if (index < 0 || index >= length) return kGoOn;
  PyObject* found = list ? PyList_GetItem(owner.object, index) : PyTuple_GetItem(owner.object, index);
  Py_INCREF(found);
  return keep(frame, found, into);
}

Answer is_kind(PyObject* o, int32_t kind) {
  if (kind == kNothing) return o == Py_None ? kYes : kNo;
  bool is_int = PyLong_CheckExact(o) || PyBool_Check(o);
  switch (kind) {
    case kInteger: if (is_int) return kYes; break;
    case kReal: if (is_int || PyFloat_CheckExact(o)) return kYes; break;
    case kBoolean: if (PyBool_Check(o)) return kYes; break;
    case kString: if (PyUnicode_CheckExact(o)) return kYes; break;
    case kMapping: if (PyDict_CheckExact(o)) return kYes; break;
    default: return kCannot;
  }
  PyTypeObject* type = Py_TYPE(o);
  return is_own(o) || type == connection.tensor || type == connection.parameter ? kNo : kCannot;
}

}  // namespace llm_op_guard
