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
namespace avx512vnni {
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
  // "base", "avx2", "avx512" or "avx512vnni" hold back newer instructions, for tests
  static const char* const kNames[] = {"base", "avx2", "avx512", "avx512vnni"};
  const char* cap = std::getenv("V4TREE_CPU");
  int most = 4;
  for (int i = 0; i < 4; ++i)
    if (cap && std::strcmp(cap, kNames[i]) == 0) most = i;
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vl");
  const bool vnni = avx512 && __builtin_cpu_supports("avx512vnni");
#if __GNUC__ >= 10
  if (most >= 4 && vnni && __builtin_cpu_supports("avx512bf16")) return avx512bf16::table;
#endif
  if (most >= 3 && vnni) return avx512vnni::table;
  if (most >= 2 && avx512) return avx512::table;
  if (most >= 1 && avx2) return avx2::table;
#endif
  return base::table;
}

const Kernels& kernels() {
  static const Kernels& chosen = choose();
  return chosen;
}

}  // namespace v4tree
