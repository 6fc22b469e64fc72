// What a program works on: numbers, texts, sizes, and what of them is not there.
#pragma once

// Python's limited API of 3.11: one build serves all later versions.
#ifndef Py_LIMITED_API
#define Py_LIMITED_API 0x030b0000
#endif
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstdint>

namespace llm_op_guard {

// What a call comes to. An operation that comes to nothing goes on. Raised is what may not be kept from the caller, a
// KeyboardInterrupt for one: it is set as Python's error.
enum Answer { kNo = 0, kYes = 1, kCannot = 2, kGoOn = 3, kRaised = 4 };

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

constexpr int kMostDims = 8;

inline Value absent() { return {kAbsent, 0, {0}}; }
inline Value number(int64_t n) { return {kInt, 0, {n}}; }
inline Value truth(bool b) { return {kBool, 0, {b}}; }
inline Value object(PyObject* o) {
  Value value{kObject, 0, {0}};
  value.object = o;
  return value;
}

inline Value sizes(const int64_t* first, int32_t count) {
  Value value{kSizes, count, {0}};
  value.sizes = first;
  return value;
}

inline bool is_nothing(const Value& value) {
  return value.tag == kAbsent || value.tag == kNone || (value.tag == kObject && value.object == Py_None);
}

inline bool is_whole(const Value& value) { return value.tag == kInt || value.tag == kBool; }

inline bool has(int64_t set, int64_t member) { return member >= 0 && member < 63 && ((set >> member) & 1) != 0; }

// The integer of an exact Python int; kCannot where it takes more than 64 bits.
Answer integer_of(PyObject* from, int64_t& into);

enum Equality { kUnequal = 0, kEqual = 1, kUnclear = 2 };

Equality equal(const Value& a, const Value& b);

// Whether a value counts as true; kCannot where only Python can say.
Answer truth_of(const Value& value);

// Whole numbers: no is a broken rule, as 129 / 2 is; kCannot is a number that does not fit.
Answer arithmetic(int32_t op, int64_t a, int64_t b, int64_t& into);

Answer length_of(const Value& value, int64_t& into);

}  // namespace llm_op_guard
