// Registration of the operators in the domain `v4tree`.
#include <cctype>
#include <mutex>

#include "ops.h"

namespace v4tree {

namespace {

void check(OrtStatus* status) {
  if (status != nullptr) throw Error("a call into ONNX Runtime failed");  // a fault of this library: the status is not read
}

Tensor tensor_of(const OrtApi* api, const OrtValue* value) {
  Tensor t;
  const int64_t* dims = nullptr;
  size_t rank = 0;
  check(ort::call<OrtStatus*>(api, ort::kGetTensorTypeAndShapeReference, value, &t.type, &dims, &rank));
  require(rank <= kMaxRank, "a tensor has more than 8 axes");
  t.rank = static_cast<int>(rank);
  std::copy_n(dims, rank, t.dims);
  check(ort::call<OrtStatus*>(api, ort::kGetTensorMutableData, const_cast<OrtValue*>(value), &t.data));
  return t;
}

// The inputs of a kernel that are weights, by index; without data where an input is none. Looked up once: three calls for every input of
// every kernel are a tenth of a pass of a small model.
std::vector<Tensor> weights_of(const OrtApi* api, const OrtKernelInfo* info) {
  size_t count = 0;
  check(ort::call<OrtStatus*>(api, ort::kKernelInfoGetInputCount, info, &count));
  std::vector<Tensor> weights(count);
  for (size_t i = 0; i < count; ++i) {
    int constant = 0;
    const OrtValue* value = nullptr;
    check(ort::call<OrtStatus*>(api, ort::kKernelInfoGetConstantInput, info, i, &constant, &value));
    if (constant) weights[i] = tensor_of(api, value);
  }
  return weights;
}

class OrtAttributes : public Attributes {
 public:
  OrtAttributes(const OrtApi* api, const OrtKernelInfo* info) : api_(api), info_(info) {}
  int64_t integer(const char* name) const override {
    int64_t value = 0;
    check(ort::call<OrtStatus*>(api_, ort::kGetAttributeInt, info_, name, &value));
    return value;
  }
  float real(const char* name) const override {
    float value = 0;
    check(ort::call<OrtStatus*>(api_, ort::kGetAttributeFloat, info_, name, &value));
    return value;
  }
  std::string text(const char* name) const override {
    size_t size = 0;
    check(ort::call<OrtStatus*>(api_, ort::kGetAttributeString, info_, name, static_cast<char*>(nullptr), &size));
    std::string value(size, 0);
    check(ort::call<OrtStatus*>(api_, ort::kGetAttributeString, info_, name, value.data(), &size));
    value.resize(size > 0 ? size - 1 : 0);  // the size counts the null behind it
    return value;
  }

 private:
  const OrtApi* api_;
  const OrtKernelInfo* info_;
};

class OrtContext : public Context {
 public:
  OrtContext(const OrtApi* api, OrtKernelContext* context, const std::vector<Tensor>& weights)
      : Context(num_threads()), api_(api), context_(context), weights_(weights) {}

  Tensor input(size_t index) const override {
    if (index < weights_.size() && weights_[index].data != nullptr) return weights_[index];
    const OrtValue* value = nullptr;
    check(ort::call<OrtStatus*>(api_, ort::kContextGetInput, static_cast<const OrtKernelContext*>(context_), index, &value));
    return value == nullptr ? Tensor{} : tensor_of(api_, value);
  }

  void* output(size_t index, const Shape& dims) const override {
    OrtValue* value = nullptr;
    check(ort::call<OrtStatus*>(api_, ort::kContextGetOutput, context_, index, dims.dims, static_cast<size_t>(dims.rank), &value));
    if (value == nullptr) return nullptr;
    void* data = nullptr;
    check(ort::call<OrtStatus*>(api_, ort::kGetTensorMutableData, value, &data));
    return data;
  }

