// Native tests of the probes on a machine without CUDA: probe_tests NAME CUPTI STANDIN_CUDA NCCL STANDIN_NCCL.
// The stand-in is mapped under the name of the driver first, so that the probe finds it as it would find the real one.
#include <dlfcn.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "lanterne_nccl.h"
#include "lanterne_probe.h"

namespace {

#define CHECK(condition)                                                      \
  do {                                                                        \
    if (!(condition)) {                                                       \
      std::fprintf(stderr, "%s:%d: not true: %s\n", __FILE__, __LINE__, #condition); \
      std::exit(1);                                                           \
    }                                                                         \
  } while (0)

template <class F>
F symbol(void* library, const char* name) {
  auto found = reinterpret_cast<F>(dlsym(library, name));
  if (found == nullptr) {
    std::fprintf(stderr, "%s: %s\n", name, dlerror());
    std::exit(1);
  }
  return found;
}

void* load(const char* path) {
  void* library = dlopen(path, RTLD_NOW | RTLD_GLOBAL);
  if (library == nullptr) {
    std::fprintf(stderr, "%s\n", dlerror());
    std::exit(1);
  }
  return library;
}

// The driver's names resolve through LD_LIBRARY_PATH, which the loader reads at start: run again with it set.
void* load_probe(char** arguments) {
  if (std::getenv("LANTERNE_TEST_NAMES") == nullptr) {
    char folder[] = "/tmp/lanterne-probe-XXXXXX";
    CHECK(mkdtemp(folder) != nullptr);
    for (const char* name : {"libcuda.so.1", "libcupti.so.13"}) {
      CHECK(symlink(arguments[3], (std::string(folder) + "/" + name).c_str()) == 0);
    }
    setenv("LD_LIBRARY_PATH", folder, 1);
    setenv("LANTERNE_TEST_NAMES", folder, 1);
    execv(arguments[0], arguments);
    std::exit(1);
  }
  return load(arguments[2]);
}

void tidy() {
  const std::string folder = std::getenv("LANTERNE_TEST_NAMES");
  unlink((folder + "/libcuda.so.1").c_str());
  unlink((folder + "/libcupti.so.13").c_str());
  rmdir(folder.c_str());
}

using Emit = uint64_t (*)(uint32_t, uint64_t, int);

void kernels(char** arguments) {
  void* probe = load_probe(arguments);
  CHECK(symbol<decltype(&lp_open)>(probe, "lp_open")("", LP_KERNELS) == LP_COLLECTING);
  CHECK(symbol<Emit>(load("libcupti.so.13"), "standin_emit")(10, 5000, 40) == 5000);
  CHECK(symbol<decltype(&lp_head)>(probe, "lp_head")() == 5000);
  CHECK(symbol<decltype(&lp_name_count)>(probe, "lp_name_count")() == 40);
  const lp_record* ring = symbol<decltype(&lp_ring)>(probe, "lp_ring")();
  for (uint64_t n = 0; n < 5000; n++) {
    CHECK(ring[n].version == 2 * n + 2);
    CHECK(ring[n].correlation == n);
    CHECK(ring[n].end_ns - ring[n].start_ns == 1000);
  }
  CHECK(std::strcmp(symbol<decltype(&lp_name)>(probe, "lp_name")(ring[41].name), "gemm_kernel_1<float>") == 0);
  CHECK(symbol<decltype(&lp_close)>(probe, "lp_close")() == LP_IDLE);
}

void starved(char** arguments) {
  void* probe = load_probe(arguments);
  CHECK(symbol<decltype(&lp_open)>(probe, "lp_open")("", LP_KERNELS) == LP_COLLECTING);
  void* standin = load("libcupti.so.13");
  CHECK(symbol<int (*)(int)>(standin, "standin_hoard")(100) == 16);
  CHECK(symbol<Emit>(standin, "standin_emit")(10, 10, 1) == 0);
  lp_counters counts{};
  symbol<decltype(&lp_count)>(probe, "lp_count")(&counts);
  CHECK(counts.starved_buffers >= 2);
}

void reopened(char** arguments) {
  void* probe = load_probe(arguments);
  auto open = symbol<decltype(&lp_open)>(probe, "lp_open");
  auto close = symbol<decltype(&lp_close)>(probe, "lp_close");
  Emit emit = symbol<Emit>(load("libcupti.so.13"), "standin_emit");
  for (uint64_t window = 1; window <= 20; window++) {
    CHECK(open("", LP_KERNELS) == LP_COLLECTING);
    CHECK(emit(10, 100, 3) == 100);
    CHECK(close() == LP_IDLE);
    CHECK(symbol<decltype(&lp_head)>(probe, "lp_head")() == 100 * window);
  }
  CHECK(close() == LP_IDLE);
}

void ranges(char** arguments) {
  void* probe = load_probe(arguments);
  auto open = symbol<decltype(&lp_open)>(probe, "lp_open");
  Emit emit = symbol<Emit>(load("libcupti.so.13"), "standin_emit");
  CHECK(open("", LP_RANGES) == LP_COLLECTING);
  CHECK(emit(12, 20001, 2) == 20001);  // the last one begins and does not end
  CHECK(symbol<decltype(&lp_head)>(probe, "lp_head")() == 10000);
  const lp_record* ring = symbol<decltype(&lp_ring)>(probe, "lp_ring")();
  for (uint64_t n = 0; n < 10000; n++) CHECK(ring[n].kind == 12 && ring[n].end_ns >= ring[n].start_ns + 3000);
  CHECK(symbol<decltype(&lp_close)>(probe, "lp_close")() == LP_IDLE);
}

void nccl(char** arguments) {
  auto drive = symbol<int (*)(const char*, int, int, int, int, int)>(load(arguments[5]), "standin_nccl");
  void* plugin = load(arguments[4]);
  uint64_t calls = 0;
  for (int version = 4; version <= 6; version++) {
    CHECK(drive(arguments[4], version, 4, 100, 2, 500) == (2 | 4 | 64));
    calls += 400;
    CHECK(symbol<decltype(&ln_abi_version)>(plugin, "ln_abi_version")() == version);
    CHECK(symbol<decltype(&ln_head)>(plugin, "ln_head")() == calls);
  }
  const ln_record* ring = symbol<decltype(&ln_ring)>(plugin, "ln_ring")();
  for (uint64_t n = 0; n < calls; n++) CHECK(ring[n].channels_done == 2 && ring[n].version == 2 * n + 2);
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 6) return 2;
  const std::string name = arguments[1];
  if (name == "nccl") return nccl(arguments), 0;
  if (name == "kernels") kernels(arguments);
  if (name == "starved") starved(arguments);
  if (name == "reopened") reopened(arguments);
  if (name == "ranges") ranges(arguments);
  tidy();
  return 0;
}
