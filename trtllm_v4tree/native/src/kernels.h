// Kernels of one instruction set, as a table of functions. Every result of a row is the same to the bit whatever rows are computed with
// it: sums run over the inputs in one order, so a token's value does not depend on the tree, batch or chunk around it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace v4tree {

constexpr int kLanes = 16;  // columns of a packed weight block, rows of an attention group

constexpr int kPanel = 4;   // blocks that lie side by side

// A weight [inputs, outputs] in blocks of 16 columns, four blocks (the last panel: what is left) side by side, so that a pass over a
// panel is one stream: float as [panel][inputs][blocks][16], bfloat16 as [panel][inputs / 2][blocks][16][2].
struct Packed {
  const void* data;
  bool half;
  int64_t inputs, blocks;
  bool rounded;  // its inputs are rounded to bfloat16: rows come from `Kernels::round`; only with `half`
  int64_t rows() const { return half ? (inputs + 1) / 2 * 2 : inputs; }
  // Blocks in the panel of this block.
  int64_t wide(int64_t block) const {
    const int64_t left = blocks - block / kPanel * kPanel;
    return left < kPanel ? left : kPanel;
  }
  // Elements from the start to the first element of a block (of the panel's first row, or pair of rows).
  int64_t offset(int64_t block) const { return (block / kPanel * kPanel * rows() + block % kPanel * (half ? 2 : 1)) * kLanes; }
};

// Rows of attention: keys (= values) by pointer, a group of up to 16 (node, head) rows.
struct AttentionGroup {
  const float* const* keys;  // [num_keys] rows of head_dim
  int64_t num_keys;
  const float* query;  // packed [head_dim][16], scaled
  const float* mask;   // [num_keys][16]: additive
  const float* sink;   // [16]
  float* scores;       // scratch [num_keys][16]
  float* out;          // [16][head_dim]
  int64_t head_dim, rows;
};

struct Kernels {
  const char* name;
  // Rows as a linear with `rounded` reads them, without gaps: `rounded_per_word` bfloat16 in each float, or rounded floats.
  int64_t rounded_per_word;
  void (*round)(const float* x, int64_t ldx, int64_t rows, int64_t inputs, float* out);
  // y[r, c] = sum_i x[r, i] w[i, c] for the column blocks first..last; y is row-major with row stride ldy and `columns` columns.
  void (*linear)(const float* x, int64_t ldx, int64_t rows, const Packed& w, int64_t first, int64_t last, float* y,
                 int64_t ldy, int64_t columns);
  void (*attention)(const AttentionGroup& group);
  // scores[k][16] = mask[k][16] + sum_i keys[k][i] query[i][16]
  void (*scores)(const float* const* keys, int64_t num_keys, const float* query, const float* mask, float* scores, int64_t dim);
  // c: [m * m][16] logits of up to 16 nodes -> doubly stochastic (row softmax, then column and row sums in turn).
  void (*sinkhorn)(float* c, int64_t m, int64_t iterations, float eps);
  // out[i] = silu(min(gate, limit)) * clip(up, limit) * scale
  void (*swiglu)(const float* gate, const float* up, float* out, int64_t count, float limit, float scale);
  void (*add)(const float* x, float* to, int64_t count);  // to += x
  void (*sigmoid)(float* x, int64_t count);
  // out = x * rsqrt(mean x^2 + eps) * weight (weight may be null)
  void (*rms_norm)(const float* x, const float* weight, float* out, int64_t count, float eps);
  float (*mean_square)(const float* x, int64_t count);
  // out[i] = sum_j a[j] x[j * stride + i]
  void (*mix)(const float* x, int64_t stride, const float* a, int64_t terms, float* out, int64_t count);
  // Per-channel softmax pool of rows by pointer, scores at row[c], values at row[dim + c]: the first `first` rows one after another, the
  // `second` rows behind them likewise, then the two results.
  void (*pool)(const float* const* rows, int64_t first, int64_t second, int64_t dim, float* out);
  // Rows pooled one after another, as a row to pool again: out[c] = log of the sum of exp of the scores, out[dim + c] = the pooled value.
  void (*fold)(const float* const* rows, int64_t num_rows, int64_t dim, float* out);
  // log of the sum of exp(x - top)
  float (*log_sum_exp)(const float* x, int64_t count, float top);
  // first index at or after `from` whose value is above `floor`, else count
  int64_t (*next_above)(const float* x, int64_t from, int64_t count, float floor);
};

const Kernels& kernels();  // of the best instruction set that this processor has

}  // namespace v4tree
