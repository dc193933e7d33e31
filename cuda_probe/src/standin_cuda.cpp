// A stand-in for libcupti.so.13 and libcuda.so.1, for tests on machines without a GPU: it hands real record layouts to
// the probe's real buffer callbacks, as CUPTI's worker thread would. Behaviour is set by environment variables:
// STANDIN_CUINIT (result of cuInit), STANDIN_DEVICES, STANDIN_BUSY (the owner's name), STANDIN_DENIED, STANDIN_CLOCK=own.
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>

#include "cupti_abi.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace abi = cupti_abi;

namespace {
abi::BufferRequested request = nullptr;
abi::BufferCompleted complete = nullptr;
abi::Timestamp clock_of = nullptr;
std::atomic<int> subscribers{0};
std::atomic<size_t> lost{0};
std::atomic<uint64_t> enabled{0};  // a bit for each kind of activity
constexpr uint64_t kOwnClockAhead = 5'000'000'000;

size_t size_of(uint32_t kind) {
  switch (kind) {
    case abi::kConcurrentKernel: return 208;
    case abi::kMemcpy: return 88;
    case abi::kMemset: return 88;
    case abi::kSynchronization: return 40;
    case abi::kGraphTrace: return 56;
    case abi::kMarker: return 56;
    default: return 40;
  }
}

uint64_t now() {
  if (clock_of != nullptr) return clock_of();
  timespec t{};
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<uint64_t>(t.tv_sec) * 1000000000u + static_cast<uint64_t>(t.tv_nsec) + kOwnClockAhead;
}

int number(const char* name, int otherwise) {
  const char* text = std::getenv(name);
  return text != nullptr ? std::atoi(text) : otherwise;
}

void fill(uint8_t* at, uint32_t kind, uint64_t i, const char* name, uint64_t kernel_ns) {
  std::memset(at, 0, size_of(kind));
  const uint64_t end = now();
  if (kind == abi::kConcurrentKernel) {
    auto* k = reinterpret_cast<abi::Kernel*>(at);
    k->start = end - kernel_ns;
    k->end = end;
    k->stream = 7;
    k->device = 0;
    k->correlation = static_cast<uint32_t>(i);
    k->name = name;
    for (int d = 0; d < 3; d++) k->grid[d] = k->block[d] = 2;
  } else if (kind == abi::kMemcpy || kind == abi::kMemset) {
    auto* m = reinterpret_cast<abi::Memcpy*>(at);
    m->bytes = 4096;
    m->start = end - 500;
    m->end = end;
    m->correlation = static_cast<uint32_t>(i);
  } else if (kind == abi::kGraphTrace) {
    auto* g = reinterpret_cast<abi::GraphTrace*>(at);
    g->start = end - 2000;
    g->end = end;
    g->graph = 3;
  } else if (kind == abi::kSynchronization) {
    auto* s = reinterpret_cast<abi::Synchronization*>(at);
    s->start = end - 100;
    s->end = end;
  } else if (kind == abi::kMarker) {  // every second one ends the one before it
    auto* m = reinterpret_cast<abi::Marker*>(at);
    m->flags = i % 2 == 0 ? abi::kMarkerStart : abi::kMarkerEnd;
    m->timestamp = i % 2 == 0 ? end - 3000 : end;
    m->id = static_cast<uint32_t>(i / 2 + 1);
    m->name = i % 2 == 0 ? name : nullptr;
  } else if (kind == abi::kOverhead) {
    auto* o = reinterpret_cast<abi::Overhead*>(at);
    o->start = end - 50;
    o->end = end;
  }
  reinterpret_cast<abi::Activity*>(at)->kind = kind;
}
}  // namespace

