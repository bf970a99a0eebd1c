// Region: operators that follow each other, as one. Every thread does all of them for its own rows (a row is a node of a sequence), so rows
// stay in its caches and threads meet only where an operator reads rows of others, once in a decoder block. Where there is a single row,
// or weights are too many to be read by every thread, one thread leads and the operators share their columns as they do by themselves.
#include <mutex>

#include "region.h"

namespace v4tree {

Region::Region(const Attributes& a)
    : program(std::make_shared<const Program>(a.text("program"), a.text("kinds"), a.integer("weight_bytes"))) {}

namespace {

// What the threads of one call share.
class Call {
 public:
  Call(const Region::Program& program, const Context& ctx) : program(program), outputs_(program.outputs.size()), ctx_(ctx) {
    for (size_t i = 0; i < program.kinds.size(); ++i) {
      inputs.push_back(ctx.input(i));
      const Tensor& t = inputs.back();
      if (program.kinds[i] == (program.by_rows ? 'r' : 's') && batch < 0) batch = t.dim(0), nodes = program.by_rows ? t.dim(1) : 1;
      require(program.kinds[i] != 'r' || (t.rank >= 2 && t.dims[0] == batch && t.dims[1] == nodes), "an input has other rows");
    }
    require(batch >= 0 && nodes > 0, "a region without rows");
    for (size_t i = 0; i < program.kinds.size(); ++i)
      require(program.kinds[i] != 's' || (inputs[i].rank >= 1 && inputs[i].dims[0] == batch), "an input has other sequences");
  }

  int64_t rows() const { return batch * nodes; }
  int64_t threads() const { return ctx_.threads(); }
  bool failed() const { return failed_.load(std::memory_order_relaxed); }
  void fail(const char* what) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!failed()) what_ = what, failed_.store(true, std::memory_order_relaxed);
  }
  void done() const {
    if (failed()) throw Error(what_);
  }

  // Returns when all `size` threads have come here for the `count`-th time.
  void meet(int64_t size, int64_t count) {
    arrived_.fetch_add(1, std::memory_order_acq_rel);
    wait_in_team([&] { return arrived_.load(std::memory_order_acquire) >= size * count; });
  }

  // The place of a tensor in its output; `second` are the nodes or entries of a sequence, behind which come the axes of `dims` from the third on.
  char* place(const Made& tensor, int64_t second, const Shape& dims) {
    std::atomic<char*>& at = outputs_[tensor.output];
    char* base = at.load(std::memory_order_acquire);
    int64_t size = element(tensor.type) * batch * second;
    for (int i = 2; i < dims.rank; ++i) size *= dims.dims[i];
    if (base == nullptr) {
      std::lock_guard<std::mutex> lock(mutex_);
      base = at.load(std::memory_order_relaxed);
      if (base == nullptr) at.store(base = make(tensor.output, second, dims), std::memory_order_release);
    }
    return base + tensor.layer * size;
  }

  const Region::Program& program;
  std::vector<Tensor> inputs;
  int64_t batch = -1, nodes = -1;

 private:
  char* make(int64_t output, int64_t second, const Shape& dims) const {
    const int64_t layers = program.outputs[output].layers;
    Shape full = layers ? Shape{layers, batch, second} : Shape{batch, second};
    full.append(dims.begin() + 2, dims.end());
    static char nothing;  // of a tensor without elements
    char* data = static_cast<char*>(ctx_.output(output, full));
    return data == nullptr ? &nothing : data;
  }

  std::vector<std::atomic<char*>> outputs_;
  const Context& ctx_;
  std::atomic<int64_t> arrived_{0};
  std::atomic<bool> failed_{false};
  std::mutex mutex_;
  std::string what_;
};

// A rectangle [batch, nodes] of rows, the first of them `row`, and the first of its sequences.
struct Part {
  int64_t batch, nodes, row, sequence;
};

// What a thread has of a tensor: from row (or sequence) `origin` on.
struct Held {
  Tensor tensor;
  int64_t origin = 0;
};

// One thread's rows of a call.
class Share {
 public:
  Share(Call& call, int64_t member, int64_t size)
      : call_(call), size_(size), first_(border(member)), last_(border(member + 1)), held_(tensors()) {
    bool cut = false;
    for (int64_t m = 1; m < size; ++m) cut |= border(m) % call.nodes != 0;
    meets_ = cut;
    if (static_cast<int64_t>(buffers().size()) < call.program.buffers) buffers().resize(call.program.buffers);
    if (held_.size() < call.program.tensors.size()) held_.resize(call.program.tensors.size());
  }

  void run() {
    int64_t met = 0;
    for (const Step& step : call_.program.steps) {
      if (step.meet && meets_) call_.meet(size_, ++met);  // a thread that failed comes too: others wait for it
      if (call_.failed()) continue;
      try {
        run(step);
      } catch (const std::exception& error) {
        call_.fail(error.what());
      }
    }
  }

 private:
  class StepContext : public Context {
   public:
    StepContext(Share& share, const Step& step, const Part& part)
        : Context(share.size_ == 1 ? share.call_.threads() : 1), share_(share), step_(step), part_(part) {}
    Tensor input(size_t i) const override { return i < step_.in.size() ? share_.view(step_, i, part_) : Tensor{}; }
    void* output(size_t i, const Shape& dims) const override {
      return i < step_.out.size() && step_.out[i] >= 0 ? share_.output(step_.out[i], part_, dims) : nullptr;
    }
    int64_t nodes(int64_t given) const override { return share_.call_.program.by_rows ? share_.call_.nodes : given; }

