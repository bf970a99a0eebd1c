// Operators that know the tree: compressor pools, indexer selection, attention over window, nodes, entries and branch entries.
#include <cmath>
#include <numeric>

#include "linear.h"
#include "ops.h"

namespace v4tree {

// Interleaved rotation of the leading 2 * half values of a head.
static void rotate(float* x, const float* cos, const float* sin, int64_t half, float sign) {
  for (int64_t i = 0; i < half; ++i) {
    const float a = x[2 * i], b = x[2 * i + 1], s = sign * sin[i];
    x[2 * i] = a * cos[i] - b * s;
    x[2 * i + 1] = a * s + b * cos[i];
  }
}

static void rotation(const int64_t* positions, int64_t r, const float* frequencies, int64_t half, float* cos, float* sin, float* neg) {
  const int64_t at = r * half;
  if (r > 0 && positions[r] == positions[r - 1]) {  // siblings lie side by side
    for (float* table : {cos, sin, neg}) std::copy_n(table + at - half, half, table + at);
    return;
  }
  for (int64_t i = 0; i < half; ++i) {
    const float angle = static_cast<float>(positions[r]) * frequencies[i];
    cos[at + i] = std::cos(angle), sin[at + i] = std::sin(angle), neg[at + i] = -sin[at + i];
  }
}

// of each set positions [B, S], inverse frequencies [rope / 2] -> cos, sin, -sin [B, S, rope / 2]
void RopeTables::run(const Context& ctx) const {
  for (int64_t set = 0; set < sets; ++set) {
    const Tensor positions = ctx.input(2 * set), frequencies = ctx.input(2 * set + 1);
    require(positions.type == ort::kInt64 && positions.rank == 2 && frequencies.type == ort::kFloat, "a rotation needs positions and frequencies");
    const int64_t count = positions.count(), half = frequencies.count();
    const Shape dims{positions.dim(0), positions.dim(1), half};
    float *cos = ctx.output_f32(3 * set, dims), *sin = ctx.output_f32(3 * set + 1, dims), *neg = ctx.output_f32(3 * set + 2, dims);
    for (int64_t r = 0; r < count; ++r) rotation(positions.i64(), r, frequencies.f32(), half, cos, sin, neg);
  }
}

AttentionInputs::AttentionInputs(const Attributes& a)
    : q_width(a.integer("q_width")), head_dim(a.integer("head_dim")), raw_width(a.integer("raw_width")),
      index_width(a.integer("index_width")), index_heads(a.integer("index_heads")), eps(a.real("eps")),
      index_scale(a.real("index_scale")) {}

// Inputs from `at` on: q_norm, kv_norm, cos, sin [B, N, rope / 2], positions [B, N], ape and index ape [ratio, width].
void AttentionInputs::check(const Context& ctx, Split& s, size_t at, const Tensor& cos) const {
  const Tensor q_norm = ctx.input(at), kv_norm = ctx.input(at + 1), sin = ctx.input(at + 3), position = ctx.input(at + 4);
  const Tensor ape = ctx.input(at + 5), index_ape = ctx.input(at + 6);
  s.half = cos.dim(-1);
  require(q_norm.count() == q_width && kv_norm.count() == head_dim && 2 * s.half <= head_dim, "a norm or rotation has the wrong size");
  require(cos.count() == s.rows * s.half && sin.count() == cos.count(), "there is not one rotation per node");
  require(raw_width == 0 || (position.count() == s.rows && ape.dim(-1) == raw_width), "the position bias has the wrong size");
  require(index_width == 0 || index_ape.dim(-1) == index_width, "the position bias has the wrong size");
  for (int64_t r = 0; raw_width != 0 && r < s.rows; ++r)
    require(position.i64()[r] >= 0, "a position is out of range");
  s.ratio = ape ? ape.dim(0) : 1;
  require(s.ratio > 0 && (index_width == 0 || index_ape.dim(0) == s.ratio), "the position biases have different ratios");
  s.q_norm = q_norm.f32(), s.kv_norm = kv_norm.f32(), s.cos = cos.f32(), s.sin = sin.f32();
  s.position = position.i64(), s.ape = ape.f32(), s.index_ape = index_ape.f32();
}

// The same of some of the rows.
AttentionInputs::Split AttentionInputs::part(Split s, int64_t first, int64_t last) const {
  const auto advance = [](auto*& at, int64_t by) { at = at == nullptr ? nullptr : at + by; };
  s.rows = last - first;
  advance(s.cos, first * s.half), advance(s.sin, first * s.half), advance(s.position, first), advance(s.q, first * q_width);
  advance(s.kv, first * head_dim), advance(s.raw, first * raw_width), advance(s.index_raw, first * index_width);
  advance(s.index_weights, first * index_heads);
  return s;
}

void AttentionInputs::split(const Work& work, const float* projected, const Split& s) const {
  work.split(s.rows, s.rows * width() / 2, [&](int64_t first, int64_t last) {
    for (int64_t r = first; r < last; ++r) {
      const float* from = projected + r * width();
      if (s.q != nullptr) kernels().rms_norm(from, s.q_norm, s.q + r * q_width, q_width, eps);
      kernels().rms_norm(from += q_width, s.kv_norm, s.kv + r * head_dim, head_dim, eps);
      rotate(s.kv + r * head_dim, s.cos + r * s.half, s.sin + r * s.half, s.half, 1);
      from += head_dim;
      if (s.raw == nullptr) continue;
      const int64_t p = s.position[r] % s.ratio;
      for (int64_t c = 0; c < raw_width; ++c) s.raw[r * raw_width + c] = from[c] + s.ape[p * raw_width + c];
      from += raw_width;
      if (s.index_raw == nullptr) continue;
      for (int64_t c = 0; c < index_width; ++c) s.index_raw[r * index_width + c] = from[c] + s.index_ape[p * index_width + c];
      for (int64_t c = 0; c < index_heads; ++c) s.index_weights[r * index_heads + c] = from[index_width + c] * index_scale;
    }
  });
}

// projected [B, N, q | kv | raw | index raw | index weights], then the inputs of `check` -> normed q input, window row (normed, rotated),
// raw rows with their position bias, index raw rows, index weights
void AttentionInputs::run(const Context& ctx) const {
  const Tensor x = ctx.input(0);
  const int64_t batch = x.dim(0), nodes = x.dim(1);
  require(x.dim(2) == width(), "the projected width is not the sum of its parts");
  Split s{};
  s.rows = batch * nodes;
  check(ctx, s, 1, ctx.input(3));
  s.q = ctx.output_f32(0, {batch, nodes, q_width});
  s.kv = ctx.output_f32(1, {batch, nodes, head_dim});
  if (raw_width) s.raw = ctx.output_f32(2, {batch, nodes, raw_width});
  if (index_width) s.index_raw = ctx.output_f32(3, {batch, nodes, index_width});
  if (index_heads) s.index_weights = ctx.output_f32(4, {batch, nodes, index_heads});
  split(ctx, x.f32(), s);
}

// x [B, N, D], packed input projection [D, width], the inputs of `check`, packed query projection [q, queries] or none -> window row,
// queries, raw rows, index raw rows, index weights
void AttentionProject::run(const Context& ctx) const {
  const Tensor x = ctx.input(0), query_weight = ctx.input(9);
  const int64_t batch = x.dim(0), nodes = x.dim(1), dim = x.dim(2), width = inputs.width();
  AttentionInputs::Split s{};
  s.rows = batch * nodes;
  inputs.check(ctx, s, 2, ctx.input(4));
  const Packed in_proj = packed(ctx.input(1), dim, rounded);
  require(in_proj.blocks == (width + kLanes - 1) / kLanes, "the packed weight does not fit the output");
  s.kv = ctx.output_f32(0, {batch, nodes, inputs.head_dim});
  float* queries = query_weight ? ctx.output_f32(1, {batch, nodes, query_columns}) : nullptr;
  if (inputs.raw_width) s.raw = ctx.output_f32(2, {batch, nodes, inputs.raw_width});
  if (inputs.index_width) s.index_raw = ctx.output_f32(3, {batch, nodes, inputs.index_width});
  if (inputs.index_heads) s.index_weights = ctx.output_f32(4, {batch, nodes, inputs.index_heads});
  const Packed query = queries ? packed(query_weight, inputs.q_width, rounded) : Packed{};
  require(!queries || query.blocks == (query_columns + kLanes - 1) / kLanes, "the packed weight does not fit the output");
  const int64_t bytes = bytes_of(ctx.input(1)) + (queries ? bytes_of(query_weight) : 0);
  by_rows(ctx, s.rows, bytes, linear_cost(s.rows, in_proj), [&](const Work& work, int64_t first, int64_t last) {
    thread_local std::vector<float> projected, normed;
    AttentionInputs::Split own = inputs.part(s, first, last);
    if (queries != nullptr) own.q = scratch(normed, own.rows * inputs.q_width);
    float* all = scratch(projected, own.rows * width);
    linear_parallel(work, x.f32() + first * dim, own.rows, in_proj, all, width);
    inputs.split(work, all, own);
    if (queries != nullptr) linear_parallel(work, own.q, own.rows, query, queries + first * query_columns, query_columns);
  });
}

void StackLayers::run(const Context& ctx) const {
  const Tensor like = ctx.input(0);
  Shape dims{layers};
  dims.append(like.dims, like.dims + like.rank);
  float* out = ctx.output_f32(0, dims);
  for (int64_t layer = 0; layer < layers; ++layer) {
    const Tensor x = ctx.input(layer);
    require(x.count() == like.count(), "the layers differ in shape");
    std::copy_n(x.f32(), x.count(), out + layer * like.count());
  }
}

// state [slots, S, 2 dim], slots [B], raw [B, N, halves * 2 dim], table [B, M, T] (S states, one null row, then raw rows; a part per half,
// each from the oldest row on), norm [dim], cos, sin [B, M, rope / 2] -> entries [B, M, dim]
TreePool::TreePool(const Attributes& a) : eps(a.real("eps")), slot_offset(a.integer("slot_offset")) {}
void TreePool::run(const Context& ctx) const {
  const Tensor state = ctx.input(0), slots = ctx.input(1), raw = ctx.input(2), table = ctx.input(3), norm = ctx.input(4);
  const Tensor cos = ctx.input(5), sin = ctx.input(6);
  const int64_t batch = table.dim(0), entries = table.dim(1), width = table.dim(2), dim = norm.count(), held = state.dim(1);
  require(dim % kLanes == 0 && state.dim(2) == 2 * dim, "the compressor width must be a multiple of 16");
  const int64_t rows = raw.count(1) / (2 * dim), half = cos.dim(-1), halves = raw.dim(2) / (2 * dim);
  require(halves >= 1 && halves <= 2 && width % halves == 0, "the pool table does not divide into the halves");
  float* out = ctx.output_f32(0, {batch, entries, dim});
  thread_local std::vector<const float*> pointers;
  const float** picked = scratch(pointers, width);
  for (int64_t e = 0; e < batch * entries; ++e) {
    const int64_t b = e / entries, slot = slots.i64()[b] + slot_offset;
    require(slot >= 0 && slot < state.dim(0), "a slot is out of range");
    int64_t count = 0, first = 0;
    for (int64_t i = 0; i < width; ++i) {
      if (i == width / halves) first = count;
      const int64_t row = table.i64()[e * width + i];
      require(row >= 0 && row <= held + rows, "a pooled row is out of range");
      if (row < held) picked[count++] = state.f32() + (slot * held + row) * 2 * dim;
      if (row > held) picked[count++] = raw.f32() + (b * rows + row - held - 1) * 2 * dim;  // the row between weighs nothing
    }
    float* to = out + e * dim;
    if (count == 0)
      std::fill_n(to, dim, 0.0f);
    else
      kernels().pool(picked, first, count - first, dim, to);
    kernels().rms_norm(to, norm.f32(), to, dim, eps);
    rotate(to, cos.f32() + e * half, sin.f32() + e * half, half, 1);
  }
}

namespace {

// Keys of sequence b one after another at `next`: pool rows by table.
const float** pooled(const float** next, const Tensor& pool, const Tensor& table, int64_t offset, int64_t b, int64_t dim) {
  const int64_t count = table.dim(1), *own = table.i64() + b * count;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t row = own[i] + offset;
    require(row >= 0 && row < pool.dim(0), "a row of a pool is out of range");
    *next++ = pool.f32() + row * dim;
  }
  return next;
}

// The same of rows of the pass.
const float** fresh(const float** next, const Tensor& values, int64_t b, int64_t dim) {
  for (int64_t i = 0; i < values.dim(1); ++i) *next++ = values.f32() + (b * values.dim(1) + i) * dim;
  return next;
}

}  // namespace

