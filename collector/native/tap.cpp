// The collective tap: one boxed kernel in front of the backend kernel of every c10d operator, below every caller
// (Python API, DDP reducer, FSDP2, DTensor, functional and compiled collectives). It writes one 128-byte record a call
// into a memory-mapped file, before the call (so a call that hangs is visible) and again when it completes. No Python,
// no interpreter lock, no allocation. The layout is the one of lanterne/blackbox.py, which reads it.
//
// It sits on the backend keys (CPU, CUDA) and not on the autograd keys: DTensor, eager functional collectives and
// inference mode dispatch below those. The original kernel is fetched from the dispatcher first and called from here.
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Exception.h>
#include <c10/util/Half.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/library.h>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <ctime>
#include <map>
#include <mutex>
#include <tuple>

namespace {

struct Record {
  std::atomic<uint64_t> version;  // 2 * call + 1 while it is written, 2 * call + 2 when published
  int64_t entered, returned;
  std::atomic<int64_t> completed;  // CLOCK_MONOTONIC ns, 0 = pending
  int64_t step, sequence, bytes;
  uint32_t group;
  uint8_t op, dtype, dims, flags;
  int32_t peer, nonfinite;
  int64_t sizes[4];
  double mean_square;
  uint32_t samples, reserved;
  std::atomic<uint64_t> version_again;
};
static_assert(sizeof(Record) == 128, "record layout");

struct Group {
  char name[56];
  int32_t size, rank;
};
static_assert(sizeof(Group) == 64, "group layout");

struct Header {
  char magic[8];
  uint32_t record_bytes, capacity;
  std::atomic<uint64_t> head;
  std::atomic<int64_t> step, backward;
  std::atomic<uint64_t> hits, groups;
  std::atomic<double> squares;
  std::atomic<uint64_t> buckets;
};

constexpr size_t kHeaderBytes = 4096, kGroups = 256, kRecordsAt = kHeaderBytes + kGroups * sizeof(Group);
constexpr uint8_t kNoCompletion = 1, kFailed = 2;
constexpr int64_t kSamplesMax = 1 << 15, kStrideMin = 16;

Header* header = nullptr;
Group* groups = nullptr;
Record* records = nullptr;
uint64_t mask = 0;
std::atomic<int> enabled{0};

int64_t now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return int64_t(t.tv_sec) * 1000000000 + t.tv_nsec;
}

// --- process groups ---------------------------------------------------------------------------------------------

std::mutex groups_lock;
std::atomic<const c10d::ProcessGroup*> group_of[kGroups];
std::atomic<int64_t> group_sequence[kGroups];
std::map<std::tuple<uint32_t, int64_t, int>, int64_t> pair_sequence;  // (group, peer, op) -> calls

bool same_name(const Group& g, const std::string& name) {
  return strncmp(g.name, name.c_str(), sizeof(g.name) - 1) == 0;
}

uint32_t group_number(c10d::ProcessGroup* pg) {
  const std::string& name = pg->getGroupName();
  uint64_t n = header->groups.load(std::memory_order_acquire);
  for (uint64_t i = 0; i < n; i++)
    if (group_of[i].load(std::memory_order_relaxed) == pg && same_name(groups[i], name)) return uint32_t(i);
  std::lock_guard<std::mutex> hold(groups_lock);
  n = header->groups.load(std::memory_order_acquire);
  for (uint64_t i = 0; i < n; i++)
    if (same_name(groups[i], name)) {  // the same group through another object: the count goes on
      group_of[i].store(pg, std::memory_order_relaxed);
      return uint32_t(i);
    }
  if (n >= kGroups) return kGroups - 1;
  strncpy(groups[n].name, name.c_str(), sizeof(groups[n].name) - 1);
  groups[n].size = pg->getSize();
  groups[n].rank = pg->getRank();
  int64_t before = 0;  // calls made before we looked: the backend counts them on every rank alike
  try {
    before = int64_t(pg->getSequenceNumberForGroup());
  } catch (...) {
  }
  group_sequence[n].store(before, std::memory_order_relaxed);
  group_of[n].store(pg, std::memory_order_relaxed);
  header->groups.store(n + 1, std::memory_order_release);
  return uint32_t(n);
}

// --- what a call carries ----------------------------------------------------------------------------------------

struct Payload {
  int64_t bytes = 0;
  at::Tensor first;
  bool reduces = false;
};

int64_t count(const c10::IValue& v, at::Tensor& first) {
  if (v.isTensor()) {
    const at::Tensor& t = v.toTensor();
    if (!t.defined()) return 0;
    if (!first.defined()) first = t;
    return int64_t(t.nbytes());
  }
  int64_t sum = 0;
  if (v.isTensorList()) {
    for (const at::Tensor& t : v.toTensorList()) {
      if (!t.defined()) continue;
      if (!first.defined()) first = t;
      sum += int64_t(t.nbytes());
    }
  } else if (v.isList()) {
    for (const c10::IValue& inner : v.toListRef()) sum += count(inner, first);
  }
  return sum;
}

