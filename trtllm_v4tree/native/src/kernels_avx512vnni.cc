#include "kernels.h"

#if defined(__x86_64__) && !defined(__clang__)  // clang takes no target pragma: the portable body alone
#pragma GCC target("avx512vnni,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,prefer-vector-width=512")
#include <immintrin.h>
#define V4_NAME "avx512vnni"
#define V4_BYTE_DOT
namespace v4tree::avx512vnni {
constexpr int kRegister = 16, kTileRegisters = 24, kTogether = 8;
constexpr int64_t kFloatRate = 50, kByteRate = 200;
#include "vectors.inl"
#include "products.inl"
#include "kernels.inl"
}  // namespace v4tree::avx512vnni
#endif