TreeIndexSelect::TreeIndexSelect(const Attributes& a)
    : heads(a.integer("heads")), topk(a.integer("topk")), offset(a.integer("offset")), entry_offset(a.integer("entry_offset")) {}

// Keeps the k best scores of a row among the visible entries (lower index first among equals), hides the others.
static void keep_best(const float* score, const float* mask, int64_t keys, int64_t topk, float* out) {
  thread_local std::vector<int64_t> visible;
  visible.clear();
  for (int64_t k = 0; k < keys; ++k) {
    out[k] = mask[k];
    if (mask[k] != kHidden) visible.push_back(k);
  }
  if (static_cast<int64_t>(visible.size()) <= topk) return;
  std::nth_element(visible.begin(), visible.begin() + topk, visible.end(), Descending{score});
  for (size_t i = topk; i < visible.size(); ++i) out[visible[i]] = kHidden;
}

// queries [B, N, .. | Hi * di] from column `offset` on, weights [B, N, Hi], entries [R, di], rows [B, E], branch [B, M, di], mask
// [B, N, E + M], cos, sin [B, N, rope / 2] -> mask that keeps the top-k visible entries of every node
void TreeIndexSelect::run(const Context& ctx) const {
  const Tensor query = ctx.input(0), weights = ctx.input(1), entries = ctx.input(2), rows = ctx.input(3), branch = ctx.input(4);
  const Tensor mask = ctx.input(5), cos = ctx.input(6), sin = ctx.input(7);
  const int64_t batch = query.dim(0), nodes = query.dim(1), dim = entries.dim(1), half = cos.dim(-1), keys = mask.dim(2);
  require(query.dim(2) == offset + heads * dim && weights.dim(2) == heads, "the indexer query has the wrong width");
  require(keys == rows.dim(1) + branch.dim(1), "the indexer mask has the wrong width");
  float* out = ctx.output_f32(0, {batch, nodes, keys});
  thread_local std::vector<const float*> pointers;
  thread_local std::vector<float> zeros;
  const float** sources = scratch(pointers, batch * keys);
  for (int64_t b = 0; b < batch; ++b) fresh(pooled(sources + b * keys, entries, rows, entry_offset, b, dim), branch, b, dim);
  const float* no_mask = scratch(zeros, keys * kLanes);  // nobody writes to it
  ctx.split(batch * nodes, batch * nodes * keys * heads * dim / 30, [&](int64_t first, int64_t last) {
    thread_local std::vector<float> buffer;
    float *q = scratch(buffer, dim * kLanes + dim + keys + keys * kLanes), *head = q + dim * kLanes, *score = head + dim, *lanes = score + keys;
    for (int64_t n = first; n < last; ++n) {
      std::fill_n(score, keys, 0.0f);
      for (int64_t h0 = 0; h0 < heads; h0 += kLanes) {
        const int64_t count = std::min<int64_t>(kLanes, heads - h0);
        if (count < kLanes) std::fill_n(q, dim * kLanes, 0.0f);
        for (int64_t h = 0; h < count; ++h) {
          std::copy_n(query.f32() + n * query.dim(2) + offset + (h0 + h) * dim, dim, head);
          rotate(head, cos.f32() + n * half, sin.f32() + n * half, half, 1);
          for (int64_t i = 0; i < dim; ++i) q[i * kLanes + h] = head[i];
        }
        kernels().scores(sources + n / nodes * keys, keys, q, no_mask, lanes, dim);
        float w[kLanes] = {};
        std::copy_n(weights.f32() + n * heads + h0, count, w);
        kernels().add_weighted(lanes, keys, w, score);
      }
      keep_best(score, mask.f32() + n * keys, keys, topk, out + n * keys);
    }
  });
}

