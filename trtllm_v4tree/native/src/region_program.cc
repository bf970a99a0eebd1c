// The text of a region read, and its tensors placed.
#include <cctype>
#include <map>
#include <sstream>

#include "region.h"

namespace v4tree {

namespace {

template <class Op>
struct Boxed : AnyOp {
  explicit Boxed(const Attributes& a) : op(a) {}
  void run(const Context& ctx) const override { op.run(ctx); }
  Op op;
};

struct Maker {
  std::unique_ptr<AnyOp> (*make)(const Attributes&);
  std::string inputs, outputs;  // as in ops.h
  Reach reach;
  size_t whole, more;  // the input in which it reads rows of other threads, and from which on
};

constexpr size_t kNone = 1 << 16;

template <class Op>
std::pair<const std::string, Maker> maker(Reach reach, size_t whole = kNone, size_t more = kNone) {
  const auto make = [](const Attributes& a) -> std::unique_ptr<AnyOp> { return std::make_unique<Boxed<Op>>(a); };
  return {Op::kName, {make, Op::kInputs, Op::kOutputs, reach, whole, more}};
}

const Maker& maker_of(const std::string& name) {
  static const std::map<std::string, Maker> makers = {
      maker<Linear>(Reach::kRows), maker<HyperMix>(Reach::kRows), maker<HyperPost>(Reach::kRows), maker<HyperPostMix>(Reach::kRows),
      maker<MixtureOfExperts>(Reach::kRows), maker<AttentionProject>(Reach::kRows), maker<TreePool>(Reach::kSequences, 2),
      maker<TreeIndexSelect>(Reach::kTree), maker<TreeAttention>(Reach::kTree, 3, 12), maker<TakeRow>(Reach::kSequences),
      maker<DraftEntry>(Reach::kRows), maker<DraftProposal>(Reach::kSequences),
  };
  const auto found = makers.find(name);
  require(found != makers.end(), "an operator that no region can hold");
  return found->second;
}

class TextAttributes : public Attributes {
 public:
  void set(const std::string& pair) {
    const size_t at = pair.find('=');
    require(at != std::string::npos, "an attribute without a value");
    values_[pair.substr(0, at)] = pair.substr(at + 1);
  }
  int64_t integer(const char* name) const override { return std::stoll(text(name)); }
  float real(const char* name) const override { return std::stof(text(name)); }
  std::string text(const char* name) const override {
    const auto found = values_.find(name);
    require(found != values_.end(), "an operator of a region lacks an attribute");
    return found->second;
  }

 private:
  std::map<std::string, std::string> values_;
};

Ref ref_of(const std::string& word) {
  require(word == "-" || word[0] == 'i' || word[0] == 't', "an operator of a region reads what is nowhere");
  return word == "-" ? Ref{} : Ref{word[0], std::stoll(word.substr(1))};
}

}  // namespace

Region::Program::Program(const std::string& text, const std::string& kinds, int64_t weight_bytes)
    : kinds(kinds), by_rows(kinds.find('r') != std::string::npos), weight_bytes(weight_bytes) {
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) line.rfind("output", 0) == 0 ? add_output(line) : add_step(line);
  place_meetings();
  place_buffers();
}

Made& Region::Program::made(int64_t index) {
  require(index >= 0 && index < (1 << 20), "a tensor of a region has no number");
  if (index >= static_cast<int64_t>(tensors.size())) tensors.resize(index + 1);
  return tensors[index];
}

void Region::Program::add_step(const std::string& line) {
  std::istringstream words(line);
  std::string name, word;
  words >> name;
  const Maker& maker = maker_of(name);
  TextAttributes attributes;
  while (words >> word && word != ";") attributes.set(word);
  Step step{maker.make(attributes), by_rows ? maker.reach : Reach::kSequences, {}, {}, {}};
  while (words >> word && word != ";") add_input(step, ref_of(word), maker.whole, maker.more);
  for (size_t i = 0; i < maker.inputs.size(); ++i)
    require(std::isupper(maker.inputs[i]) || (i < step.in.size() && step.in[i].from != '-'), "an operator of a region lacks an input");
  while (words >> word) add_made(step, ref_of(word).index, maker.outputs);
  steps.push_back(std::move(step));
}

void Region::Program::add_input(Step& step, Ref ref, size_t whole, size_t more) {
  step.whole.push_back(step.in.size() == whole || step.in.size() >= more);
  step.in.push_back(ref);
  require(ref.from != 'i' || (ref.index >= 0 && ref.index < static_cast<int64_t>(kinds.size())), "a region has fewer inputs");
  if (ref.from != 't') return;
  require(made(ref.index).maker >= 0, "an operator of a region reads what is made later");
  made(ref.index).last_reader = static_cast<int64_t>(steps.size());
}

void Region::Program::add_made(Step& step, int64_t index, const std::string& types) {
  step.out.push_back(index);
  require(step.out.size() <= types.size(), "an operator of a region makes less");
  if (index < 0) return;
  Made& tensor = made(index);
  require(tensor.maker < 0, "a tensor of a region is made twice");
  tensor.maker = tensor.last_reader = static_cast<int64_t>(steps.size());
  tensor.by_rows = step.reach != Reach::kSequences;
  tensor.type = std::tolower(types[step.out.size() - 1]) == 'i' ? ort::kInt64 : ort::kFloat;
}

void Region::Program::add_output(const std::string& line) {
  std::istringstream words(line);
  std::string word;
  words >> word;
  Output output;
  for (int64_t layer = 0; words >> word;) {
    if (word == "stack") {
      output.layers = 1;
      continue;
    }
    Made& tensor = made(ref_of(word).index);
    require(tensor.maker >= 0 && tensor.output < 0, "an output of a region that is made by none, or twice an output");
    tensor.output = static_cast<int64_t>(outputs.size()), tensor.layer = layer++;
    if (output.layers) output.layers = layer;
  }
  outputs.push_back(output);
}

void Region::Program::place_meetings() {
  int64_t met = -1;
  for (int64_t s = 0; by_rows && s < static_cast<int64_t>(steps.size()); ++s) {
    for (size_t i = 0; i < steps[s].in.size(); ++i) {
      const Ref ref = steps[s].in[i];
      if (ref.from != 't' || !steps[s].whole[i]) continue;
      require(tensors[ref.index].output >= 0, "rows that other threads read must be an output of the region");
      steps[s].meet |= tensors[ref.index].maker >= met;
    }
    if (steps[s].meet) met = s;
  }
}

// A buffer is free again behind the last operator that reads what is in it.
void Region::Program::place_buffers() {
  std::vector<int64_t> free;
  for (int64_t s = 0; s < static_cast<int64_t>(steps.size()); ++s) {
    for (Made& t : tensors) {
      if (t.maker != s || (t.output >= 0 && t.by_rows)) continue;
      if (free.empty()) free.push_back(buffers++);
      t.buffer = free.back(), free.pop_back();
    }
    for (const Made& t : tensors)
      if (t.last_reader == s && t.buffer >= 0) free.push_back(t.buffer);
  }
}

}  // namespace v4tree
