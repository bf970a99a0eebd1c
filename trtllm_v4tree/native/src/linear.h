// Linears as parts of operators: rows as a linear reads them, columns over the threads.
#pragma once

#include "context.h"

namespace v4tree {

// x [rows, inputs] as a linear reads them: rounded into the buffer, or as they are.
inline Rows rows_of(const float* x, int64_t rows, int64_t inputs, bool rounded, std::vector<float>& buffer) {
  if (!rounded) return {x, inputs};
  float* to = scratch(buffer, rows * rounded_words(inputs));
  kernels().round(x, inputs, rows, inputs, to);
  return {to, rounded_words(inputs)};
}

inline void linear_parallel(const Context& ctx, const Rows& x, int64_t rows, const Packed& w, float* y, int64_t columns) {
  ctx.split(w.blocks, linear_cost(rows, w), [&](int64_t first, int64_t last) {
    kernels().linear(x.data, x.stride, rows, w, first, last, y, columns, columns);
  });
}

}  // namespace v4tree
