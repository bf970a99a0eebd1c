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

// Blocks that a tile reads: A side by side in one panel, then B at the start of the next; elements from a row (a pair of rows) to the next.
template <class T>
struct Panels {
  const T *first, *second;
  int64_t first_stride, second_stride;
};

template <int A, class T>
V4_INLINE const T* block_of(const Panels<T>& p, int c, int64_t width) {
  return c < A ? p.first + c * width : p.second + (c - A) * width;
}

template <class T>
V4_INLINE void advance(Panels<T>& p) { p.first += p.first_stride, p.second += p.second_stride; }

// acc[r][c] += sum_i x[r][i] w[i][c]
template <int R, int A, int C>
V4_INLINE void tile_float(const float* const* x, Panels<float> w, int64_t inputs, vf (&acc)[R][C]) {
  for (int64_t i = 0; i < inputs; ++i, advance(w)) {
    vf wv[C];
    for (int c = 0; c < C; ++c) wv[c] = held(load(block_of<A>(w, c, kLanes)));
    for (int r = 0; r < R; ++r)
      for (int c = 0; c < C; ++c) acc[r][c] += x[r][i] * wv[c];
  }
}

template <int R, int A, int C>
V4_INLINE void tile_half(const float* const* x, Panels<uint16_t> w, int64_t inputs, vf (&acc)[R][C]) {
  for (int64_t i = 0; i < inputs; i += 2, advance(w)) {
    vu pair[C];
    vf part[C];
    for (int c = 0; c < C; ++c) pair[c] = held(load_as<vu>(block_of<A>(w, c, 2 * kLanes)));
    for (int c = 0; c < C; ++c) part[c] = bits<vf>(pair[c] << 16);
    for (int r = 0; r < R; ++r)
      for (int c = 0; c < C; ++c) acc[r][c] += x[r][i] * part[c];
    if (i + 1 == inputs) break;
    for (int c = 0; c < C; ++c) part[c] = bits<vf>(pair[c] & 0xffff0000u);
    for (int r = 0; r < R; ++r)
      for (int c = 0; c < C; ++c) acc[r][c] += x[r][i + 1] * part[c];
  }
}

// sum + the products of four unsigned bytes of every lane with the four signed bytes of a word.
#if defined(V4_BYTE_DOT)
V4_INLINE vi dot_bytes(vi sum, vu w, uint32_t x) { return (vi)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)w, (__m512i)(vu{} + x)); }
#elif defined(V4_PAIR_DOT)
// Sums of pairs of products of 16 bits: bytes 0 and 2, then 1 and 3.
V4_INLINE ri dot_bytes(ri sum, ru w, uint32_t x) {
  typedef int16_t rs __attribute__((vector_size(4 * kRegister)));
  const rs words = (rs)(ru{} + x), even = words << 8 >> 8, odd = words >> 8;
  return sum + (ri)V4_PAIR_DOT((V4_PAIRS)(w & 0x00ff00ffu), (V4_PAIRS)even) + (ri)V4_PAIR_DOT((V4_PAIRS)(w >> 8 & 0x00ff00ffu), (V4_PAIRS)odd);
}
template <class I, class U>
V4_INLINE Pair<I> dot_bytes(Pair<I> sum, Pair<U> w, uint32_t x) { return {dot_bytes(sum.lo, w.lo, x), dot_bytes(sum.hi, w.hi, x)}; }
#else
V4_INLINE vi dot_bytes(vi sum, vu w, uint32_t x) {
  for (int j = 0; j < 4; ++j) sum += bits<vi>(w >> 8 * j & 0xff) * static_cast<int8_t>(x >> 8 * j);
  return sum;
}
#endif

// acc[r][c] = the product of a row of `encode_bytes` with a column: sums of whole numbers, times the scales of both.
template <int R, int A, int C>
V4_INLINE void tile_bytes(const float* const* x, Panels<uint8_t> w, int64_t inputs, const float* scales, vf (&acc)[R][C]) {
  vi sum[R][C];
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) {
      int32_t zero;
      __builtin_memcpy(&zero, x[r] + 1, sizeof zero);
      sum[r][c] = vi{} + zero;
    }
  for (int64_t i = 0; i < (inputs + 3) / 4; ++i, advance(w)) {
    vu four[C];
    for (int c = 0; c < C; ++c) four[c] = held(load_as<vu>(block_of<A>(w, c, 4 * kLanes)));
    for (int r = 0; r < R; ++r) {
      uint32_t word;
      __builtin_memcpy(&word, x[r] + 2 + i, sizeof word);
      for (int c = 0; c < C; ++c) sum[r][c] = dot_bytes(sum[r][c], four[c], word);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) acc[r][c] = convert<vf>(sum[r][c]) * (x[r][0] * load(scales + c * kLanes));
}

