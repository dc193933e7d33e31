// The per-element rule of lanterne_stats.h, for host and device.
#pragma once
#include <cstdint>
#include <cstring>

#include "lanterne_stats.h"

#ifdef __CUDACC__
#define LS_BOTH __host__ __device__ inline
#else
#define LS_BOTH inline
#endif

namespace lanterne {

LS_BOTH float from_bits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}
LS_BOTH uint32_t to_bits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

// Widen a 16-bit float exactly, subnormals included.
LS_BOTH float widen_half(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16;
  uint32_t exponent = (h >> 10) & 0x1fu, mantissa = h & 0x3ffu;
  if (exponent == 31) return from_bits(sign | 0x7f800000u | (mantissa << 13));
  if (exponent == 0) {
    if (mantissa == 0) return from_bits(sign);
    exponent = 1;
    while ((mantissa & 0x400u) == 0) {
      mantissa <<= 1;
      exponent--;
    }
    mantissa &= 0x3ffu;
  }
  return from_bits(sign | ((exponent + 112u) << 23) | (mantissa << 13));
}
LS_BOTH float widen_bfloat(uint16_t b) { return from_bits(static_cast<uint32_t>(b) << 16); }

LS_BOTH void count_one(float value, ls_stats& s) {
  const uint32_t magnitude = to_bits(value) & 0x7fffffffu;
  s.total++;
  if (magnitude >= 0x7f800000u) {
    magnitude == 0x7f800000u ? s.infinite++ : s.nan++;
    return;
  }
  if (magnitude == 0) {
    s.zeros++;
    return;
  }
  const float a = from_bits(magnitude);
  s.fp16_over += a >= 65504.0f;
  s.fp16_under += a < 5.9604644775390625e-08f;
  s.e4m3_over += a >= 448.0f;
  s.e4m3_under += a < 0.001953125f;
  s.e5m2_over += a >= 57344.0f;
  s.e5m2_under += a < 1.52587890625e-05f;
  if (magnitude > s.max_abs_bits) s.max_abs_bits = magnitude;
}

LS_BOTH float load(const void* data, uint64_t i, uint32_t dtype) {
  if (dtype == LS_FLOAT32) return static_cast<const float*>(data)[i];
  const uint16_t half = static_cast<const uint16_t*>(data)[i];
  return dtype == LS_FLOAT16 ? widen_half(half) : widen_bfloat(half);
}

}  // namespace lanterne