// The argument whose size is the same on every rank: the full message where there is one.
constexpr int kAllArguments = -1;
struct Op {
  const char* name;
  int payload;
  bool reduces, paired;
};
constexpr Op kOps[] = {
    {"other", kAllArguments, false, false},
    {"allreduce_", 0, true, false},
    {"allreduce_coalesced_", 0, true, false},
    {"broadcast_", 0, false, false},
    {"reduce_", 0, true, false},
    {"allgather_", 0, false, false},
    {"_allgather_base_", 0, false, false},
    {"allgather_coalesced_", 0, false, false},
    {"allgather_into_tensor_coalesced_", 0, false, false},
    {"reduce_scatter_", 1, true, false},
    {"_reduce_scatter_base_", 1, true, false},
    {"reduce_scatter_tensor_coalesced_", 1, true, false},
    {"alltoall_", 1, false, false},
    {"alltoall_base_", 1, false, false},
    {"gather_", 1, false, false},
    {"scatter_", 0, false, false},
    {"barrier", -2, false, false},
    {"send", 0, false, true},
    {"recv_", 0, false, true},
    {"recv_any_source_", 0, false, false},
};

// --- a look at the values before they are reduced ---------------------------------------------------------------

template <typename T>
void look(const T* data, int64_t numel, int64_t stride, Record& r, double& squares) {
  int64_t bad = 0, n = 0;
  double sum = 0;
  for (int64_t i = 0; i < numel; i += stride, n++) {
    const float x = static_cast<float>(data[i]);
    const float square = x * x;
    if (square - square != 0.0f && !std::isfinite(x))
      bad++;
    else
      sum += square;
  }
  r.nonfinite = int32_t(bad);
  r.samples = uint32_t(n);
  r.mean_square = n > bad ? sum / double(n - bad) : 0.0;
  squares = r.mean_square * double(numel);
}

// One element a cache line, at most 32,768 of them: a parameter of 16 elements or more in a bucket of up to 2 MiB is
// always met. Values on a device are never touched.
void sample(const at::Tensor& t, Record& r) {
  if (!t.defined() || !t.device().is_cpu() || !t.is_non_overlapping_and_dense() || t.numel() == 0) return;
  const int64_t numel = t.numel();
  const int64_t stride = numel <= 1024 ? 1 : std::max(kStrideMin, numel / kSamplesMax);
  double squares = 0;
  switch (t.scalar_type()) {
    case at::kFloat: look(t.const_data_ptr<float>(), numel, stride, r, squares); break;
    case at::kDouble: look(t.const_data_ptr<double>(), numel, stride, r, squares); break;
    case at::kHalf: look(t.const_data_ptr<c10::Half>(), numel, stride, r, squares); break;
    case at::kBFloat16: look(t.const_data_ptr<c10::BFloat16>(), numel, stride, r, squares); break;
    default: return;
  }
  if (!header->backward.load(std::memory_order_relaxed)) return;
  header->squares.fetch_add(squares, std::memory_order_relaxed);
  header->buckets.fetch_add(1, std::memory_order_relaxed);
  if (r.nonfinite) header->hits.fetch_add(1, std::memory_order_relaxed);
}

// --- the kernel -------------------------------------------------------------------------------------------------

struct Tap : c10::OperatorKernel {
  c10::SafeKernelFunction original;
  const uint8_t number;

  Tap(c10::SafeKernelFunction kernel, uint8_t op) : original(std::move(kernel)), number(op) {}

