// The smallest and the largest element of a small tensor.
#pragma once

#include "values.h"

namespace llm_op_guard {

// extremes(tensor): (lowest, highest), both NaN where an element is; None for what is not small, dense and in the
// memory of the CPU, or of a dtype that is not known here. Negated views must not come here: DLPack does not show them.
PyObject* extremes(PyObject*, PyObject* tensor);

}  // namespace llm_op_guard
