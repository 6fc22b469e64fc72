// The fast path of a check: yes, no, or cannot tell.
//
// A program (program.py) is run on the arguments of one call. It reads tensors through the table of functions that
// their class publishes for DLPack, so that nothing here is linked to PyTorch. Whatever it meets that it does not know
// for certain it cannot tell, and the Python check decides. It runs no code of the objects that it is given.
//
// Python's limited API of 3.11: one build serves all later versions.
#ifndef Py_LIMITED_API
#define Py_LIMITED_API 0x030b0000
#endif
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstdint>
#include <cstring>
#include <initializer_list>

#include "dlpack.h"

namespace {

// What a call comes to. An operation that comes to nothing goes on.
enum Answer { kNo = 0, kYes = 1, kCannot = 2, kGoOn = 3 };

// As in program.py, by name and order.
#define OPERATIONS(X)                                                                                              \
  X(YES) X(NO) X(CANNOT) X(JUMP) X(UNLESS) X(WHERE_FALSE) X(WHERE_TRUE) X(WHERE_SET) X(ON_ABSENT) X(ABSENT)         \
  X(COPY) X(PLAIN) X(COMPARED) X(READ) X(ITEM) X(NEED) X(TENSOR) X(HELD) X(MATCH) X(RANK) X(RANK_AT_LEAST)  \
  X(DTYPE_IN) X(DEVICE_IN) X(SIZE) X(SIZES) X(NDIM) X(NUMEL) X(DTYPE) X(DEVICE) X(DENSE) X(STRIDE) X(LIKE)          \
  X(SIZE_IS) X(DEVICE_IS) X(SIGHT) X(SIGHT_DTYPE) X(IS_KIND) X(IS_LITERAL) X(IS_NONE) X(PRESENT) X(ADD) X(SUBTRACT) X(MULTIPLY) X(DIVIDE)   \
  X(FLOOR_DIVIDE) X(MODULO) X(CEIL_DIVIDE) X(LEAST) X(GREATEST) X(NEGATE) X(ABSOLUTE) X(NOT) X(TRUTH) X(EQUAL)      \
  X(UNEQUAL) X(LESS) X(AT_MOST) X(AMONG) X(IN_DTYPES) X(ON_DEVICE) X(LENGTH) X(AT) X(TUPLE) X(BROADCASTS) X(WHOLE)           \
  X(WHOLE_RATIO) X(NO_FACTOR) X(NO_SIZE)

enum Op : int32_t {
#define X(name) name,
  OPERATIONS(X)
#undef X
      kOperations
};

// What the operands of an operation are: a value that is read, one that is written, a tensor that is read or loaded,
// an instruction further on, a constant, a name, a number of any kind, nothing.
const char* operands_of(int32_t op) {
  switch (op) {
    case YES: case NO: case CANNOT: case ABSENT: return "...";
    case JUMP: case ON_ABSENT: return "t..";
    case UNLESS: return "vnt";
    case WHERE_FALSE: case WHERE_TRUE: case WHERE_SET: return "vt.";
    case COPY: case PLAIN: case COMPARED: case IS_NONE: case PRESENT: case NEGATE: case ABSOLUTE: case NOT:
    case TRUTH: case LENGTH: case WHOLE: case SIGHT_DTYPE: return "dv.";
    case READ: return "dvk";
    case ITEM: case ON_DEVICE: case IN_DTYPES: return "dvc";
    case AMONG: return "dvm";
    case NEED: case NO_FACTOR: case NO_SIZE: return "v..";
    case TENSOR: return "Xvt";
    case HELD: return "Xv.";
    case MATCH: return "Xvf";
    case RANK: case RANK_AT_LEAST: return "xnt";
    case DTYPE_IN: case DEVICE_IN: return "xct";
    case SIZE: case SIZES: case SIZE_IS: return "dxn";
    case DEVICE_IS: case NDIM: case NUMEL: case DTYPE: case DEVICE: case DENSE: return "dx.";
    case STRIDE: return "dxv";
    case LIKE: return "xxt";
    case SIGHT: return "dvt";
    case IS_KIND: return "vnt";
    case IS_LITERAL: return "vct";
    case TUPLE: return "dvn";
    default: return "dvv";
  }
}

enum Tag : int32_t { kAbsent, kInt, kFloat, kBool, kNone, kText, kSizes, kDtype, kDevice, kObject };

// A value; `object` is borrowed from the arguments or kept by the frame, `sizes` lie in the frame.
struct Value {
  Tag tag;
  int32_t count;  // of kSizes
  union {
    int64_t number;
    double real;
    const int64_t* sizes;
    PyObject* object;
  };
};

constexpr int kMostValues = 192;
constexpr int kMostTensors = 24;
constexpr int kMostInstructions = 4096;
constexpr int kMostDims = 8;
constexpr int kArena = 128;
constexpr int kMostKept = 32;
constexpr uint32_t kMostSkipped = 1024;

struct Tensor {
  PyObject* of;
  int32_t ndim;
  int32_t dtype;
  DLDevice device;
  int64_t shape[kMostDims];
  int64_t strides[kMostDims];
};

struct Instruction {
  int32_t op, a, b, c;
};

// Where an attribute of objects of one class is read.
struct Reader {
  PyTypeObject* type;  // owned
  bool plainly;
};

// What `MATCH` asks of a tensor; -1 stands for what it does not ask.
struct Form {
  int64_t dtypes;
  int32_t ndim, open, device, count;
  int32_t dims[kMostDims];
};

// The numbers of a tuple among the constants, and the form that they are, if they can be one.
struct Numbers {
  int64_t* numbers;  // owned; null for a constant that is no tuple
  int32_t count;
  Form form;
};

struct Program {
  PyObject_HEAD
  Instruction* instructions;
  Reader* readers;  // one for each instruction
  int32_t length, arguments, values, tensors;
  PyObject* constants;  // a tuple, as are names
  PyObject* names;
  Value* made;       // the constants, as values
  Numbers* numbers;  // the constants, as tuples
  int32_t constant_count;
  bool with_strides;  // some operation asks for them
  uint32_t skip, streak;  // calls to leave alone, and how many in a row could not be told
};

// What `connect` was given: the class of tensors and that of parameters, how they are read, and the Python functions
// for what only Python can say.
struct Connection {
  PyTypeObject* tensor = nullptr;
  PyTypeObject* parameter = nullptr;
  DLPackDLTensorFromPyObjectNoSync read = nullptr;
  PyObject* attribute = nullptr;       // (owner, name) -> value or unset
  PyObject* unset = nullptr;
  PyObject* reads_plainly = nullptr;   // (class) -> bool
} connection;

PyObject* tables[3];  // "_parameters", "_buffers", "_modules"
PyObject* size_class;  // torch.Size

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

bool has(int64_t set, int64_t member) { return member >= 0 && member < 63 && ((set >> member) & 1) != 0; }

// Those whose name in PyTorch is known: cpu, cuda (of NVIDIA and AMD), mps, xpu.
constexpr int64_t kDevices = 1 << kDLCPU | 1 << kDLCUDA | 1 << kDLROCM | 1 << kDLMetal | 1 << kDLOneAPI;

struct Frame {
  Value values[kMostValues];
  Tensor tensors[kMostTensors];
  int64_t arena[kArena];
  PyObject* kept[kMostKept];
  int arena_used = 0, kept_count = 0;

