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
#endif

static const Kernels& choose() {
#if defined(__x86_64__) && !defined(__clang__)  // clang takes no target pragma: the portable body alone
  const char* cap = std::getenv("V4TREE_CPU");  // "base" or "avx2" hold back newer instructions, for tests
  const bool below_avx2 = cap && std::strcmp(cap, "base") == 0, below_avx512 = below_avx2 || (cap && std::strcmp(cap, "avx2") == 0);
  __builtin_cpu_init();
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
