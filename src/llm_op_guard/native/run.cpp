#include "operations.h"
#include "reading.h"

namespace llm_op_guard {

namespace {

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

// Where what is shown as the place of the elements is an address.
constexpr int64_t kAddressed = 1 << kDLCPU | 1 << kDLCUDA | 1 << kDLROCM;

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
        STEP(item(frame, v[b], PyTuple_GetItem(program.constants, c), found));
        v[a] = found;
        break;
      }
      case NEED: OPERAND(v[a]) break;
      case TENSOR: case HELD:
        switch (load(x[a], program.readers[here], v[b], program.with_strides)) {
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
          case kInterrupted: return kRaised;
        }
        break;
      case MATCH:
        switch (load(x[a], program.readers[here], v[b], program.with_strides)) {
          case kTensor: break;
          case kNoTensor: return kNo;
          case kRefused: refused = true; return kCannot;
          case kUnknown: return kCannot;
          case kInterrupted: return kRaised;
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
      case ALIGNED: {
        OPERAND(v[c])
        if (!is_whole(v[c]) || !has(kAddressed, x[b].device.device_type)) return kCannot;
        if (v[c].number <= 0) {
          GO_ABSENT
        } else {
          bool empty = false;
          for (int32_t i = 0; i < x[b].ndim; i++) empty |= x[b].shape[i] == 0;
          v[a] = truth(empty || x[b].address % static_cast<uint64_t>(v[c].number) == 0);
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
      case NOT: {
        OPERAND(v[b])
        Answer said = truth_of(v[b]);
        if (said == kCannot) return kCannot;
        v[a] = truth(said == kNo);
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

}  // namespace

Answer judged(Program& program, PyObject* const* arguments, bool& refused) {
  Frame frame;
  for (int32_t i = 0; i < program.arguments; i++) frame.values[i] = object(arguments[i]);
  const int32_t constants = program.values - program.constant_count;
  for (int32_t i = program.arguments; i < constants; i++) frame.values[i].tag = kAbsent;
  for (int32_t i = constants; i < program.values; i++) frame.values[i] = program.made[i - constants];
  for (int32_t i = 0; i < program.tensors; i++) frame.tensors[i].of = nullptr;
  return run(program, frame, refused);
}

}  // namespace llm_op_guard