TreeAttention::TreeAttention(const Attributes& a)
    : heads(a.integer("heads")), window_offset(a.integer("window_offset")), entry_offset(a.integer("entry_offset")),
      scale(a.real("scale")), eps(a.real("eps")) {}

namespace {

// The (node, head) rows of one sequence that are attended together.
struct RowGroup {
  int64_t first, count, heads;
  int64_t node(int64_t r) const { return (first + r) / heads; }
  int64_t head(int64_t r) const { return (first + r) % heads; }
};

// The keys that a group sees, in the order in which they are summed, and the mask of each for every row.
class Visible {
 public:
  Visible(const RowGroup& group, float* mask, const float** keys) : group_(group), mask_(mask), keys_(keys) {
    for (int64_t r = 0; r < group.count; ++r) node_of_[r] = group.node(r);
  }

  // Of keys first, first + step, .. those that a node of the group sees by its row of `mask` [nodes, width]; all of them if `always`.
  void add(const float* const* keys, const float* mask, int64_t width, int64_t first, int64_t step, int64_t count, bool always = false) {
    const float* from = mask + node_of_[0] * width;
    const int64_t nodes = node_of_[group_.count - 1] - node_of_[0] + 1;
    for (int64_t k = first; count > 0; --count, k += step) {
      bool any = always, all = true;
      for (int64_t n = 0; n < nodes; ++n) {
        const float m = from[n * width + k];
        any |= m != kHidden, all &= m == 0.0f;
      }
      if (!any) continue;
      float* lanes = mask_ + size_ * kLanes;
      std::fill_n(lanes, kLanes, 0.0f);
      for (int64_t r = 0; !all && r < group_.count; ++r) lanes[r] = mask[node_of_[r] * width + k];
      keys_[size_++] = keys[k];
    }
  }

