// Bodies of the kernels, on the lanes of vectors.inl; included once per instruction set inside its own namespace.

// e^x to about one unit in the last place; 0 below -87.3 (so for -inf), infinite above 88, NaN for NaN.
template <class V>
V4_INLINE V vexp(V x) {
  const V clamped = vmin(vmax(x, V{} - 87.3f), V{} + 88.0f);
  const V whole = (clamped * 1.44269504f + 12582912.0f) - 12582912.0f;
  const V r = (clamped - whole * 0.693359375f) - whole * -2.12194440e-4f;
  V p = V{} + 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  const V scale = bits<V>((convert<decltype(x < x)>(whole) + 127) << 23);
  const V bounded = select(x <= 88.0f, p * scale, x + __builtin_inff());
  return select(x < -87.3f, V{}, bounded);
}

V4_INLINE vf vsigmoid(vf x) { return 1.0f / (1.0f + vexp(-x)); }

// log(1 + e) for e in [0, 1], as 2 atanh(e / (2 + e)): absolute error below 1e-7.
V4_INLINE vf vlog1p(vf e) {
  const vf t = e / (2.0f + e), t2 = t * t;
  vf p = splat(2.0f / 13);
  p = p * t2 + 2.0f / 11;
  p = p * t2 + 2.0f / 9;
  p = p * t2 + 2.0f / 7;
  p = p * t2 + 2.0f / 5;
  p = p * t2 + 2.0f / 3;
  return p * t2 * t + 2.0f * t;
}

template <class V, int R>
V4_INLINE void score_tile(const float* const* keys, const float* query, const float* mask, float* to, int64_t dim) {
  V acc[R];
  for (int r = 0; r < R; ++r) acc[r] = V{};
  for (int64_t i = 0; i < dim; ++i) {
    const V q = load_as<V>(query + i * kLanes);
    for (int r = 0; r < R; ++r) acc[r] += keys[r][i] * q;
  }
  for (int r = 0; r < R; ++r) store(to + r * kLanes, acc[r] + load_as<V>(mask + r * kLanes));
}

// Of as many of the 16 lanes as V has.
template <class V>
V4_INLINE void scores_of(const float* const* keys, int64_t num_keys, const float* query, const float* mask, float* to, int64_t dim) {
  constexpr int R = kTileRegisters < 8 ? 8 * kRegister * sizeof(float) / sizeof(V) : 8;  // eight sums at least, or they wait for themselves
  int64_t k = 0;
  for (; k + R <= num_keys; k += R) score_tile<V, R>(keys + k, query, mask + k * kLanes, to + k * kLanes, dim);
  for (; k < num_keys; ++k) score_tile<V, 1>(keys + k, query, mask + k * kLanes, to + k * kLanes, dim);
}

static void scores(const float* const* keys, int64_t num_keys, const float* query, const float* mask, float* to, int64_t dim) {
  scores_of<vf>(keys, num_keys, query, mask, to, dim);
}

static void add_weighted(const float* scores, int64_t num_keys, const float* weights, float* to) {
  const vf w = load(weights);
  for (int64_t k = 0; k < num_keys; ++k) to[k] += paired_total(vmax(vf{}, load(scores + k * kLanes)) * w);
}

template <int R, int C>
V4_INLINE void value_tile(const AttentionGroup& g, int64_t row, int64_t column, const float* inverse) {
  vf acc[R][C];
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) acc[r][c] = vf{};
  for (int64_t k = 0; k < g.num_keys; ++k) {
    const float* p = g.scores + k * kLanes + row;
    vf v[C];
    for (int c = 0; c < C; ++c) v[c] = load(g.keys[k] + column + c * kLanes);
    for (int r = 0; r < R; ++r)
      for (int c = 0; c < C; ++c) acc[r][c] += p[r] * v[c];
  }
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) store(g.out + (row + r) * g.head_dim + column + c * kLanes, acc[r][c] * inverse[row + r]);
}

template <int C>
V4_INLINE void value_columns(const AttentionGroup& g, int64_t column, const float* inverse) {
  constexpr int R = kTileRegisters < 8 ? (kTileRegisters + 2) / 2 : 4;
  int64_t row = 0;
  for (; row + R <= g.rows; row += R) value_tile<R, C>(g, row, column, inverse);
  for (; row < g.rows; ++row) value_tile<1, C>(g, row, column, inverse);
}

