#include "program.h"

#include <cstring>
#include <new>

#include "operations.h"
#include "reading.h"

namespace llm_op_guard {

namespace {

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
  uint64_t loaded[kMostInstructions];
  for (int32_t i = 0; i < program.length; i++) loaded[i] = UINT64_MAX;
  loaded[0] = 0;
  for (int32_t i = 0; i < program.length && sound; i++) {
    const Instruction& ins = program.instructions[i];
    const char* kinds = operands_of(ins.op);
    const int32_t operands[] = {ins.a, ins.b, ins.c};
    uint64_t known = loaded[i], after = known;
    for (int k = 0; k < 3; k++) {
      if (kinds[k] == 'x' && ((known >> operands[k]) & 1) == 0) sound = false;
      if (kinds[k] == 'X') after |= uint64_t{1} << operands[k];
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
  if (count > kMostNumbers) return;
  int64_t* numbers = new (std::nothrow) int64_t[count + 1];
  if (numbers == nullptr) return;  // whoever needs it is refused
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
  if (arguments < 0 || values < arguments + PyTuple_Size(constants) || values > kMostValues || tensors < 0 ||
      tensors > kMostTensors) {
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
  program.instructions = new (std::nothrow) Instruction[length];
  program.readers = new (std::nothrow) Reader[length]();
  program.made = new (std::nothrow) Value[constant_count + 1];
  program.numbers = new (std::nothrow) Numbers[constant_count + 1]();
  if (program.instructions == nullptr || program.readers == nullptr || program.made == nullptr ||
      program.numbers == nullptr) {
    return PyErr_NoMemory();
  }
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
    Py_VISIT(program.readers[i].type);
  }
  return 0;
}

void program_dealloc(PyObject* self) {
  PyObject_GC_UnTrack(self);
  Program& program = *reinterpret_cast<Program*>(self);
  for (int32_t i = 0; program.readers != nullptr && i < program.length; i++) {
    Py_XDECREF(program.readers[i].type);
  }
  delete[] program.instructions;
  delete[] program.readers;
  delete[] program.made;
  for (int32_t i = 0; program.numbers != nullptr && i < program.constant_count; i++) {
    delete[] program.numbers[i].numbers;
  }
  delete[] program.numbers;
  Py_XDECREF(program.constants);
  Py_XDECREF(program.names);
  PyTypeObject* type = Py_TYPE(self);
  auto free = reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free));
  free(self);
  Py_DECREF(type);
}

PyType_Slot program_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(program_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(program_dealloc)},
    {Py_tp_traverse, reinterpret_cast<void*>(program_traverse)},
    {0, nullptr},
};

PyType_Spec program_spec = {"llm_op_guard.native._check.Program", sizeof(Program), 0,
                            Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE, program_slots};

}  // namespace

PyTypeObject* make_program_class() {
  return reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&program_spec));
}

}  // namespace llm_op_guard