  int64_t size() const { return size_; }

 private:
  const RowGroup& group_;
  float* mask_;
  const float** keys_;
  int64_t node_of_[kLanes], size_ = 0;
};

// As many tasks as fill 16 lanes each; where that leaves threads idle, smaller ones.
int64_t row_groups(int64_t batch, int64_t rows, int64_t threads) {
  const int64_t full = (rows + kLanes - 1) / kLanes, few = (rows + kLanes / 2 - 1) / (kLanes / 2);
  return std::max(full, std::min<int64_t>(few, threads / batch));
}

// One call of TreeAttention: its inputs, and the keys of every sequence, `near` in the window and its nodes and `far` entries.
class Attention {
 public:
  Attention(const TreeAttention& op, const Context& ctx) : op_(op), query_(ctx.input(0)), node_mask_(ctx.input(4)), entry_mask_(ctx.input(8)),
        sink_(ctx.input(9)), cos_(ctx.input(10)), sin_(ctx.input(11)), dim_(ctx.input(1).dim(1)), half_(cos_.dim(-1)),
        siblings_(ctx.nodes(query_.dim(1))), near_(node_mask_.dim(2)), far_(entry_mask_ ? entry_mask_.dim(2) : 0) {
    gather(ctx);
    require(query_.dim(2) >= op.heads * dim_ && dim_ % kLanes == 0 && sink_.count() == op.heads, "the attention query has the wrong width");
    out_ = ctx.output_f32(0, {batch(), nodes(), op.heads * dim_});
  }

