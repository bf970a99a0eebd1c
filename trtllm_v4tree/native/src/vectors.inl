// Sixteen lanes as one value, in as many registers as the instruction set needs: kRegister lanes to each. A compiler's own vectors that
// are wider than a register go through memory (30 times slower). Included once per instruction set inside its own namespace.

#define V4_INLINE static inline __attribute__((always_inline))
#ifdef __clang__
#define V4_UNROLL _Pragma("unroll")
#else
#define V4_UNROLL _Pragma("GCC unroll 16")
#endif

// Two halves, each a register or two halves itself.
template <class H>
struct Pair {
  using Half = H;
  H lo, hi;
};

typedef float rf __attribute__((vector_size(4 * kRegister)));
typedef int32_t ri __attribute__((vector_size(4 * kRegister)));
typedef uint32_t ru __attribute__((vector_size(4 * kRegister)));
typedef int8_t rb __attribute__((vector_size(kRegister)));

template <class R>
using Lanes = std::conditional_t<kRegister == 16, R, std::conditional_t<kRegister == 8, Pair<R>, Pair<Pair<R>>>>;

using vf = Lanes<rf>;
using vi = Lanes<ri>;
using vu = Lanes<ru>;

// Eight lanes, for what has no more: half the registers, or registers of half the width, of which some processors work on two at once.
constexpr int kFew = 8;
typedef float few __attribute__((vector_size(4 * kFew)));
using hf = std::conditional_t<kRegister == 16, few, std::conditional_t<kRegister == 8, rf, Pair<rf>>>;

#define V4_OPERATOR(op)                                                                                                     \
  template <class H, class G>                                                                                               \
  V4_INLINE auto operator op(Pair<H> a, Pair<G> b) { return Pair<decltype(a.lo op b.lo)>{a.lo op b.lo, a.hi op b.hi}; }     \
  template <class H, class S, class = std::enable_if_t<std::is_arithmetic_v<S>>>                                            \
  V4_INLINE auto operator op(Pair<H> a, S b) { return Pair<decltype(a.lo op b)>{a.lo op b, a.hi op b}; }                    \
  template <class H, class S, class = std::enable_if_t<std::is_arithmetic_v<S>>>                                            \
  V4_INLINE auto operator op(S a, Pair<H> b) { return Pair<decltype(a op b.lo)>{a op b.lo, a op b.hi}; }
V4_OPERATOR(+)
V4_OPERATOR(-)
V4_OPERATOR(*)
V4_OPERATOR(/)
V4_OPERATOR(<)
V4_OPERATOR(>)
V4_OPERATOR(<=)
V4_OPERATOR(==)
V4_OPERATOR(&)
V4_OPERATOR(|)
V4_OPERATOR(<<)
V4_OPERATOR(>>)
#undef V4_OPERATOR
template <class H>
V4_INLINE Pair<H> operator-(Pair<H> a) { return {-a.lo, -a.hi}; }
template <class H, class T>
V4_INLINE Pair<H>& operator+=(Pair<H>& a, T b) { return a = a + b; }
template <class H, class T>
V4_INLINE Pair<H>& operator*=(Pair<H>& a, T b) { return a = a * b; }

template <class V>
struct IsPair : std::false_type {};
template <class H>
struct IsPair<Pair<H>> : std::true_type {};

// a where the mask is set, else b.
template <class M, class V>
V4_INLINE V select(M mask, V a, V b) {
  if constexpr (IsPair<V>::value)
    return {select(mask.lo, a.lo, b.lo), select(mask.hi, a.hi, b.hi)};
  else
    return mask ? a : b;
}

template <class V>
V4_INLINE V load_as(const void* p) {
  V v;
  if constexpr (IsPair<V>::value) {
    v.lo = load_as<typename V::Half>(p);
    v.hi = load_as<typename V::Half>(static_cast<const char*>(p) + sizeof(V) / 2);
  } else {
    __builtin_memcpy(&v, p, sizeof v);
  }
  return v;
}

