#include "kernels.h"

#if defined(__x86_64__) && !defined(__clang__)  // clang takes no target pragma: the portable body alone
#pragma GCC target("avx2,fma")
#include <immintrin.h>
#define V4_NAME "avx2"
#define V4_PAIR_DOT _mm256_madd_epi16
#define V4_PAIRS __m256i
namespace v4tree::avx2 {
constexpr int kRegister = 8, kTileRegisters = 6;
#include "vectors.inl"
#include "kernels.inl"
}  // namespace v4tree::avx2
#endif