  int64_t batch() const { return query_.dim(0); }
  int64_t nodes() const { return query_.dim(1); }
  int64_t keys() const { return near_ + far_; }
  int64_t dim() const { return dim_; }

  void attend(int64_t b, const RowGroup& group) const {
    thread_local std::vector<float> buffer;
    thread_local std::vector<const float*> seen;
    if (static_cast<int64_t>(seen.size()) < keys()) seen.resize(keys());
    float* q = scratch(buffer, 2 * dim_ * kLanes + 2 * keys() * kLanes);
    float *o = q + dim_ * kLanes, *mask = o + dim_ * kLanes, *scores = mask + keys() * kLanes, sinks[kLanes] = {};
    pack_queries(b, group, q, sinks, o);
    Visible visible(group, mask, seen.data());
    const float* const* rows = keys_ + b * keys();
    const float* near_mask = node_mask_.f32() + b * nodes() * near_;
    visible.add(rows, near_mask, near_, 0, 1, 1, true);  // it carries the sink
    visible.add(rows, near_mask, near_, near_ - 1, -1, std::min(siblings_, near_ - 1));
    visible.add(rows, near_mask, near_, 1, 1, near_ - 1 - siblings_);
    if (far_) visible.add(rows + near_, entry_mask_.f32() + b * nodes() * far_, far_, 0, 1, far_);
    kernels().attention({seen.data(), visible.size(), q, mask, sinks, scores, o, dim_, group.count});
    for (int64_t r = 0; r < group.count; ++r) {
      const int64_t n = b * nodes() + group.node(r);
      rotate(o + r * dim_, cos_.f32() + n * half_, sin_.f32() + n * half_, half_, -1);
      std::copy_n(o + r * dim_, dim_, out_ + (n * op_.heads + group.head(r)) * dim_);
    }
  }