  void describe(const c10::OperatorHandle& op, const torch::jit::Stack& stack, Record& r, uint64_t) const {
    const Op& about = kOps[number];
    const size_t arguments = op.schema().arguments().size(), base = stack.size() - arguments;
    at::Tensor first;
    c10::intrusive_ptr<c10d::ProcessGroup> pg;
    size_t at_group = 0;
    for (size_t i = 0; i < arguments && i < 4; i++) {
      const c10::IValue& v = stack[base + i];
      if (v.isCustomClass()) {
        pg = v.toCustomClass<c10d::ProcessGroup>();
        at_group = i;
        break;
      }
      if (about.payload == int(i)) r.bytes = count(v, first);
    }
    if (first.defined()) {
      r.dtype = uint8_t(first.scalar_type());
      r.dims = uint8_t(std::min<int64_t>(first.dim(), 255));
      for (int64_t d = 0; d < std::min<int64_t>(first.dim(), 4); d++) r.sizes[d] = first.size(d);
    }
    if (pg) {
      r.group = group_number(pg.get());
      if (about.paired) {
        r.peer = int32_t(stack[base + at_group + 1].toInt());
        std::lock_guard<std::mutex> hold(groups_lock);
        r.sequence = pair_sequence[{r.group, r.peer, number}]++;
      } else {
        r.sequence = group_sequence[r.group].fetch_add(1, std::memory_order_relaxed);
      }
    }
    if (about.reduces) sample(first, r);
    if (first.defined() && !first.device().is_cpu()) r.flags |= kNoCompletion;
  }

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    if (!enabled.load(std::memory_order_relaxed)) {
      original.callBoxed(op, keys, stack);
      return;
    }
    const uint64_t call = header->head.fetch_add(1, std::memory_order_relaxed);
    Record& r = records[call & mask];
    r.version.store(2 * call + 1, std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_release);
    memset(reinterpret_cast<char*>(&r) + sizeof(r.version), 0, sizeof(Record) - sizeof(r.version));
    r.step = header->step.load(std::memory_order_relaxed);
    r.op = number;
    r.dtype = 255;
    r.peer = -1;
    try {
      describe(op, *stack, r, call);
    } catch (...) {
      r.flags |= kFailed;
    }
    r.entered = now();
    r.version_again.store(2 * call + 2, std::memory_order_release);
    r.version.store(2 * call + 2, std::memory_order_release);
    try {
      original.callBoxed(op, keys, stack);
    } catch (...) {
      finish(call, kFailed);
      throw;
    }
    if (r.version.load(std::memory_order_relaxed) != 2 * call + 2) return;
    r.returned = now();
    if (r.flags & kNoCompletion || !when_done(call, *stack)) finish(call, kNoCompletion);
  }

  static void finish(uint64_t call, uint8_t flag) {
    Record& r = records[call & mask];
    if (r.version.load(std::memory_order_acquire) != 2 * call + 2) return;
    r.flags |= flag;
    r.completed.store(now(), std::memory_order_release);
  }

  static bool when_done(uint64_t call, const torch::jit::Stack& stack) {
    if (stack.empty() || !stack.back().isCustomClass()) return false;
    try {
      auto future = stack.back().toCustomClass<c10d::Work>()->getFuture();
      if (!future) return false;
      future->addCallback([call](c10::ivalue::Future&) { finish(call, 0); }, /*uses_future=*/false);
      return true;
    } catch (...) {
      return false;
    }
  }
};

std::vector<torch::Library>* libraries = nullptr;

struct Quiet : c10::WarningHandler {  // "overriding a kernel" is the point
  void process(const c10::Warning&) override {}
};

}  // namespace

extern "C" {

// Map the file that Python made (header written, zeroed) and wrap the kernels. Returns how many operators are wrapped,
// -1 when the file cannot be mapped or is not ours. A second call maps another file and wraps nothing twice.
__attribute__((visibility("default"))) int lanterne_tap_start(const char* path) {
  const int fd = open(path, O_RDWR | O_CLOEXEC);
  if (fd < 0) return -1;
  struct stat about;
  void* at = MAP_FAILED;
  if (fstat(fd, &about) == 0 && size_t(about.st_size) > kRecordsAt)
    at = mmap(nullptr, size_t(about.st_size), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  close(fd);
  if (at == MAP_FAILED) return -1;
  auto* found = static_cast<Header*>(at);
  const uint64_t capacity = found->capacity;
  if (memcmp(found->magic, "LNTTAP01", 8) != 0 || capacity == 0 || (capacity & (capacity - 1)) != 0 ||
      size_t(about.st_size) < kRecordsAt + capacity * sizeof(Record))
    return -1;
  enabled.store(0);
  header = found;
  groups = reinterpret_cast<Group*>(static_cast<char*>(at) + kHeaderBytes);
  records = reinterpret_cast<Record*>(static_cast<char*>(at) + kRecordsAt);
  mask = capacity - 1;
  {
    std::lock_guard<std::mutex> hold(groups_lock);
    pair_sequence.clear();
  }
  if (!libraries) {
    Quiet quiet;
    c10::WarningUtils::WarningHandlerGuard hush(&quiet);
    libraries = new std::vector<torch::Library>();  // never freed: the dispatcher outlives every static of ours
    for (auto key : {c10::DispatchKey::CPU, c10::DispatchKey::CUDA}) {
      libraries->emplace_back(torch::Library::IMPL, "c10d", key, __FILE__, __LINE__);
      for (size_t i = 1; i < std::size(kOps); i++) {
        auto op = c10::Dispatcher::singleton().findSchema({std::string("c10d::") + kOps[i].name, ""});
        if (!op || !op->hasComputedKernelForDispatchKey(key)) continue;
        libraries->back().impl(
            kOps[i].name, torch::CppFunction::makeFromBoxedFunctor(
                              std::make_unique<Tap>(op->getComputedKernelForDispatchKey(key), uint8_t(i))));
      }
    }
  }
  enabled.store(1);
  return int(std::size(kOps)) - 1;
}

// Switch recording on or off; the kernels stay in place (a branch when off).
__attribute__((visibility("default"))) void lanterne_tap_enable(int on) { enabled.store(header ? on : 0); }
}
