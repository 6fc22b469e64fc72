#include "values.h"

#include <initializer_list>

#include "operations.h"

namespace llm_op_guard {

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

Answer truth_of(const Value& value) {
  switch (value.tag) {
    case kInt: case kBool: return value.number != 0 ? kYes : kNo;
    case kFloat: return value.real != 0 ? kYes : kNo;
    case kNone: return kNo;
    case kSizes: return value.count != 0 ? kYes : kNo;
    default: return kCannot;
  }
}

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

}  // namespace llm_op_guard
