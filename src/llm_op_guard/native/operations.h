// What the instructions of a program do, and on what.
#pragma once

#include <cstdint>

namespace llm_op_guard {

// As in program.py, by name and order.
#define OPERATIONS(X)                                                                                             \
  X(YES) X(NO) X(CANNOT) X(JUMP) X(UNLESS) X(WHERE_FALSE) X(WHERE_TRUE) X(WHERE_SET) X(ON_ABSENT) X(ABSENT)       \
  X(COPY) X(PLAIN) X(COMPARED) X(READ) X(ITEM) X(NEED) X(TENSOR) X(HELD) X(MATCH) X(RANK) X(RANK_AT_LEAST)        \
  X(DTYPE_IN) X(DEVICE_IN) X(SIZE) X(SIZES) X(NDIM) X(NUMEL) X(DTYPE) X(DEVICE) X(DENSE) X(STRIDE) X(ALIGNED)     \
  X(LIKE) X(SIZE_IS) X(DEVICE_IS) X(SIGHT) X(SIGHT_DTYPE) X(IS_KIND) X(IS_LITERAL) X(IS_NONE) X(PRESENT) X(ADD)   \
  X(SUBTRACT) X(MULTIPLY) X(DIVIDE) X(FLOOR_DIVIDE) X(MODULO) X(CEIL_DIVIDE) X(LEAST) X(GREATEST) X(NEGATE)       \
  X(ABSOLUTE) X(NOT) X(EQUAL) X(UNEQUAL) X(LESS) X(AT_MOST) X(AMONG) X(IN_DTYPES) X(ON_DEVICE) X(LENGTH) X(AT)    \
  X(TUPLE) X(BROADCASTS) X(WHOLE) X(WHOLE_RATIO) X(NO_FACTOR) X(NO_SIZE)

enum Op : int32_t {
#define X(name) name,
  OPERATIONS(X)
#undef X
      kOperations
};

// What `IS_KIND` asks for, as in program.py.
enum Kind : int32_t { kNothing, kInteger, kReal, kBoolean, kString, kMapping };

// What the operands of an operation are: a value that is read, one that is written, a tensor that is read or loaded,
// an instruction further on, a constant, a form or numbers among those, a name, a number of any kind, nothing.
inline const char* operands_of(int32_t op) {
  switch (op) {
    case YES: case NO: case CANNOT: case ABSENT: return "...";
    case JUMP: case ON_ABSENT: return "t..";
    case UNLESS: return "vnt";
    case WHERE_FALSE: case WHERE_TRUE: case WHERE_SET: return "vt.";
    case COPY: case PLAIN: case COMPARED: case IS_NONE: case PRESENT: case NEGATE: case ABSOLUTE: case NOT:
    case LENGTH: case WHOLE: case SIGHT_DTYPE: return "dv.";
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
    case STRIDE: case ALIGNED: return "dxv";
    case LIKE: return "xxt";
    case SIGHT: return "dvt";
    case IS_KIND: return "vnt";
    case IS_LITERAL: return "vct";
    case TUPLE: return "dvn";
    default: return "dvv";
  }
}

}  // namespace llm_op_guard