#ifdef V4_BF16_DOT
constexpr int64_t kRoundedPerWord = 2;

// The same on rows of pairs of bfloat16: one instruction for two inputs, with no unpacking.
template <int R, int A, int C>
V4_INLINE void tile_rounded(const float* const* x, Panels<uint16_t> w, int64_t inputs, vf (&acc)[R][C]) {
  for (int64_t i = 0; i < (inputs + 1) / 2; ++i, advance(w)) {
    vu pair[C];
    for (int c = 0; c < C; ++c) pair[c] = held(load_as<vu>(block_of<A>(w, c, 2 * kLanes)));
    for (int r = 0; r < R; ++r) {
      uint32_t word;
      __builtin_memcpy(&word, x[r] + i, sizeof word);
      const vu both = vu{} + word;
      for (int c = 0; c < C; ++c) acc[r][c] = (vf)_mm512_dpbf16_ps((__m512)acc[r][c], (__m512bh)pair[c], (__m512bh)both);
    }
  }
}
#else
constexpr int64_t kRoundedPerWord = 1;

template <int R, int A, int C>
V4_INLINE void tile_rounded(const float* const* x, Panels<uint16_t> w, int64_t inputs, vf (&acc)[R][C]) {
  tile_half<R, A, C>(x, w, inputs, acc);
}
#endif

// The upper halves of floats, to the nearest and to even; what is no number stays none.
V4_INLINE vu bfloat16_of(vf x) {
  const vu word = bits<vu>(x), nearest = (word + 0x7fff + (word >> 16 & 1)) >> 16, quiet = word >> 16 | 0x40;
  return select(x == x, nearest, quiet);
}

// Sixteen words of output from kRoundedPerWord times as many floats.
#ifdef V4_BF16_DOT
V4_INLINE void round_words(const float* x, float* out) {
  const vu even = {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30};
  const vu low = bfloat16_of(load(x)), high = bfloat16_of(load(x + kLanes));
  store(out, __builtin_shuffle(low, high, even) | __builtin_shuffle(low, high, even + 1) << 16);
}
#else
V4_INLINE void round_words(const float* x, float* out) { store(out, bfloat16_of(load(x)) << 16); }
#endif

static void encode_rounded(const float* x, int64_t ldx, int64_t rows, int64_t inputs, float* out) {
  constexpr int64_t Step = kRoundedPerWord * kLanes;
  for (int64_t r = 0; r < rows; ++r, x += ldx) {
    int64_t i = 0;
    for (; i + Step <= inputs; i += Step, out += kLanes) round_words(x + i, out);
    if (i == inputs) continue;
    float rest[Step] = {}, words[kLanes];
    __builtin_memcpy(rest, x + i, (inputs - i) * sizeof(float));
    round_words(rest, words);
    const int64_t count = (inputs - i + kRoundedPerWord - 1) / kRoundedPerWord;
    __builtin_memcpy(out, words, count * sizeof(float));
    out += count;
  }
}

// The 16 values at x + i, zeros behind the end.
V4_INLINE vf load_some(const float* x, int64_t i, int64_t count) {
  if (i + kLanes <= count) return load(x + i);
  float rest[kLanes] = {};
  __builtin_memcpy(rest, x + i, (count - i) * sizeof(float));
  return load(rest);
}

V4_INLINE void store_some(float* x, int64_t i, int64_t count, vf v) {
  float some[kLanes];
  if (i + kLanes <= count) return store(x + i, v);
  store(some, v);
  __builtin_memcpy(x + i, some, (count - i) * sizeof(float));
}

