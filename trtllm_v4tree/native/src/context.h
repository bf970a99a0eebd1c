// Tensors, attributes and the thread pool of one kernel call.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstring>
#include <initializer_list>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels.h"
#include "ort_abi.h"
#include "pool.h"

namespace v4tree {

struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

inline void require(bool condition, const char* what) {
  if (!condition) throw Error(what);
}

constexpr int kMaxRank = 8;

// Dims of a tensor that a kernel makes.
struct Shape {
  int rank = 0;
  int64_t dims[kMaxRank];
  Shape(std::initializer_list<int64_t> given) { append(given.begin(), given.end()); }
  Shape(const int64_t* first, const int64_t* last) { append(first, last); }
  void append(const int64_t* first, const int64_t* last) {
    require(rank + (last - first) <= kMaxRank, "a tensor has more than 8 axes");
    while (first < last) dims[rank++] = *first++;
  }
  const int64_t* begin() const { return dims; }
  const int64_t* end() const { return dims + rank; }
};

struct Tensor {
  void* data = nullptr;
  int type = 0;
  int rank = 0;
  int64_t dims[kMaxRank] = {};

  explicit operator bool() const { return data != nullptr || rank > 0; }
  Shape shape() const { return {dims, dims + rank}; }
  const float* f32() const { return static_cast<const float*>(data); }
  const int64_t* i64() const { return static_cast<const int64_t*>(data); }
  int64_t dim(int axis) const { return dims[axis < 0 ? rank + axis : axis]; }
  int64_t count(int first = 0) const {  // of the axes from `first` on
    int64_t n = 1;
    for (int i = first; i < rank; ++i) n *= dims[i];
    return n;
  }
};

// What a kernel was made with.
class Attributes {
 public:
  virtual ~Attributes() = default;
  virtual int64_t integer(const char* name) const = 0;
  virtual float real(const char* name) const = 0;
  virtual std::string text(const char* name) const = 0;
};

// One call of a kernel: its tensors, and the threads that it may use.
class Context {
 public:
  explicit Context(int64_t threads) : threads_(threads) {}
  virtual ~Context() = default;
  virtual Tensor input(size_t index) const = 0;  // false where it was not given
  virtual void* output(size_t index, const Shape& dims) const = 0;
  float* output_f32(size_t index, const Shape& dims) const { return static_cast<float*>(output(index, dims)); }
  virtual int64_t nodes(int64_t given) const { return given; }  // of a sequence, of which a call may be given some
  int64_t threads() const { return threads_; }

  // fn(task) for every task, on the threads of the call; the first failure is thrown here.
  template <class Fn>
  void parallel(int64_t tasks, const Fn& fn) const {
    if (threads_ == 1 || tasks == 1) {
      for (int64_t task = 0; task < tasks; ++task) fn(task);
      return;
    }
    struct Job {
      const Fn& fn;
      std::atomic<bool> failed;
      std::string what;
    } job{fn, {false}, {}};
    run_tasks(
        tasks,
        [](void* user, int64_t task) {
          Job& job = *static_cast<Job*>(user);
          try {
            job.fn(task);
          } catch (const std::exception& error) {
            if (!job.failed.exchange(true)) job.what = error.what();
          }
        },
        &job);
    if (job.failed) throw Error(job.what);
  }

  // fn(first, last) over pieces of [0, count), one per thread; in one piece where it would take less than two hand-overs.
  template <class Fn>
  void split(int64_t count, int64_t nanoseconds, const Fn& fn) const {
    const int64_t parts = std::max<int64_t>(1, std::min({threads_, count, nanoseconds / kHandover}));
    parallel(parts, [&](int64_t part) { fn(count * part / parts, count * (part + 1) / parts); });
  }

 private:
  static constexpr int64_t kHandover = 1000;  // nanoseconds from one thread to another, caches included (measured)
  const int64_t threads_;
};

// Where a piece of an operator runs: over the threads, or alone in the thread that has its rows.
class Work {
 public:
  Work(const Context& ctx, bool alone = false) : ctx_(ctx), alone_(alone) {}

