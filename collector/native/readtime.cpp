// Times file reads of a process, preloaded (LD_PRELOAD) where the user asked for it: read, pread and readv on regular
// files, as data loaders issue them. Memory-mapped files are not seen: their reads are page faults.
//
// Each process writes four counters into a page of its own, <LANTERNE_READ_TIMES>/reads-<pid>, mapped shared: no lock,
// nothing to flush, readable after a crash. A fork begins a page of its own. Where the page cannot be made the calls go
// through untouched.
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <ctime>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

struct Counters {
  std::atomic<uint64_t> calls, bytes, ns, longest_ns;
};
constexpr int kDescriptors = 1 << 16;
enum Kind : uint8_t { kUnknown = 0, kFile = 1, kOther = 2 };

std::atomic<Counters*> page{nullptr};
std::atomic<pid_t> owner{0};
std::atomic<uint8_t> kinds[kDescriptors];

uint64_t now_ns() {
  timespec t{};
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<uint64_t>(t.tv_sec) * 1000000000u + static_cast<uint64_t>(t.tv_nsec);
}

Counters* made(pid_t pid) {
  const char* folder = std::getenv("LANTERNE_READ_TIMES");
  if (folder == nullptr || *folder == 0) return nullptr;
  char path[512];
  if (std::snprintf(path, sizeof path, "%s/reads-%d", folder, static_cast<int>(pid)) >= static_cast<int>(sizeof path)) {
    return nullptr;
  }
  const int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (fd < 0) return nullptr;
  void* found = MAP_FAILED;
  if (ftruncate(fd, sizeof(Counters)) == 0) {
    found = mmap(nullptr, sizeof(Counters), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  }
  close(fd);
  return found == MAP_FAILED ? nullptr : static_cast<Counters*>(found);
}

// This process's page; the parent's stays mapped after a fork and is not written any more.
Counters* counters() {
  const pid_t pid = getpid();
  pid_t was = owner.load(std::memory_order_acquire);
  if (was == pid) return page.load(std::memory_order_acquire);
  if (owner.compare_exchange_strong(was, pid)) {
    const int kept = errno;
    page.store(nullptr);
    page.store(made(pid), std::memory_order_release);
    errno = kept;
  }
  return page.load(std::memory_order_acquire);
}

bool is_file(int fd) {
  if (fd < 0 || fd >= kDescriptors) return false;
  uint8_t kind = kinds[fd].load(std::memory_order_relaxed);
  if (kind == kUnknown) {
    const int kept = errno;
    struct stat about{};
    kind = fstat(fd, &about) == 0 && S_ISREG(about.st_mode) ? kFile : kOther;
    kinds[fd].store(kind, std::memory_order_relaxed);
    errno = kept;
  }
  return kind == kFile;
}

void count(ssize_t got, uint64_t began) {
  Counters* mine = counters();
  if (mine == nullptr || got < 0) return;
  const uint64_t took = now_ns() - began;
  mine->calls.fetch_add(1, std::memory_order_relaxed);
  mine->bytes.fetch_add(static_cast<uint64_t>(got), std::memory_order_relaxed);
  mine->ns.fetch_add(took, std::memory_order_relaxed);
  uint64_t longest = mine->longest_ns.load(std::memory_order_relaxed);
  while (took > longest && !mine->longest_ns.compare_exchange_weak(longest, took)) {
  }
}

template <class F>
F next(const char* name, std::atomic<void*>& kept) {
  void* found = kept.load(std::memory_order_relaxed);
  if (found == nullptr) {
    found = dlsym(RTLD_NEXT, name);
    kept.store(found, std::memory_order_relaxed);
  }
  return reinterpret_cast<F>(found);
}

template <class F, class... A>
ssize_t timed(F real, int fd, A... arguments) {
  if (!is_file(fd)) return real(fd, arguments...);
  const uint64_t began = now_ns();
  const ssize_t got = real(fd, arguments...);
  const int kept = errno;
  count(got, began);
  errno = kept;
  return got;
}

std::atomic<void*> real_read, real_pread, real_pread64, real_readv, real_close;

}  // namespace

EXPORT ssize_t read(int fd, void* to, size_t n) {
  return timed(next<ssize_t (*)(int, void*, size_t)>("read", real_read), fd, to, n);
}
EXPORT ssize_t pread(int fd, void* to, size_t n, off_t at) {
  return timed(next<ssize_t (*)(int, void*, size_t, off_t)>("pread", real_pread), fd, to, n, at);
}
EXPORT ssize_t pread64(int fd, void* to, size_t n, off64_t at) {
  return timed(next<ssize_t (*)(int, void*, size_t, off64_t)>("pread64", real_pread64), fd, to, n, at);
}
EXPORT ssize_t readv(int fd, const struct iovec* parts, int n) {
  return timed(next<ssize_t (*)(int, const struct iovec*, int)>("readv", real_readv), fd, parts, n);
}
// A descriptor may come back as another thing.
EXPORT int close(int fd) {
  if (fd >= 0 && fd < kDescriptors) kinds[fd].store(kUnknown, std::memory_order_relaxed);
  return next<int (*)(int)>("close", real_close)(fd);
}
