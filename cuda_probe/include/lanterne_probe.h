/* The C ABI of the CUPTI probe: no Python, no CUDA in it. All times in ns on CLOCK_MONOTONIC. */
#ifndef LANTERNE_PROBE_H
#define LANTERNE_PROBE_H
#include <stdint.h>

#define LP_API __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

enum lp_status {
  LP_COLLECTING = 0,
  LP_IDLE = 1,
  LP_NO_CUPTI = 2,
  LP_NO_DRIVER = 3,
  LP_NO_DEVICE = 4,
  LP_BUSY = 5,
  LP_DENIED = 6,
  LP_TOO_OLD = 7,
  LP_ERROR = 8
};

enum lp_kinds {
  LP_KERNELS = 1,
  LP_MEMCPY = 2,
  LP_MEMSET = 4,
  LP_OVERHEAD = 8,
  LP_SYNCHRONIZATION = 16,
  LP_GRAPHS = 32,
  LP_RANGES = 64 /* NVTX ranges; the process must have been started with NVTX_INJECTION64_PATH naming libcupti */
};

/* 64 bytes. `version` is 2n+1 while record n is written and 2n+2 when it is whole. */
struct lp_record {
  uint64_t version;
  uint64_t start_ns, end_ns;
  uint64_t bytes_or_blocks; /* bytes of a copy; blocks in the grid of a kernel */
  uint32_t kind;            /* CUPTI's activity kind */
  uint32_t name;            /* index for lp_name; copy kind for a memcpy */
  uint32_t device, stream, correlation, graph;
  uint32_t threads_per_block;
  uint32_t reserved;
};

struct lp_counters {
  uint64_t records, dropped_by_cupti, starved_buffers, buffers, parse_ns, cupti_overhead_ns, names_refused;
};

/* Count and time of one kernel name (or one kind of copy). */
struct lp_total {
  uint32_t kind, name; /* as in lp_record; 0 for a memset */
  uint64_t count, ns;
};

struct lp_taken {
  uint64_t records, lost; /* since the last take; lost ones were overwritten before it */
  uint64_t busy_ns;       /* time in which the device did anything: the union of kernels, copies and sets */
  uint32_t kept, totals;  /* rows written to the two arrays */
};

LP_API int lp_open(const char* cupti_path, uint32_t kinds); /* opens a window; returns an lp_status */
LP_API int lp_stop(void);  /* what is launched from now on is left out; what was launched may still run */
LP_API int lp_close(void); /* flushes, unsubscribes */
/* Records since the last take: the `most` longest to `out` in order of their starts, and the sums, longest first. */
LP_API void lp_take(struct lp_record* out, uint32_t most, struct lp_total* totals, uint32_t most_totals,
                    struct lp_taken* taken);
LP_API int lp_flush(void);
LP_API int lp_status(void);
LP_API const char* lp_status_text(void);
LP_API uint32_t lp_cupti_version(void);
LP_API int64_t lp_clock_offset_ns(void); /* added to CUPTI's stamps to get CLOCK_MONOTONIC; 0 where CUPTI took our clock */
LP_API int64_t lp_clock_error_ns(void);  /* half-width of that offset */
LP_API const struct lp_record* lp_ring(void);
LP_API uint64_t lp_head(void); /* records ever written; the ring holds the last lp_capacity() */
LP_API uint32_t lp_capacity(void);
LP_API void lp_count(struct lp_counters* out);
LP_API uint32_t lp_name_count(void);
LP_API const char* lp_name(uint32_t index);
LP_API int InitializeInjection(void); /* CUDA_INJECTION64_PATH */

#ifdef __cplusplus
}
#endif
#endif
