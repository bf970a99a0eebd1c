// Operators that are local to a token: linear, hyper-connections, mixture of experts, top log-probabilities.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "linear.h"
#include "ops.h"

namespace v4tree {

static Shape with_last(const Tensor& x, int64_t last) {
  Shape shape = x.shape();
  shape.dims[x.rank - 1] = last;
  return shape;
}

// x [.., groups * I], packed weight [groups][I, columns / groups], norm [groups * I] or none -> [.., columns]; a group of columns reads
// its group of inputs; with a norm every row is normed first; `rounded`: a bfloat16 weight takes rounded inputs. With a second packed weight
// [columns, then] that product of the result: [.., then]
Linear::Linear(const Attributes& a)
    : columns(a.integer("columns")), groups(a.integer("groups")), then(a.integer("then")), eps(a.real("eps")),
      rounded(a.integer("rounded")) {
  require(groups >= 1 && columns % groups == 0, "the columns do not divide into the groups");
}
void Linear::run(const Context& ctx) const {
  const Tensor x = ctx.input(0), weight = ctx.input(1), norm = ctx.input(2), second = ctx.input(3);
  const int64_t dim = x.dim(-1), rows = x.count() / dim, out = then ? then : columns;
  require(dim % groups == 0, "the inputs do not divide into the groups");
  const Packed one = part_of(weight, dim / groups, groups, 0, rounded);
  require(one.blocks == (columns / groups + kLanes - 1) / kLanes, "the packed weight does not fit the output");
  require(static_cast<bool>(second) == (then > 0), "a second product needs its weight");
  require(!norm || norm.count() == dim, "the norm does not fit the input");
  float* result = ctx.output_f32(0, with_last(x, out));
  const int64_t bytes = bytes_of(weight) + (second ? bytes_of(second) : 0);
  by_rows(ctx, rows, bytes, groups * linear_cost(rows, one), [&](const Work& work, int64_t first, int64_t last) {
    piece(work, x.f32() + first * dim, last - first, dim, weight, norm.f32(), second, result + first * out);
  });
}

void Linear::piece(const Work& work, const float* x, int64_t rows, int64_t dim, const Tensor& weight, const float* norm,
                   const Tensor& second, float* result) const {
  thread_local std::vector<float> normed, words, between;
  const int64_t inputs = dim / groups, width = columns / groups;
  const Packed one = part_of(weight, inputs, groups, 0, rounded);
  float* y = then ? scratch(between, rows * columns) : result;
  if (norm != nullptr) {
    float* to = scratch(normed, rows * dim);
    for (int64_t r = 0; r < rows; ++r) kernels().rms_norm(x + r * dim, norm, to + r * dim, dim, eps);
    x = to;
  }
  const Rows read = rows_of(x, rows * groups, inputs, one.form, words);  // a group is a row of its own
  work.split(groups * one.blocks, groups * linear_cost(rows, one), [&](int64_t first, int64_t last) {
    for (int64_t g = first / one.blocks; g * one.blocks < last; ++g) {
      const int64_t from = std::max<int64_t>(first - g * one.blocks, 0), to = std::min(last - g * one.blocks, one.blocks);
      const Packed part = part_of(weight, inputs, groups, g, rounded);
      kernels().linear(read.data + g * read.stride, groups * read.stride, rows, part, from, to, y + g * width, columns, width);
    }
  });
  if (then) linear_parallel(work, y, rows, packed(second, columns, rounded), result, then);
}

// table [V, D], tokens [B, N] -> [B, N, m, D]
void EmbedStreams::run(const Context& ctx) const {
  const Tensor table = ctx.input(0), tokens = ctx.input(1);
  require(table.rank == 2 && tokens.rank == 2, "an embedding needs a table and tokens by sequence");
  const int64_t dim = table.dim(1);
  float* out = ctx.output_f32(0, {tokens.dim(0), tokens.dim(1), m, dim});
  for (int64_t i = 0; i < tokens.count(); ++i) {
    const int64_t token = tokens.i64()[i];
    require(token >= 0 && token < table.dim(0), "a token id is out of range");
    for (int64_t j = 0; j < m; ++j) std::copy_n(table.f32() + token * dim, dim, out + (i * m + j) * dim);
  }
}

HyperMix::HyperMix(const Attributes& a)
    : m(a.integer("streams")), iterations(a.integer("iterations")), hc_eps(a.real("hc_eps")), norm_eps(a.real("norm_eps")) {
  require(m >= 1 && m <= 8, "the number of streams goes from 1 to 8");
}

// streams [B, N, m, D], packed fn [m D, 2 m + m m], base [2 m + m m], norm [D] -> normed input [B, N, D], post [B, N, 1, m], comb [B, N, m, m]
void HyperMix::run(const Context& ctx) const { mix(ctx, ctx.input(0), 1, 0); }

// The streams of `count` (16 at most) nodes from `first` on are at z.
void HyperMix::mix_nodes(const float* z, const Mixed& to, int64_t first, int64_t count) const {
  const int64_t dim = to.dim, gains = 2 * m + m * m;
  thread_local std::vector<float> words, buffer;
  float *mix = scratch(buffer, count * gains + m * m * kLanes), *lanes = mix + count * gains;
  if (count < kLanes) std::fill_n(lanes, m * m * kLanes, 0.0f);
  const Rows read = rows_of(z, count, m * dim, to.fn.form, words);
  kernels().linear(read.data, read.stride, count, to.fn, 0, to.fn.blocks, mix, gains, gains);
  for (int64_t r = 0; r < count; ++r) {
    float* row = mix + r * gains;
    const float scale = 1.0f / std::sqrt(kernels().mean_square(z + r * m * dim, m * dim) + norm_eps);
    for (int64_t g = 0; g < gains; ++g) row[g] = row[g] * scale + to.base[g];
    for (int64_t g = 0; g < m * m; ++g) lanes[g * kLanes + r] = row[2 * m + g];
    kernels().sigmoid(row, 2 * m);
    for (int64_t j = 0; j < m; ++j) to.post[(first + r) * m + j] = 2 * row[m + j], row[j] += hc_eps;
    float* out = to.x + (first + r) * dim;
    kernels().mix(z + r * m * dim, dim, row, m, out, dim);
    kernels().rms_norm(out, to.norm, out, dim, norm_eps);
  }
  kernels().sinkhorn(lanes, m, count, iterations, hc_eps);
  for (int64_t r = 0; r < count; ++r)
    for (int64_t g = 0; g < m * m; ++g) to.comb[(first + r) * m * m + g] = lanes[g * kLanes + r];
}

// Inputs from `at` on: packed fn, base, norm; outputs from `out` on.
HyperMix::Mixed HyperMix::outputs(const Context& ctx, const Tensor& streams, size_t at, size_t out) const {
  const Tensor base = ctx.input(at + 1), norm = ctx.input(at + 2);
  const int64_t dim = streams.dim(-1), batch = streams.dim(0), nodes = streams.dim(1);
  require(streams.dim(-2) == m, "the number of streams differs");
  require(base.count() == 2 * m + m * m && norm.count() == dim, "the base or norm of a hyper-connection has the wrong size");
  return {packed(ctx.input(at), m * dim), base.f32(), norm.f32(), dim, ctx.output_f32(out, {batch, nodes, dim}),
          ctx.output_f32(out + 1, {batch, nodes, 1, m}), ctx.output_f32(out + 2, {batch, nodes, m, m})};
}

void HyperMix::mix(const Context& ctx, const Tensor& streams, size_t at, size_t out) const {
  const Mixed to = outputs(ctx, streams, at, out);
  const int64_t rows = streams.count() / (m * to.dim);
  ctx.parallel((rows + kLanes - 1) / kLanes, [&](int64_t task) {
    const int64_t first = task * kLanes;
    mix_nodes(streams.f32() + first * m * to.dim, to, first, std::min<int64_t>(kLanes, rows - first));
  });
}

void post_mix(const Spread& s, int64_t r, float* result) {
  const int64_t size = s.m * s.dim;
  kernels().spread(s.streams + r * size, s.out + r * s.dim, s.post + r * s.m, s.comb + r * s.m * s.m, s.m, s.dim, result + r * size);
}

Spread spread(const Context& ctx) {
  const Tensor streams = ctx.input(0), out = ctx.input(1), post = ctx.input(2), comb = ctx.input(3);
  const int64_t m = streams.dim(2), dim = streams.dim(3), rows = streams.count() / (m * dim);
  require(m <= 8 && out.count() == rows * dim && post.count() == rows * m && comb.count() == rows * m * m,
          "hyper-connection shapes differ");
  return {streams.f32(), out.f32(), post.f32(), comb.f32(), m, dim, rows};
}

// streams [B, N, m, D], out [B, N, D], post [B, N, 1, m], comb [B, N, m, m] -> post[k] out + sum_j comb[j, k] streams[j]
void HyperPost::run(const Context& ctx) const {
  const Tensor streams = ctx.input(0);
  const Spread s = spread(ctx);
  float* result = ctx.output_f32(0, {streams.dim(0), streams.dim(1), s.m, s.dim});
  ctx.split(s.rows, s.rows * s.m * (s.m + 1) * s.dim / 16, [&](int64_t first, int64_t last) {
    for (int64_t r = first; r < last; ++r) post_mix(s, r, result);
  });
}

// Inputs of HyperPost, then fn, base and norm of the next site -> the streams, and what HyperMix makes of them
HyperPostMix::HyperPostMix(const Attributes& a) : next(a) {}
void HyperPostMix::run(const Context& ctx) const {
  Tensor streams = ctx.input(0);
  const Spread s = spread(ctx);
  float* result = ctx.output_f32(0, {streams.dim(0), streams.dim(1), s.m, s.dim});
  const HyperMix::Mixed to = next.outputs(ctx, streams, 4, 1);
  const int64_t groups = mix_groups(s.rows, ctx.threads());
  ctx.parallel(groups, [&](int64_t task) {
    const int64_t first = s.rows * task / groups, last = s.rows * (task + 1) / groups;
    for (int64_t r = first; r < last; ++r) post_mix(s, r, result);
    next.mix_nodes(result + first * s.m * s.dim, to, first, last - first);
  });
}

// Rows `nodes` [B, R] of streams [B, N, m, D]: where they lie if they are all, in order, else a copy.
static const float* picked(const Tensor& streams, const Tensor& nodes) {
  require(streams.rank == 4 && nodes.rank == 2 && nodes.dim(0) == streams.dim(0), "there are not as many rows of nodes as sequences");
  const int64_t all = streams.dim(1), count = nodes.dim(1), size = streams.count(2);
  bool in_order = count == all;
  for (int64_t i = 0; i < nodes.count(); ++i) {
    const int64_t node = nodes.i64()[i];
    require(node >= 0 && node < all, "a node is out of range");
    in_order &= node == i % count;
  }
  if (in_order) return streams.f32();
  thread_local std::vector<float> buffer;
  float* rows = scratch(buffer, nodes.count() * size);
  for (int64_t i = 0; i < nodes.count(); ++i)
    std::copy_n(streams.f32() + (i / count * all + nodes.i64()[i]) * size, size, rows + i * size);
  return rows;
}

// streams [B, N, m, D], packed fn [m D, m], base [m], norm [D], the nodes that are wanted [B, R] or none (all) -> normed sum of the streams
// [B, R, D]
HyperHead::HyperHead(const Attributes& a) : hc_eps(a.real("hc_eps")), norm_eps(a.real("norm_eps")) {}
void HyperHead::run(const Context& ctx) const {
  const Tensor streams = ctx.input(0), nodes = ctx.input(4);
  const Weights w = weights(ctx, streams, 1);
  const int64_t rows = nodes ? nodes.count() : streams.count() / (w.m * w.dim);
  const float* from = nodes ? picked(streams, nodes) : streams.f32();
  float* x = ctx.output_f32(0, {streams.dim(0), nodes ? nodes.dim(1) : streams.dim(1), w.dim});
  ctx.split(rows, linear_cost(rows, w.fn), [&](int64_t first, int64_t last) { reduce(from, w, first, last, x); });
}

HyperHead::Weights HyperHead::weights(const Context& ctx, const Tensor& streams, size_t at) const {
  const Tensor base = ctx.input(at + 1), norm = ctx.input(at + 2);
  const int64_t m = streams.dim(-2), dim = streams.dim(-1);
  require(base.count() == m && norm.count() == dim, "the base or norm of the head has the wrong size");
  return {packed(ctx.input(at), m * dim), base.f32(), norm.f32(), m, dim};
}

void HyperHead::reduce(const float* streams, const Weights& w, int64_t first, int64_t last, float* x) const {
  const int64_t m = w.m, dim = w.dim;
  thread_local std::vector<float> words, buffer;
  float* mix = scratch(buffer, (last - first) * m);
  const Rows read = rows_of(streams + first * m * dim, last - first, m * dim, w.fn.form, words);
  kernels().linear(read.data, read.stride, last - first, w.fn, 0, w.fn.blocks, mix, m, m);
  for (int64_t r = first; r < last; ++r) {
    const float* z = streams + r * m * dim;
    float* row = mix + (r - first) * m;
    const float scale = 1.0f / std::sqrt(kernels().mean_square(z, m * dim) + norm_eps);
    for (int64_t j = 0; j < m; ++j) row[j] = row[j] * scale + w.base[j];
    kernels().sigmoid(row, m);
    for (int64_t j = 0; j < m; ++j) row[j] += hc_eps;
    kernels().mix(z, dim, row, m, x + r * dim, dim);
    kernels().rms_norm(x + r * dim, w.norm, x + r * dim, dim, norm_eps);
  }
}

MixtureOfExperts::MixtureOfExperts(const Attributes& a)
    : experts(a.integer("experts")), topk(a.integer("topk")), width(a.integer("width")), shared(a.integer("shared")),
      limit(a.real("limit")), scale(a.real("scale")), rounded(a.integer("rounded")) {
  require(topk >= 1 && topk <= experts, "topk goes from 1 to the number of experts");
}

namespace {

struct Routing {
  std::vector<int64_t> start;  // [experts + 1] into token and share
  std::vector<int64_t> token;  // tokens of expert 0, of expert 1, ..
  std::vector<float> share;
};

}  // namespace

// logits [rows, experts]; route: bias [E] or expert ids by token [V, k]
static const Routing& route_tokens(const MixtureOfExperts& op, const float* logits, int64_t rows, const Tensor& route, const int64_t* tokens) {
  const bool hashed = route.type == ort::kInt64;
  thread_local std::vector<int64_t> chosen, order, next;
  thread_local std::vector<float> weight, scores, biased;
  chosen.resize(rows * op.topk), order.resize(op.experts), weight.resize(rows * op.topk), biased.resize(op.experts);
  scores.resize(rows * op.experts);
  kernels().sqrt_softplus(logits, scores.data(), rows * op.experts);
  thread_local Routing r;
  r.start.assign(op.experts + 1, 0);
  for (int64_t t = 0; t < rows; ++t) {
    const float* score = scores.data() + t * op.experts;
    if (hashed) {
      require(tokens[t] >= 0 && tokens[t] < route.dim(0), "a token id is out of range");
      std::copy_n(route.i64() + tokens[t] * op.topk, op.topk, chosen.begin() + t * op.topk);
    } else {
      for (int64_t e = 0; e < op.experts; ++e) biased[e] = score[e] + route.f32()[e];
      std::iota(order.begin(), order.end(), 0);
      std::partial_sort(order.begin(), order.begin() + op.topk, order.end(), Descending{biased.data()});
      std::copy_n(order.begin(), op.topk, chosen.begin() + t * op.topk);
    }
    float sum = 0;
    for (int64_t k = 0; k < op.topk; ++k) {
      const int64_t e = chosen[t * op.topk + k];
      require(e >= 0 && e < op.experts, "an expert id is out of range");
      sum += weight[t * op.topk + k] = score[e];
      ++r.start[e + 1];
    }
    for (int64_t k = 0; k < op.topk; ++k) weight[t * op.topk + k] *= op.scale / sum;
  }
  for (int64_t e = 0; e < op.experts; ++e) r.start[e + 1] += r.start[e];
  r.token.resize(rows * op.topk);
  r.share.resize(rows * op.topk);
  next.assign(r.start.begin(), r.start.end() - 1);
  for (int64_t i = 0; i < rows * op.topk; ++i) {
    const int64_t at = next[chosen[i]]++;
    r.token[at] = i / op.topk;
    r.share[at] = weight[i];
  }
  return r;
}

namespace {

// Gate, up and act of SwiGLU rows, side by side.
struct Activations {
  float *gate, *up, *act;
  int64_t width;
  Activations(float* at, int64_t rows, int64_t width) : gate(at), up(at + rows * width), act(at + 2 * rows * width), width(width) {}
  static int64_t size(int64_t rows, int64_t width) { return 3 * rows * width; }

