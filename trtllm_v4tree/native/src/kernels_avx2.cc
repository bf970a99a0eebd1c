#include "kernels.h"

#if defined(__x86_64__) && !defined(__clang__)  // clang takes no target pragma: the portable body alone
#pragma GCC target("avx2,fma")
#include <immintrin.h>
#define V4_NAME "avx2"
#define V4_PAIR_DOT _mm256_madd_epi16
#define V4_PAIRS __m256i
#define V4_PACK(a, b) \
  _mm256_permute4x64_epi64(_mm256_packs_epi32(_mm256_shuffle_epi32(a, 0xd8), _mm256_shuffle_epi32(b, 0xd8)), 0xd8)
namespace v4tree::avx2 {
constexpr int kRegister = 8, kTileRegisters = 6, kTogether = 2;
constexpr int64_t kFloatRate = 35, kByteRate = 55;
#include "vectors.inl"
#include "products.inl"
#include "kernels.inl"
}  // namespace v4tree::avx2
#endif
