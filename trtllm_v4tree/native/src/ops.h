// The operators: attributes are read once, `run` computes. Shapes: B sequences, N nodes, D hidden, m streams, H heads, d head dim.
#pragma once

#include <algorithm>
#include <limits>
#include <memory>

#include "context.h"

namespace v4tree {

constexpr float kHidden = -std::numeric_limits<float>::infinity();  // of a mask: not seen

// Inputs as a string of one letter each: f float, i int64, w packed weight (float, bfloat16 or uint8), a any; upper case if optional; v
// any number of floats, x any number of anything.
struct Linear {
  static constexpr const char *kName = "PackedLinear", *kInputs = "fwFW", *kOutputs = "f";
  explicit Linear(const Attributes& a);
  void run(const Context& ctx) const;
  void piece(const Work& work, const float* x, int64_t rows, int64_t dim, const Tensor& weight, const float* norm, const Tensor& second,
             float* result) const;
  int64_t columns, groups, then;
  float eps;
  bool rounded;
};

struct HyperMix {
  static constexpr const char *kName = "HyperMix", *kInputs = "fwff", *kOutputs = "fff";
  struct Mixed {
    Packed fn;
    const float *base, *norm;
    int64_t dim;
    float *x, *post, *comb;
  };
  explicit HyperMix(const Attributes& a);
  void run(const Context& ctx) const;
  Mixed outputs(const Context& ctx, const Tensor& streams, size_t at, size_t out) const;
  void mix(const Context& ctx, const Tensor& streams, size_t at, size_t out) const;
  void mix_nodes(const float* z, const Mixed& to, int64_t first, int64_t count) const;
  int64_t m, iterations;
  float hc_eps, norm_eps;
};

// Inputs of HyperPost: streams [rows, m, dim], out [rows, dim], post [rows, m], comb [rows, m, m].
struct Spread {
  const float *streams, *out, *post, *comb;
  int64_t m, dim, rows;
};

Spread spread(const Context& ctx);

// post[k] out + sum_j comb[j, k] streams[j] of node r
void post_mix(const Spread& s, int64_t r, float* result);

// Into how many tasks the mixing of `rows` nodes is cut; fewer than two nodes for a thread are not worth the hand-over.
inline int64_t mix_groups(int64_t rows, int64_t threads) {
  return std::max<int64_t>((rows + kLanes - 1) / kLanes, std::min<int64_t>(rows / 2, threads));
}

struct HyperPost {
  static constexpr const char *kName = "HyperPost", *kInputs = "ffff", *kOutputs = "f";
  explicit HyperPost(const Attributes&) {}
  void run(const Context& ctx) const;
};

struct HyperPostMix {
  static constexpr const char *kName = "HyperPostMix", *kInputs = "ffffwff", *kOutputs = "ffff";
  explicit HyperPostMix(const Attributes& a);
  void run(const Context& ctx) const;
  HyperMix next;
};

struct HyperHead {
  static constexpr const char *kName = "HyperHead", *kInputs = "fwffI", *kOutputs = "f";
  struct Weights {
    Packed fn;
    const float *base, *norm;
    int64_t m, dim;
  };
  explicit HyperHead(const Attributes& a);
  void run(const Context& ctx) const;
  Weights weights(const Context& ctx, const Tensor& streams, size_t at) const;  // packed fn, base, norm from input `at` on
  void reduce(const float* streams, const Weights& w, int64_t first, int64_t last, float* x) const;
  float hc_eps, norm_eps;
};

struct MixtureOfExperts {
  static constexpr const char *kName = "MixtureOfExperts", *kInputs = "fiwwwaww", *kOutputs = "f";
  explicit MixtureOfExperts(const Attributes& a);
  struct Weights {
    Packed router, shared_out, gate, shared_gate;
    Tensor shared_in, route, fc1, fc2;
  };
  void run(const Context& ctx) const;
  Weights weights(const Context& ctx, int64_t dim) const;
  void piece(const Work& work, const Weights& w, const float* x, const int64_t* tokens, int64_t rows, int64_t dim, float* out) const;
  int64_t experts, topk, width, shared;
  float limit, scale;
  bool rounded;
};

struct TopLogProbs {
  static constexpr const char *kName = "TopLogProbs", *kInputs = "fw", *kOutputs = "fi";
  explicit TopLogProbs(const Attributes& a);
  void run(const Context& ctx) const;
  void best(const Context& ctx, const float* x, int64_t rows, const Packed& w, float* values, int64_t* tokens) const;
  void piece(const Work& work, const float* x, int64_t rows, const Packed& w, float* values, int64_t* tokens) const;
  int64_t columns, topk;
  bool rounded;
};

// One row of every sequence, of two to five tensors.
struct TakeRow {
  static constexpr const char *kName = "TakeRow", *kInputs = "iffFFF", *kOutputs = "ffFFF";
  explicit TakeRow(const Attributes&) {}
  void run(const Context& ctx) const;
};

// Of a draft level: the input of its block, and what HyperMix makes of it.
struct DraftEntry {
  static constexpr const char *kName = "DraftEntry", *kInputs = "fwffIwff", *kOutputs = "ffff";
  explicit DraftEntry(const Attributes& a) : next(a), eps(a.real("eps")), rounded(a.integer("rounded")) {}
  void run(const Context& ctx) const;
  HyperMix next;
  float eps;
  bool rounded;
};

// Of a draft level: its candidates, and the frontier that the next level expands.
struct DraftFrontier {
  static constexpr const char *kName = "DraftFrontier", *kInputs = "fiFIFFF", *kOutputs = "fiiFIIFF";
  struct Proposed {  // log_probs, tokens [batch, nodes, topk], streams [batch, nodes, m, dim]
    const float* log_probs;
    const int64_t* tokens;
    const float* streams;
    int64_t batch, nodes, topk, m, dim;
  };
  explicit DraftFrontier(const Attributes& a) : level(a.integer("level")), first(a.integer("first")), last(a.integer("last")) {}
  void run(const Context& ctx) const;
  void advance(const Context& ctx, const Proposed& p, size_t at) const;
  std::vector<int64_t> choose(const Context& ctx, const Proposed& p, const float* scores) const;
  void expand(const Context& ctx, const Proposed& p, const std::vector<int64_t>& best, const Tensor& mask, const Tensor& levels) const;
  int64_t level, first;
  bool last;
};

// Of a draft level: the output of its block, the tokens that it proposes, and DraftFrontier.
struct DraftProposal {
  static constexpr const char *kName = "DraftProposal", *kInputs = "ffffwffwIFIFF", *kOutputs = "fiiFIIFF";
  explicit DraftProposal(const Attributes& a) : head(a), top(a), next(a) {}
  void run(const Context& ctx) const;
  HyperHead head;
  TopLogProbs top;
  DraftFrontier next;
};

// Rotations of one or more sets of positions, each by its frequencies.
struct RopeTables {
  static constexpr const char *kName = "RopeTables", *kInputs = "x", *kOutputs = "v";
  explicit RopeTables(const Attributes& a) : sets(a.integer("sets")) {}
  void run(const Context& ctx) const;
  int64_t sets;
};

// The embedding of every token, once for each stream.
struct EmbedStreams {
  static constexpr const char *kName = "EmbedStreams", *kInputs = "fi", *kOutputs = "f";
  explicit EmbedStreams(const Attributes& a) : m(a.integer("streams")) {}
  void run(const Context& ctx) const;
  int64_t m;
};

struct AttentionInputs {
  static constexpr const char *kName = "AttentionInputs", *kInputs = "fffffIFF", *kOutputs = "ffFFF";
  struct Split {  // what the projection of `rows` nodes is split with, and into
    int64_t rows, half, ratio;
    const float *q_norm, *kv_norm, *cos, *sin, *ape, *index_ape;
    const int64_t* position;
    float *q, *kv, *raw, *index_raw, *index_weights;
  };
  explicit AttentionInputs(const Attributes& a);
  void run(const Context& ctx) const;
  int64_t width() const { return q_width + head_dim + raw_width + index_width + index_heads; }
  void check(const Context& ctx, Split& s, size_t at, const Tensor& cos) const;
  Split part(Split s, int64_t first, int64_t last) const;
  void split(const Work& work, const float* projected, const Split& s) const;
  int64_t q_width, head_dim, raw_width, index_width, index_heads;
  float eps, index_scale;
};

struct AttentionProject {
  static constexpr const char *kName = "AttentionProject", *kInputs = "fwffffIFFW", *kOutputs = "fFFFF";
  explicit AttentionProject(const Attributes& a) : inputs(a), query_columns(a.integer("query_columns")), rounded(a.integer("rounded")) {}
  void run(const Context& ctx) const;
  AttentionInputs inputs;
  int64_t query_columns;
  bool rounded;
};

// Tensors of one shape, one for each layer, as one: [layers, ..]
struct StackLayers {
  static constexpr const char *kName = "StackLayers", *kInputs = "v", *kOutputs = "f";
  explicit StackLayers(const Attributes& a) : layers(a.integer("layers")) {}
  void run(const Context& ctx) const;
  int64_t layers;
};

struct TreePool {
  static constexpr const char *kName = "TreePool", *kInputs = "fififff", *kOutputs = "f";
  explicit TreePool(const Attributes& a);
  void run(const Context& ctx) const;
  float eps;
  int64_t slot_offset;  // added to every slot
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
  int64_t heads, topk, offset, entry_offset;  // the last is added to every row of entries
};

struct TreeAttention {
  static constexpr const char *kName = "TreeAttention", *kInputs = "ffiffFIFFfffFFFFFFF", *kOutputs = "f";
  static constexpr size_t kMoreParts = 7;
  explicit TreeAttention(const Attributes& a);
  void run(const Context& ctx) const;
  int64_t heads, window_offset, entry_offset;  // added to every row of the window, of entries
  float scale, eps;
};

// Operators that follow each other, each on the rows of its thread.
struct Region {
  static constexpr const char *kName = "Region", *kInputs = "x", *kOutputs = "x";
  struct Program;
  explicit Region(const Attributes& a);
  void run(const Context& ctx) const;
  std::shared_ptr<const Program> program;
};

int64_t region_members();  // threads that shared the rows of the last region

}  // namespace v4tree
