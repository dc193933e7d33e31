// The overflow kernel: one launch over all tensors, 16-byte loads, counts kept in registers and reduced per warp before
// one atomic per counter and block. It is bound by memory bandwidth and never waits for the host.
#include <cuda_runtime.h>

#include "stats_rule.h"

namespace {

constexpr int kThreads = 256;
constexpr int kBlocksPerTensor = 64;

__device__ void add(uint64_t* to, uint64_t value) {
  for (int offset = 16; offset > 0; offset /= 2) value += __shfl_down_sync(0xffffffffu, value, offset);
  if ((threadIdx.x & 31) == 0 && value != 0) atomicAdd(reinterpret_cast<unsigned long long*>(to), value);
}

__device__ void reduce(const ls_stats& mine, ls_stats* out) {
  add(&out->total, mine.total);
  add(&out->zeros, mine.zeros);
  add(&out->infinite, mine.infinite);
  add(&out->nan, mine.nan);
  add(&out->fp16_over, mine.fp16_over);
  add(&out->fp16_under, mine.fp16_under);
  add(&out->e4m3_over, mine.e4m3_over);
  add(&out->e4m3_under, mine.e4m3_under);
  add(&out->e5m2_over, mine.e5m2_over);
  add(&out->e5m2_under, mine.e5m2_under);
  uint32_t largest = mine.max_abs_bits;
  for (int offset = 16; offset > 0; offset /= 2) largest = max(largest, __shfl_down_sync(0xffffffffu, largest, offset));
  if ((threadIdx.x & 31) == 0 && largest != 0) atomicMax(&out->max_abs_bits, largest);
}

__device__ void count_vector(const uint4& four, uint32_t dtype, ls_stats& mine) {
  const uint32_t words[4] = {four.x, four.y, four.z, four.w};
  for (uint32_t word : words) {
    if (dtype == LS_FLOAT32) {
      lanterne::count_one(lanterne::from_bits(word), mine);
    } else if (dtype == LS_FLOAT16) {
      lanterne::count_one(lanterne::widen_half(static_cast<uint16_t>(word)), mine);
      lanterne::count_one(lanterne::widen_half(static_cast<uint16_t>(word >> 16)), mine);
    } else {
      lanterne::count_one(lanterne::widen_bfloat(static_cast<uint16_t>(word)), mine);
      lanterne::count_one(lanterne::widen_bfloat(static_cast<uint16_t>(word >> 16)), mine);
    }
  }
}

__global__ void stats_kernel(const ls_tensor* tensors, ls_stats* out) {
  const ls_tensor tensor = tensors[blockIdx.y];
  const uint32_t per_vector = tensor.dtype == LS_FLOAT32 ? 4 : 8;
  const bool aligned = (reinterpret_cast<uintptr_t>(tensor.data) & 15) == 0;
  const uint64_t vectors = aligned ? tensor.count / per_vector : 0;
  const uint64_t first = static_cast<uint64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const uint64_t stride = static_cast<uint64_t>(gridDim.x) * blockDim.x;
  ls_stats mine{};
  for (uint64_t v = first; v < vectors; v += stride) {
    count_vector(static_cast<const uint4*>(tensor.data)[v], tensor.dtype, mine);
  }
  for (uint64_t i = vectors * per_vector + first; i < tensor.count; i += stride) {
    lanterne::count_one(lanterne::load(tensor.data, i, tensor.dtype), mine);
  }
  reduce(mine, out);
}

}  // namespace

int ls_stats_cuda(const ls_tensor* tensors, uint32_t n, ls_stats* out, void* stream) {
  if (n == 0) return 0;
  const dim3 grid(kBlocksPerTensor, n);
  stats_kernel<<<grid, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(tensors, out);
  return static_cast<int>(cudaGetLastError());
}
