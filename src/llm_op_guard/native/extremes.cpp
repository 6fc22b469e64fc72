#include "extremes.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "reading.h"

namespace llm_op_guard {

namespace {

// More takes longer than the calls that this spares.
constexpr int64_t kMostBytes = 16384;

struct Extremes {
  PyObject* low;
  PyObject* high;
};

// Of numbers that lie in memory as they are.
template <typename T>
Extremes of_integers(const void* data, int64_t count) {
  const T* numbers = static_cast<const T*>(data);
  T low = numbers[0], high = numbers[0];
  for (int64_t i = 1; i < count; i++) {
    low = numbers[i] < low ? numbers[i] : low;
    high = numbers[i] > high ? numbers[i] : high;
  }
  return {PyLong_FromLongLong(low), PyLong_FromLongLong(high)};
}

Extremes of_reals(double low, double high) { return {PyFloat_FromDouble(low), PyFloat_FromDouble(high)}; }

template <typename T>
Extremes of_floats(const void* data, int64_t count) {
  const T* numbers = static_cast<const T*>(data);
  T low = numbers[0], high = numbers[0];
  bool known = numbers[0] == numbers[0];
  for (int64_t i = 1; i < count; i++) {
    known &= numbers[i] == numbers[i];
    low = numbers[i] < low ? numbers[i] : low;
    high = numbers[i] > high ? numbers[i] : high;
  }
  return known ? of_reals(low, high) : of_reals(NAN, NAN);
}

inline int16_t placed(int16_t bits) {
  int16_t sign = static_cast<int16_t>(bits >> 15);
  return static_cast<int16_t>(bits ^ (sign & 0x7fff));
}

// Of 16 bits: with those of the magnitude turned round where the sign is set, they rise as the numbers do. What is no
// number lies beyond the infinities.
template <double (*value)(uint16_t)>
Extremes of_halves(const void* data, int64_t count, int16_t infinity) {
  const int16_t* bits = static_cast<const int16_t*>(data);
  int16_t low = INT16_MAX, high = INT16_MIN;
  for (int64_t i = 0; i < count; i++) {  // written so that compilers take several at a time
    int16_t place = placed(bits[i]);
    low = std::min(low, place);
    high = std::max(high, place);
  }
  if (high > infinity || low < placed(static_cast<int16_t>(infinity | 0x8000))) return of_reals(NAN, NAN);
  auto number = [](int16_t place) {
    double magnitude = value(static_cast<uint16_t>(placed(place) & 0x7fff));
    return place < 0 ? -magnitude : magnitude;
  };
  return of_reals(number(low), number(high));
}

double bfloat16(uint16_t bits) {
  uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float number;
  std::memcpy(&number, &wide, sizeof number);
  return number;
}

double float16(uint16_t bits) {
  int exponent = bits >> 10 & 31, fraction = bits & 1023;
  if (exponent == 31) return std::numeric_limits<double>::infinity();
  return exponent == 0 ? std::ldexp(fraction, -24) : std::ldexp(1024 + fraction, exponent - 25);
}

// Whether elements lie side by side in row order.
bool is_dense(const DLTensor& tensor) {
  int64_t stride = 1;
  for (int32_t i = tensor.ndim - 1; i >= 0; i--) {
    if (tensor.shape[i] != 1 && tensor.strides[i] != stride) return false;
    stride *= tensor.shape[i];
  }
  return true;
}

}  // namespace

PyObject* extremes(PyObject*, PyObject* tensor) {
  PyTypeObject* type = Py_TYPE(tensor);
  if (connection.tensor == nullptr || (type != connection.tensor && type != connection.parameter)) Py_RETURN_NONE;
  DLTensor seen;
  if (connection.read(tensor, &seen) != 0) {
    PyErr_Clear();
    Py_RETURN_NONE;
  }
  if (seen.device.device_type != kDLCPU || seen.data == nullptr || seen.dtype.lanes != 1) Py_RETURN_NONE;
  int64_t count = 1;
  for (int32_t i = 0; i < seen.ndim; i++) {
    if (seen.shape[i] < 1 || seen.shape[i] > kMostBytes || (count *= seen.shape[i]) > kMostBytes) Py_RETURN_NONE;
  }
  if (count * seen.dtype.bits / 8 > kMostBytes || !is_dense(seen)) Py_RETURN_NONE;
  const void* data = static_cast<const char*>(seen.data) + seen.byte_offset;
  // Of a buffer that somebody else cut, elements may lie across.
  if (reinterpret_cast<uintptr_t>(data) * 8 % seen.dtype.bits != 0) Py_RETURN_NONE;
  Extremes found = {nullptr, nullptr};
  switch (seen.dtype.code << 8 | seen.dtype.bits) {
    case kDLInt << 8 | 64: found = of_integers<int64_t>(data, count); break;
    case kDLInt << 8 | 32: found = of_integers<int32_t>(data, count); break;
    case kDLInt << 8 | 16: found = of_integers<int16_t>(data, count); break;
    case kDLFloat << 8 | 64: found = of_floats<double>(data, count); break;
    case kDLFloat << 8 | 32: found = of_floats<float>(data, count); break;
    case kDLFloat << 8 | 16: found = of_halves<float16>(data, count, 0x7c00); break;
    case kDLBfloat << 8 | 16: found = of_halves<bfloat16>(data, count, 0x7f80); break;
    default: Py_RETURN_NONE;
  }
  PyObject* both = found.low != nullptr && found.high != nullptr ? PyTuple_Pack(2, found.low, found.high) : nullptr;
  Py_XDECREF(found.low);
  Py_XDECREF(found.high);
  return both;
}

}  // namespace llm_op_guard
