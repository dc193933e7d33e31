/* The C ABI of the NCCL profiler plugin's ring. Host times in ns on CLOCK_MONOTONIC; GPU times on the device's
 * globaltimer (ns). A communicator is named by its id and rank count; order within it by `sequence`. */
#ifndef LANTERNE_NCCL_H
#define LANTERNE_NCCL_H
#include <stdint.h>

#define LN_API __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

/* 160 bytes. `version` is 2n+1 while record n is written and 2n+2 when it is whole; later fields are updated in place. */
struct ln_record {
  uint64_t version;
  uint64_t communicator, sequence;
  uint64_t enqueued_ns, enqueue_ended_ns;
  uint64_t gpu_first_ns, gpu_last_ns; /* first channel's start, last channel's end; 0 = not seen yet */
  uint64_t bytes;
  int32_t rank, ranks, peer;
  uint8_t kind; /* 2 collective, 4 point to point */
  uint8_t channels, channels_started, channels_done;
  char function[20], algorithm[12], protocol[12], datatype[16];
  char reserved[20];
};

struct ln_counters {
  uint64_t callbacks, records, overwritten, communicators;
};

LN_API const struct ln_record* ln_ring(void);
LN_API uint64_t ln_head(void);
LN_API uint32_t ln_capacity(void);
LN_API void ln_count(struct ln_counters* out);
LN_API int ln_abi_version(void); /* the version that NCCL picked: 4, 5 or 6; 0 = not loaded by NCCL yet */
LN_API const char* ln_communicator_name(uint64_t communicator);

#ifdef __cplusplus
}
#endif
#endif
