// Operators of a draft level: the input of its block, what it proposes, and the frontier that is expanded next.
#include <algorithm>
#include <numeric>

#include "linear.h"
#include "ops.h"

namespace v4tree {

// index [B, 1], values [B, S, ..] each -> [B, 1, ..] each
void TakeRow::run(const Context& ctx) const {
  const Tensor index = ctx.input(0);
  for (size_t i = 0; i < std::strlen(kOutputs); ++i) {
    const Tensor values = ctx.input(1 + i);
    if (!values) return;
    require(values.rank >= 2 && index.count() == values.dim(0), "there is not one index per sequence");
    Shape shape = values.shape();
    shape.dims[1] = 1;
    float* out = ctx.output_f32(i, shape);
    const int64_t size = values.count(2);
    for (int64_t b = 0; b < values.dim(0); ++b) {
      require(index.i64()[b] >= 0 && index.i64()[b] < values.dim(1), "a row is out of range");
      std::copy_n(values.f32() + (b * values.dim(1) + index.i64()[b]) * size, size, out + b * size);
    }
  }
}

// to += the row of its token, in every stream of the nodes first..last
static void add_rows(const float* table, const int64_t* tokens, int64_t m, int64_t dim, int64_t first, int64_t last, float* to) {
  for (int64_t i = first * m; i < last * m; ++i) {
    const int64_t row = tokens != nullptr ? tokens[i / m] : i / m;
    kernels().add(table + row * dim, to + i * dim, dim);
  }
}

// streams [B, N, m, D], packed h_proj [D, D], hnorm [D], table [V, D] with tokens [B, N] or the rows [B, N, D] themselves, then fn, base
// and norm of HyperMix -> h_proj(norm(streams)) + row [B, N, m, D], and what HyperMix makes of it
void DraftEntry::run(const Context& ctx) const {
  const Tensor streams = ctx.input(0), norm = ctx.input(2), table = ctx.input(3), tokens = ctx.input(4);
  const int64_t m = next.m, dim = streams.dim(-1), rows = streams.count() / dim, nodes = rows / m;
  const Packed w = packed(ctx.input(1), dim, rounded);
  require(streams.rank == 4 && w.blocks == (dim + kLanes - 1) / kLanes && norm.count() == dim && table.dim(-1) == dim,
          "the projection, norm or table does not fit the streams");
  require(tokens ? tokens.count() == nodes && table.rank == 2 : table.count() == nodes * dim, "there is not one row per node");
  for (int64_t i = 0; tokens && i < nodes; ++i)
    require(tokens.i64()[i] >= 0 && tokens.i64()[i] < table.dim(0), "a token id is out of range");
  const HyperMix::Mixed to = next.outputs(ctx, streams, 5, 1);
  float* result = ctx.output_f32(0, {streams.dim(0), streams.dim(1), m, dim});
  thread_local std::vector<float> buffer;
  float* normed = scratch(buffer, rows * dim);
  for (int64_t r = 0; r < rows; ++r) kernels().rms_norm(streams.f32() + r * dim, norm.f32(), normed + r * dim, dim, eps);
  linear_parallel(ctx, normed, rows, w, result, dim);
  const int64_t groups = mix_groups(nodes, ctx.threads());
  ctx.parallel(groups, [&](int64_t task) {
    const int64_t first = nodes * task / groups, last = nodes * (task + 1) / groups;
    add_rows(table.f32(), tokens ? tokens.i64() : nullptr, m, dim, first, last, result);
    next.mix_nodes(result + first * m * dim, to, first, last - first);
  });
}

// log-probabilities and tokens [B, F, k] of the children of F nodes, then scores and candidate ids [B, F] of these or none (the root), and
// for a next level mask [B, F, W + A], level masks [B, L, W] and streams [B, F, m, D] -> scores, tokens and parents [B, F k] of the children;
// of the k best children (of equal ones the first) scores, tokens and candidate ids (from `first` on) [B, k], the streams of their parents
// [B, k, m, D], and what they see [B, k, W + A + k]: the row of the level, what their parent saw of the drafted rows, themselves.
void DraftFrontier::run(const Context& ctx) const {
  const Tensor log_probs = ctx.input(0), tokens = ctx.input(1), streams = ctx.input(6);
  const int64_t batch = log_probs.dim(0), nodes = log_probs.dim(1), topk = log_probs.dim(2);
  require(tokens.count() == batch * nodes * topk, "there is not one token per log-probability");
  if (streams) require(streams.rank == 4 && streams.dim(0) == batch && streams.dim(1) == nodes, "the streams do not fit the frontier");
  advance(ctx, {log_probs.f32(), tokens.i64(), streams.f32(), batch, nodes, topk, streams.dims[2], streams.dims[3]}, 2);
}

// Inputs from `at` on: scores, candidate ids, mask, level masks.
void DraftFrontier::advance(const Context& ctx, const Proposed& p, size_t at) const {
  const Tensor behind = ctx.input(at), ids = ctx.input(at + 1);
  const int64_t count = p.batch * p.nodes;
  require(p.nodes >= 1 && (!behind || behind.count() == count) && (!ids || ids.count() == count), "scores or ids do not fit the frontier");
  const Shape dims{p.batch, p.nodes * p.topk};
  float* scores = ctx.output_f32(0, dims);
  int64_t *tokens = static_cast<int64_t*>(ctx.output(1, dims)), *parents = static_cast<int64_t*>(ctx.output(2, dims));
  std::copy_n(p.tokens, count * p.topk, tokens);
  for (int64_t i = 0; i < count * p.topk; ++i) {
    scores[i] = behind ? p.log_probs[i] + behind.f32()[i / p.topk] : p.log_probs[i];
    parents[i] = ids ? ids.i64()[i / p.topk] : -1;
  }
  if (last) return;
  const std::vector<int64_t> best = choose(ctx, p, scores);
  expand(ctx, p, best, ctx.input(at + 2), ctx.input(at + 3));
}

// The best children of each sequence: their numbers among all, b F k + i.
std::vector<int64_t> DraftFrontier::choose(const Context& ctx, const Proposed& p, const float* scores) const {
  const Shape dims{p.batch, p.topk};
  const int64_t children = p.nodes * p.topk;
  float* held = ctx.output_f32(3, dims);
  int64_t *tokens = static_cast<int64_t*>(ctx.output(4, dims)), *ids = static_cast<int64_t*>(ctx.output(5, dims));
  std::vector<int64_t> order(children), best;
  for (int64_t b = 0; b < p.batch; ++b) {
    std::iota(order.begin(), order.end(), b * children);
    std::partial_sort(order.begin(), order.begin() + p.topk, order.end(), Descending{scores});
    best.insert(best.end(), order.begin(), order.begin() + p.topk);
  }
  for (int64_t i = 0; i < p.batch * p.topk; ++i) {
    held[i] = scores[best[i]], tokens[i] = p.tokens[best[i]];
    ids[i] = first + best[i] % children;
  }
  return best;
}

void DraftFrontier::expand(const Context& ctx, const Proposed& p, const std::vector<int64_t>& best, const Tensor& mask, const Tensor& levels) const {
  require(mask.rank == 3 && levels.rank == 3 && mask.dim(0) == p.batch && mask.dim(1) == p.nodes && levels.dim(0) == p.batch &&
              level >= 0 && level < levels.dim(1) && mask.dim(2) >= levels.dim(2),
          "the masks do not fit the frontier");
  const int64_t k = p.topk, size = p.m * p.dim, base = levels.dim(2), seen = mask.dim(2), width = seen + k;
  float *streams = ctx.output_f32(6, {p.batch, k, p.m, p.dim}), *visible = ctx.output_f32(7, {p.batch, k, width});
  for (int64_t i = 0; i < p.batch * k; ++i) {
    const int64_t parent = best[i] / k;
    std::copy_n(p.streams + parent * size, size, streams + i * size);
    float* to = visible + i * width;
    std::copy_n(levels.f32() + (i / k * levels.dim(1) + level) * base, base, to);
    std::copy_n(mask.f32() + parent * seen + base, seen - base, to + base);
    std::fill_n(to + seen, k, kHidden);
    to[seen + i % k] = 0.0f;
  }
}

// Inputs of HyperPost, then fn, base and norm of HyperHead, the packed head, the token of each of its columns [columns] or none, then
// scores, candidate ids, mask and level masks of DraftFrontier -> its outputs
void DraftProposal::run(const Context& ctx) const {
  const Tensor streams = ctx.input(0), ids = ctx.input(8);
  const Spread s = spread(ctx);
  const HyperHead::Weights own = head.weights(ctx, streams, 4);
  const Packed w = packed(ctx.input(7), s.dim, top.rounded);
  require(w.blocks == (top.columns + kLanes - 1) / kLanes && (!ids || ids.count() == top.columns), "the head has the wrong size");
  thread_local std::vector<float> buffer;
  thread_local std::vector<int64_t> tokens;
  float *result = scratch(buffer, s.rows * ((s.m + 1) * s.dim + top.topk)), *x = result + s.rows * s.m * s.dim, *values = x + s.rows * s.dim;
  tokens.resize(s.rows * top.topk);
  ctx.split(s.rows, s.rows * s.m * (s.m + 1) * s.dim / 16 + linear_cost(s.rows, own.fn), [&](int64_t first, int64_t last) {
    for (int64_t r = first; r < last; ++r) post_mix(s, r, result);
    head.reduce(result, own, first, last, x);
  });
  top.best(ctx, x, s.rows, w, values, tokens.data());
  if (ids)
    for (int64_t& token : tokens) token = ids.i64()[token];
  next.advance(ctx, {values, tokens.data(), result, streams.dim(0), streams.dim(1), top.topk, s.m, s.dim}, 9);
}

}  // namespace v4tree
