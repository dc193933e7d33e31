// Kernel-level timing through the CUPTI Activity API.
//
// Nothing of CUDA is linked: libcuda and libcupti are opened at run time, so the library loads on any machine and says
// why it is idle. A copy of libcupti that the process already mapped (torch's) is preferred; a second one would fight
// it. Collection is by windows: lp_open subscribes and enables, lp_close disables and unsubscribes, so that another
// profiler can have CUPTI in between; a CUPTI that somebody else holds is a status, not an error.
//
// CUPTI's own thread parses buffers into a fixed ring: no allocation per record, no Python, no lock but the one around
// kernel names, which are interned once.
#include "lanterne_probe.h"

#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <deque>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "cupti_abi.h"
#include "records.h"

#ifdef LANTERNE_CHECK_CUPTI_ABI
#include "cupti_abi_check.h"
#endif

namespace abi = cupti_abi;

extern "C" char* __cxa_demangle(const char*, char*, size_t*, int*);  // <cxxabi.h> would take the name `abi`

namespace {

constexpr uint32_t kRing = 1u << 16;
constexpr uint32_t kBuffers = 16;
constexpr size_t kBufferBytes = 1u << 20;
constexpr size_t kNamesMax = 1u << 16;
constexpr size_t kOpenRangesMax = 1u << 12;
constexpr int kCudaErrorNoDevice = 100;
constexpr int kClockSamples = 32;

lp_record ring[kRing];
std::atomic<uint64_t> head{0};
std::atomic<uint64_t> records{0}, dropped{0}, starved{0}, buffers{0}, parse_ns{0}, overhead_ns{0}, names_refused{0};
std::atomic<int> status{LP_IDLE};
std::atomic<int64_t> clock_offset{0}, clock_error{0};
char why[320] = "no window was opened";
std::mutex control;
void* library = nullptr;
void* subscriber = nullptr;
uint32_t open_kinds = 0, cupti_version = 0;
bool window_open = false, stopped = false;
uint64_t taken_until = 0;

std::mutex names_lock;
std::unordered_map<const char*, uint32_t> name_by_pointer;
std::unordered_map<std::string, uint32_t> name_by_text;
std::vector<const std::string*> names;
std::deque<std::string> shown;  // the same, demangled as torch.profiler shows them; references stay valid

struct OpenRange {
  uint64_t start;
  uint32_t name;
};
std::mutex ranges_lock;
std::unordered_map<uint32_t, OpenRange> open_ranges;  // NVTX ranges that began and have not ended, by id

std::array<uint8_t*, kBuffers> pool{};
std::atomic<uint32_t> free_buffers{0};

struct Api {
  int (*GetVersion)(uint32_t*);
  int (*Subscribe)(void**, abi::Callback, void*);
  int (*Unsubscribe)(void*);
  int (*ActivityRegisterCallbacks)(abi::BufferRequested, abi::BufferCompleted);
  int (*ActivityEnable)(uint32_t);
  int (*ActivityDisable)(uint32_t);
  int (*ActivityFlushAll)(uint32_t);
  int (*ActivityGetNextRecord)(uint8_t*, size_t, abi::Activity**);
  int (*GetResultString)(int, const char**);
  // optional
  int (*Subscribe_v2)(void**, abi::Callback, void*, abi::SubscriberParams*);
  int (*ActivityGetNumDroppedRecords)(void*, uint32_t, size_t*);
  int (*ActivityRegisterTimestampCallback)(abi::Timestamp);
  int (*GetTimestamp)(uint64_t*);
} api{};

struct KindOf {
  uint32_t bit;
  uint32_t activity;
};
constexpr KindOf kKinds[] = {
    {LP_KERNELS, abi::kConcurrentKernel},      {LP_MEMCPY, abi::kMemcpy},  {LP_MEMSET, abi::kMemset},
    {LP_OVERHEAD, abi::kOverhead},             {LP_SYNCHRONIZATION, abi::kSynchronization},
    {LP_GRAPHS, abi::kGraphTrace},             {LP_RANGES, abi::kMarker},
};

uint64_t monotonic_ns() {
  timespec t{};
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<uint64_t>(t.tv_sec) * 1000000000u + static_cast<uint64_t>(t.tv_nsec);
}

int say(int code, const char* format, const char* a = "", const char* b = "") {
  std::snprintf(why, sizeof why, format, a, b);
  status.store(code);
  return code;
}

const char* text_of(int result) {
  const char* text = "unknown";
  if (api.GetResultString != nullptr) api.GetResultString(result, &text);
  return text;
}

std::string demangled(const char* name) {
  int result = 0;
  char* text = __cxa_demangle(name, nullptr, nullptr, &result);
  std::string found = result == 0 && text != nullptr ? text : name;
  std::free(text);
  return found;
}

// CUPTI shares one pointer per kernel name; a pointer may be reused for another text after a module is unloaded.
uint32_t intern(const char* name) {
  if (name == nullptr) name = "?";
  std::lock_guard<std::mutex> guard(names_lock);
  auto known = name_by_pointer.find(name);
  if (known != name_by_pointer.end() && *names[known->second] == name) return known->second;
  if (names.size() >= kNamesMax && name_by_text.find(name) == name_by_text.end()) {
    names_refused++;
    return 0;
  }
  auto [at, fresh] = name_by_text.try_emplace(name, static_cast<uint32_t>(names.size()));
  if (fresh) {
    names.push_back(&at->first);
    shown.push_back(demangled(name));
  }
  if (name_by_pointer.size() < 2 * kNamesMax) name_by_pointer[name] = at->second;
  return at->second;
}

// An NVTX range is whole when its end comes; one whose beginning was not seen, or was one too many, is left out.
bool range_ended(const abi::Marker* m, lp_record* out) {
  std::lock_guard<std::mutex> guard(ranges_lock);
  if ((m->flags & abi::kMarkerStart) != 0) {
    if (open_ranges.size() < kOpenRangesMax) open_ranges[m->id] = {m->timestamp, intern(m->name)};
    return false;
  }
  auto begun = (m->flags & abi::kMarkerEnd) != 0 ? open_ranges.find(m->id) : open_ranges.end();
  if (begun == open_ranges.end()) return false;
  *out = {0, begun->second.start, m->timestamp, 0, m->kind, begun->second.name, 0, 0, m->id, 0, 0, 0};
  open_ranges.erase(begun);
  return true;
}

bool convert(const abi::Activity* activity, lp_record* out) {
  switch (activity->kind) {
    case abi::kKernel:
    case abi::kConcurrentKernel: {
      auto* k = reinterpret_cast<const abi::Kernel*>(activity);
      *out = {0, k->start, k->end, static_cast<uint64_t>(k->grid[0]) * k->grid[1] * k->grid[2], k->kind,
              intern(k->name), k->device, k->stream, k->correlation, k->graph,
              static_cast<uint32_t>(k->block[0] * k->block[1] * k->block[2]), 0};
      return true;
    }
    case abi::kMemcpy: {
      auto* m = reinterpret_cast<const abi::Memcpy*>(activity);
      *out = {0, m->start, m->end, m->bytes, m->kind, m->copy_kind, m->device, m->stream, m->correlation, 0, 0, 0};
      return true;
    }
    case abi::kMemset: {
      auto* m = reinterpret_cast<const abi::Memset*>(activity);
      *out = {0, m->start, m->end, m->bytes, m->kind, m->value, m->device, m->stream, m->correlation, 0, 0, 0};
      return true;
    }
    case abi::kSynchronization: {
      auto* s = reinterpret_cast<const abi::Synchronization*>(activity);
      *out = {0, s->start, s->end, 0, s->kind, s->type, 0, s->stream, s->correlation, 0, 0, 0};
      return true;
    }
    case abi::kGraphTrace: {
      auto* g = reinterpret_cast<const abi::GraphTrace*>(activity);
      *out = {0, g->start, g->end, 0, g->kind, 0, g->device, g->stream, g->correlation, g->graph, 0, 0};
      return true;
    }
    case abi::kMarker:
      return range_ended(reinterpret_cast<const abi::Marker*>(activity), out);
    case abi::kOverhead: {
      auto* o = reinterpret_cast<const abi::Overhead*>(activity);
      overhead_ns += o->end - o->start;
      return false;
    }
    default:
      return false;
  }
}

void publish(lp_record record) {
  const int64_t offset = clock_offset.load(std::memory_order_relaxed);
  record.start_ns += static_cast<uint64_t>(offset);
  record.end_ns += static_cast<uint64_t>(offset);
  const uint64_t n = head.fetch_add(1, std::memory_order_relaxed);
  lp_record& slot = ring[n & (kRing - 1)];
  auto* version = reinterpret_cast<std::atomic<uint64_t>*>(&slot.version);
  version->store(2 * n + 1, std::memory_order_release);
  std::memcpy(reinterpret_cast<char*>(&slot) + sizeof slot.version,
              reinterpret_cast<const char*>(&record) + sizeof record.version, sizeof slot - sizeof slot.version);
  version->store(2 * n + 2, std::memory_order_release);
  records++;
}

// Bounded memory: with no free buffer CUPTI gets none, drops, and counts.
void on_request(uint8_t** buffer, size_t* size, size_t* max_records) {
  *buffer = nullptr;
  *size = 0;
  *max_records = 0;
  uint32_t mask = free_buffers.load();
  while (mask != 0) {
    const uint32_t i = static_cast<uint32_t>(__builtin_ctz(mask));
    if (free_buffers.compare_exchange_weak(mask, mask & ~(1u << i))) {
      *buffer = pool[i];
      *size = kBufferBytes;
      return;
    }
  }
  starved++;
}

void on_complete(void* context, uint32_t stream, uint8_t* buffer, size_t /*size*/, size_t valid) {
  const uint64_t begin = monotonic_ns();
  buffers++;
  abi::Activity* activity = nullptr;
  lp_record record{};
  while (valid != 0 && api.ActivityGetNextRecord(buffer, valid, &activity) == abi::kSuccess) {
    if (convert(activity, &record)) publish(record);
  }
  size_t lost = 0;
  if (api.ActivityGetNumDroppedRecords != nullptr &&
      api.ActivityGetNumDroppedRecords(context, stream, &lost) == abi::kSuccess) {
    dropped += lost;
  }
  for (uint32_t i = 0; i < kBuffers; i++) {
    if (pool[i] == buffer) free_buffers.fetch_or(1u << i);
  }
  parse_ns += monotonic_ns() - begin;
}

void on_callback(void*, int, uint32_t, const void*) {}

template <class F>
bool find(F& target, const char* name) {
  target = reinterpret_cast<F>(dlsym(library, name));
  return target != nullptr;
}

int load(const char* path) {
  if (library != nullptr) return LP_COLLECTING;
  const char* usual[] = {"libcupti.so.13", "libcupti.so.12", "libcupti.so"};
  for (const char* name : usual) {
    if (library == nullptr) library = dlopen(name, RTLD_NOW | RTLD_NOLOAD);
  }
  if (library == nullptr && path != nullptr && *path != 0) library = dlopen(path, RTLD_NOW | RTLD_GLOBAL);
  for (const char* name : usual) {
    if (library == nullptr) library = dlopen(name, RTLD_NOW | RTLD_GLOBAL);
  }
  if (library == nullptr) {
    return say(LP_NO_CUPTI, "libcupti was not found (it comes with a CUDA toolkit or the package nvidia-cuda-cupti): %s",
               dlerror());
  }
  bool all = find(api.GetVersion, "cuptiGetVersion");
  all &= find(api.Subscribe, "cuptiSubscribe");
  all &= find(api.Unsubscribe, "cuptiUnsubscribe");
  all &= find(api.ActivityRegisterCallbacks, "cuptiActivityRegisterCallbacks");
  all &= find(api.ActivityEnable, "cuptiActivityEnable");
  all &= find(api.ActivityDisable, "cuptiActivityDisable");
  all &= find(api.ActivityFlushAll, "cuptiActivityFlushAll");
  all &= find(api.ActivityGetNextRecord, "cuptiActivityGetNextRecord");
  all &= find(api.GetResultString, "cuptiGetResultString");
  find(api.Subscribe_v2, "cuptiSubscribe_v2");
  find(api.ActivityGetNumDroppedRecords, "cuptiActivityGetNumDroppedRecords");
  find(api.ActivityRegisterTimestampCallback, "cuptiActivityRegisterTimestampCallback");
  find(api.GetTimestamp, "cuptiGetTimestamp");
  if (!all) {
    dlclose(library);
    library = nullptr;
    return say(LP_TOO_OLD, "this libcupti lacks functions of the Activity API; CUDA 12 or newer is needed");
  }
  api.GetVersion(&cupti_version);
  return LP_COLLECTING;
}

// Without a driver CUPTI answers with a meaningless code, so the driver is asked first.
int check_driver() {
  void* cuda = dlopen("libcuda.so.1", RTLD_NOW);
  if (cuda == nullptr) return say(LP_NO_DRIVER, "no NVIDIA driver on this machine: %s", dlerror());
  auto init = reinterpret_cast<int (*)(unsigned)>(dlsym(cuda, "cuInit"));
  auto count = reinterpret_cast<int (*)(int*)>(dlsym(cuda, "cuDeviceGetCount"));
  if (init == nullptr || count == nullptr) return say(LP_NO_DRIVER, "libcuda.so.1 has no cuInit");
  const int result = init(0);
  if (result != 0) {
    char code[16];
    std::snprintf(code, sizeof code, "%d", result);
    return result == kCudaErrorNoDevice ? say(LP_NO_DEVICE, "the driver is there, but no device is visible (cuInit %s)", code)
                                        : say(LP_NO_DRIVER, "the NVIDIA driver does not start (cuInit %s)", code);
  }
  int devices = 0;
  if (count(&devices) != 0 || devices == 0) return say(LP_NO_DEVICE, "the driver is there, but no device is visible");
  return LP_COLLECTING;
}

int subscribe() {
  char owner[128] = "";
  int result;
  if (api.Subscribe_v2 != nullptr) {
    abi::SubscriberParams params{sizeof(abi::SubscriberParams), "lanterne", owner, sizeof owner};
    result = api.Subscribe_v2(&subscriber, on_callback, nullptr, &params);
  } else {
    result = api.Subscribe(&subscriber, on_callback, nullptr);
  }
  if (result == abi::kMultipleSubscribers) {
    return say(LP_BUSY, "CUPTI is held by another tool (%s); the probe steps aside", owner[0] != 0 ? owner : "unnamed");
  }
  if (result == abi::kInsufficientPrivileges) {
    return say(LP_DENIED, "CUPTI refuses for want of privileges (%s); an administrator must allow profiling", text_of(result));
  }
  if (result != abi::kSuccess) return say(LP_ERROR, "cuptiSubscribe: %s", text_of(result));
  return LP_COLLECTING;
}

// CUPTI takes our clock where it can; else the offset is bounded by the tightest of some paired readings.
void correlate_clocks() {
  clock_offset = 0;
  clock_error = 0;
  if (api.ActivityRegisterTimestampCallback != nullptr &&
      api.ActivityRegisterTimestampCallback(monotonic_ns) == abi::kSuccess) {
    return;
  }
  if (api.GetTimestamp == nullptr) return;
  uint64_t best = UINT64_MAX;
  for (int i = 0; i < kClockSamples; i++) {
    uint64_t device = 0;
    const uint64_t before = monotonic_ns();
    if (api.GetTimestamp(&device) != abi::kSuccess) return;
    const uint64_t width = monotonic_ns() - before;
    if (width < best) {
      best = width;
      clock_offset = static_cast<int64_t>(before + width / 2) - static_cast<int64_t>(device);
      clock_error = static_cast<int64_t>(width / 2 + 1);
    }
  }
}

int allocate() {
  for (uint32_t i = 0; i < kBuffers; i++) {
    if (pool[i] != nullptr) continue;
    pool[i] = static_cast<uint8_t*>(std::aligned_alloc(64, kBufferBytes));
    if (pool[i] == nullptr) return say(LP_ERROR, "no memory for CUPTI's buffers");
    free_buffers.fetch_or(1u << i);
  }
  return LP_COLLECTING;
}

}  // namespace