EXPORT int cuptiGetVersion(uint32_t* v) { return *v = 130001, abi::kSuccess; }
EXPORT int cuptiSubscribe_v2(void** s, abi::Callback, void*, abi::SubscriberParams* p) {
  if (number("STANDIN_DENIED", 0) != 0) return abi::kInsufficientPrivileges;
  const char* owner = std::getenv("STANDIN_BUSY");
  if (owner != nullptr || subscribers.exchange(1) != 0) {
    if (p != nullptr) std::snprintf(p->old_name, p->old_name_size, "%s", owner != nullptr ? owner : "lanterne");
    return abi::kMultipleSubscribers;
  }
  *s = &subscribers;
  return abi::kSuccess;
}
EXPORT int cuptiSubscribe(void** s, abi::Callback c, void* u) { return cuptiSubscribe_v2(s, c, u, nullptr); }
EXPORT int cuptiUnsubscribe(void*) { return subscribers = 0, abi::kSuccess; }
EXPORT int cuptiActivityRegisterCallbacks(abi::BufferRequested r, abi::BufferCompleted c) {
  return request = r, complete = c, abi::kSuccess;
}
EXPORT int cuptiActivityRegisterTimestampCallback(abi::Timestamp t) {
  if (std::getenv("STANDIN_CLOCK") != nullptr) return 1;
  return clock_of = t, abi::kSuccess;
}
EXPORT int cuptiGetTimestamp(uint64_t* t) { return *t = now(), abi::kSuccess; }
EXPORT int cuptiActivityEnable(uint32_t kind) { return enabled |= 1ull << kind, abi::kSuccess; }
EXPORT int cuptiActivityDisable(uint32_t kind) { return enabled &= ~(1ull << kind), abi::kSuccess; }
EXPORT int cuptiActivityFlushAll(uint32_t) { return abi::kSuccess; }
EXPORT int cuptiGetResultString(int, const char** s) { return *s = "STANDIN", abi::kSuccess; }
EXPORT int cuptiActivityGetNumDroppedRecords(void*, uint32_t, size_t* n) { return *n = lost.exchange(0), abi::kSuccess; }
EXPORT int cuptiActivityGetNextRecord(uint8_t* buffer, size_t valid, abi::Activity** record) {
  uint8_t* next = *record == nullptr ? buffer : reinterpret_cast<uint8_t*>(*record) + size_of((*record)->kind);
  if (next + 4 > buffer + valid) return abi::kMaxLimitReached;
  auto* found = reinterpret_cast<abi::Activity*>(next);
  if (next + size_of(found->kind) > buffer + valid) return abi::kMaxLimitReached;
  return *record = found, abi::kSuccess;
}

namespace {
uint64_t emit(uint32_t kind, uint64_t n, const char* const* names, uint64_t distinct, uint64_t kernel_ns) {
  if ((enabled >> kind & 1) == 0) return 0;
  uint64_t i = 0;
  while (i < n) {
    uint8_t* buffer = nullptr;
    size_t size = 0, most = 0;
    request(&buffer, &size, &most);
    if (buffer == nullptr) {
      lost += n - i;
      return i;
    }
    size_t used = 0;
    for (; i < n && used + size_of(kind) <= size; i++, used += size_of(kind)) {
      fill(buffer + used, kind, i, names[i % distinct], kernel_ns);
    }
    complete(nullptr, 0, buffer, size, used);
  }
  return i;
}
}  // namespace

// Push n records of a kind through the registered callbacks; returns how many were collected and found a buffer.
EXPORT uint64_t standin_emit(uint32_t kind, uint64_t n, int distinct_names) {
  static char texts[64][48];
  static const char* names[64];
  for (int i = 0; i < 64; i++) {
    std::snprintf(texts[i], sizeof texts[i], "gemm_kernel_%d<float>", i);
    names[i] = texts[i];
  }
  return emit(kind, n, names, static_cast<uint64_t>(distinct_names), 1000);
}
// One kernel of a name and a duration that ends now.
EXPORT uint64_t standin_kernel(const char* name, uint64_t ns) { return emit(abi::kConcurrentKernel, 1, &name, 1, ns); }
// Take buffers and never give them back: the probe must starve, count, and stay alive.
EXPORT int standin_hoard(int n) {
  int taken = 0;
  for (; taken < n; taken++) {
    uint8_t* buffer = nullptr;
    size_t size = 0, most = 0;
    request(&buffer, &size, &most);
    if (buffer == nullptr) break;
  }
  return taken;
}
EXPORT int cuInit(unsigned) { return number("STANDIN_CUINIT", 0); }
EXPORT int cuDeviceGetCount(int* n) { return *n = number("STANDIN_DEVICES", 1), 0; }
