#include "kernels.h"

#define V4_NAME "base"
namespace v4tree::base {
constexpr int kTileRegisters = 4;
#include "kernels.inl"
}  // namespace v4tree::base