  ~Frame() {
    for (int i = 0; i < kept_count; i++) Py_DECREF(kept[i]);
  }
};

enum Loaded { kTensor, kNoTensor, kUnknown, kRefused };

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

Value absent() { return {kAbsent, 0, {0}}; }
Value number(int64_t n) { return {kInt, 0, {n}}; }
Value truth(bool b) { return {kBool, 0, {b}}; }
Value object(PyObject* o) {
  Value value{kObject, 0, {0}};
  value.object = o;
  return value;
}
Value sizes(const int64_t* first, int32_t count) {
  Value value{kSizes, count, {0}};
  value.sizes = first;
  return value;
}

bool is_nothing(const Value& value) {
  return value.tag == kAbsent || value.tag == kNone || (value.tag == kObject && value.object == Py_None);
}

bool is_whole(const Value& value) { return value.tag == kInt || value.tag == kBool; }

// The integer of an exact Python int; kCannot where it takes more than 64 bits.
Answer integer_of(PyObject* from, int64_t& into) {
  int overflow = 0;
  long long n = PyLong_AsLongLongAndOverflow(from, &overflow);
  if (overflow != 0 || (n == -1 && PyErr_Occurred())) {
    PyErr_Clear();
    return kCannot;
  }
  into = n;
  return kGoOn;
}

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
  } else if (PyTuple_CheckExact(o) || (size_class != nullptr && reinterpret_cast<PyObject*>(type) == size_class)) {
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

enum Equality { kUnequal = 0, kEqual = 1, kUnclear = 2 };

Equality equal(const Value& a, const Value& b) {
  if (is_whole(a) && is_whole(b)) return a.number == b.number ? kEqual : kUnequal;
  if ((a.tag == kFloat || is_whole(a)) && (b.tag == kFloat || is_whole(b))) {
    constexpr int64_t exact = int64_t{1} << 53;
    for (const Value* v : {&a, &b}) {
      if (v->tag != kFloat && (v->number > exact || v->number < -exact)) return kUnclear;
    }
    double x = a.tag == kFloat ? a.real : static_cast<double>(a.number);
    double y = b.tag == kFloat ? b.real : static_cast<double>(b.number);
    return x == y ? kEqual : kUnequal;
  }
  if (a.tag == kObject || b.tag == kObject) return kUnclear;
  if (a.tag != b.tag) return kUnequal;
  switch (a.tag) {
    case kNone: return kEqual;
    case kText: {
      int order = PyUnicode_Compare(a.object, b.object);
      if (order == -1 && PyErr_Occurred()) {
        PyErr_Clear();
        return kUnclear;
      }
      return order == 0 ? kEqual : kUnequal;
    }
    case kSizes:
      if (a.count != b.count) return kUnequal;
      for (int32_t i = 0; i < a.count; i++) {
        if (a.sizes[i] != b.sizes[i]) return kUnequal;
      }
      return kEqual;
    default: return a.number == b.number ? kEqual : kUnequal;
  }
}

// Whether a value counts as true; kCannot where only Python can say.
Answer truth_of(const Value& value) {
  switch (value.tag) {
    case kInt: case kBool: return value.number != 0 ? kYes : kNo;
    case kFloat: return value.real != 0 ? kYes : kNo;
    case kNone: return kNo;
    case kSizes: return value.count != 0 ? kYes : kNo;
    default: return kCannot;
  }
}

// Whole numbers: no is a broken rule, as 129 / 2 is; kCannot is a number that does not fit.
Answer arithmetic(int32_t op, int64_t a, int64_t b, int64_t& into) {
  bool overflow = false;
  switch (op) {
    case ADD: overflow = __builtin_add_overflow(a, b, &into); break;
    case SUBTRACT: overflow = __builtin_sub_overflow(a, b, &into); break;
    case MULTIPLY: overflow = __builtin_mul_overflow(a, b, &into); break;
    case LEAST: into = b < a ? b : a; break;
    case GREATEST: into = b > a ? b : a; break;
    default: {
      if (b == 0) return kNo;
      if (a == INT64_MIN && b == -1) return kCannot;
      int64_t quotient = a / b, rest = a % b;
      bool down = rest != 0 && (rest < 0) != (b < 0);
      switch (op) {
        case DIVIDE:
          if (rest != 0) return kNo;
          into = quotient;
          break;
        case FLOOR_DIVIDE: into = quotient - down; break;
        case MODULO: into = rest + (down ? b : 0); break;
        default: into = quotient + (rest != 0 && !down); break;  // CEIL_DIVIDE
      }
    }
  }
  return overflow ? kCannot : kGoOn;
}

int64_t device_number(DLDevice device) {
  // A CPU has no index.
  int64_t index = device.device_type == kDLCPU ? 0 : device.device_id;
  return (static_cast<int64_t>(device.device_type) << 32) | static_cast<uint32_t>(index);
}

Answer length_of(const Value& value, int64_t& into) {
  Py_ssize_t length = 0;
  if (value.tag == kSizes) {
    length = value.count;
  } else if (value.tag == kText) {
    length = PyUnicode_GetLength(value.object);
  } else if (value.tag != kObject) {
    return kCannot;
  } else if (PyDict_CheckExact(value.object)) {
    length = PyDict_Size(value.object);
  } else if (PyList_CheckExact(value.object)) {
    length = PyList_Size(value.object);
  } else if (PyTuple_CheckExact(value.object)) {
    length = PyTuple_Size(value.object);
  } else if (PyUnicode_CheckExact(value.object)) {
    length = PyUnicode_GetLength(value.object);
  } else {
    return kCannot;
  }
  into = length;
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

// The value of a symbol is the size of a dimension (or the device): bound where it is not yet, compared where it is.
Answer sighted(Value& symbol, Tag tag, int64_t seen) {
  if (symbol.tag == tag) return symbol.number == seen ? kGoOn : kNo;
  if (symbol.tag != kAbsent) return kCannot;
  symbol = {tag, 0, {seen}};
  return kGoOn;
}

Answer match(const Tensor& tensor, const Form& form, Value* values) {
  if (form.open < 0 ? tensor.ndim != form.ndim : tensor.ndim < form.ndim) return kNo;
  if (form.dtypes != -1 && !has(form.dtypes, tensor.dtype)) return kNo;
  for (int32_t i = 0; i < form.count; i++) {
    if (form.dims[i] < 0) continue;
    int32_t axis = form.open >= 0 && i > form.open ? tensor.ndim - form.count + i : i;
    Answer said = sighted(values[form.dims[i]], kInt, tensor.shape[axis]);
    if (said != kGoOn) return said;
  }
  return form.device < 0 ? kGoOn : sighted(values[form.device], kDevice, device_number(tensor.device));
}

// Inside the switch of `run`: a rule has nothing to say of what is not there.
// Forward only, as all jumps: a handler that lies behind is none.
#define GO_ABSENT                      \
  {                                    \
    if (on_absent < at) return kCannot; \
    at = on_absent;                    \
  }
#define OPERAND(value)          \
  if ((value).tag == kAbsent) { \
    GO_ABSENT                   \
    break;                      \
  }
#define STEP(answer)                            \
  do {                                          \
    Answer said_ = (answer);                    \
    if (said_ != kGoOn) return said_;           \
  } while (0)

// Run a program whose arguments have been put in the frame. `refused` says that a tensor could not be read, at a price.
Answer run(const Program& program, Frame& frame, bool& refused) {
  Value* v = frame.values;
  Tensor* x = frame.tensors;
  int32_t at = 0, on_absent = program.length - 1;
  while (true) {
    const Instruction& ins = program.instructions[at];
    const int32_t here = at++;
    const int32_t a = ins.a, b = ins.b, c = ins.c;
    switch (ins.op) {
      case YES: return kYes;
      case NO: return kNo;
      case CANNOT: return kCannot;
      case JUMP: at = a; break;
      case UNLESS: if (!is_whole(v[a]) || v[a].number != b) at = c; break;
      case WHERE_FALSE: case WHERE_TRUE: {
        Answer said = truth_of(v[a]);
        if (said == kCannot) return kCannot;
        if ((said == kYes) == (ins.op == WHERE_TRUE)) at = b;
        break;
      }
      case WHERE_SET: if (v[a].tag != kAbsent) at = b; break;
      case ON_ABSENT: on_absent = a; break;
      case ABSENT: GO_ABSENT break;
      case COPY: v[a] = v[b]; break;
      case PLAIN: case COMPARED: {
        Value seen;
        STEP(plain(frame, v[b], seen));
        OPERAND(seen)
        if (ins.op == COMPARED && seen.tag == kNone) {
          GO_ABSENT
          break;
        }
        v[a] = seen;
        break;
      }
      case READ: STEP(read(frame, program.readers[here], v[b], PyTuple_GetItem(program.names, c), v[a])); break;
      case ITEM: {
        Value found;
        STEP(item(v[b], PyTuple_GetItem(program.constants, c), found));
        if (found.tag == kObject) {
          Py_INCREF(found.object);
          if (keep(frame, found.object) == nullptr) return kCannot;
        }
        v[a] = found;
        break;
      }
      case NEED: OPERAND(v[a]) break;
      case TENSOR: case HELD:
        switch (load(x[a], v[b], program.with_strides)) {
          case kTensor: break;
          case kNoTensor:
            if (ins.op == HELD && !is_nothing(v[b])) return kCannot;
            if (ins.op == TENSOR) {
              at = c;
            } else {
              GO_ABSENT
            }
            break;
          case kRefused: refused = true; return kCannot;
          case kUnknown: return kCannot;
        }
        break;
      case MATCH:
        switch (load(x[a], v[b], program.with_strides)) {
          case kTensor: break;
          case kNoTensor: return kNo;
          case kRefused: refused = true; return kCannot;
          case kUnknown: return kCannot;
        }
        STEP(match(x[a], program.numbers[c].form, v));
        break;
      case RANK: if (x[a].ndim != b) at = c; break;
      case RANK_AT_LEAST: if (x[a].ndim < b) at = c; break;
      case DTYPE_IN: if (!has(program.made[b].number, x[a].dtype)) at = c; break;
      case DEVICE_IN: if (!has(program.made[b].number, x[a].device.device_type)) at = c; break;
      case SIZE: {
        int32_t axis = c < 0 ? c + x[b].ndim : c;
        if (axis < 0 || axis >= x[b].ndim) {
          GO_ABSENT
        } else {
          v[a] = number(x[b].shape[axis]);
        }
        break;
      }
      case SIZES: {
        int32_t first = c & 0xff, count = x[b].ndim - first - ((c >> 8) & 0xff);
        if (count < 0) return kCannot;
        v[a] = sizes(x[b].shape + first, count);
        break;
      }
      case NDIM: v[a] = number(x[b].ndim); break;
      case NUMEL: {
        int64_t count = 1;
        for (int32_t i = 0; i < x[b].ndim; i++) STEP(arithmetic(MULTIPLY, count, x[b].shape[i], count));
        v[a] = number(count);
        break;
      }
      case DTYPE: v[a] = {kDtype, 0, {x[b].dtype}}; break;
      case DEVICE: v[a] = {kDevice, 0, {device_number(x[b].device)}}; break;
      case DENSE: {
        int32_t last = x[b].ndim - 1;
        v[a] = truth(last < 0 || x[b].shape[last] <= 1 || x[b].strides[last] == 1);
        break;
      }
      case STRIDE: {
        OPERAND(v[c])
        if (!is_whole(v[c])) return kCannot;
        int64_t axis = v[c].number < 0 ? v[c].number + x[b].ndim : v[c].number;
        if (axis < 0 || axis >= x[b].ndim) {
          GO_ABSENT
        } else {
          v[a] = number(x[b].strides[axis]);
        }
        break;
      }
      case LIKE: {
        const Tensor &one = x[a], &other = x[b];
        if (one.dtype != other.dtype) return kCannot;  // autocast may make them one
        if (device_number(one.device) != device_number(other.device) ||
            equal(sizes(one.shape, one.ndim), sizes(other.shape, other.ndim)) != kEqual) {
          at = c;
        }
        break;
      }
      case SIZE_IS: {
        int32_t axis = c < 0 ? c + x[b].ndim : c;
        if (axis < 0 || axis >= x[b].ndim) return kCannot;
        STEP(sighted(v[a], kInt, x[b].shape[axis]));
        break;
      }
      case DEVICE_IS: STEP(sighted(v[a], kDevice, device_number(x[b].device))); break;
      case SIGHT: case SIGHT_DTYPE:
        if (v[a].tag == kAbsent) {
          v[a] = v[b];
        } else if (equal(v[a], v[b]) != kEqual) {
          if (ins.op == SIGHT_DTYPE) return kCannot;  // autocast may make them one
          at = c;
        }
        break;
      case IS_KIND: {
        OPERAND(v[a])
        if (v[a].tag != kObject) return kCannot;
        Answer said = is_kind(v[a].object, b);
        if (said == kCannot) return kCannot;
        if (said == kNo) at = c;
        break;
      }
      case IS_LITERAL: {
        OPERAND(v[a])
        if (v[a].tag != kObject) return kCannot;
        Value seen, wanted = program.made[b];
        // What is of no class that is known here is of no literal's class either.
        if (plain(frame, v[a], seen) != kGoOn || seen.tag != wanted.tag || equal(seen, wanted) != kEqual) at = c;
        break;
      }
      case IS_NONE:
        OPERAND(v[b])
        v[a] = truth(is_nothing(v[b]));
        break;
      case PRESENT:
        v[a] = truth(!is_nothing(v[b]));
        break;
      case ADD: case SUBTRACT: case MULTIPLY: case DIVIDE: case FLOOR_DIVIDE: case MODULO: case CEIL_DIVIDE:
      case LEAST: case GREATEST: {
        OPERAND(v[b])
        OPERAND(v[c])
        if (!is_whole(v[b]) || !is_whole(v[c])) return kCannot;
        int64_t n = 0;
        STEP(arithmetic(ins.op, v[b].number, v[c].number, n));
        v[a] = number(n);
        break;
      }
      case NEGATE: case ABSOLUTE: {
        OPERAND(v[b])
        if (!is_whole(v[b])) return kCannot;
        int64_t n = v[b].number;
        if (ins.op == NEGATE || n < 0) STEP(arithmetic(SUBTRACT, 0, n, n));
        v[a] = number(n);
        break;
      }
      case NOT: case TRUTH: {
        OPERAND(v[b])
        Answer said = truth_of(v[b]);
        if (said == kCannot) return kCannot;
        v[a] = truth((said == kYes) == (ins.op == TRUTH));
        break;
      }
      case EQUAL: case UNEQUAL: {
        OPERAND(v[b])
        OPERAND(v[c])
        Equality said = v[b].tag == kInt && v[c].tag == kInt ? static_cast<Equality>(v[b].number == v[c].number)
                                                             : equal(v[b], v[c]);
        if (said == kUnclear) return kCannot;
        v[a] = truth((said == kEqual) == (ins.op == EQUAL));
        break;
      }
      case LESS: case AT_MOST: {
        OPERAND(v[b])
        OPERAND(v[c])
        if (is_whole(v[b]) && is_whole(v[c])) {
          v[a] = truth(ins.op == LESS ? v[b].number < v[c].number : v[b].number <= v[c].number);
          break;
        }
        if (equal(v[b], v[c]) == kUnclear) return kCannot;
        if ((v[b].tag != kFloat && !is_whole(v[b])) || (v[c].tag != kFloat && !is_whole(v[c]))) return kCannot;
        double one = v[b].tag == kFloat ? v[b].real : static_cast<double>(v[b].number);
        double other = v[c].tag == kFloat ? v[c].real : static_cast<double>(v[c].number);
        v[a] = truth(ins.op == LESS ? one < other : one <= other);
        break;
      }
      case AMONG: {
        OPERAND(v[b])
        if (!is_whole(v[b])) {
          if (v[b].tag == kFloat || v[b].tag == kObject) return kCannot;
          v[a] = truth(false);
          break;
        }
        const Numbers& among = program.numbers[c];
        bool found = false;
        for (int32_t i = 0; i < among.count && !found; i++) found = among.numbers[i] == v[b].number;
        v[a] = truth(found);
        break;
      }
      case IN_DTYPES:
        OPERAND(v[b])
        if (v[b].tag != kDtype) return kCannot;
        v[a] = truth(has(program.made[c].number, v[b].number));
        break;
      case ON_DEVICE:
        OPERAND(v[b])
        if (v[b].tag != kDevice) return kCannot;
        v[a] = truth(has(program.made[c].number, v[b].number >> 32));
        break;
      case LENGTH: {
        OPERAND(v[b])
        int64_t n = 0;
        STEP(length_of(v[b], n));
        v[a] = number(n);
        break;
      }
      case AT: {
        OPERAND(v[b])
        OPERAND(v[c])
        if (v[b].tag != kSizes || !is_whole(v[c])) return kCannot;
        int64_t index = v[c].number < 0 ? v[c].number + v[b].count : v[c].number;
        if (index < 0 || index >= v[b].count) {
          GO_ABSENT
        } else {
          v[a] = number(v[b].sizes[index]);
        }
        break;
      }
      case TUPLE: {
        if (c > kMostDims || frame.arena_used + c > kArena) return kCannot;
        int64_t* first = frame.arena + frame.arena_used;
        for (int32_t i = 0; i < c; i++) {
          if (v[b + i].tag != kInt) return kCannot;
          first[i] = v[b + i].number;
        }
        frame.arena_used += c;
        v[a] = sizes(first, c);
        break;
      }
      case BROADCASTS: {
        OPERAND(v[b])
        OPERAND(v[c])
        const Value &shape = v[b], &target = v[c];
        if (shape.tag != kSizes || target.tag != kSizes) return kCannot;
        bool fits = shape.count <= target.count;
        for (int32_t i = 1; fits && i <= shape.count; i++) {
          int64_t size = shape.sizes[shape.count - i];
          fits = size == 1 || size == target.sizes[target.count - i];
        }
        v[a] = truth(fits);
        break;
      }
      case WHOLE:
        OPERAND(v[b])
        if (v[b].tag != kInt) return kCannot;
        v[a] = v[b];
        break;
      case WHOLE_RATIO: {
        OPERAND(v[b])
        OPERAND(v[c])
        if (v[b].tag != kInt || v[c].tag != kInt) return kCannot;
        if (v[b].number == 0 && v[c].number == 0) {
          GO_ABSENT
          break;
        }
        int64_t n = 0;
        STEP(arithmetic(DIVIDE, v[b].number, v[c].number, n));
        v[a] = number(n);
        break;
      }
      case NO_FACTOR:
        OPERAND(v[a])
        if (v[a].tag != kInt) return kCannot;
        if (v[a].number == 0) return kNo;
        break;
      case NO_SIZE:
        OPERAND(v[a])
        if (v[a].tag != kInt) return kCannot;
        if (v[a].number < 0) return kNo;
        break;
      default: return kCannot;
    }
  }
}

#undef GO_ABSENT
#undef OPERAND
#undef STEP

Answer judged(Program& program, PyObject* const* arguments, bool& refused) {
  Frame frame;
  for (int32_t i = 0; i < program.arguments; i++) frame.values[i] = object(arguments[i]);
  const int32_t constants = program.values - program.constant_count;
  for (int32_t i = program.arguments; i < constants; i++) frame.values[i].tag = kAbsent;
  for (int32_t i = constants; i < program.values; i++) frame.values[i] = program.made[i - constants];
  for (int32_t i = 0; i < program.tensors; i++) frame.tensors[i].of = nullptr;
  return run(program, frame, refused);
}

// ---------------------------------------------------------------- the class

PyTypeObject* program_class;

PyObject* problem(const char* text) {
  PyErr_SetString(PyExc_ValueError, text);
  return nullptr;
}

// What is wrong with one operand; null when nothing is.
const char* misfit(const Program& program, const Value* made, Py_ssize_t constants, Py_ssize_t names, int32_t at,
                   const Instruction& ins, char kind, int32_t operand) {
  switch (kind) {
    case 'v': case 'd':
      if (operand < 0 || operand >= program.values) return "an operand is no value";
      return kind == 'd' && operand < program.arguments ? "an argument is written to" : nullptr;
    case 'x': case 'X': return operand < 0 || operand >= program.tensors ? "an operand is no tensor" : nullptr;
    case 't': return operand <= at || operand >= program.length ? "a jump leads nowhere, or back" : nullptr;
    case 'f': case 'm':
      if (operand < 0 || operand >= constants || program.numbers[operand].numbers == nullptr) {
        return "an operand is no tuple of numbers";
      }
      return kind == 'f' && program.numbers[operand].form.count < 0 ? "an operand is no form" : nullptr;
    case 'k': return operand < 0 || operand >= names ? "an operand is no name" : nullptr;
    case 'c':
      if (operand < 0 || operand >= constants) return "an operand is no constant";
      if (ins.op == ITEM) return nullptr;
      if (made[operand].tag == kObject) return "a constant is of no kind that is known";
      if ((ins.op == DTYPE_IN || ins.op == DEVICE_IN || ins.op == IN_DTYPES || ins.op == ON_DEVICE) &&
          made[operand].tag != kInt) {
        return "a set is no number";
      }
      return nullptr;
    default: return nullptr;
  }
}

// Whether every tensor is loaded before it is read, on every way through the program: jumps go forward only.
bool loads_first(const Program& program) {
  bool sound = true;
  uint32_t* loaded = new uint32_t[program.length];
  for (int32_t i = 0; i < program.length; i++) loaded[i] = UINT32_MAX;
  loaded[0] = 0;
  for (int32_t i = 0; i < program.length && sound; i++) {
    const Instruction& ins = program.instructions[i];
    const char* kinds = operands_of(ins.op);
    const int32_t operands[] = {ins.a, ins.b, ins.c};
    uint32_t known = loaded[i], after = known;
    for (int k = 0; k < 3; k++) {
      if (kinds[k] == 'x' && ((known >> operands[k]) & 1) == 0) sound = false;
      if (kinds[k] == 'X') after |= uint32_t{1} << operands[k];
    }
    for (int k = 0; k < 3; k++) {
      // A jump from TENSOR has not loaded; absence is met after ON_ABSENT, which knows what was loaded by then.
      if (kinds[k] == 't') loaded[operands[k]] &= known;
    }
    if (i + 1 < program.length && ins.op != JUMP && ins.op != YES && ins.op != NO && ins.op != CANNOT &&
        ins.op != ABSENT) {
      loaded[i + 1] &= after;
    }
  }
  delete[] loaded;
  return sound;
}

Value constant(PyObject* from) {
  Frame unused;
  Value value;
  if (PyTuple_CheckExact(from) || plain(unused, object(from), value) != kGoOn) return object(from);
  return value;
}

// The numbers of a tuple, and the form that they are.
void read_numbers(PyObject* from, int32_t values, int32_t arguments, Numbers& into) {
  into = {nullptr, 0, {}};
  into.form.count = -1;
  if (!PyTuple_CheckExact(from)) return;
  Py_ssize_t count = PyTuple_Size(from);
  if (count > 1024) return;
  int64_t* numbers = new int64_t[count + 1];
  for (Py_ssize_t i = 0; i < count; i++) {
    PyObject* item = PyTuple_GetItem(from, i);
    if (!PyLong_CheckExact(item) || integer_of(item, numbers[i]) != kGoOn) {
      delete[] numbers;
      return;
    }
  }
  into.numbers = numbers;
  into.count = static_cast<int32_t>(count);
  if (count < 4 || count - 4 > kMostDims || numbers[0] < 0 || numbers[0] > kMostDims) return;
  Form& form = into.form;
  int32_t dims = static_cast<int32_t>(count - 4);
  // What is written to is no argument.
  for (Py_ssize_t i = 3; i < count; i++) {
    if (numbers[i] != -1 && (numbers[i] < arguments || numbers[i] >= values)) return;
  }
  if (numbers[1] < -1 || numbers[1] >= dims || numbers[0] != dims - (numbers[1] >= 0 ? 1 : 0)) return;
  form.ndim = static_cast<int32_t>(numbers[0]);
  form.open = static_cast<int32_t>(numbers[1]);
  form.dtypes = numbers[2];
  form.device = static_cast<int32_t>(numbers[3]);
  for (int32_t i = 0; i < dims; i++) form.dims[i] = i == form.open ? -1 : static_cast<int32_t>(numbers[4 + i]);
  form.count = dims;
}

// Program(instructions, constants, names, arguments, values, tensors): raises ValueError for a program that leads out
// of itself.
PyObject* program_new(PyTypeObject* type, PyObject* args, PyObject*) {
  Py_buffer code;
  PyObject *constants, *names;
  int arguments, values, tensors;
  if (!PyArg_ParseTuple(args, "y*O!O!iii", &code, &PyTuple_Type, &constants, &PyTuple_Type, &names, &arguments,
                        &values, &tensors)) {
    return nullptr;
  }
  struct Released {
    Py_buffer* buffer;
    ~Released() { PyBuffer_Release(buffer); }
  } released{&code};
  Py_ssize_t length = code.len / static_cast<Py_ssize_t>(sizeof(Instruction));
  if (length < 1 || length > kMostInstructions || code.len % static_cast<Py_ssize_t>(sizeof(Instruction)) != 0) {
    return problem("not a whole number of instructions, none, or too many");
  }
  if (arguments < 0 || values < arguments + PyTuple_Size(constants) || values > kMostValues || tensors < 0 || tensors > kMostTensors) {
    return problem("too many values or tensors");
  }
  PyObject* self = PyType_GenericAlloc(type, 0);
  if (self == nullptr) return nullptr;
  Program& program = *reinterpret_cast<Program*>(self);
  struct Owned {
    PyObject* self;
    ~Owned() { Py_XDECREF(self); }
  } owned{self};
  Py_INCREF(constants);
  Py_INCREF(names);
  program.constants = constants;
  program.names = names;
  program.length = static_cast<int32_t>(length);
  program.arguments = arguments;
  program.values = values;
  program.tensors = tensors;
  Py_ssize_t constant_count = PyTuple_Size(constants), name_count = PyTuple_Size(names);
  program.constant_count = static_cast<int32_t>(constant_count);
  program.instructions = new Instruction[length];
  program.readers = new Reader[length]();
  program.made = new Value[constant_count + 1];
  program.numbers = new Numbers[constant_count + 1];
  std::memcpy(program.instructions, code.buf, static_cast<size_t>(code.len));
  for (Py_ssize_t i = 0; i < constant_count; i++) {
    program.made[i] = constant(PyTuple_GetItem(constants, i));
    read_numbers(PyTuple_GetItem(constants, i), values, arguments, program.numbers[i]);
  }
  for (Py_ssize_t i = 0; i < name_count; i++) {
    if (!PyUnicode_CheckExact(PyTuple_GetItem(names, i))) return problem("a name is no text");
  }
  for (int32_t i = 0; i < program.length; i++) {
    const Instruction& ins = program.instructions[i];
    if (ins.op < 0 || ins.op >= kOperations) return problem("no such operation");
    const char* kinds = operands_of(ins.op);
    const int32_t operands[] = {ins.a, ins.b, ins.c};
    for (int k = 0; k < 3; k++) {
      const char* wrong = misfit(program, program.made, constant_count, name_count, i, ins, kinds[k], operands[k]);
      if (wrong != nullptr) return problem(wrong);
    }
    program.with_strides |= ins.op == DENSE || ins.op == STRIDE;
    if (ins.op == TUPLE && (ins.c < 0 || ins.c > kMostDims || ins.b + ins.c > values)) {
      return problem("an operand is no value");
    }
    if (ins.op == SIZES && (ins.c < 0 || ins.c > 0xffff)) return problem("no such sizes");
    if (ins.op == ITEM) {
      PyObject* key = PyTuple_GetItem(constants, ins.c);
      if (!PyUnicode_CheckExact(key) && !PyLong_CheckExact(key)) return problem("a key is neither text nor number");
    }
  }
  int32_t last = program.instructions[length - 1].op;
  if (last != YES && last != NO && last != CANNOT) return problem("the end is open");
  if (!loads_first(program)) return problem("a tensor is read before it is loaded");
  owned.self = nullptr;
  return self;
}

int program_traverse(PyObject* self, visitproc visit, void* arg) {
  Program& program = *reinterpret_cast<Program*>(self);
  Py_VISIT(reinterpret_cast<PyObject*>(Py_TYPE(self)));
  Py_VISIT(program.constants);
  Py_VISIT(program.names);
  for (int32_t i = 0; program.readers != nullptr && i < program.length; i++) {
    Py_VISIT(reinterpret_cast<PyObject*>(program.readers[i].type));
  }
  return 0;
}

void program_dealloc(PyObject* self) {
  PyObject_GC_UnTrack(self);
  Program& program = *reinterpret_cast<Program*>(self);
  for (int32_t i = 0; program.readers != nullptr && i < program.length; i++) {
    Py_XDECREF(reinterpret_cast<PyObject*>(program.readers[i].type));
  }
  delete[] program.instructions;
  delete[] program.readers;
  delete[] program.made;
  for (int32_t i = 0; program.numbers != nullptr && i < program.constant_count; i++) delete[] program.numbers[i].numbers;
  delete[] program.numbers;
  Py_XDECREF(program.constants);
  Py_XDECREF(program.names);
  PyTypeObject* type = Py_TYPE(self);
  auto free = reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free));
  free(self);
  Py_DECREF(type);
}