 private:
  void gather(const Context& ctx) {
    const Tensor window = ctx.input(1), window_rows = ctx.input(2), entries = ctx.input(5), entry_rows = ctx.input(6), branch = ctx.input(7);
    thread_local std::vector<const float*> pointers;
    Tensor parts[1 + TreeAttention::kMoreParts] = {ctx.input(3)};
    int64_t count = 0, own = 0;
    for (; count <= static_cast<int64_t>(TreeAttention::kMoreParts); ++count) {
      Tensor& p = parts[count];
      if (count > 0) p = ctx.input(12 + count - 1);
      if (!p) break;
      require(p.rank == 3 && p.dim(0) == batch() && p.dim(2) == dim_, "rows of nodes do not fit the window");
      own += p.dim(1);
    }
    require(near_ == window_rows.dim(1) + own, "the node mask has the wrong width");
    require(far_ == (far_ ? entry_rows.dim(1) + branch.dim(1) : 0), "the entry mask has the wrong width");
    const float** next = keys_ = scratch(pointers, batch() * keys());
    for (int64_t b = 0; b < batch(); ++b) {
      next = pooled(next, window, window_rows, op_.window_offset, b, dim_);
      for (int64_t i = 0; i < count; ++i) next = fresh(next, parts[i], b, dim_);
      if (far_) next = fresh(pooled(next, entries, entry_rows, op_.entry_offset, b, dim_), branch, b, dim_);
    }
  }

  // Queries of a group, normed, rotated and scaled, as [dim][16]; a row at a time is worked on at `row`.
  void pack_queries(int64_t b, const RowGroup& group, float* q, float* sinks, float* row) const {
    std::fill_n(q, dim_ * kLanes, 0.0f);
    for (int64_t r = 0; r < group.count; ++r) {
      const int64_t n = b * nodes() + group.node(r), h = group.head(r);
      kernels().rms_norm(query_.f32() + n * query_.dim(2) + h * dim_, nullptr, row, dim_, op_.eps);
      rotate(row, cos_.f32() + n * half_, sin_.f32() + n * half_, half_, 1);
      for (int64_t i = 0; i < dim_; ++i) q[i * kLanes + r] = row[i] * op_.scale;
      sinks[r] = sink_.f32()[h];
    }
  }

  const TreeAttention& op_;
  const Tensor query_, node_mask_, entry_mask_, sink_, cos_, sin_;
  const int64_t dim_, half_, siblings_, near_, far_;
  const float** keys_ = nullptr;  // [batch, keys], of the thread
  float* out_ = nullptr;
};

}  // namespace

// Shared-KV attention of queries [B, N, >= H * d] (normed per head and rotated here) over [sink | held window rows, newest first | nodes |
// entries | branch], the nodes perhaps in more parts, [B, ., d] each, with the sink added to key 0, rotated back: [B, N, H * d]. Sums run
// over the sink, the window from the newest position back (nodes, a node's descendants before it, then held rows) and the entries from the
// oldest on, so a token sums the same rows in the same order whether they are nodes or held. A key that no row of a group sees is skipped,
// so its values may be anything.
void TreeAttention::run(const Context& ctx) const {
  const Attention call(*this, ctx);
  const int64_t rows = call.nodes() * heads, groups = row_groups(call.batch(), rows, ctx.threads()), tasks = call.batch() * groups;
  ctx.split(tasks, tasks * call.keys() * call.dim(), [&](int64_t from, int64_t to) {
    for (int64_t task = from; task < to; ++task) {
      const int64_t first = rows * (task % groups) / groups, last = rows * (task % groups + 1) / groups;
      call.attend(task / groups, {first, last - first, heads});
    }
  });
}

}  // namespace v4tree
