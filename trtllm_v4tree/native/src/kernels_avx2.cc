#include "kernels.h"

#if defined(__x86_64__) && !defined(__clang__)  // clang takes no target pragma: the portable body alone
#pragma GCC target("avx2,fma")
#define V4_NAME "avx2"
namespace v4tree::avx2 {
constexpr int kTileRegisters = 4;  // vectors of 16 floats take two registers each
#include "kernels.inl"
}  // namespace v4tree::avx2
#endif
