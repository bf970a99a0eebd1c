// Registration of the operators in the domain `v4tree`.
#include <cctype>
#include <mutex>

#include "ops.h"

namespace v4tree {

namespace {

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

int kind(char letter) { return letter == 'v' ? ort::kVariadic : std::isupper(letter) ? ort::kOptional : ort::kRequired; }

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
    d.min_variadic_inputs = d.same_variadic_inputs = [](const OrtCustomOp*) { return 1; };
    d.min_variadic_outputs = d.same_variadic_outputs = [](const OrtCustomOp*) { return 0; };
    d.create_kernel_v2 = [](const OrtCustomOp*, const OrtApi* api, const OrtKernelInfo* info, void** out) -> OrtStatus* {
      try {
        *out = new Kernel<Op>{api, Op(Attributes(api, info)), weights_of(api, info)};
        return nullptr;
      } catch (const std::exception& error) {
        return failure(api, Op::kName, error.what());
      }
    };
    d.compute_v2 = [](void* kernel, OrtKernelContext* context) -> OrtStatus* {
      const auto* k = static_cast<const Kernel<Op>*>(kernel);
      try {
        k->op.run(Context(k->api, context, k->weights));
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
          descriptor<RopeTables>(), descriptor<AttentionInputs>(), descriptor<AttentionProject>(), descriptor<StackLayers>(), descriptor<TreePool>(),
          descriptor<TreeIndexSelect>(), descriptor<TreeAttention>(), descriptor<PutRows>(), descriptor<FoldRows>()})
      if (OrtStatus* s = ort::call<OrtStatus*>(api, ort::kCustomOpDomainAdd, made, op)) return s;
    domain = made;
  }
  return ort::call<OrtStatus*>(api, ort::kAddCustomOpDomain, options, domain);
}
