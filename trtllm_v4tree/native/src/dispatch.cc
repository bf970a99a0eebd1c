#include <cstdlib>
#include <cstring>

#include "kernels.h"

namespace v4tree {

namespace base {
extern const Kernels table;
}
#if defined(__x86_64__) && !defined(__clang__)  // clang takes no target pragma: the portable body alone
namespace avx2 {
extern const Kernels table;
}
namespace avx512 {
extern const Kernels table;
}
#if __GNUC__ >= 10
namespace avx512bf16 {
extern const Kernels table;
}
#endif
#endif

static const Kernels& choose() {
#if defined(__x86_64__) && !defined(__clang__)  // clang takes no target pragma: the portable body alone
  const char* cap = std::getenv("V4TREE_CPU");  // "base", "avx2" or "avx512" hold back newer instructions, for tests
  const bool below_avx2 = cap && std::strcmp(cap, "base") == 0, below_avx512 = below_avx2 || (cap && std::strcmp(cap, "avx2") == 0);
  __builtin_cpu_init();
#if __GNUC__ >= 10
  const bool below_bf16 = below_avx512 || (cap && std::strcmp(cap, "avx512") == 0);
  if (!below_bf16 && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl"))
    return avx512bf16::table;
#endif
  if (!below_avx512 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
    return avx512::table;
  if (!below_avx2 && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return avx2::table;
#endif
  return base::table;
}

const Kernels& kernels() {
  static const Kernels& chosen = choose();
  return chosen;
}

}  // namespace v4tree
