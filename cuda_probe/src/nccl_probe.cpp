// NCCL profiler plugin: NCCL_PROFILER_PLUGIN=/path/to/liblanterne_nccl.so, set before the first communicator.
//
// For each collective and point-to-point call: when it was enqueued (host clock), which channels ran when (GPU clock),
// bytes, algorithm, protocol. Only Coll, P2p and KernelCh events are asked for, so nothing is paid per network chunk.
// Every callback returns success and never blocks; memory is fixed. "stop" of a collective means enqueued, not done:
// the GPU interval is the first channel's start to the last channel's stop.
#include "lanterne_nccl.h"

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>

#include "nccl_abi.h"

namespace abi = nccl_abi;

static_assert(sizeof(ln_record) == 160, "layout");

namespace {

constexpr uint64_t kRing = 1u << 13;
constexpr uint32_t kHandles = 1u << 14;
constexpr uint32_t kCommunicators = 256;

struct Communicator {
  uint64_t id;
  int rank, ranks;
  char name[64];
};
struct Handle {
  uint64_t kind;
  uint64_t call;
};

ln_record ring[kRing];
Handle handles[kHandles];
Communicator communicators[kCommunicators];
std::atomic<uint64_t> head{0}, callbacks{0}, overwritten{0};
std::atomic<uint32_t> next_handle{0}, communicator_count{0};
std::atomic<int> abi_version{0};

uint64_t monotonic_ns() {
  timespec t{};
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<uint64_t>(t.tv_sec) * 1000000000u + static_cast<uint64_t>(t.tv_nsec);
}

template <size_t N>
void copy(char (&to)[N], const char* from) {
  std::snprintf(to, N, "%s", from != nullptr ? from : "");
}

uint64_t width_of(const char* datatype) {
  if (datatype == nullptr) return 1;
  if (std::strstr(datatype, "64") != nullptr || std::strstr(datatype, "ouble") != nullptr) return 8;
  if (std::strstr(datatype, "32") != nullptr || std::strcmp(datatype, "ncclFloat") == 0) return 4;
  if (std::strstr(datatype, "16") != nullptr || std::strstr(datatype, "alf") != nullptr) return 2;
  return 1;
}

std::atomic<uint64_t>& version_of(ln_record& record) { return *reinterpret_cast<std::atomic<uint64_t>*>(&record.version); }

// The record of a call, or null when the ring has gone round since.
ln_record* record_of(uint64_t call) {
  ln_record& record = ring[call & (kRing - 1)];
  if (version_of(record).load(std::memory_order_acquire) == 2 * call + 2) return &record;
  overwritten++;
  return nullptr;
}

void* hand_out(uint64_t kind, uint64_t call) {
  Handle& handle = handles[next_handle.fetch_add(1, std::memory_order_relaxed) & (kHandles - 1)];
  handle = {kind, call};
  return &handle;
}

int init(int version, void** context, int* mask, const char* name, uint64_t id, int ranks, int rank) {
  Communicator& c = communicators[communicator_count.fetch_add(1) & (kCommunicators - 1)];
  c.id = id;
  c.rank = rank;
  c.ranks = ranks;
  copy(c.name, name);
  abi_version = version;
  *context = &c;
  const char* chosen = std::getenv("LANTERNE_NCCL_EVENTS");
  *mask = chosen != nullptr ? std::atoi(chosen) : static_cast<int>(abi::kColl | abi::kP2p | abi::kKernelCh);
  return 0;
}

template <class D>
void fill(ln_record& r, const Communicator& c, const D& d, uint64_t kind) {
  r.communicator = c.id;
  r.rank = c.rank;
  r.ranks = c.ranks;
  r.kind = static_cast<uint8_t>(kind);
  r.enqueue_ended_ns = r.gpu_first_ns = r.gpu_last_ns = 0;
  r.channels_started = r.channels_done = 0;
  if (kind == abi::kColl) {
    r.sequence = d.coll.sequence;
    r.bytes = d.coll.count * width_of(d.coll.datatype);
    r.channels = d.coll.channels;
    r.peer = -1;
    copy(r.function, d.coll.function);
    copy(r.algorithm, d.coll.algorithm);
    copy(r.protocol, d.coll.protocol);
    copy(r.datatype, d.coll.datatype);
  } else {
    r.sequence = UINT64_MAX;
    r.bytes = d.p2p.count * width_of(d.p2p.datatype);
    r.channels = d.p2p.channels;
    r.peer = d.p2p.peer;
    copy(r.function, d.p2p.function);
    r.algorithm[0] = r.protocol[0] = 0;
    copy(r.datatype, d.p2p.datatype);
  }
  r.enqueued_ns = monotonic_ns();
}

template <class D>
int start(void* context, void** handle, D* descriptor) {
  callbacks++;
  *handle = nullptr;
  const auto kind = static_cast<uint64_t>(descriptor->type);
  if (kind == abi::kColl || kind == abi::kP2p) {
    const uint64_t call = head.fetch_add(1, std::memory_order_relaxed);
    ln_record& record = ring[call & (kRing - 1)];
    version_of(record).store(2 * call + 1, std::memory_order_release);
    fill(record, *static_cast<Communicator*>(context), *descriptor, kind);
    version_of(record).store(2 * call + 2, std::memory_order_release);
    *handle = hand_out(kind, call);
  } else if (kind == abi::kKernelCh && descriptor->parent != nullptr) {
    const uint64_t call = static_cast<Handle*>(descriptor->parent)->call;
    if (ln_record* record = record_of(call); record != nullptr) {
      const uint64_t at = descriptor->kernel.timer;
      if (record->gpu_first_ns == 0 || at < record->gpu_first_ns) record->gpu_first_ns = at;
      record->channels_started++;
      *handle = hand_out(kind, call);
    }
  }
  return 0;
}

int record_state(void* handle, int state, abi::StateArguments* arguments) {
  callbacks++;
  auto* h = static_cast<Handle*>(handle);
  if (h == nullptr || arguments == nullptr || state != abi::kKernelChStop || h->kind != abi::kKernelCh) return 0;
  if (ln_record* record = record_of(h->call); record != nullptr) {
    if (arguments->kernel.timer > record->gpu_last_ns) record->gpu_last_ns = arguments->kernel.timer;
    record->channels_done++;
  }
  return 0;
}

int stop(void* handle) {
  callbacks++;
  auto* h = static_cast<Handle*>(handle);
  if (h == nullptr || (h->kind != abi::kColl && h->kind != abi::kP2p)) return 0;
  if (ln_record* record = record_of(h->call); record != nullptr) record->enqueue_ended_ns = monotonic_ns();
  return 0;
}

int finalize(void*) { return 0; }

int init_v4(void** context, int* mask, const char* name, uint64_t id, int, int ranks, int rank, abi::Logger) {
  return init(4, context, mask, name, id, ranks, rank);
}
int init_v5(void** context, uint64_t id, int* mask, const char* name, int, int ranks, int rank, abi::Logger) {
  return init(5, context, mask, name, id, ranks, rank);
}
int init_v6(void** context, uint64_t id, int* mask, const char* name, int, int ranks, int rank, abi::Logger) {
  return init(6, context, mask, name, id, ranks, rank);
}

}  // namespace

extern "C" {
LN_API abi::PluginV4 ncclProfiler_v4 = {"lanterne", init_v4, start<abi::DescriptorV4>, stop, record_state, finalize};
LN_API abi::PluginV5 ncclProfiler_v5 = {"lanterne", init_v5, start<abi::DescriptorV5>, stop, record_state, finalize};
LN_API abi::PluginV5 ncclProfiler_v6 = {"lanterne", init_v6, start<abi::DescriptorV5>, stop, record_state, finalize};
}

const ln_record* ln_ring(void) { return ring; }
uint64_t ln_head(void) { return head; }
uint32_t ln_capacity(void) { return kRing; }
int ln_abi_version(void) { return abi_version; }
void ln_count(ln_counters* out) { *out = {callbacks, head, overwritten, communicator_count}; }

const char* ln_communicator_name(uint64_t communicator) {
  const uint32_t known = communicator_count.load();
  for (uint32_t i = 0; i < known && i < kCommunicators; i++) {
    if (communicators[i].id == communicator) return communicators[i].name;
  }
  return "";
}
