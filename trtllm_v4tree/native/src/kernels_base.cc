#include "kernels.h"

#define V4_NAME "base"
#ifdef __SSE2__
#include <emmintrin.h>
#define V4_PAIR_DOT _mm_madd_epi16
#define V4_PAIRS __m128i
#endif
namespace v4tree::base {
constexpr int kRegister = 4, kTileRegisters = 4;
#include "vectors.inl"
#include "kernels.inl"
}  // namespace v4tree::base
