// Products of rows with packed weights, and rows as they are stored for them; included once per instruction set inside its own namespace, before kernels.inl.

// Registers of a block.
constexpr int kParts = kLanes / kRegister;

// Blocks that a tile reads: A side by side in one panel, then B at the start of the next; elements from a row (a pair of rows) to the next.
template <class T>
struct Panels {
  const T *first, *second;
  int64_t first_stride, second_stride;
};

// Register h of a row of blocks, each of `width` elements.
template <int A, class V, class T>
V4_INLINE V weights_at(const Panels<T>& p, int h, int64_t width) {
  const int c = h / kParts;
  const T* block = c < A ? p.first + c * width : p.second + (c - A) * width;
  return read<V>(block + h % kParts * (width / kParts));
}

template <class T>
V4_INLINE void advance(Panels<T>& p) { p.first += p.first_stride, p.second += p.second_stride; }

// Input i of every row with registers g.. of weights.
template <int R, int H>
V4_INLINE void multiply_rows(const float* const* x, int64_t i, int g, const rf (&part)[kTogether], rf (&acc)[R][H]) {
  V4_UNROLL
  for (int r = 0; r < R; ++r) {
    const rf all = read_all(x[r] + i);
    V4_UNROLL
    for (int h = 0; h < kTogether; ++h)
      if (g + h < H) multiply_add(acc[r][g + h], all, part[h]);
  }
}

// acc[r][h] += sum_i x[r][i] w[i][h], of kTogether registers of weights at a time.
template <int R, int A, int H>
V4_INLINE void tile_float(const float* const* x, Panels<float> w, int64_t inputs, rf (&acc)[R][H]) {
  for (int64_t i = 0; i < inputs; ++i, advance(w)) {
    V4_UNROLL
    for (int g = 0; g < H; g += kTogether) {
      rf part[kTogether];
      V4_UNROLL
      for (int h = 0; h < kTogether; ++h)
        if (g + h < H) part[h] = weights_at<A, rf>(w, g + h, kLanes);
      multiply_rows(x, i, g, part, acc);
    }
  }
}

// Inputs i and, if there are two, i + 1 of a pair of bfloat16.
template <int R, int A, int Inputs, int H>
V4_INLINE void half_inputs(const float* const* x, const Panels<uint16_t>& w, int64_t i, rf (&acc)[R][H]) {
  V4_UNROLL
  for (int g = 0; g < H; g += kTogether) {
    V4_UNROLL
    for (int j = 0; j < Inputs; ++j) {
      rf part[kTogether];
      V4_UNROLL
      for (int h = 0; h < kTogether; ++h)
        if (g + h < H) {
          const ru pair = weights_at<A, ru>(w, g + h, 2 * kLanes);
          part[h] = (rf)(j == 0 ? pair << 16 : pair & 0xffff0000u);
        }
      multiply_rows(x, i + j, g, part, acc);
    }
  }
}

template <int R, int A, int H>
V4_INLINE void tile_half(const float* const* x, Panels<uint16_t> w, int64_t inputs, rf (&acc)[R][H]) {
  int64_t i = 0;
  for (; i + 2 <= inputs; i += 2, advance(w)) half_inputs<R, A, 2>(x, w, i, acc);
  if (i < inputs) half_inputs<R, A, 1>(x, w, i, acc);
}

// Rows in 8 bits hold four codes to a word where an instruction multiplies bytes; else they hold 16 bits to a code, of four codes the first
// and third in a word, then the second and fourth, as the even and odd bytes of weights are.
#ifdef V4_BYTE_DOT
constexpr int64_t kWordsOfFour = 1;

struct Codes {
  ru all;
};
V4_INLINE Codes codes(ru w) { return {w}; }
V4_INLINE Codes row_codes(const float* x) { return {(ru)read_all(x)}; }
V4_INLINE ri dot_bytes(ri sum, Codes w, Codes x) { return (ri)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)w.all, (__m512i)x.all); }
#else
constexpr int64_t kWordsOfFour = 2;

typedef int16_t rs __attribute__((vector_size(4 * kRegister)));
typedef uint16_t rus __attribute__((vector_size(4 * kRegister)));
struct Codes {
  ru even, odd;
};
V4_INLINE Codes codes(ru w) { return {w & 0x00ff00ffu, (ru)((rus)w >> 8)}; }
V4_INLINE Codes row_codes(const float* x) { return {(ru)read_all(x), (ru)read_all(x + 1)}; }
V4_INLINE ri dot_pairs(ru a, ru b) {
#ifdef V4_PAIR_DOT
  return (ri)V4_PAIR_DOT((V4_PAIRS)a, (V4_PAIRS)b);
#else
  return ((ri)a << 16 >> 16) * ((ri)b << 16 >> 16) + ((ri)a >> 16) * ((ri)b >> 16);
#endif
}
V4_INLINE ri dot_bytes(ri sum, Codes w, Codes x) { return sum + dot_pairs(w.even, x.even) + dot_pairs(w.odd, x.odd); }
#endif

