// What is read of tensors and objects, without running any code of theirs.
#pragma once

#include "program.h"

namespace llm_op_guard {

// What `connect` was given: the class of tensors and that of parameters, how they are read, and the Python functions
// for what only Python can say.
struct Connection {
  PyTypeObject* tensor = nullptr;
  PyTypeObject* parameter = nullptr;
  PyTypeObject* size = nullptr;  // torch.Size
  DLPackDLTensorFromPyObjectNoSync read = nullptr;
  PyObject* attribute = nullptr;       // (owner, name) -> value or unset
  PyObject* unset = nullptr;
  PyObject* reads_plainly = nullptr;   // (class) -> bool
};

extern Connection connection;

enum Loaded { kTensor, kNoTensor, kUnknown, kRefused, kInterrupted };

Loaded load(Tensor& tensor, Reader& reader, const Value& value, bool with_strides);

int64_t device_number(DLDevice device);

// What stands in arithmetic and comparisons. Tensors do not: the rule has nothing to say of the call then.
Answer plain(Frame& frame, const Value& from, Value& into);

// An attribute as `reading.optional_attribute` reads it: from the dict of an instance, from the tables of nn.Module;
// that function is asked for anything else.
Answer read(Frame& frame, Reader& reader, const Value& owner, PyObject* name, Value& into);

// An item of a plain dict, list or tuple, kept by the frame.
Answer item(Frame& frame, const Value& owner, PyObject* key, Value& into);

// Whether a scalar is of a declared kind; kCannot for classes of which only Python knows.
Answer is_kind(PyObject* o, int32_t kind);

// False with an error set where the names that are looked up cannot be made.
bool make_names();

}  // namespace llm_op_guard
