// Linears as parts of operators: rows as a linear reads them, columns over the threads.
#pragma once

#include "context.h"

namespace v4tree {

// x [rows, inputs] as a linear with weights of the form reads them: encoded into the buffer, or as they are.
inline Rows rows_of(const float* x, int64_t rows, int64_t inputs, Form form, std::vector<float>& buffer) {
  if (form != Form::kRounded && form != Form::kByte) return {x, inputs};
  const int64_t words = kernels().words(form, inputs);
  float* to = scratch(buffer, rows * words);
  kernels().encode(form, x, inputs, rows, inputs, to);
  return {to, words};
}

inline void linear_parallel(const Work& work, const Rows& x, int64_t rows, const Packed& w, float* y, int64_t columns) {
  work.split(w.blocks, linear_cost(rows, w), [&](int64_t first, int64_t last) {
    kernels().linear(x.data, x.stride, rows, w, first, last, y, columns, columns);
  });
}

// The same of rows of floats.
inline void linear_parallel(const Work& work, const float* x, int64_t rows, const Packed& w, float* y, int64_t columns) {
  thread_local std::vector<float> words;
  linear_parallel(work, rows_of(x, rows, w.inputs, w.form, words), rows, w, y, columns);
}

}  // namespace v4tree