// Exponentials of the scores against the largest of a row, and one over the sum of each row's.
template <class V>
V4_INLINE void softmax_scores(const AttentionGroup& g, float* inverse) {
  scores_of<V>(g.keys, g.num_keys, g.query, g.mask, g.scores, g.head_dim);
  store(g.scores, load_as<V>(g.scores) + load_as<V>(g.sink));
  V top = load_as<V>(g.scores), sum = V{};
  for (int64_t k = 1; k < g.num_keys; ++k) top = vmax(top, load_as<V>(g.scores + k * kLanes));
  for (int64_t k = 0; k < g.num_keys; ++k) {
    const V p = vexp(load_as<V>(g.scores + k * kLanes) - top);
    sum += p;
    store(g.scores + k * kLanes, p);
  }
  store(inverse, 1.0f / sum);
}

static void attention(const AttentionGroup& g) {
  float inverse[kLanes];
  if (g.rows <= kFew)
    softmax_scores<hf>(g, inverse);
  else
    softmax_scores<vf>(g, inverse);
  int64_t column = 0;
  if constexpr (kTileRegisters >= 16)
    for (; column + 4 * kLanes <= g.head_dim; column += 4 * kLanes) value_columns<4>(g, column, inverse);
  for (; column < g.head_dim; column += kLanes) value_columns<1>(g, column, inverse);
}

// Every line of m values, `inner` apart, over its sum.
template <class V>
V4_INLINE void normalise_lines(V* a, int m, int outer, int inner, float eps) {
  for (int i = 0; i < m; ++i) {
    V sum = a[i * outer];
    for (int j = 1; j < m; ++j) sum += a[i * outer + j * inner];
    const V inverse = 1.0f / (sum + eps);
    for (int j = 0; j < m; ++j) a[i * outer + j * inner] *= inverse;
  }
}

// With an m that the compiler knows the matrix stays in registers.
template <class V>
V4_INLINE void sinkhorn_of(float* c, int m, int64_t iterations, float eps) {
  V a[64];
  for (int i = 0; i < m; ++i) {
    V top = load_as<V>(c + i * m * kLanes), sum{};
    for (int j = 1; j < m; ++j) top = vmax(top, load_as<V>(c + (i * m + j) * kLanes));
    for (int j = 0; j < m; ++j) sum += a[i * m + j] = vexp(load_as<V>(c + (i * m + j) * kLanes) - top);
    for (int j = 0; j < m; ++j) a[i * m + j] = a[i * m + j] / sum + eps;
  }
  normalise_lines(a, m, 1, m, eps);
  for (int64_t t = 1; t < iterations; ++t) {
    normalise_lines(a, m, m, 1, eps);
    normalise_lines(a, m, 1, m, eps);
  }
  for (int i = 0; i < m * m; ++i) store(c + i * kLanes, a[i]);
}

static void sinkhorn(float* c, int64_t m, int64_t rows, int64_t iterations, float eps) {
  if (m == 4 && rows <= kFew)
    sinkhorn_of<hf>(c, 4, iterations, eps);
  else if (m == 4)
    sinkhorn_of<vf>(c, 4, iterations, eps);
  else
    sinkhorn_of<vf>(c, static_cast<int>(m), iterations, eps);
}

V4_INLINE vf gated(vf gate, vf up, float limit, float scale) {
  const vf g = vmin(splat(limit), gate), u = vmin(splat(limit), vmax(splat(-limit), up));
  return g * vsigmoid(g) * u * scale;
}

static void swiglu(const float* gate, const float* up, float* out, int64_t count, float limit, float scale) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store(out + i, gated(load(gate + i), load(up + i), limit, scale));
  if (i == count) return;
  float g[kLanes] = {}, u[kLanes] = {}, y[kLanes];
  const size_t bytes = (count - i) * sizeof(float);
  __builtin_memcpy(g, gate + i, bytes);
  __builtin_memcpy(u, up + i, bytes);
  store(y, gated(load(g), load(u), limit, scale));
  __builtin_memcpy(out + i, y, bytes);
}

static void add(const float* x, float* to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) to[i] += x[i];
}

static void sigmoid(float* x, int64_t count) {
  float v[kLanes] = {};
  for (int64_t i = 0; i < count; i += kLanes) {
    const size_t bytes = (count - i < kLanes ? count - i : kLanes) * sizeof(float);
    __builtin_memcpy(v, x + i, bytes);
    store(v, vsigmoid(load(v)));
    __builtin_memcpy(x + i, v, bytes);
  }
}

static void sqrt_softplus(const float* x, float* out, int64_t count) {
  for (int64_t i = 0; i < count; i += kLanes) {
    const vf v = load_some(x, i, count);
    store_some(out, i, count, vmax(v, vf{}) + vlog1p(vexp(select(v > 0.0f, -v, v))));
  }
  for (int64_t i = 0; i < count; ++i) out[i] = __builtin_sqrtf(out[i]);
}

static float mean_square(const float* x, int64_t count) {
  vf acc = vf{};
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) acc += load(x + i) * load(x + i);
  float sum = total(acc);
  for (; i < count; ++i) sum += x[i] * x[i];
  return sum / count;
}