  // Column blocks from..to of `count` rows from `first` on, their inputs at x; expert e of a stack of `experts`, with shares (1 if none).
  void run(const Rows& x, int64_t first, int64_t count, const Tensor& stack, int64_t dim, int64_t experts, int64_t e, bool rounded,
           int64_t from, int64_t to, float limit, const float* share) const {
    const int64_t left = from * kLanes, right = std::min(to * kLanes, width);
    for (int64_t half = 0; half < 2; ++half) {
      const Packed w = part_of(stack, dim, 2 * experts, 2 * e + half, rounded);
      kernels().linear(x.data, x.stride, count, w, from, to, (half ? up : gate) + first * width, width, width);
    }
    for (int64_t i = first; i < first + count; ++i) {
      const int64_t at = i * width + left;
      kernels().swiglu(gate + at, up + at, act + at, right - left, limit, share ? share[i] : 1.0f);
    }
  }
};

}  // namespace

MixtureOfExperts::Weights MixtureOfExperts::weights(const Context& ctx, int64_t dim) const {
  const Tensor shared_in = ctx.input(3), fc1 = ctx.input(6);
  const Weights w{packed(ctx.input(2), dim, rounded), packed(ctx.input(4), shared, rounded), part_of(fc1, dim, 2 * experts, 0, rounded),
                  part_of(shared_in, dim, 2, 0, rounded), shared_in, ctx.input(5), fc1, ctx.input(7)};
  require(w.gate.form == w.shared_gate.form && w.gate.form == w.shared_out.form, "experts are stored in more than one form");
  return w;
}

// x [.., D], token ids [..], router [D, E], shared_in [gate, up][D, S], shared_out [S, D], route: bias [E] or ids by token [V, k],
// fc1 [E][gate, up][D, I], fc2 [E][I, D], all packed -> shared expert + scale * sum of the routed ones [.., D]
void MixtureOfExperts::run(const Context& ctx) const {
  const Tensor x = ctx.input(0), tokens = ctx.input(1);
  const int64_t dim = x.dim(-1), rows = x.count() / dim;
  const Weights w = weights(ctx, dim);
  require(tokens.count() == rows, "there is not one token id per row");
  float* out = ctx.output_f32(0, with_last(x, dim));
  const int64_t bytes = bytes_of(w.shared_in) + bytes_of(w.fc1) + bytes_of(w.fc2);
  by_rows(ctx, rows, bytes, 2 * linear_cost(rows * topk, w.gate), [&](const Work& work, int64_t first, int64_t last) {
    piece(work, w, x.f32() + first * dim, tokens.i64() + first, last - first, dim, out + first * dim);
  });
}

void MixtureOfExperts::piece(const Work& work, const Weights& w, const float* x, const int64_t* tokens, int64_t rows, int64_t dim,
                             float* out) const {
  thread_local std::vector<float> buffer, router_words, words, act_words, shared_words;
  const int64_t pairs = rows * topk;
  const Rows read = rows_of(x, rows, dim, w.gate.form, words);
  const int64_t hidden = Activations::size(pairs, width) + Activations::size(rows, shared);
  float* logits = scratch(buffer, rows * experts + pairs * (read.stride + dim) + hidden);
  float *gathered = logits + rows * experts, *sums = gathered + pairs * read.stride;
  const Activations routed(sums + pairs * dim, pairs, width), common(routed.act + pairs * width, rows, shared);

  const Rows routed_by = w.router.form == w.gate.form ? read : rows_of(x, rows, dim, w.router.form, router_words);
  linear_parallel(work, routed_by, rows, w.router, logits, experts);
  const Routing& r = route_tokens(*this, logits, rows, w.route, tokens);
  for (int64_t i = 0; i < pairs; ++i) std::copy_n(read.data + r.token[i] * read.stride, read.stride, gathered + i * read.stride);

  // Threads that share rows take the same share of the columns of every expert.
  const auto each_expert = [&](auto&& body) {
    for (int64_t e = 0; e < experts; ++e)
      if (const int64_t count = r.start[e + 1] - r.start[e]) body(e, r.start[e], count);
  };
  const int64_t blocks = w.gate.blocks, cost = 2 * (linear_cost(pairs, w.gate) + linear_cost(rows, w.shared_gate));
  work.split(blocks, cost, [&](int64_t from, int64_t to) {
    const int64_t left = w.shared_gate.blocks * from / blocks, right = w.shared_gate.blocks * to / blocks;
    common.run(read, 0, rows, w.shared_in, dim, 1, 0, rounded, left, right, limit, nullptr);
    each_expert([&](int64_t e, int64_t first, int64_t count) {
      const Rows own{gathered + first * read.stride, read.stride};
      routed.run(own, first, count, w.fc1, dim, experts, e, rounded, from, to, limit, r.share.data());
    });
  });
  const Rows active = rows_of(routed.act, pairs, width, w.gate.form, act_words);
  const Rows shared_active = rows_of(common.act, rows, shared, w.gate.form, shared_words);
  work.split(w.shared_out.blocks, cost / 2, [&](int64_t from, int64_t to) {
    const int64_t left = from * kLanes, right = std::min(dim, to * kLanes);
    kernels().linear(shared_active.data, shared_active.stride, rows, w.shared_out, from, to, out, dim, dim);
    each_expert([&](int64_t e, int64_t first, int64_t count) {
      const Packed down = part_of(w.fc2, width, experts, e, rounded);
      kernels().linear(active.data + first * active.stride, active.stride, count, down, from, to, sums + first * dim, dim, dim);
      for (int64_t i = first; i < first + count; ++i) kernels().add(sums + i * dim + left, out + r.token[i] * dim + left, right - left);
    });
  });
}

// x [.., D], packed head [D, V] -> the k largest log-probabilities, descending, and their tokens [.., k]
TopLogProbs::TopLogProbs(const Attributes& a)
    : columns(a.integer("columns")), topk(a.integer("topk")), rounded(a.integer("rounded")) {
  require(topk >= 1 && topk <= columns, "topk goes from 1 to the size of the vocabulary");
}
void TopLogProbs::run(const Context& ctx) const {
  const Tensor x = ctx.input(0);
  const Packed w = packed(ctx.input(1), x.dim(-1), rounded);
  float* values = ctx.output_f32(0, with_last(x, topk));
  best(ctx, x.f32(), x.count() / x.dim(-1), w, values, static_cast<int64_t*>(ctx.output(1, with_last(x, topk))));
}

void TopLogProbs::best(const Context& ctx, const float* x, int64_t rows, const Packed& w, float* values, int64_t* tokens) const {
  by_rows(ctx, rows, w.block_bytes() * w.blocks, linear_cost(rows, w), [&](const Work& work, int64_t first, int64_t last) {
    piece(work, x + first * w.inputs, last - first, w, values + first * topk, tokens + first * topk);
  });
}

void TopLogProbs::piece(const Work& work, const float* x, int64_t rows, const Packed& w, float* values, int64_t* tokens) const {
  thread_local std::vector<float> buffer;
  float* logits = scratch(buffer, rows * columns);
  linear_parallel(work, x, rows, w, logits, columns);
  work.split(rows, rows * columns * 2, [&](int64_t first, int64_t last) {
    std::vector<std::pair<float, int64_t>> best(topk);
    for (int64_t r = first; r < last; ++r) {
      const float* row = logits + r * columns;
      const auto insert = [&](int64_t held, int64_t c) {  // into a short sorted list; equal values keep the lower token first
        int64_t at = held;
        for (; at > 0 && row[c] > best[at - 1].first; --at)
          if (at < topk) best[at] = best[at - 1];
        if (at < topk) best[at] = {row[c], c};
      };
      for (int64_t c = 0; c < topk; ++c) insert(c, c);
      for (int64_t c = topk; (c = kernels().next_above(row, c, columns, best[topk - 1].first)) < columns; ++c) insert(topk, c);
      const float top = best[0].first, norm = kernels().log_sum_exp(row, columns, top);
      for (int64_t k = 0; k < topk; ++k) values[r * topk + k] = best[k].first - top - norm, tokens[r * topk + k] = best[k].second;
    }
  });
}

}  // namespace v4tree
