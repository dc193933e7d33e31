// The NCCL profiler plugin ABI, versions 4 to 6, declared from its public documentation; no NCCL header is needed.
// v4: NCCL 2.27. v5: NCCL 2.28 (communicator id first in init, 64-bit event type, parent group). v6: NCCL 2.29 and
// newer, the same layout with more event types.
#pragma once
#include <cstddef>
#include <cstdint>

namespace nccl_abi {

enum Event : uint64_t { kGroup = 1, kColl = 2, kP2p = 4, kProxyOp = 8, kProxyStep = 16, kProxyCtrl = 32, kKernelCh = 64 };
enum State : int { kKernelChStop = 22 };

using Logger = void (*)(int level, unsigned long flags, const char* file, int line, const char* format, ...);

struct CollV4 {
  uint64_t sequence;
  const char* function;
  const void* send;
  void* receive;
  size_t count;
  int root;
  const char* datatype;
  uint8_t channels, warps;
  const char* algorithm;
  const char* protocol;
};
struct P2pV4 {
  const char* function;
  void* buffer;
  const char* datatype;
  size_t count;
  int peer;
  uint8_t channels;
};
struct KernelCh {
  uint8_t channel;
  uint64_t timer;
};

template <class Type>
struct Descriptor {
  Type type;
  void* parent;
  int rank;
  union {
    CollV4 coll;  // v5 and v6 append fields that are not read here
    P2pV4 p2p;
    KernelCh kernel;
    char room[160];
  };
};
using DescriptorV4 = Descriptor<uint8_t>;
using DescriptorV5 = Descriptor<uint64_t>;

union StateArguments {
  struct {
    size_t transferred;
  } proxy_step;
  struct {
    uint64_t timer;
  } kernel;
};

template <class D, class Init>
struct Plugin {
  const char* name;
  Init init;
  int (*start)(void* context, void** handle, D* descriptor);
  int (*stop)(void* handle);
  int (*record)(void* handle, int state, StateArguments* arguments);
  int (*finalize)(void* context);
};
using InitV4 = int (*)(void** context, int* mask, const char* name, uint64_t id, int nodes, int ranks, int rank, Logger log);
using InitV5 = int (*)(void** context, uint64_t id, int* mask, const char* name, int nodes, int ranks, int rank, Logger log);
using PluginV4 = Plugin<DescriptorV4, InitV4>;
using PluginV5 = Plugin<DescriptorV5, InitV5>;

static_assert(offsetof(DescriptorV4, coll) == 24 && offsetof(DescriptorV5, coll) == 24);
static_assert(offsetof(CollV4, datatype) == 48 && offsetof(CollV4, algorithm) == 64);
static_assert(offsetof(P2pV4, peer) == 32);

}  // namespace nccl_abi