int lp_open(const char* cupti_path, uint32_t kinds) {
  std::lock_guard<std::mutex> guard(control);
  if (window_open) return LP_COLLECTING;
  for (auto* step : {+[](const char*) { return check_driver(); }, +[](const char* p) { return load(p); },
                     +[](const char*) { return allocate(); }, +[](const char*) { return subscribe(); }}) {
    if (const int code = step(cupti_path); code != LP_COLLECTING) return code;
  }
  correlate_clocks();
  {
    std::lock_guard<std::mutex> ranges(ranges_lock);
    open_ranges.clear();
  }
  int result = api.ActivityRegisterCallbacks(on_request, on_complete);
  for (const KindOf& k : kKinds) {
    if (result == abi::kSuccess && (kinds & k.bit) != 0) result = api.ActivityEnable(k.activity);
  }
  if (result != abi::kSuccess) {
    api.Unsubscribe(subscriber);
    subscriber = nullptr;
    return say(LP_ERROR, "enabling the records: %s", text_of(result));
  }
  open_kinds = kinds;
  window_open = true;
  stopped = false;
  return say(LP_COLLECTING, "collecting");
}

int lp_flush(void) {
  std::lock_guard<std::mutex> guard(control);
  return window_open ? api.ActivityFlushAll(0) : 0;
}