// A row in 8 bits: its scale (no number, if a value is none or infinite), -128 times the sum of its codes, which makes up for the zero of
// the weights, and the codes, four to a word.
static void encode_bytes(const float* x, int64_t inputs, float* out) {
  vf top = vf{}, wrong = vf{};
  for (int64_t i = 0; i < inputs; i += kLanes) {
    const vf v = load_some(x, i, inputs);
    top = vmax(top, vmax(v, -v));
    wrong += v * 0.0f;
  }
  float largest = 0;
  for (int i = 0; i < kLanes; ++i) largest = lane(top, i) > largest ? lane(top, i) : largest;
  const vf inverse = splat(largest > 1e-30f ? 127.0f / largest : 0.0f);
  int8_t* codes = reinterpret_cast<int8_t*>(out + 2);
  vi sum = vi{};
  for (int64_t i = 0; i < inputs; i += kLanes) {
    const vf nearest = (load_some(x, i, inputs) * inverse + 12582912.0f) - 12582912.0f;
    const vi code = convert<vi>(nearest);
    int8_t bytes[kLanes];
    store_bytes(bytes, code);
    const int64_t left = (inputs - i + 3) / 4 * 4;
    sum += code;
    __builtin_memcpy(codes + i, bytes, left < kLanes ? left : kLanes);
  }
  int32_t zero = 0;
  for (int i = 0; i < kLanes; ++i) zero -= 128 * lane(sum, i);
  out[0] = largest / 127.0f + total(wrong);
  __builtin_memcpy(out + 1, &zero, sizeof zero);
}

static int64_t words(Form form, int64_t inputs) {
  if (form == Form::kByte) return 2 + (inputs + 3) / 4;
  return form == Form::kRounded ? (inputs + kRoundedPerWord - 1) / kRoundedPerWord : inputs;
}

static void encode(Form form, const float* x, int64_t ldx, int64_t rows, int64_t inputs, float* out) {
  if (form == Form::kByte)
    for (int64_t r = 0; r < rows; ++r) encode_bytes(x + r * ldx, inputs, out + r * words(form, inputs));
  else
    encode_rounded(x, ldx, rows, inputs, out);
}

// What a tile of A blocks from `first` on, and B behind them in the next panel, reads of a weight of `scale` elements for a lane.
template <int A, int B, class T>
V4_INLINE Panels<T> panels_of(const Packed& w, int64_t first, int64_t scale) {
  const T* data = static_cast<const T*>(w.data);
  const int64_t second = B ? first + A : first;
  return {data + w.offset(first), data + w.offset(second), scale * w.wide(first) * kLanes, scale * w.wide(second) * kLanes};
}

// R rows times A column blocks of one panel, and B of the next.
template <int R, int A, int B = 0>
static void linear_tile(const float* x, int64_t ldx, const Packed& w, int64_t first, float* y, int64_t ldy, int64_t columns) {
  constexpr int C = A + B;
  const float* rows[R];
  for (int r = 0; r < R; ++r) rows[r] = x + r * ldx;
  vf acc[R][C];
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) acc[r][c] = vf{};
  if (w.form == Form::kByte)
    tile_bytes<R, A>(rows, panels_of<A, B, uint8_t>(w, first, 4), w.inputs, w.scales() + first * kLanes, acc);
  else if (w.form == Form::kRounded)
    tile_rounded<R, A>(rows, panels_of<A, B, uint16_t>(w, first, 2), w.inputs, acc);
  else if (w.form == Form::kHalf)
    tile_half<R, A>(rows, panels_of<A, B, uint16_t>(w, first, 2), w.inputs, acc);
  else
    tile_float<R, A>(rows, panels_of<A, B, float>(w, first, 1), w.inputs, acc);
  for (int c = 0; c < C; ++c) {
    const int64_t column = (first + c) * kLanes;
    const int64_t left = columns - column;
    for (int r = 0; r < R; ++r) {
      float* to = y + r * ldy + column;
      store_some(to, 0, left, acc[r][c]);
    }
  }
}

// Rows in tiles of R, what is left in smaller ones.
template <int R, int C>
static void linear_rows(const float* x, int64_t ldx, int64_t rows, const Packed& w, int64_t first, float* y, int64_t ldy,
                        int64_t columns) {
  for (; rows >= R; rows -= R, x += R * ldx, y += R * ldy) linear_tile<R, C>(x, ldx, w, first, y, ldy, columns);
  if constexpr (R > 1)
    if (rows > 0) linear_rows<R - 1, C>(x, ldx, rows, w, first, y, ldy, columns);
}