 private:
  const OrtApi* api_;
  OrtKernelContext* context_;
  const std::vector<Tensor>& weights_;
};

template <class Op>
struct Kernel {
  const OrtApi* api;
  Op op;
  std::vector<Tensor> weights;
};

int element_type(char letter) {
  switch (std::tolower(letter)) {
    case 'f':
    case 'v': return ort::kFloat;
    case 'i': return ort::kInt64;
    default: return ort::kAnyType;
  }
}

int kind(char letter) { return letter == 'v' || letter == 'x' ? ort::kVariadic : std::isupper(letter) ? ort::kOptional : ort::kRequired; }

OrtStatus* failure(const OrtApi* api, const char* op, const char* what) {
  const std::string message = std::string(op) + ": " + what;
  return ort::call<OrtStatus*>(api, ort::kCreateStatus, ort::kInvalidArgument, message.c_str());
}

template <class Op>
const OrtCustomOp* descriptor() {
  static const OrtCustomOp op = [] {
    OrtCustomOp d{};
    d.version = ort::kOpVersion;
    d.name = [](const OrtCustomOp*) { return Op::kName; };
    d.provider = [](const OrtCustomOp*) -> const char* { return nullptr; };
    d.input_type = [](const OrtCustomOp*, size_t i) { return element_type(Op::kInputs[i]); };
    d.num_inputs = [](const OrtCustomOp*) { return std::strlen(Op::kInputs); };
    d.output_type = [](const OrtCustomOp*, size_t i) { return element_type(Op::kOutputs[i]); };
    d.num_outputs = [](const OrtCustomOp*) { return std::strlen(Op::kOutputs); };
    d.input_kind = [](const OrtCustomOp*, size_t i) { return kind(Op::kInputs[i]); };
    d.output_kind = [](const OrtCustomOp*, size_t i) { return kind(Op::kOutputs[i]); };
    d.input_memory = [](const OrtCustomOp*, size_t) { return 0; };
    d.min_variadic_inputs = d.min_variadic_outputs = [](const OrtCustomOp*) { return 1; };
    d.same_variadic_inputs = [](const OrtCustomOp*) { return Op::kInputs[0] == 'x' ? 0 : 1; };
    d.same_variadic_outputs = [](const OrtCustomOp*) { return Op::kOutputs[0] == 'x' ? 0 : 1; };
    d.create_kernel_v2 = [](const OrtCustomOp*, const OrtApi* api, const OrtKernelInfo* info, void** out) -> OrtStatus* {
      try {
        *out = new Kernel<Op>{api, Op(OrtAttributes(api, info)), weights_of(api, info)};
        return nullptr;
      } catch (const std::exception& error) {
        return failure(api, Op::kName, error.what());
      }
    };
    d.compute_v2 = [](void* kernel, OrtKernelContext* context) -> OrtStatus* {
      const auto* k = static_cast<const Kernel<Op>*>(kernel);
      try {
        k->op.run(OrtContext(k->api, context, k->weights));
        return nullptr;
      } catch (const std::exception& error) {
        return failure(k->api, Op::kName, error.what());
      }
    };
    d.destroy = [](void* kernel) { delete static_cast<Kernel<Op>*>(kernel); };
    return d;
  }();
  return &op;
}

}  // namespace
}  // namespace v4tree

extern "C" __attribute__((visibility("default"))) const char* v4tree_instruction_set() { return v4tree::kernels().name; }

extern "C" __attribute__((visibility("default"))) void v4tree_set_num_threads(int count) { v4tree::set_num_threads(count); }

extern "C" __attribute__((visibility("default"))) void v4tree_set_patience(int microseconds) { v4tree::set_patience(microseconds); }

extern "C" __attribute__((visibility("default"))) int64_t v4tree_region_members() { return v4tree::region_members(); }

extern "C" __attribute__((visibility("default"))) OrtStatus* RegisterCustomOps(OrtSessionOptions* options, const OrtApiBase* base) {
  using namespace v4tree;
  const OrtApi* api = base->get_api(ort::kApiVersion);
  static std::mutex one_at_a_time;
  std::lock_guard<std::mutex> lock(one_at_a_time);
  static OrtCustomOpDomain* domain = nullptr;  // whole or null; lives as long as the process, as sessions may
  if (domain == nullptr) {
    OrtCustomOpDomain* made = nullptr;
    if (OrtStatus* s = ort::call<OrtStatus*>(api, ort::kCreateCustomOpDomain, "v4tree", &made)) return s;
    for (const OrtCustomOp* op :
         {descriptor<Linear>(), descriptor<HyperMix>(), descriptor<HyperPost>(), descriptor<HyperPostMix>(), descriptor<HyperHead>(),
          descriptor<MixtureOfExperts>(), descriptor<TopLogProbs>(), descriptor<TakeRow>(), descriptor<DraftEntry>(), descriptor<DraftProposal>(), descriptor<DraftFrontier>(),
          descriptor<RopeTables>(), descriptor<EmbedStreams>(), descriptor<AttentionInputs>(), descriptor<AttentionProject>(), descriptor<StackLayers>(), descriptor<TreePool>(),
          descriptor<TreeIndexSelect>(), descriptor<TreeAttention>(), descriptor<PutRows>(), descriptor<FoldRows>(), descriptor<Region>()})
      if (OrtStatus* s = ort::call<OrtStatus*>(api, ort::kCustomOpDomainAdd, made, op)) return s;
    domain = made;
  }
  return ort::call<OrtStatus*>(api, ort::kAddCustomOpDomain, options, domain);
}