namespace {
void disable_kinds() {
  if (stopped) return;
  for (const KindOf& k : kKinds) {
    if ((open_kinds & k.bit) != 0) api.ActivityDisable(k.activity);
  }
  stopped = true;
}

}  // namespace

void lp_take(lp_record* out, uint32_t most, lp_total* totals, uint32_t most_totals, lp_taken* taken) {
  std::lock_guard<std::mutex> guard(control);
  const uint64_t until = head.load(std::memory_order_acquire);
  const uint64_t from = std::max(taken_until, until > kRing ? until - kRing : 0);
  *taken = {};
  taken->lost = from - taken_until;
  taken_until = until;
  std::vector<lp_record> found;
  found.reserve(until - from);
  for (uint64_t n = from; n < until; n++) {
    const lp_record copy = ring[n & (kRing - 1)];
    const auto* version = reinterpret_cast<const std::atomic<uint64_t>*>(&ring[n & (kRing - 1)].version);
    if (copy.version == 2 * n + 2 && version->load(std::memory_order_acquire) == 2 * n + 2) {
      found.push_back(copy);
    } else {
      taken->lost++;
    }
  }
  const auto earlier = [](const lp_record& a, const lp_record& b) { return a.start_ns < b.start_ns; };
  std::sort(found.begin(), found.end(), earlier);
  taken->records = found.size();
  taken->busy_ns = covered(found);
  taken->totals = sums(found, totals, most_totals);
  if (found.size() > most) {
    const auto longer = [](const lp_record& a, const lp_record& b) {
      return a.end_ns - a.start_ns > b.end_ns - b.start_ns;
    };
    std::nth_element(found.begin(), found.begin() + most, found.end(), longer);
    found.resize(most);
    std::sort(found.begin(), found.end(), earlier);
  }
  taken->kept = static_cast<uint32_t>(found.size());
  std::copy(found.begin(), found.end(), out);
}