// ---------------------------------------------------------------- the module

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
  if (said == kCannot) {
    // What can't be told here will hardly be told the next time, and a tensor that can't be read costs a millisecond.
    if (program->streak < 10) program->streak++;
    if (refused || program->streak >= 4) program->skip = uint32_t{1} << program->streak;
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
    return problem("the table is of another version of DLPack, or lacks what is needed");
  }
  for (PyObject* kept : {tensor, parameter, size, attribute, unset, plainly}) Py_INCREF(kept);
  connection.tensor = reinterpret_cast<PyTypeObject*>(tensor);
  connection.parameter = reinterpret_cast<PyTypeObject*>(parameter);
  connection.read = table->dltensor_from_py_object_no_sync;
  connection.attribute = attribute;
  connection.unset = unset;
  connection.reads_plainly = plainly;
  size_class = size;
  Py_RETURN_NONE;
}

PyMethodDef functions[] = {
    {"accepts", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(accepts)), METH_FASTCALL,
     "accepts(program, *arguments): True for yes, False for no and for what cannot be told."},
    {"judge", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(judge)), METH_FASTCALL,
     "judge(program, *arguments): True for yes, False for no, None where it cannot be told."},
    {"connect", connect, METH_VARARGS, "connect(tensor, parameter, size, table, attribute, unset, reads_plainly)"},
    {nullptr, nullptr, 0, nullptr},
};

PyType_Slot program_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(program_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(program_dealloc)},
    {Py_tp_traverse, reinterpret_cast<void*>(program_traverse)},
    {0, nullptr},
};
PyType_Spec program_spec = {"llm_op_guard.native._check.Program", sizeof(Program), 0,
                            Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE, program_slots};
PyModuleDef module = {PyModuleDef_HEAD_INIT, "_check", "The fast path of checks.", -1, functions, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__check() {
  PyObject* made = PyModule_Create(&module);
  if (made == nullptr) return nullptr;
  const char* names[] = {"_parameters", "_buffers", "_modules"};
  for (int i = 0; i < 3; i++) {
    tables[i] = PyUnicode_InternFromString(names[i]);
    if (tables[i] == nullptr) return nullptr;
  }
  program_class = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&program_spec));
  if (program_class == nullptr || PyModule_AddType(made, program_class) < 0) return nullptr;
  PyObject* operations = PyTuple_New(kOperations);
  if (operations == nullptr) return nullptr;
#define X(name) PyTuple_SetItem(operations, name, PyUnicode_FromString(#name));
  OPERATIONS(X)
#undef X
  if (PyModule_AddObject(made, "OPERATIONS", operations) < 0) return nullptr;
  return made;
}