// acc[r][h] = the product of a row of `encode_bytes` with a column: sums of whole numbers, times the scales of both.
template <int R, int A, int H>
V4_INLINE void tile_bytes(const float* const* x, Panels<uint8_t> w, int64_t inputs, const float* scales, rf (&acc)[R][H]) {
  ri sum[R][H];
  V4_UNROLL
  for (int r = 0; r < R; ++r) {
    int32_t zero;
    __builtin_memcpy(&zero, x[r] + 1, sizeof zero);
    V4_UNROLL
    for (int h = 0; h < H; ++h) sum[r][h] = ri{} + zero;
  }
  for (int64_t i = 0; i < (inputs + 3) / 4; ++i, advance(w)) {
    V4_UNROLL
    for (int g = 0; g < H; g += kTogether) {
      Codes four[kTogether];
      V4_UNROLL
      for (int h = 0; h < kTogether; ++h)
        if (g + h < H) four[h] = codes(weights_at<A, ru>(w, g + h, 4 * kLanes));
      V4_UNROLL
      for (int r = 0; r < R; ++r) {
        const Codes row = row_codes(x[r] + 2 + kWordsOfFour * i);
        V4_UNROLL
        for (int h = 0; h < kTogether; ++h)
          if (g + h < H) sum[r][g + h] = dot_bytes(sum[r][g + h], four[h], row);
      }
    }
  }
  V4_UNROLL
  for (int r = 0; r < R; ++r)
    V4_UNROLL
    for (int h = 0; h < H; ++h) acc[r][h] = convert<rf>(sum[r][h]) * (x[r][0] * load_as<rf>(scales + h * kRegister));
}

#ifdef V4_BF16_DOT
constexpr int64_t kRoundedPerWord = 2;

// The same on rows of pairs of bfloat16: one instruction for two inputs, with no unpacking.
template <int R, int A, int H>
V4_INLINE void tile_rounded(const float* const* x, Panels<uint16_t> w, int64_t inputs, rf (&acc)[R][H]) {
  for (int64_t i = 0; i < (inputs + 1) / 2; ++i, advance(w)) {
    ru pair[H];
    for (int h = 0; h < H; ++h) pair[h] = weights_at<A, ru>(w, h, 2 * kLanes);
    for (int r = 0; r < R; ++r) {
      uint32_t word;
      __builtin_memcpy(&word, x[r] + i, sizeof word);
      const ru both = ru{} + word;
      for (int h = 0; h < H; ++h) acc[r][h] = (rf)_mm512_dpbf16_ps((__m512)acc[r][h], (__m512bh)pair[h], (__m512bh)both);
    }
  }
}
#else
constexpr int64_t kRoundedPerWord = 1;

