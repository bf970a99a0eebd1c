// The operators: attributes are read once, `run` computes. Shapes: B sequences, N nodes, D hidden, m streams, H heads, d head dim.
#pragma once

#include <algorithm>

#include "context.h"

namespace v4tree {

// Inputs as a string of one letter each: f float, i int64, w packed weight (float or bfloat16), a any; upper case if optional.
struct Linear {
  static constexpr const char *kName = "PackedLinear", *kInputs = "fwF", *kOutputs = "f";
  explicit Linear(const Attributes& a);
  void run(const Context& ctx) const;
  int64_t columns, groups;
  float eps;
  bool rounded;
};

struct HyperMix {
  static constexpr const char *kName = "HyperMix", *kInputs = "fwff", *kOutputs = "fff";
  explicit HyperMix(const Attributes& a);
  void run(const Context& ctx) const;
  int64_t m, iterations;
  float hc_eps, norm_eps;
};

struct HyperPost {
  static constexpr const char *kName = "HyperPost", *kInputs = "ffff", *kOutputs = "f";
  explicit HyperPost(const Attributes&) {}
  void run(const Context& ctx) const;
};

struct HyperHead {
  static constexpr const char *kName = "HyperHead", *kInputs = "fwff", *kOutputs = "f";
  explicit HyperHead(const Attributes& a);
  void run(const Context& ctx) const;
  float hc_eps, norm_eps;
};

struct MixtureOfExperts {
  static constexpr const char *kName = "MixtureOfExperts", *kInputs = "fiwwaww", *kOutputs = "f";
  explicit MixtureOfExperts(const Attributes& a);
  void run(const Context& ctx) const;
  int64_t experts, topk, width, shared;
  float limit, scale;
  bool rounded;
};

struct TopLogProbs {
  static constexpr const char *kName = "TopLogProbs", *kInputs = "fw", *kOutputs = "fi";
  explicit TopLogProbs(const Attributes& a);
  void run(const Context& ctx) const;
  int64_t columns, topk;
  bool rounded;
};

struct RopeTables {
  static constexpr const char *kName = "RopeTables", *kInputs = "if", *kOutputs = "fff";
  explicit RopeTables(const Attributes&) {}
  void run(const Context& ctx) const;
};

struct AttentionInputs {
  static constexpr const char *kName = "AttentionInputs", *kInputs = "fffffIFF", *kOutputs = "ffFFF";
  explicit AttentionInputs(const Attributes& a);
  void run(const Context& ctx) const;
  int64_t q_width, head_dim, raw_width, index_width, index_heads;
  float eps, index_scale;
};

struct TreePool {
  static constexpr const char *kName = "TreePool", *kInputs = "fififff", *kOutputs = "f";
  explicit TreePool(const Attributes& a);
  void run(const Context& ctx) const;
  float eps;
};

// The commit: state -> state, in place where a caller bound both to one buffer.
struct PutRows {
  static constexpr const char *kName = "PutRows", *kInputs = "ffii", *kOutputs = "f";
  explicit PutRows(const Attributes& a);
  void run(const Context& ctx) const;
  int64_t layers;
};

struct FoldRows {
  static constexpr const char *kName = "FoldRows", *kInputs = "ffii", *kOutputs = "f";
  explicit FoldRows(const Attributes& a);
  void run(const Context& ctx) const;
  int64_t layers;
};

struct TreeIndexSelect {
  static constexpr const char *kName = "TreeIndexSelect", *kInputs = "fffiffff", *kOutputs = "f";
  explicit TreeIndexSelect(const Attributes& a);
  void run(const Context& ctx) const;
  int64_t heads, topk, offset;
};

struct TreeAttention {
  static constexpr const char *kName = "TreeAttention", *kInputs = "ffiffFIFFfff", *kOutputs = "f";
  explicit TreeAttention(const Attributes& a);
  void run(const Context& ctx) const;
  int64_t heads;
  float scale, eps;
};

}  // namespace v4tree
