// The state of the step under way and the writers of its records (see core.cpp).
#pragma once
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <ctime>

namespace {

constexpr int kPhases = 16, kBoundaries = 32, kWindowMax = 1 << 20;
constexpr uint16_t kStep = 1, kPhase = 2, kMetrics = 3, kEvent = 4;
constexpr int kSpansAPhase = 8;
constexpr int64_t kCpuReadingNs = 1000, kCpuReadingSteps = 64;
constexpr int64_t kShadowEvery = 16;
constexpr size_t kLeast = 8, kBytesHashed = 64;

struct Record {
  uint64_t number;
  uint16_t kind, mask;
  uint32_t name;
  int64_t step, at, duration;
  double values[8];
  uint32_t label, text;
  int64_t aux;
  uint64_t number_again;
};
static_assert(sizeof(Record) == 128, "record layout");

struct Progress {
  int64_t step, since, last;
  uint32_t phase;
};

struct Core {
  PyObject_HEAD
  Py_buffer ring, tap;
  Record* records;
  uint64_t mask, taken;
  Progress* progress;
  int64_t *tap_step, *tap_backward;
  uint64_t *tap_hits, *tap_buckets;
  double* tap_squares;
  uint32_t ids[kPhases];
  int64_t total[kPhases], rest[kPhases];
  int64_t times[kPhases];
  int phases, data_wait, forward, backward, optimizer, eval, other;
  long long step, began, at, spent, samples, tokens, gc_ns, steps;
  int user_phase, forward_phase;
  char on, in_backward, explicit_loss;
  long long forward_began, backward_began, optimizer_began;
  long long cpu, cpu_step, cpu_due, took;
  double lr, lr_planned, lr_zero, loss_scale, flops_per_step, flops_per_sample, peak_flops, step_ns;
  double nonfinite, mfu;
  unsigned int boundary_ids, value_ids, batch_id, fingerprint_id;
  long long norm_every, ratio_every, ranges_every, rates_every, hits_seen;
  double averaging;
  long long root;  // id of the model whose forward counts; no reference, so that there is no cycle
  PyObject *tensor, *losses, *grad_norm, *local_norm, *update_ratio, *checksum;
  int64_t boundaries[kBoundaries];
  double* window;
  size_t window_size, window_used, window_at, window_since;
  double sum, squares;
};

PyObject *s_training, *s_is_cpu, *s_ndim, *s_data_ptr, *s_nbytes, *s_is_contiguous, *s_is_sparse, *s_shape,
    *s_is_floating_point, *s_is_complex, *s_detach, *s_param_groups, *s_lr;

int64_t now(clockid_t clock = CLOCK_MONOTONIC) {
  timespec t;
  clock_gettime(clock, &t);
  return int64_t(t.tv_sec) * 1000000000 + t.tv_nsec;
}

// --- records ----------------------------------------------------------------------------------------------------

Record* begin(Core* c, uint16_t kind, uint16_t bits, uint32_t name, int64_t step, int64_t at, int64_t duration) {
  const uint64_t n = c->taken++;
  Record* r = c->records + (n & c->mask);
  r->number = n + 1;
  std::atomic_thread_fence(std::memory_order_release);
  r->kind = kind, r->mask = bits, r->name = name, r->step = step, r->at = at, r->duration = duration;
  memset(r->values, 0, sizeof(r->values));
  r->label = r->text = 0, r->aux = 0;
  return r;
}

void end(Core* c, Record* r) {
  std::atomic_thread_fence(std::memory_order_release);
  r->number_again = r->number;
}

void span(Core* c, uint16_t kind, int64_t times, uint32_t name, int64_t step, int64_t at, int64_t duration) {
  end(c, begin(c, kind, uint16_t(times), name, step, at, duration));
}

void show(Core* c, int phase, int64_t since, int64_t last) {
  *c->progress = {c->step, since, last, c->ids[phase]};
}

int64_t enter(Core* c, int phase) {
  const int64_t at = now();
  show(c, phase, at, at);
  return at;
}

void leave(Core* c, int phase, int64_t began) {
  const int64_t at = now(), took = at - began;
  c->total[phase] += took;
  if (++c->times[phase] <= kSpansAPhase)
    span(c, kPhase, 1, c->ids[phase], c->step, began, took);
  else
    c->rest[phase] += took;
  show(c, c->other, at, at);
}

bool arguments(const char* name, Py_ssize_t n, Py_ssize_t least, Py_ssize_t most) {
  if (n >= least && n <= most) return true;
  PyErr_Format(PyExc_TypeError, "%s takes %zd to %zd arguments, not %zd", name, least, most, n);
  return false;
}

}  // namespace
