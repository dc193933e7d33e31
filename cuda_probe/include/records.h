// Sums over the records of one window.
#pragma once
#include <algorithm>
#include <cstdint>
#include <unordered_map>
#include <vector>

#include "cupti_abi.h"
#include "lanterne_probe.h"

inline bool on_the_device(uint32_t kind) {
  return kind != cupti_abi::kSynchronization && kind != cupti_abi::kOverhead && kind != cupti_abi::kMarker;
}

// Length of the union of the intervals, which are in order of their starts.
inline uint64_t covered(const std::vector<lp_record>& found) {
  uint64_t sum = 0, until = 0;
  for (const lp_record& r : found) {
    if (!on_the_device(r.kind)) continue;
    const uint64_t from = std::max(until, r.start_ns);
    if (r.end_ns > from) sum += r.end_ns - from;
    until = std::max(until, r.end_ns);
  }
  return sum;
}

inline uint32_t sums(const std::vector<lp_record>& found, lp_total* totals, uint32_t most) {
  std::unordered_map<uint64_t, lp_total> by_name;
  for (const lp_record& r : found) {
    if (!on_the_device(r.kind)) continue;
    const uint32_t name = r.kind == cupti_abi::kMemset ? 0 : r.name;
    lp_total& t = by_name[static_cast<uint64_t>(r.kind) << 32 | name];
    t.kind = r.kind;
    t.name = name;
    t.count++;
    t.ns += r.end_ns > r.start_ns ? r.end_ns - r.start_ns : 0;
  }
  std::vector<lp_total> rows;
  for (const auto& entry : by_name) rows.push_back(entry.second);
  std::sort(rows.begin(), rows.end(), [](const lp_total& a, const lp_total& b) {
    return a.ns != b.ns ? a.ns > b.ns : a.name < b.name;
  });
  const uint32_t n = static_cast<uint32_t>(std::min<size_t>(most, rows.size()));
  std::copy_n(rows.begin(), n, totals);
  return n;
}