// The tile of R rows, A blocks and `rest` (1 to 4) of the next panel.
template <int R, int A>
static void linear_across(const float* x, int64_t ldx, const Packed& w, int64_t first, int64_t rest, float* y, int64_t ldy,
                          int64_t columns) {
  switch (rest) {
    case 1: return linear_tile<R, A, 1>(x, ldx, w, first, y, ldy, columns);
    case 2: return linear_tile<R, A, 2>(x, ldx, w, first, y, ldy, columns);
    case 3: return linear_tile<R, A, 3>(x, ldx, w, first, y, ldy, columns);
    default: return linear_tile<R, A, 4>(x, ldx, w, first, y, ldy, columns);
  }
}

template <int R>
static void linear_across(const float* x, int64_t ldx, const Packed& w, int64_t first, int64_t left, int64_t rest, float* y,
                          int64_t ldy, int64_t columns) {
  switch (left) {
    case 1: return linear_across<R, 1>(x, ldx, w, first, rest, y, ldy, columns);
    case 2: return linear_across<R, 2>(x, ldx, w, first, rest, y, ldy, columns);
    case 3: return linear_across<R, 3>(x, ldx, w, first, rest, y, ldy, columns);
    default: return linear_across<R, 4>(x, ldx, w, first, rest, y, ldy, columns);
  }
}

// Column blocks first..last in the widest pieces that stay within a panel and, with the rows, within so many registers. One row or two of a
// piece that is less than a panel would wait for their own sums, so it goes together with a piece of the next panel.
template <int Registers>
static void linear_within(const float* x, int64_t ldx, int64_t rows, const Packed& w, int64_t first, int64_t last, float* y,
                          int64_t ldy, int64_t columns) {
  constexpr int Wide = Registers / 4, Narrow = Registers / 2;
  constexpr int Across = Registers / (2 * kPanel) < 2 ? Registers / (2 * kPanel) : 2;
  for (int64_t b = first; b < last;) {
    const int64_t left = (last < b / kPanel * kPanel + kPanel ? last : b / kPanel * kPanel + kPanel) - b;
    const int64_t rest = last - b - left < kPanel ? last - b - left : kPanel;
    if (rows > 0 && rows <= Across && rest > 0 && left + rest < 2 * kPanel) {
      if constexpr (Across > 0) {
        if (rows == Across)
          linear_across<Across>(x, ldx, w, b, left, rest, y, ldy, columns);
        else
          linear_across<1>(x, ldx, w, b, left, rest, y, ldy, columns);
      }
      b += left + rest;
    } else if (left == 4 && rows <= Wide) {
      linear_rows<Wide, 4>(x, ldx, rows, w, b, y, ldy, columns);
      b += 4;
    } else if (left >= 2) {
      linear_rows<Narrow, 2>(x, ldx, rows, w, b, y, ldy, columns);
      b += 2;
    } else {
      linear_rows<Narrow, 1>(x, ldx, rows, w, b, y, ldy, columns);
      b += 1;
    }
  }
}

// Weights that are unpacked take registers of their own.
static void linear(const float* x, int64_t ldx, int64_t rows, const Packed& w, int64_t first, int64_t last, float* y,
                   int64_t ldy, int64_t columns) {
  constexpr int Coded = kTileRegisters < 8 ? 4 : kTileRegisters;
  if (w.form == Form::kFloat)
    linear_within<kTileRegisters>(x, ldx, rows, w, first, last, y, ldy, columns);
  else
    linear_within<Coded>(x, ldx, rows, w, first, last, y, ldy, columns);
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
  constexpr int R = kTileRegisters < 8 ? kTileRegisters - 2 : 8;
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
  constexpr int R = kTileRegisters < 8 ? kTileRegisters - 2 : 4;
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
const Kernels table = {V4_NAME, words,         encode,   linear,      attention, scores, add_weighted, sinkhorn, swiglu,      add,
                       sigmoid, sqrt_softplus, rms_norm, mean_square, mix,       spread, pool,         fold,     log_sum_exp, next_above};