   private:
    Share& share_;
    const Step& step_;
    const Part& part_;
  };

  int64_t border(int64_t member) const { return call_.rows() * member / size_; }
  int64_t first_sequence() const { return first_ / call_.nodes; }
  int64_t last_sequence() const { return (last_ + call_.nodes - 1) / call_.nodes; }
  static std::vector<std::vector<float>>& buffers() {
    thread_local std::vector<std::vector<float>> held;
    return held;
  }
  static std::vector<Held>& tensors() {
    thread_local std::vector<Held> held;
    return held;
  }

  void run(const Step& step) {
    if (step.reach == Reach::kRows) {
      run(step, {1, last_ - first_, first_, 0});
    } else if (step.reach == Reach::kSequences) {
      run(step, {last_sequence() - first_sequence(), call_.nodes, first_sequence() * call_.nodes, first_sequence()});
      for (const int64_t t : step.out)
        if (t >= 0 && call_.program.tensors[t].output >= 0) publish(t);
    } else {
      const int64_t nodes = call_.nodes;
      for (int64_t row = first_; row < last_;) {
        const int64_t sequences = row % nodes == 0 ? (last_ - row) / nodes : 0;
        const Part part = sequences ? Part{sequences, nodes, row, row / nodes}
                                    : Part{1, std::min(last_ - row, nodes - row % nodes), row, row / nodes};
        run(step, part);
        row += part.batch * part.nodes;
      }
    }
  }

  void run(const Step& step, const Part& part) { step.op->run(StepContext(*this, step, part)); }

  // Input i of a step, of the part.
  Tensor view(const Step& step, size_t i, const Part& part) const {
    const Ref ref = step.in[i];
    if (ref.from == '-') return {};
    const bool given = ref.from == 'i';
    const char kind = given ? call_.program.kinds[ref.index] : call_.program.tensors[ref.index].by_rows ? 'r' : 's';
    if (kind == 'g') return call_.inputs[ref.index];
    Tensor t = given ? call_.inputs[ref.index] : held_[ref.index].tensor;
    const int64_t origin = given ? 0 : held_[ref.index].origin;
    int64_t skip;
    if (kind == 's') {
      t.dims[0] = part.batch;
      skip = (part.sequence - origin) * t.count(1);
    } else {
      const bool whole = step.whole[i];
      t.dims[0] = part.batch, t.dims[1] = whole ? call_.nodes : part.nodes;
      skip = ((whole ? part.sequence * call_.nodes : part.row) - origin) * t.count(2);
    }
    t.data = static_cast<char*>(t.data) + skip * element(t.type);
    return t;
  }

  void* output(int64_t index, const Part& part, const Shape& dims) {
    const Made& made = call_.program.tensors[index];
    Held& held = held_[index];
    Tensor& t = held.tensor;
    t.type = made.type, t.rank = dims.rank;
    require(dims.rank >= 2 && dims.dims[0] == part.batch, "a step of a region made something else");
    std::copy(dims.begin(), dims.end(), t.dims);
    const int64_t unit = t.count(made.by_rows ? 2 : 1), bytes = element(made.type);  // of a row, of a sequence
    require(!made.by_rows || dims.dims[1] == part.nodes, "a step of a region made something else");
    const int64_t from = made.by_rows ? first_ : first_sequence(), count = made.by_rows ? last_ - first_ : last_sequence() - from;
    if (made.buffer >= 0)
      t.data = scratch(buffers()[made.buffer], std::max<int64_t>(1, count * unit * bytes / 4)), held.origin = from;
    else
      t.data = call_.place(made, call_.nodes, dims), held.origin = 0;
    return static_cast<char*>(t.data) + ((made.by_rows ? part.row : part.sequence) - held.origin) * unit * bytes;
  }

  // Into the output, the sequences that begin in the rows of this thread.
  void publish(int64_t index) {
    const Tensor& t = held_[index].tensor;
    const int64_t unit = t.count(1) * element(t.type), begin = (first_ + call_.nodes - 1) / call_.nodes, end = last_sequence();
    if (begin >= end) return;
    char* to = call_.place(call_.program.tensors[index], t.dims[1], t.shape());
    std::copy_n(static_cast<char*>(t.data) + (begin - held_[index].origin) * unit, (end - begin) * unit, to + begin * unit);
  }

  Call& call_;
  const int64_t size_, first_, last_;
  bool meets_ = false;
  std::vector<Held>& held_;  // of the thread: an operator reads what one before it made
};

}  // namespace

static std::atomic<int64_t> members{0};  // of the last team

int64_t region_members() { return members.load(std::memory_order_relaxed); }

void Region::run(const Context& ctx) const {
  Call call(*program, ctx);
  const bool apart = program->weight_bytes <= kReadTwice;
  const int64_t wanted = apart ? std::min(ctx.threads(), call.rows()) : 1;
  const auto share = [](void* user, int64_t member, int64_t size) {
    if (member == 0) members.store(size, std::memory_order_relaxed);
    Share(*static_cast<Call*>(user), member, size).run();
  };
  run_team(wanted, share, &call);
  call.done();
}

}  // namespace v4tree
