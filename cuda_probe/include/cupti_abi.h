// The part of CUPTI's ABI that the probe reads, written from its public documentation so that no CUDA header is
// needed to build. Records only ever grow at their end; where the real header is present (LANTERNE_CHECK_CUPTI_ABI)
// every offset below is compared with it at compile time.
#pragma once
#include <cstddef>
#include <cstdint>

namespace cupti_abi {

enum Kind : uint32_t {
  kMemcpy = 1,
  kMemset = 2,
  kKernel = 3,
  kConcurrentKernel = 10,
  kMarker = 12,
  kOverhead = 17,
  kSynchronization = 38,
  kGraphTrace = 51,
};

enum Result : int {
  kSuccess = 0,
  kMaxLimitReached = 12,
  kInsufficientPrivileges = 35,
  kMultipleSubscribers = 39,
};

enum MarkerFlag : uint32_t { kMarkerStart = 2, kMarkerEnd = 4 };

enum FlushFlag : uint32_t { kFlushForced = 1 };

struct Activity {
  uint32_t kind;
};

// CUpti_ActivityKernel9: the prefix up to graphId.
struct Kernel {
  uint32_t kind;
  uint8_t cache_config, shared_memory_config;
  uint16_t registers_per_thread;
  uint32_t partitioned_cache[2];
  uint64_t start, end, completed;
  uint32_t device, context, stream;
  int32_t grid[3], block[3];
  int32_t static_shared_memory, dynamic_shared_memory;
  uint32_t local_memory_per_thread, local_memory_total;
  uint32_t correlation;
  int64_t grid_id;
  const char* name;
  void* reserved;
  uint64_t queued, submitted;
  uint8_t launch_type, shared_memory_carveout;
  uint8_t padding_[2];
  uint32_t shared_memory_executed;
  uint64_t graph_node;
  uint32_t shmem_limit;
  uint32_t graph;
};

struct Memcpy {  // CUpti_ActivityMemcpy5, prefix
  uint32_t kind;
  uint8_t copy_kind, source_kind, target_kind, flags;
  uint64_t bytes, start, end;
  uint32_t device, context, stream, correlation;
};

struct Memset {  // CUpti_ActivityMemset4, prefix
  uint32_t kind, value;
  uint64_t bytes, start, end;
  uint32_t device, context, stream, correlation;
};

struct Synchronization {  // CUpti_ActivitySynchronization, prefix
  uint32_t kind, type;
  uint64_t start, end;
  uint32_t correlation, context, stream;
};

struct GraphTrace {  // CUpti_ActivityGraphTrace2, prefix
  uint32_t kind, correlation;
  uint64_t start, end;
  uint32_t device, graph, context, stream;
};

struct Marker {  // CUpti_ActivityMarker2: an NVTX range is one that starts and one that ends, of the same id
  uint32_t kind, flags;
  uint64_t timestamp;
  uint32_t id, object_kind;
  uint32_t object_[3];
  uint32_t padding_;
  const char* name;
  const char* domain;
};

struct Overhead {  // CUpti_ActivityOverhead, prefix
  uint32_t kind, overhead_kind;
  uint64_t object_[2];
  uint64_t start, end;
};

static_assert(offsetof(Kernel, start) == 16 && offsetof(Kernel, name) == 104 && offsetof(Kernel, graph) == 156);
static_assert(offsetof(Memcpy, correlation) == 44 && offsetof(Memset, correlation) == 44);
static_assert(offsetof(Synchronization, stream) == 32 && offsetof(GraphTrace, stream) == 36);
static_assert(offsetof(Overhead, start) == 24 && offsetof(Marker, id) == 16 && offsetof(Marker, name) == 40);

struct SubscriberParams {  // CUpti_SubscriberParams (13.0 and newer): names the tool that holds CUPTI
  size_t struct_size;
  const char* name;
  char* old_name;
  size_t old_name_size;
};

using BufferRequested = void (*)(uint8_t** buffer, size_t* size, size_t* max_records);
using BufferCompleted = void (*)(void* context, uint32_t stream, uint8_t* buffer, size_t size, size_t valid);
using Callback = void (*)(void* user, int domain, uint32_t id, const void* data);
using Timestamp = uint64_t (*)();

}  // namespace cupti_abi