  // fn(first, last) over pieces of [0, count), or once.
  template <class Fn>
  void split(int64_t count, int64_t nanoseconds, const Fn& fn) const {
    if (!alone_)
      ctx_.split(count, nanoseconds, fn);
    else if (count > 0)
      fn(int64_t{0}, count);
  }

 private:
  const Context& ctx_;
  bool alone_;
};

constexpr int64_t kReadTwice = 2 << 20;  // bytes of weights up to which every thread may read all of them

// fn(work, first, last): either every thread does all of its own rows, so that these stay in its caches from operator to operator and
// threads meet once in an operator; or, where a thread would have fewer than two rows or weights are too many to be read by each, all
// threads share all rows and split columns. With two threads, a pass over six nodes: 731 -> 662 us with caches near to each other, 1400 ->
// 1020 with caches far apart (the same machine at other hours).
template <class Fn>
void by_rows(const Context& ctx, int64_t rows, int64_t weight_bytes, int64_t nanoseconds, const Fn& fn) {
  if (rows >= 2 * ctx.threads() && weight_bytes <= kReadTwice)
    ctx.split(rows, nanoseconds, [&](int64_t first, int64_t last) { fn(Work(ctx, true), first, last); });
  else
    fn(Work(ctx), int64_t{0}, rows);
}

// Rows that a linear reads, and words from one to the next.
struct Rows {
  const float* data;
  int64_t stride;
};

// Nanoseconds of `rows` products with a weight, which comes from memory at about 60 bytes in one.
inline int64_t linear_cost(int64_t rows, const Packed& w) {
  const int64_t elements = w.inputs * w.blocks * kLanes;
  return std::max(rows * elements / (w.form == Form::kByte ? kernels().byte_rate : kernels().float_rate), elements * w.element() / 60);
}

// Order of indices: larger values first, lower indices first among equals. What is not a number comes before all, so that it is not
// dropped, and so that this is an order (a sort by an order that is none may leave its bounds).
struct Descending {
  const float* value;
  bool operator()(int64_t a, int64_t b) const {
    const float x = value[a], y = value[b];
    const bool x_is_nan = x != x, y_is_nan = y != y;
    if (x_is_nan != y_is_nan) return x_is_nan;
    return x > y || (!(x < y) && a < b);
  }
};

// Floats (or pointers) that live until the call ends; one growing buffer per thread and purpose.
template <class T>
T* scratch(std::vector<T>& buffer, int64_t count) {
  if (static_cast<int64_t>(buffer.size()) < count) buffer.resize(count);
  return buffer.data();
}

constexpr int64_t kMaxByteInputs = 1 << 16;  // products of 8 bits, unsigned and signed, whose sum 32 bits hold

// `rounded`: a weight in bfloat16 takes rows that are rounded to it.
inline Packed packed(const Tensor& w, int64_t inputs, bool rounded = false) {
  const bool half = w.type == ort::kBfloat16, byte = w.type == ort::kUint8;
  require(half || byte || w.type == ort::kFloat, "a packed weight is float, bfloat16 or uint8");
  require(half || !rounded, "only a bfloat16 weight takes rounded inputs");
  require(!byte || inputs <= kMaxByteInputs, "a weight of 8 bits has too many inputs");
  Packed p{w.data, byte ? Form::kByte : rounded ? Form::kRounded : half ? Form::kHalf : Form::kFloat, inputs, 0};
  const int64_t bytes = w.count() * p.element();
  require(bytes % p.block_bytes() == 0, "a packed weight does not fit its input");
  p.blocks = bytes / p.block_bytes();
  return p;
}

inline int64_t bytes_of(const Tensor& w) { return w.count() * (w.type == ort::kFloat ? 4 : w.type == ort::kUint8 ? 1 : 2); }

// The packed weight number e of a stack of `count`.
inline Packed part_of(const Tensor& stack, int64_t inputs, int64_t count, int64_t e, bool rounded = false) {
  Packed w = packed(stack, inputs, rounded);
  require(w.blocks % count == 0, "a stack of packed weights has the wrong size");
  w.blocks /= count;
  w.data = static_cast<char*>(stack.data) + e * w.blocks * w.block_bytes();
  return w;
}

}  // namespace v4tree
