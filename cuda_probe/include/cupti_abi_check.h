// Compiled only where the real CUPTI header is at hand: our layout and theirs must agree.
#pragma once
#include <cupti.h>

#define LANTERNE_SAME(ours, field, theirs, their_field) \
  static_assert(offsetof(cupti_abi::ours, field) == offsetof(theirs, their_field), #theirs "." #their_field)

LANTERNE_SAME(Kernel, start, CUpti_ActivityKernel9, start);
LANTERNE_SAME(Kernel, end, CUpti_ActivityKernel9, end);
LANTERNE_SAME(Kernel, device, CUpti_ActivityKernel9, deviceId);
LANTERNE_SAME(Kernel, stream, CUpti_ActivityKernel9, streamId);
LANTERNE_SAME(Kernel, grid, CUpti_ActivityKernel9, gridX);
LANTERNE_SAME(Kernel, block, CUpti_ActivityKernel9, blockX);
LANTERNE_SAME(Kernel, correlation, CUpti_ActivityKernel9, correlationId);
LANTERNE_SAME(Kernel, name, CUpti_ActivityKernel9, name);
LANTERNE_SAME(Kernel, graph_node, CUpti_ActivityKernel9, graphNodeId);
LANTERNE_SAME(Kernel, graph, CUpti_ActivityKernel9, graphId);
LANTERNE_SAME(Memcpy, copy_kind, CUpti_ActivityMemcpy5, copyKind);
LANTERNE_SAME(Memcpy, bytes, CUpti_ActivityMemcpy5, bytes);
LANTERNE_SAME(Memcpy, start, CUpti_ActivityMemcpy5, start);
LANTERNE_SAME(Memcpy, correlation, CUpti_ActivityMemcpy5, correlationId);
LANTERNE_SAME(Memset, bytes, CUpti_ActivityMemset4, bytes);
LANTERNE_SAME(Memset, correlation, CUpti_ActivityMemset4, correlationId);
LANTERNE_SAME(Synchronization, start, CUpti_ActivitySynchronization, start);
LANTERNE_SAME(Synchronization, stream, CUpti_ActivitySynchronization, streamId);
LANTERNE_SAME(GraphTrace, start, CUpti_ActivityGraphTrace, start);
LANTERNE_SAME(GraphTrace, stream, CUpti_ActivityGraphTrace, streamId);
LANTERNE_SAME(Overhead, start, CUpti_ActivityOverhead, start);
LANTERNE_SAME(Marker, flags, CUpti_ActivityMarker2, flags);
LANTERNE_SAME(Marker, timestamp, CUpti_ActivityMarker2, timestamp);
LANTERNE_SAME(Marker, id, CUpti_ActivityMarker2, id);
LANTERNE_SAME(Marker, name, CUpti_ActivityMarker2, name);
static_assert(static_cast<int>(cupti_abi::kMarker) == static_cast<int>(CUPTI_ACTIVITY_KIND_MARKER));
static_assert(static_cast<int>(cupti_abi::kMarkerStart) == static_cast<int>(CUPTI_ACTIVITY_FLAG_MARKER_START));
static_assert(static_cast<int>(cupti_abi::kMarkerEnd) == static_cast<int>(CUPTI_ACTIVITY_FLAG_MARKER_END));
static_assert(static_cast<int>(cupti_abi::kConcurrentKernel) == static_cast<int>(CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL));
static_assert(static_cast<int>(cupti_abi::kSynchronization) == static_cast<int>(CUPTI_ACTIVITY_KIND_SYNCHRONIZATION));
static_assert(static_cast<int>(cupti_abi::kGraphTrace) == static_cast<int>(CUPTI_ACTIVITY_KIND_GRAPH_TRACE));
static_assert(static_cast<int>(cupti_abi::kMultipleSubscribers) == static_cast<int>(CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED));
static_assert(static_cast<int>(cupti_abi::kInsufficientPrivileges) == static_cast<int>(CUPTI_ERROR_INSUFFICIENT_PRIVILEGES));
static_assert(static_cast<int>(cupti_abi::kMaxLimitReached) == static_cast<int>(CUPTI_ERROR_MAX_LIMIT_REACHED));