static void rms_norm(const float* x, const float* weight, float* out, int64_t count, float eps) {
  const float scale = 1.0f / __builtin_sqrtf(mean_square(x, count) + eps);
  if (weight == nullptr)
    for (int64_t i = 0; i < count; ++i) out[i] = x[i] * scale;
  else
    for (int64_t i = 0; i < count; ++i) out[i] = x[i] * scale * weight[i];
}

static void mix(const float* x, int64_t stride, const float* a, int64_t terms, float* out, int64_t count) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    vf sum = a[0] * load(x + i);
    for (int64_t j = 1; j < terms; ++j) sum += a[j] * load(x + j * stride + i);
    store(out + i, sum);
  }
  for (; i < count; ++i) {
    out[i] = a[0] * x[i];
    for (int64_t j = 1; j < terms; ++j) out[i] += a[j] * x[j * stride + i];
  }
}

// With an m that the compiler knows the streams are read once.
V4_INLINE void spread_of(const float* streams, const float* out, const float* post, const float* comb, int m, int64_t dim, float* result) {
  for (int64_t i = 0; i < dim; i += kLanes) {
    vf x[8];
    for (int j = 0; j < m; ++j) x[j] = load_some(streams + j * dim, i, dim);
    const vf own = load_some(out, i, dim);
    for (int k = 0; k < m; ++k) {
      vf sum = comb[k] * x[0];
      for (int j = 1; j < m; ++j) sum += comb[j * m + k] * x[j];
      store_some(result + k * dim, i, dim, sum + post[k] * own);
    }
  }
}

static void spread(const float* streams, const float* out, const float* post, const float* comb, int64_t m, int64_t dim, float* result) {
  if (m == 4)
    spread_of(streams, out, post, comb, 4, dim, result);
  else
    spread_of(streams, out, post, comb, static_cast<int>(m), dim, result);
}

// A softmax pool so far: log of the sum of exp of the scores, and the weighted mean of the values.
struct Pool {
  vf score, value;
};

V4_INLINE Pool pool_of(const float* row, int64_t dim, int64_t c) { return {load(row + c), load(row + dim + c)}; }

// Two pools as one. What is pooled one row after another is the same to the bit however it was cut into calls.
V4_INLINE Pool joined(Pool a, Pool b) {
  const vf ahead = b.score - a.score;
  const vf e = vexp(select(ahead > 0.0f, -ahead, ahead)), most = 1.0f / (1.0f + e), least = e * most;
  const vf share_a = select(ahead > 0.0f, least, most), share_b = select(ahead > 0.0f, most, least);
  return {vmax(a.score, b.score) + vlog1p(e), a.value * share_a + b.value * share_b};
}

V4_INLINE Pool folded(const float* const* rows, int64_t num_rows, int64_t dim, int64_t c) {
  Pool pool = pool_of(rows[0], dim, c);
  for (int64_t r = 1; r < num_rows; ++r) pool = joined(pool, pool_of(rows[r], dim, c));
  return pool;
}

static void pool(const float* const* rows, int64_t first, int64_t second, int64_t dim, float* out) {
  for (int64_t c = 0; c < dim; c += kLanes) {
    if (first > 0 && second > 0)
      store(out + c, joined(folded(rows, first, dim, c), folded(rows + first, second, dim, c)).value);
    else
      store(out + c, folded(rows, first + second, dim, c).value);
  }
}

static void fold(const float* const* rows, int64_t num_rows, int64_t dim, float* out) {
  for (int64_t c = 0; c < dim; c += kLanes) {
    const Pool p = folded(rows, num_rows, dim, c);
    store(out + c, p.score);
    store(out + dim + c, p.value);
  }
}

static float log_sum_exp(const float* x, int64_t count, float top) {
  vf acc = vf{};
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) acc += vexp(load(x + i) - top);
  float sum = total(acc);
  for (; i < count; ++i) sum += __builtin_expf(x[i] - top);
  return __builtin_logf(sum);
}

static int64_t next_above(const float* x, int64_t from, int64_t count, float floor) {
  for (; from + kLanes <= count; from += kLanes) {
    const vi above = load(x + from) > floor;
    int32_t any = 0;
    for (int i = 0; i < kLanes; ++i) any |= lane(above, i);
    if (any) break;
  }
  while (from < count && !(x[from] > floor)) ++from;
  return from;
}

extern const Kernels table;
const Kernels table = {V4_NAME, kFloatRate, kByteRate, words,         encode,   linear,      attention, scores, add_weighted, sinkhorn, swiglu,      add,
                       sigmoid, sqrt_softplus, rms_norm, mean_square, mix,       spread, pool,         fold,     log_sum_exp, next_above};
