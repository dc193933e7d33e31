/* One pass over many tensors: non-finite values, and what each narrow format would lose. The same per-element rule runs
 * on the CPU and on the device.
 *
 * Limits, from the formats (IEEE 754 binary16; OCP 8-bit floating point, E4M3 and E5M2):
 *   format   largest finite   smallest subnormal
 *   FP16     65504            2^-24
 *   E4M3     448              2^-9
 *   E5M2     57344            2^-16
 * "over" counts finite |x| >= the largest finite value of the format; "under" counts 0 < |x| < its smallest subnormal. */
#ifndef LANTERNE_STATS_H
#define LANTERNE_STATS_H
#include <stdint.h>

#define LS_API __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

enum ls_dtype { LS_FLOAT32 = 0, LS_FLOAT16 = 1, LS_BFLOAT16 = 2 };

struct ls_tensor {
  const void* data;
  uint64_t count; /* elements */
  uint32_t dtype;
  uint32_t reserved;
};

struct ls_stats {
  uint64_t total, zeros, infinite, nan;
  uint64_t fp16_over, fp16_under, e4m3_over, e4m3_under, e5m2_over, e5m2_under;
  uint32_t max_abs_bits; /* largest finite |x| as the bits of a float */
  uint32_t reserved;
};

/* Adds to *out, which the caller zeroes. Returns 0, or 1 on an unknown dtype. */
LS_API int ls_stats_cpu(const struct ls_tensor* tensors, uint32_t n, struct ls_stats* out);

/* The same on the device: `tensors` and `out` are device memory, `stream` a cudaStream_t. Enqueues one kernel and
 * returns its launch status without waiting. Only in builds with nvcc. */
LS_API int ls_stats_cuda(const struct ls_tensor* tensors, uint32_t n, struct ls_stats* out, void* stream);

#ifdef __cplusplus
}
#endif
#endif