int lp_stop(void) {
  std::lock_guard<std::mutex> guard(control);
  if (!window_open) return status;
  disable_kinds();
  return say(LP_COLLECTING, "what was launched in the window is waited for");
}

int lp_close(void) {
  std::lock_guard<std::mutex> guard(control);
  if (!window_open) return status;
  disable_kinds();
  api.ActivityFlushAll(abi::kFlushForced);
  api.Unsubscribe(subscriber);
  subscriber = nullptr;
  window_open = false;
  return say(LP_IDLE, "the window is closed");
}

int lp_status(void) { return status; }
const char* lp_status_text(void) { return why; }
uint32_t lp_cupti_version(void) { return cupti_version; }
int64_t lp_clock_offset_ns(void) { return clock_offset; }
int64_t lp_clock_error_ns(void) { return clock_error; }
const lp_record* lp_ring(void) { return ring; }
uint64_t lp_head(void) { return head; }
uint32_t lp_capacity(void) { return kRing; }

void lp_count(lp_counters* out) {
  *out = {records, dropped, starved, buffers, parse_ns, overhead_ns, names_refused};
}

uint32_t lp_name_count(void) {
  std::lock_guard<std::mutex> guard(names_lock);
  return static_cast<uint32_t>(names.size());
}

const char* lp_name(uint32_t index) {
  std::lock_guard<std::mutex> guard(names_lock);
  return index < shown.size() ? shown[index].c_str() : nullptr;
}

// Called by the driver inside cuInit, before any Python runs; 1 keeps the library.
int InitializeInjection(void) {
  const char* kinds = std::getenv("LANTERNE_PROBE_KINDS");
  lp_open(std::getenv("LANTERNE_PROBE_CUPTI"),
          kinds != nullptr ? static_cast<uint32_t>(std::strtoul(kinds, nullptr, 0)) : static_cast<uint32_t>(LP_KERNELS));
  return 1;
}
