// A program, and where it keeps things while it runs.
#pragma once

#include "dlpack.h"
#include "values.h"

namespace llm_op_guard {

constexpr int kMostValues = 384;
constexpr int kMostTensors = 64;  // the loader counts them in 64 bits
constexpr int kMostInstructions = 4096;
constexpr int kMostNumbers = 1024;
constexpr int kArena = 128;

struct Instruction {
  int32_t op, a, b, c;
};

// What an instruction has learnt of the class whose object it met last.
struct Reader {
  PyObject* type;  // a weak reference: a class may hold the guarded function, and with it this program
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

struct Tensor {
  PyObject* of;
  int32_t ndim;
  int32_t dtype;
  DLDevice device;
  uint64_t address;
  int64_t shape[kMostDims];
  int64_t strides[kMostDims];
};

struct Frame {
  Value values[kMostValues];
  Tensor tensors[kMostTensors];
  int64_t arena[kArena];
  PyObject* kept[kMostValues];  // what a plan reads goes each into a value of its own
  int arena_used = 0, kept_count = 0;

  ~Frame() {
    for (int i = 0; i < kept_count; i++) Py_DECREF(kept[i]);
  }
};

// What a program says of a call. `refused` says that a tensor could not be read, at a price.
Answer judged(Program& program, PyObject* const* arguments, bool& refused);

// The class of programs; null with an error set where it cannot be made.
PyTypeObject* make_program_class();

}  // namespace llm_op_guard
