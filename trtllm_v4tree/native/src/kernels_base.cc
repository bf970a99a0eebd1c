#include "kernels.h"

#define V4_NAME "base"
#ifdef __SSE2__
#include <emmintrin.h>
#define V4_PAIR_DOT _mm_madd_epi16
#define V4_PAIRS __m128i
#define V4_PACK(a, b) _mm_packs_epi32(_mm_shuffle_epi32(a, 0xd8), _mm_shuffle_epi32(b, 0xd8))
#endif
namespace v4tree::base {
#ifdef __aarch64__
constexpr int kRegister = 4, kTileRegisters = 6, kTogether = 4;
#else
constexpr int kRegister = 4, kTileRegisters = 3, kTogether = 2;
#endif
constexpr int64_t kFloatRate = 10, kByteRate = 15;
#include "vectors.inl"
#include "products.inl"
#include "kernels.inl"
}  // namespace v4tree::base
