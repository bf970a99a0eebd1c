// Kernels of one instruction set, as a table of functions. Every result of a row is the same to the bit whatever rows are computed with
// it: sums run over the inputs in one order, so a token's value does not depend on the tree, batch or chunk around it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace v4tree {

constexpr int kLanes = 16;  // columns of a packed weight block, rows of an attention group

constexpr int kPanel = 4;   // blocks that lie side by side

// What a weight is stored in, and what the rows that it multiplies are.
enum class Form {
  kFloat,
  kHalf,     // bfloat16; rows of floats
  kRounded,  // bfloat16; rows rounded to bfloat16
  kByte,     // 8-bit codes, their zero at 128, and a scale for each column; rows of 8-bit codes and a scale for each row
};

// A weight [inputs, outputs] in blocks of 16 columns, four blocks (the last panel: what is left) side by side, so that a pass over a
// panel is one stream: [panel][inputs / g][blocks][16][g], where g is 1 for float, 2 for bfloat16 and 4 for 8 bits, behind which are the
// scales of the columns.
struct Packed {
  const void* data;
  Form form;
  int64_t inputs, blocks;
  int64_t element() const { return form == Form::kFloat ? 4 : form == Form::kByte ? 1 : 2; }  // bytes
  int64_t together() const { return 4 / element(); }
  int64_t rows() const { return (inputs + together() - 1) / together() * together(); }
  // Bytes of a block, with its scales.
  int64_t block_bytes() const { return (rows() * element() + (form == Form::kByte ? 4 : 0)) * kLanes; }
  const float* scales() const { return reinterpret_cast<const float*>(static_cast<const char*>(data) + rows() * blocks * kLanes); }
  // Blocks in the panel of this block.
  int64_t wide(int64_t block) const {
    const int64_t left = blocks - block / kPanel * kPanel;
    return left < kPanel ? left : kPanel;
  }
  // Elements from the start to the first element of a block (of the panel's first row, or pair of rows).
  int64_t offset(int64_t block) const { return (block / kPanel * kPanel * rows() + block % kPanel * together()) * kLanes; }
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
  int64_t float_rate, byte_rate;  // about how many products of a linear a thread makes in a nanosecond
  // Floats that a row of a form takes, and rows as a linear with a weight of the form kRounded or kByte reads them, without gaps.
  int64_t (*words)(Form form, int64_t inputs);
  void (*encode)(Form form, const float* x, int64_t ldx, int64_t rows, int64_t inputs, float* out);
  // y[r, c] = sum_i x[r, i] w[i, c], of encoded rows if the form of the weight asks for these, for the column blocks first..last; y is row-major with row stride ldy and `columns` columns.
  void (*linear)(const float* x, int64_t ldx, int64_t rows, const Packed& w, int64_t first, int64_t last, float* y,
                 int64_t ldy, int64_t columns);
  void (*attention)(const AttentionGroup& group);
  // scores[k][16] = mask[k][16] + sum_i keys[k][i] query[i][16]
  void (*scores)(const float* const* keys, int64_t num_keys, const float* query, const float* mask, float* scores, int64_t dim);
  // to[k] += sum_h weights[h] max(scores[k][h], 0)
  void (*add_weighted)(const float* scores, int64_t num_keys, const float* weights, float* to);
  // c: [m * m][16] (m from 1 to 8) logits of `rows` (up to 16) nodes -> doubly stochastic (row softmax, then column and row sums in turn).
  void (*sinkhorn)(float* c, int64_t m, int64_t rows, int64_t iterations, float eps);
  // out[i] = silu(min(gate, limit)) * clip(up, limit) * scale
  void (*swiglu)(const float* gate, const float* up, float* out, int64_t count, float limit, float scale);
  void (*add)(const float* x, float* to, int64_t count);  // to += x
  void (*sigmoid)(float* x, int64_t count);
  void (*sqrt_softplus)(const float* x, float* out, int64_t count);  // sqrt(log(1 + e^x))
  // out = x * rsqrt(mean x^2 + eps) * weight (weight may be null)
  void (*rms_norm)(const float* x, const float* weight, float* out, int64_t count, float eps);
  float (*mean_square)(const float* x, int64_t count);
  // out[i] = sum_j a[j] x[j * stride + i]
  void (*mix)(const float* x, int64_t stride, const float* a, int64_t terms, float* out, int64_t count);
  // Streams after a block: result[k] = post[k] out + sum_j comb[j, k] streams[j], k and j below m (8 at most), each [dim].
  void (*spread)(const float* streams, const float* out, const float* post, const float* comb, int64_t m, int64_t dim, float* result);
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
