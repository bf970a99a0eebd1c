// Operators of the commit, the only writers of state. They read their inputs before they write a row of the same slot, so that state may be
// the buffer that is written; where it is not, it is copied first.
#include <vector>

#include "ops.h"

namespace v4tree {

constexpr float kNullScore = -1e30f;  // contract.NULL_SCORE

static float* written(const Context& ctx, const Tensor& state) {
  float* out = ctx.output_f32(0, state.shape());
  if (out != state.f32()) std::memcpy(out, state.f32(), state.count() * sizeof(float));
  return out;
}

// state [layers * R, w], scratch [(layers,) B, N, w], source, target [A] -> state with state[layer, target] = scratch[layer, source]
PutRows::PutRows(const Attributes& a) : layers(a.integer("layers")) {}
void PutRows::run(const Context& ctx) const {
  const Tensor state = ctx.input(0), scratch = ctx.input(1), source = ctx.input(2), target = ctx.input(3);
  const int64_t width = state.count(1), held = state.dim(0) / layers, count = source.count();
  const int64_t rows = scratch.count() / (layers * width);
  require(scratch.dim(-1) == width && target.count() == count, "the rows to put do not fit the state");
  float* out = written(ctx, state);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t from = source.i64()[i], to = target.i64()[i];
    require(from >= 0 && from < rows && to >= 0 && to < held, "a row to put is out of range");
    for (int64_t layer = 0; layer < layers; ++layer)
      std::memcpy(out + (layer * held + to) * width, scratch.f32() + (layer * rows + from) * width, width * sizeof(float));
  }
}

// state [layers * slots, S, 2 dim], raw [layers, B, N, halves * 2 dim], slots [B], table [B, S, P] over (S states, a null row, raw
// rows) -> state with the folds at the slots
FoldRows::FoldRows(const Attributes& a) : layers(a.integer("layers")) {}
void FoldRows::run(const Context& ctx) const {
  const Tensor state = ctx.input(0), raw = ctx.input(1), slots = ctx.input(2), table = ctx.input(3);
  const int64_t held = state.dim(0) / layers, states = state.dim(1), width = state.dim(2), dim = width / 2;
  const int64_t batch = slots.count(), terms = table.dim(2), rows = raw.count(2) / width;
  require(dim % kLanes == 0 && raw.dim(0) == layers && raw.dim(1) == batch, "the raw rows do not fit the state");
  require(table.dim(0) == batch && table.dim(1) == states, "the fold table does not fit the state");
  float* out = written(ctx, state);
  std::vector<float> folded(states * width);
  std::vector<const float*> picked(terms);
  for (int64_t lb = 0; lb < layers * batch; ++lb) {
    const int64_t b = lb % batch, slot = slots.i64()[b];
    require(slot >= 0 && slot < held, "a slot is out of range");
    float* own = out + (lb / batch * held + slot) * states * width;
    for (int64_t s = 0; s < states; ++s) {
      int64_t count = 0;
      for (int64_t i = 0; i < terms; ++i) {
        const int64_t row = table.i64()[(b * states + s) * terms + i];
        require(row >= 0 && row <= states + rows, "a folded row is out of range");
        if (row < states) picked[count++] = own + row * width;
        if (row > states) picked[count++] = raw.f32() + (lb * rows + row - states - 1) * width;  // the row between weighs nothing
      }
      float* to = folded.data() + s * width;
      if (count > 0) {
        kernels().fold(picked.data(), count, dim, to);
      } else {
        std::fill_n(to, dim, kNullScore);
        std::fill_n(to + dim, dim, 0.0f);
      }
    }
    std::copy(folded.begin(), folded.end(), own);
  }
}

}  // namespace v4tree
