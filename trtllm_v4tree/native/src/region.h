// What a region does: its operators in order, what each reads and makes, and where that lies.
#pragma once

#include <memory>

#include "ops.h"

namespace v4tree {

struct AnyOp {
  virtual ~AnyOp() = default;
  virtual void run(const Context& ctx) const = 0;
};

// What an operator is given of a row or of a sequence: the rows of a thread, one after another, in whatever sequence they are; whole
// sequences; or rows of sequences, a rectangle at a time.
enum class Reach { kRows, kSequences, kTree };

// An input of an operator: none, an input of the region, or what an operator before it made.
struct Ref {
  char from = '-';  // '-', 'i' or 't'
  int64_t index = -1;
};

struct Step {
  std::unique_ptr<AnyOp> op;
  Reach reach;
  std::vector<Ref> in;
  std::vector<bool> whole;  // by input: reads rows of other threads
  std::vector<int64_t> out;  // numbers of tensors, -1 where nobody reads
  bool meet = false;  // every thread must have come here first
};

// A tensor that an operator of the region makes.
struct Made {
  int64_t maker = -1, last_reader = -1;
  int64_t buffer = -1;  // of the thread; -1 where the tensor lies in an output
  int64_t output = -1, layer = 0;
  bool by_rows = true;  // else by sequences
  int type = ort::kFloat;
};

inline int64_t element(int type) { return type == ort::kInt64 ? sizeof(int64_t) : sizeof(float); }

struct Output {
  int64_t layers = 0;  // 0: not stacked
};

// Text of a region, a line each: `name attribute=value .. ; inputs ; tensors it makes` for an operator, inputs being i3, t5 or -;
// `output t7` or `output stack t3 t9`.
struct Region::Program {
  std::vector<Step> steps;
  std::vector<Made> tensors;
  std::vector<Output> outputs;
  std::string kinds;  // of the inputs: r rows [B, N, ..], s sequences [B, ..], g anything else
  bool by_rows;  // else threads have whole sequences, as where an operator orders the nodes anew
  int64_t buffers = 0, weight_bytes = 0;

  Program(const std::string& text, const std::string& kinds, int64_t weight_bytes);

 private:
  Made& made(int64_t index);
  void add_step(const std::string& line);
  void add_input(Step& step, Ref ref, size_t whole, size_t more);
  void add_made(Step& step, int64_t index, const std::string& types);
  void add_output(const std::string& line);
  void place_meetings();
  void place_buffers();
};

}  // namespace v4tree