template <int R, int A, int H>
V4_INLINE void tile_rounded(const float* const* x, Panels<uint16_t> w, int64_t inputs, rf (&acc)[R][H]) {
  tile_half<R, A>(x, w, inputs, acc);
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

// Sixteen codes as a row holds them.
#if defined(V4_BYTE_DOT)
V4_INLINE void store_codes(int8_t* out, vi code) { store_bytes(out, code); }
#elif defined(V4_PACK)
template <class H>
V4_INLINE void store_codes(int8_t* out, Pair<H> code) {
  if constexpr (IsPair<H>::value) {
    store_codes(out, code.lo);
    store_codes(out + sizeof code / 4, code.hi);
  } else {
    store(out, V4_PACK((V4_PAIRS)code.lo, (V4_PAIRS)code.hi));
  }
}
#else
V4_INLINE void store_codes(int8_t* out, vi code) {
  int16_t at[kLanes];
  for (int i = 0; i < kLanes; ++i) at[i / 4 * 4 + i % 2 * 2 + i / 2 % 2] = static_cast<int16_t>(lane(code, i));
  __builtin_memcpy(out, at, sizeof at);
}
#endif

// The largest magnitude of a row as bits; above those of any number, if one is none.
V4_INLINE int32_t largest_bits(const float* x, int64_t inputs) {
  vi top = vi{};
  for (int64_t i = 0; i < inputs; i += kLanes) {
    const vi magnitude = bits<vi>(load_some(x, i, inputs)) & 0x7fffffff;
    top = vmax(top, magnitude);
  }
  int32_t all[kLanes], largest = 0;
  store(all, top);
  for (int i = 0; i < kLanes; ++i) largest = all[i] > largest ? all[i] : largest;
  return largest;
}

// A row in 8 bits: its scale (no number, if a value is none or infinite), -128 times the sum of its codes, which makes up for the zero of
// the weights, and the codes.
static void encode_bytes(const float* x, int64_t inputs, float* out) {
  const int32_t top = largest_bits(x, inputs);
  float largest;
  __builtin_memcpy(&largest, &top, sizeof largest);
  const float inverse = largest > 1e-30f ? 127.0f / largest : 0.0f;
  int8_t* codes = reinterpret_cast<int8_t*>(out + 2);
  vi sum = vi{};
  for (int64_t i = 0; i < inputs; i += kLanes) {
    const vf shifted = load_some(x, i, inputs) * inverse + 12582912.0f;  // to the nearest whole number, in the low bits
    const vi code = bits<vi>(shifted) - 0x4b400000;
    sum = sum + code;
    int8_t bytes[4 * kLanes];
    const int64_t left = (inputs - i + 3) / 4 * 4;
    if (left >= kLanes) {
      store_codes(codes + kWordsOfFour * i, code);
      continue;
    }
    store_codes(bytes, code);
    __builtin_memcpy(codes + kWordsOfFour * i, bytes, kWordsOfFour * left);
  }
  uint32_t all[kLanes], zero = 0;  // which may pass its end, of a row that is no numbers
  store(all, bits<vu>(sum));
  for (int i = 0; i < kLanes; ++i) zero -= 128 * all[i];
  out[0] = top < 0x7f800000 ? largest / 127.0f : __builtin_nanf("");
  __builtin_memcpy(out + 1, &zero, sizeof zero);
}

static int64_t words(Form form, int64_t inputs) {
  if (form == Form::kByte) return 2 + kWordsOfFour * ((inputs + 3) / 4);
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

template <int R, int H>
V4_INLINE void store_tile(const rf (&acc)[R][H], float* y, int64_t ldy) {
  V4_UNROLL
  for (int r = 0; r < R; ++r)
    V4_UNROLL
    for (int h = 0; h < H; ++h) store(y + r * ldy + h * kRegister, acc[r][h]);
}

// R rows times A column blocks of one panel, and B of the next.
template <int R, int A, int B = 0>
static void linear_tile(const float* x, int64_t ldx, const Packed& w, int64_t first, float* y, int64_t ldy, int64_t columns) {
  constexpr int H = (A + B) * kParts;
  const float* rows[R];
  for (int r = 0; r < R; ++r) rows[r] = x + r * ldx;
  rf acc[R][H];
  V4_UNROLL
  for (int r = 0; r < R; ++r)
    V4_UNROLL
    for (int h = 0; h < H; ++h) acc[r][h] = rf{};
  if (w.form == Form::kByte)
    tile_bytes<R, A>(rows, panels_of<A, B, uint8_t>(w, first, 4), w.inputs, w.scales() + first * kLanes, acc);
  else if (w.form == Form::kRounded)
    tile_rounded<R, A>(rows, panels_of<A, B, uint16_t>(w, first, 2), w.inputs, acc);
  else if (w.form == Form::kHalf)
    tile_half<R, A>(rows, panels_of<A, B, uint16_t>(w, first, 2), w.inputs, acc);
  else
    tile_float<R, A>(rows, panels_of<A, B, float>(w, first, 1), w.inputs, acc);
  y += first * kLanes;
  const int64_t left = columns - first * kLanes;
  if (left >= H * kRegister) return store_tile(acc, y, ldy);
  float whole[R * H * kRegister];
  store_tile(acc, whole, H * kRegister);
  for (int r = 0; r < R; ++r) __builtin_memcpy(y + r * ldy, whole + r * H * kRegister, left * sizeof(float));
}

template <int R, int C>
static void linear_few(const float* x, int64_t ldx, int64_t rows, const Packed& w, int64_t first, float* y, int64_t ldy, int64_t columns) {
  if (rows == R) return linear_tile<R, C>(x, ldx, w, first, y, ldy, columns);
  if constexpr (R > 1) linear_few<R - 1, C>(x, ldx, rows, w, first, y, ldy, columns);
}

// Rows in tiles of R at most, as even as can be.
template <int R, int C>
static void linear_rows(const float* x, int64_t ldx, int64_t rows, const Packed& w, int64_t first, float* y, int64_t ldy,
                        int64_t columns) {
  const int64_t tiles = (rows + R - 1) / R;
  for (int64_t t = 0; t < tiles; ++t) {
    const int64_t from = rows * t / tiles, to = rows * (t + 1) / tiles;
    linear_few<R, C>(x + from * ldx, ldx, to - from, w, first, y + from * ldy, ldy, columns);
  }
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

// Column blocks first..last in the widest pieces that stay within a panel and, with the rows, within the registers of sums. One row or two of
// a piece that is less than a panel would wait for their own sums, so it goes together with a piece of the next panel.
static void linear(const float* x, int64_t ldx, int64_t rows, const Packed& w, int64_t first, int64_t last, float* y, int64_t ldy,
                   int64_t columns) {
  constexpr int Wide = kTileRegisters / 4, Narrow = kTileRegisters / 2, Tall = kTileRegisters < 12 ? kTileRegisters : 12;
  constexpr int Across = kTileRegisters / (2 * kPanel) < 2 ? kTileRegisters / (2 * kPanel) : 2;
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
      if constexpr (Wide > 0) linear_rows<Wide, 4>(x, ldx, rows, w, b, y, ldy, columns);
      b += 4;
    } else if (left >= 2 && (rows <= Narrow || Narrow == Tall)) {
      linear_rows<Narrow, 2>(x, ldx, rows, w, b, y, ldy, columns);
      b += 2;
    } else {
      linear_rows<Tall, 1>(x, ldx, rows, w, b, y, ldy, columns);
      b += 1;
    }
  }
}
