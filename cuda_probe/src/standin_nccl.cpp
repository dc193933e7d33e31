// Drives the NCCL profiler plugin as NCCL does: loads a plugin by version, opens communicators, and calls start, record
// and stop from several threads with descriptors of the real layout. For tests on machines without NCCL.
#include <dlfcn.h>

#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

#include "nccl_abi.h"

namespace abi = nccl_abi;

namespace {

template <class P, class D>
int drive(P* plugin, void* context, int calls, int channels, int kernel_ns) {
  for (int i = 0; i < calls; i++) {
    D d;
    std::memset(&d, 0, sizeof d);
    d.type = static_cast<decltype(d.type)>(abi::kColl);
    d.coll.sequence = static_cast<uint64_t>(i);
    d.coll.function = "AllReduce";
    d.coll.count = 1024;
    d.coll.datatype = "ncclFloat32";
    d.coll.channels = static_cast<uint8_t>(channels);
    d.coll.algorithm = "RING";
    d.coll.protocol = "LL128";
    void* call = nullptr;
    if (plugin->start(context, &call, &d) != 0) return -1;
    plugin->stop(call);
    for (int c = 0; c < channels; c++) {
      D k;
      std::memset(&k, 0, sizeof k);
      k.type = static_cast<decltype(k.type)>(abi::kKernelCh);
      k.parent = call;
      k.kernel.channel = static_cast<uint8_t>(c);
      k.kernel.timer = 1000000u + 1000u * static_cast<uint64_t>(i) + static_cast<uint64_t>(c);
      void* kernel = nullptr;
      plugin->start(context, &kernel, &k);
      abi::StateArguments end{};
      end.kernel.timer = k.kernel.timer + static_cast<uint64_t>(kernel_ns);
      plugin->record(kernel, abi::kKernelChStop, &end);
      plugin->stop(kernel);
    }
  }
  return 0;
}

}  // namespace

// Returns the event mask that the plugin asked for, or -1.
extern "C" __attribute__((visibility("default"))) int standin_nccl(const char* path, int version, int communicators,
                                                                   int calls, int channels, int kernel_ns) {
  void* library = dlopen(path, RTLD_NOW);
  if (library == nullptr) return -1;
  const char* symbol = version == 4 ? "ncclProfiler_v4" : version == 5 ? "ncclProfiler_v5" : "ncclProfiler_v6";
  void* found = dlsym(library, symbol);
  if (found == nullptr) return -1;
  int mask = 0;
  std::vector<std::thread> threads;
  for (int c = 0; c < communicators; c++) {
    void* context = nullptr;
    const auto id = static_cast<uint64_t>(100 + c);
    if (version == 4) {
      auto* plugin = static_cast<abi::PluginV4*>(found);
      plugin->init(&context, &mask, "default_pg", id, 2, 16, 3, nullptr);
      threads.emplace_back([=] { drive<abi::PluginV4, abi::DescriptorV4>(plugin, context, calls, channels, kernel_ns); });
    } else {
      auto* plugin = static_cast<abi::PluginV5*>(found);
      plugin->init(&context, id, &mask, "default_pg", 2, 16, 3, nullptr);
      threads.emplace_back([=] { drive<abi::PluginV5, abi::DescriptorV5>(plugin, context, calls, channels, kernel_ns); });
    }
  }
  for (auto& thread : threads) thread.join();
  return mask;
}