template <class V>
V4_INLINE void store(void* p, V v) {
  if constexpr (IsPair<V>::value) {
    store(p, v.lo);
    store(static_cast<char*>(p) + sizeof(V) / 2, v.hi);
  } else {
    __builtin_memcpy(p, &v, sizeof v);
  }
}

// The same bits as another kind of lanes.
template <class To, class V>
V4_INLINE To bits(V v) {
  if constexpr (IsPair<V>::value)
    return {bits<typename To::Half>(v.lo), bits<typename To::Half>(v.hi)};
  else
    return (To)v;
}

// The same values as another kind of lanes.
template <class To, class V>
V4_INLINE To convert(V v) {
  if constexpr (IsPair<V>::value)
    return {convert<typename To::Half>(v.lo), convert<typename To::Half>(v.hi)};
  else
    return __builtin_convertvector(v, To);
}

// The low byte of every lane, sixteen bytes.
template <class V>
V4_INLINE void store_bytes(int8_t* p, V v) {
  if constexpr (IsPair<V>::value) {
    store_bytes(p, v.lo);
    store_bytes(p + sizeof(V) / 8, v.hi);
  } else {
    const rb bytes = __builtin_convertvector(v, rb);
    __builtin_memcpy(p, &bytes, sizeof bytes);
  }
}

template <class V>
V4_INLINE auto lane(V v, int i) {
  if constexpr (IsPair<V>::value)
    return i < static_cast<int>(sizeof(V) / 8) ? lane(v.lo, i) : lane(v.hi, i - static_cast<int>(sizeof(V) / 8));
  else
    return v[i];
}

// Halves added until one lane is left: short chains of sums, in one order.
template <class V>
V4_INLINE float paired_total(V v) {
  if constexpr (IsPair<V>::value) {
    return paired_total(v.lo + v.hi);
  } else {
    float lanes[kRegister];
    store(lanes, v);
    V4_UNROLL
    for (int step = kRegister / 2; step > 0; step /= 2)
      for (int i = 0; i < step; ++i) lanes[i] += lanes[i + step];
    return lanes[0];
  }
}

// Held in its register: compilers would rather read a value from memory again for every use, at the price of the use.
template <class V>
V4_INLINE V held(V v) {
#ifdef __x86_64__
  if constexpr (kRegister == 16) asm("" : "+v"(v));
#endif
  return v;
}

// With sixteen registers the sums of a tile leave few for what it multiplies: here that is read again for each use, and a sum stays where it is.
#if defined(__x86_64__)
constexpr bool kScarce = kRegister == 8;
#else
constexpr bool kScarce = false;
#endif

template <class V>
V4_INLINE V read(const void* p) {
#if defined(__x86_64__)
  if constexpr (kScarce) {
    V v;
    asm volatile("vmovups %1, %0" : "=x"(v) : "m"(*static_cast<const V*>(p)));
    return v;
  }
#endif
  return held(load_as<V>(p));
}

V4_INLINE rf read_all(const float* p) {  // one value for all lanes
#if defined(__x86_64__)
  if constexpr (kScarce) {
    rf v;
    asm volatile("vbroadcastss %1, %0" : "=x"(v) : "m"(*p));
    return v;
  }
#endif
  return *p - rf{};
}

V4_INLINE void multiply_add(rf& sum, rf a, rf b) {
#if defined(__x86_64__)
  if constexpr (kScarce) {
    asm volatile("vfmadd231ps %2, %1, %0" : "+x"(sum) : "x"(a), "x"(b));
    return;
  }
#endif
  sum += a * b;
}

V4_INLINE vf load(const float* p) { return load_as<vf>(p); }
V4_INLINE vf splat(float x) { return vf{} + x; }
// The second where either is not a number.
template <class V>
V4_INLINE V vmin(V a, V b) { return select(a < b, a, b); }
template <class V>
V4_INLINE V vmax(V a, V b) { return select(a > b, a, b); }

V4_INLINE float total(vf v) {
  float sum = 0;
  for (int i = 0; i < kLanes; ++i) sum += lane(v, i);
  return sum;
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
