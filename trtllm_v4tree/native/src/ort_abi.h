// The part of ONNX Runtime's stable C ABI that a custom-operator library needs (API version 24).
//
// The table of functions only ever grows at its end, so a position in it is a fact of the ABI. Declaring these few entries here
// keeps the build free of ONNX Runtime's headers, which its Python wheel does not carry.
#pragma once

#include <cstddef>
#include <cstdint>

struct OrtApi {
  void* entries[1];
};
struct OrtApiBase {
  const OrtApi* (*get_api)(uint32_t version);
  const char* (*get_version)();
};
struct OrtStatus;
struct OrtKernelInfo;
struct OrtKernelContext;
struct OrtValue;
struct OrtSessionOptions;
struct OrtCustomOpDomain;
struct OrtCustomOp;

namespace ort {

constexpr uint32_t kApiVersion = 24;
constexpr uint32_t kOpVersion = 16;  // the newest fields of OrtCustomOp that are read here
constexpr int kInvalidArgument = 2;
constexpr int kAnyType = 0, kFloat = 1, kUint8 = 2, kInt64 = 7, kBfloat16 = 16;
constexpr int kRequired = 0, kOptional = 1, kVariadic = 2;

enum Entry {
  kCreateStatus = 0,
  kCreateCustomOpDomain = 26,
  kCustomOpDomainAdd = 27,
  kAddCustomOpDomain = 28,
  kGetTensorMutableData = 51,
  kGetAttributeFloat = 85,
  kGetAttributeInt = 86,
  kGetAttributeString = 87,
  kContextGetInput = 90,
  kContextGetOutput = 91,
  kKernelInfoGetInputCount = 230,
  kKernelInfoGetConstantInput = 249,
  kGetTensorTypeAndShapeReference = 414,
};

template <class R, class... A>
inline R call(const OrtApi* api, Entry entry, A... args) {
  return reinterpret_cast<R (*)(A...)>(api->entries[entry])(args...);
}

}  // namespace ort

struct OrtCustomOp {
  uint32_t version;
  void* (*create_kernel)(const OrtCustomOp*, const OrtApi*, const OrtKernelInfo*);
  const char* (*name)(const OrtCustomOp*);
  const char* (*provider)(const OrtCustomOp*);
  int (*input_type)(const OrtCustomOp*, size_t);
  size_t (*num_inputs)(const OrtCustomOp*);
  int (*output_type)(const OrtCustomOp*, size_t);
  size_t (*num_outputs)(const OrtCustomOp*);
  void (*compute)(void*, OrtKernelContext*);
  void (*destroy)(void*);
  int (*input_kind)(const OrtCustomOp*, size_t);
  int (*output_kind)(const OrtCustomOp*, size_t);
  int (*input_memory)(const OrtCustomOp*, size_t);
  int (*min_variadic_inputs)(const OrtCustomOp*);
  int (*same_variadic_inputs)(const OrtCustomOp*);
  int (*min_variadic_outputs)(const OrtCustomOp*);
  int (*same_variadic_outputs)(const OrtCustomOp*);
  OrtStatus* (*create_kernel_v2)(const OrtCustomOp*, const OrtApi*, const OrtKernelInfo*, void**);
  OrtStatus* (*compute_v2)(void*, OrtKernelContext*);
};
