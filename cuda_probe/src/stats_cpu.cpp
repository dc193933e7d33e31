// The CPU twin of the overflow kernel: the same rule, for tests and for CPU training.
#include "stats_rule.h"

int ls_stats_cpu(const ls_tensor* tensors, uint32_t n, ls_stats* out) {
  for (uint32_t t = 0; t < n; t++) {
    if (tensors[t].dtype > LS_BFLOAT16) return 1;
    for (uint64_t i = 0; i < tensors[t].count; i++) {
      lanterne::count_one(lanterne::load(tensors[t].data, i, tensors[t].dtype), *out);
    }
  }
  return 0;
}
