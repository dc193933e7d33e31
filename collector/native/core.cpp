// The training thread's part of a step: what every hook does every time, without interpreted code. The same as
// PythonCore in collector/core.py, which says what each member means and is used where this cannot be compiled.
// The layout of a ring record is the one of lanterne/blackbox_files.py. The interpreter's lock is held throughout.
#include "core_batch.hpp"
#include "core_state.hpp"

namespace {

PyObject* core_take(Core* c, PyObject*) { return PyLong_FromUnsignedLongLong(c->taken++); }

PyObject* core_span(Core* c, PyObject* const* a, Py_ssize_t n) {
  if (!arguments("span", n, 6, 6)) return nullptr;
  span(c, uint16_t(PyLong_AsLong(a[0])), PyLong_AsLongLong(a[1]), uint32_t(PyLong_AsUnsignedLong(a[2])),
       PyLong_AsLongLong(a[3]), PyLong_AsLongLong(a[4]), PyLong_AsLongLong(a[5]));
  if (PyErr_Occurred()) return nullptr;
  Py_RETURN_NONE;
}

PyObject* core_record(Core* c, PyObject* const* a, Py_ssize_t n) {
  if (!arguments("record", n, 6, 9)) return nullptr;
  double values[8] = {};
  if (!PyTuple_Check(a[5]) || PyTuple_GET_SIZE(a[5]) != 8) {
    PyErr_SetString(PyExc_TypeError, "record: eight values are needed");
    return nullptr;
  }
  for (int i = 0; i < 8; i++) values[i] = PyFloat_AsDouble(PyTuple_GET_ITEM(a[5], i));
  const uint16_t kind = uint16_t(PyLong_AsLong(a[0])), bits = uint16_t(PyLong_AsLong(a[1]));
  const uint32_t name = uint32_t(PyLong_AsUnsignedLong(a[2]));
  const int64_t step = PyLong_AsLongLong(a[3]), at = PyLong_AsLongLong(a[4]);
  const uint32_t label = n > 6 ? uint32_t(PyLong_AsUnsignedLong(a[6])) : 0;
  const uint32_t text = n > 7 ? uint32_t(PyLong_AsUnsignedLong(a[7])) : 0;
  const int64_t aux = n > 8 ? PyLong_AsLongLong(a[8]) : 0;
  if (PyErr_Occurred()) return nullptr;
  Record* r = begin(c, kind, bits, name, step, at, 0);
  memcpy(r->values, values, sizeof(values));
  r->label = label, r->text = text, r->aux = aux;
  end(c, r);
  Py_RETURN_NONE;
}

// --- phases and hooks -------------------------------------------------------------------------------------------

PyObject* core_enter(Core* c, PyObject* phase) {
  const long p = PyLong_AsLong(phase);
  if (p < 0 || p >= c->phases) return PyErr_Occurred() ? nullptr : PyErr_Format(PyExc_IndexError, "no phase %ld", p);
  return PyLong_FromLongLong(enter(c, int(p)));
}

PyObject* core_leave(Core* c, PyObject* const* a, Py_ssize_t n) {
  if (!arguments("leave", n, 2, 2)) return nullptr;
  const long p = PyLong_AsLong(a[0]);
  const int64_t began = PyLong_AsLongLong(a[1]);
  if (PyErr_Occurred()) return nullptr;
  if (p < 0 || p >= c->phases) return PyErr_Format(PyExc_IndexError, "no phase %ld", p);
  leave(c, int(p), began);
  Py_RETURN_NONE;
}

PyObject* core_begin_forward(Core* c, PyObject* module) {
  if (c->user_phase >= 0 || c->in_backward || (long long)module != c->root) Py_RETURN_NONE;
  PyObject* training = PyObject_GetAttr(module, s_training);
  if (training == nullptr) return nullptr;
  c->forward_phase = PyObject_IsTrue(training) == 1 ? c->forward : c->eval;
  Py_DECREF(training);
  c->forward_began = enter(c, c->forward_phase);
  if (c->on) c->spent += now() - c->forward_began;
  Py_RETURN_NONE;
}

PyObject* core_end_forward(Core* c, PyObject* module) {
  if (c->forward_began == 0 || (long long)module != c->root) Py_RETURN_NONE;
  const int64_t at = now();
  leave(c, c->forward_phase, c->forward_began);
  c->forward_began = 0;
  if (c->on) c->spent += now() - at;
  Py_RETURN_NONE;
}

int add_loss(Core* c, PyObject* value, bool is_explicit) {
  if (is_explicit && !c->explicit_loss) {
    if (PyList_SetSlice(c->losses, 0, PyList_GET_SIZE(c->losses), nullptr) < 0) return -1;
    c->explicit_loss = 1;
  } else if (c->explicit_loss && !is_explicit) {
    return 0;
  }
  if (PyFloat_CheckExact(value)) return PyList_Append(c->losses, value);
  PyObject* detached = PyObject_CallMethodNoArgs(value, s_detach);
  if (detached == nullptr) return -1;
  const int failed = PyList_Append(c->losses, detached);
  Py_DECREF(detached);
  return failed;
}

PyObject* core_loss(Core* c, PyObject* const* a, Py_ssize_t n) {
  if (!arguments("loss", n, 1, 2) || add_loss(c, a[0], n > 1 && PyObject_IsTrue(a[1]) == 1) < 0) return nullptr;
  Py_RETURN_NONE;
}

PyObject* core_begin_backward(Core* c, PyObject* loss) {
  if (c->in_backward || c->user_phase >= 0) Py_RETURN_FALSE;
  c->backward_began = enter(c, c->backward);
  c->in_backward = 1;
  *c->tap_backward = 1;
  if (loss != Py_None) {
    PyObject* dims = PyObject_GetAttr(loss, s_ndim);
    const long d = dims != nullptr ? PyLong_AsLong(dims) : -1;
    Py_XDECREF(dims);
    PyErr_Clear();
    if (d == 0 && add_loss(c, loss, false) < 0) PyErr_Clear();
  }
  if (c->on) c->spent += now() - c->backward_began;
  Py_RETURN_TRUE;
}

PyObject* core_end_backward(Core* c, PyObject*) {
  const int64_t at = now();
  *c->tap_backward = 0;
  c->in_backward = 0;
  leave(c, c->backward, c->backward_began);
  if (c->on) c->spent += now() - at;
  Py_RETURN_NONE;
}

// What is left to do before the optimizer steps: bits of collector/core.py.
constexpr long kHits = 1, kNorm = 2, kRatio = 4, kRates = 8, kRate = 16, kAveraging = 32, kRanges = 64;

bool read_rate(Core* c, PyObject* optimizer, Py_ssize_t* groups) {
  PyObject* list = PyObject_GetAttr(optimizer, s_param_groups);
  bool found = false;
  if (list != nullptr && PyList_Check(list) && (*groups = PyList_GET_SIZE(list)) > 0) {
    PyObject* group = PyList_GET_ITEM(list, 0);
    PyObject* lr = PyDict_Check(group) ? PyDict_GetItemWithError(group, s_lr) : nullptr;
    if (lr != nullptr && PyFloat_CheckExact(lr)) c->lr = PyFloat_AS_DOUBLE(lr), found = true;
  }
  Py_XDECREF(list);
  PyErr_Clear();
  return found;
}

int take_squares(Core* c) {  // the norm of the local gradient, from what entered the reductions of this step
  const double scaled = c->loss_scale > 0 ? c->averaging / c->loss_scale : c->averaging;
  PyObject* norm = PyFloat_FromDouble(std::sqrt(*c->tap_squares) * scaled);
  if (norm == nullptr) return -1;
  Py_XSETREF(c->local_norm, norm);
  *c->tap_squares = 0.0, *c->tap_buckets = 0;
  return 0;
}

PyObject* core_take_squares(Core* c, PyObject*) {
  if (*c->tap_buckets && take_squares(c) < 0) return nullptr;
  Py_RETURN_NONE;
}

PyObject* core_hit(Core* c, PyObject*) {
  if ((long long)*c->tap_hits != c->hits_seen) Py_RETURN_TRUE;
  Py_RETURN_FALSE;
}

PyObject* core_begin_optimizer(Core* c, PyObject* optimizer) {
  c->optimizer_began = c->user_phase < 0 ? enter(c, c->optimizer) : 0;
  Py_ssize_t groups = 1;
  long left = read_rate(c, optimizer, &groups) ? 0 : kRate;
  if (groups > 1 && c->step % c->rates_every == 0) left |= kRates;
  if ((long long)*c->tap_hits != c->hits_seen) left |= kHits;
  if (*c->tap_buckets) {
    if (std::isnan(c->averaging)) left |= kAveraging;
    else if (take_squares(c) < 0) return nullptr;
  }
  if (c->grad_norm == Py_None && c->norm_every && c->step % c->norm_every == 0) left |= kNorm;
  if (c->ratio_every && c->step && c->step % c->ratio_every == 0) left |= kRatio;
  if (c->ranges_every && c->step && c->step % c->ranges_every == 0) left |= kRanges;
  return PyLong_FromLong(left);
}

PyObject* core_end_optimizer(Core* c, PyObject*) {
  if (c->optimizer_began == 0) Py_RETURN_NONE;
  const int64_t at = now();
  leave(c, c->optimizer, c->optimizer_began);
  c->optimizer_began = 0;
  if (c->on) c->spent += now() - at;
  Py_RETURN_NONE;
}

// --- the boundary -----------------------------------------------------------------------------------------------

void write_phases(Core* c) {
  int64_t sum = 0;
  for (int i = 0; i < c->phases; i++) sum += c->total[i];
  const int64_t left = c->took - sum;
  if (left > 0) span(c, kPhase, 1, c->ids[c->other], c->step, c->at - left, left);
  for (int i = 0; i < c->phases; i++) {
    if (c->times[i] > kSpansAPhase) {
      span(c, kPhase, c->times[i] - kSpansAPhase, c->ids[i], c->step, c->at - c->rest[i], c->rest[i]);
      c->rest[i] = 0;
    }
    c->total[i] = c->times[i] = 0;
  }
  span(c, kStep, 0, 0, c->step, c->at - c->took, c->took);
}

void write_boundary(Core* c) {
  double v[8] = {c->lr, c->lr_planned, NAN, c->loss_scale, double(c->samples), double(c->tokens), 0.0, 0.0};
  uint16_t bits = 0;
  if (c->step >= c->cpu_due) {
    const int64_t before = now(), cpu = now(CLOCK_PROCESS_CPUTIME_ID), cost = now() - before;
    v[6] = double(cpu - c->cpu) * 1e-9 / double(c->step + 1 - c->cpu_step);
    c->cpu = cpu, c->cpu_step = c->step + 1;
    c->cpu_due = c->step + std::min<int64_t>(kCpuReadingSteps, std::max<int64_t>(1, cost / kCpuReadingNs));
    bits |= 0x40;
  }
  if (!std::isnan(c->lr)) {
    bits |= std::isnan(c->lr_planned) ? 1 : 3;
    const double against = std::isnan(c->lr_planned) ? c->lr_zero : c->lr_planned;
    if (against != 0.0) v[2] = (c->lr - against) / against, bits |= 4;
  }
  if (!std::isnan(c->loss_scale)) bits |= 8;
  if (c->samples) v[7] = c->took ? double(c->samples) * 1e9 / double(c->took) : 0.0, bits |= 0x90;
  if (c->tokens) bits |= 0x20;
  Record* r = begin(c, kMetrics, bits, c->boundary_ids, c->step, c->at, 0);
  memcpy(r->values, v, sizeof(v));
  end(c, r);
  if (c->peak_flops != 0.0 && c->took) {
    const double flops = c->flops_per_step != 0.0 ? c->flops_per_step : c->flops_per_sample * double(c->samples);
    c->mfu = flops * 1e9 / (double(c->took) * c->peak_flops);
  }
}

PyObject* core_end_step(Core* c, PyObject*) {
  c->at = now();
  c->took = c->at - c->began;
  write_phases(c);
  write_boundary(c);
  return PyLong_FromLongLong(c->at);
}

double spikeness(Core* c, double loss) {  // std / |mean| over the window, as in sources/loss.py
  if (std::isfinite(loss) && std::fabs(loss) < 1e150) {
    if (c->window_used == c->window_size) {
      const double old = c->window[c->window_at];
      c->sum -= old, c->squares -= old * old;
    } else {
      c->window_used++;
    }
    c->window[c->window_at] = loss;
    c->window_at = (c->window_at + 1) % c->window_size;
    c->sum += loss, c->squares += loss * loss;
    if (++c->window_since >= c->window_used) {  // once a window anew, so that rounding does not pile up
      c->sum = c->squares = 0.0, c->window_since = 0;
      for (size_t i = 0; i < c->window_used; i++) c->sum += c->window[i], c->squares += c->window[i] * c->window[i];
    }
  }
  if (c->window_used < kLeast) return NAN;
  const double n = double(c->window_used), mean = c->sum / n;
  return mean == 0.0 ? NAN : std::sqrt(std::max(0.0, c->squares / n - mean * mean)) / std::fabs(mean);
}

PyObject* core_spikeness(Core* c, PyObject* value) {
  const double loss = PyFloat_AsDouble(value);
  return loss == -1.0 && PyErr_Occurred() ? nullptr : PyFloat_FromDouble(spikeness(c, loss));
}

void forget_values(Core* c) {
  PyList_SetSlice(c->losses, 0, PyList_GET_SIZE(c->losses), nullptr);
  for (PyObject** kept : {&c->grad_norm, &c->local_norm, &c->update_ratio, &c->checksum})
    if (*kept != Py_None) Py_XSETREF(*kept, Py_NewRef(Py_None));
  c->nonfinite = c->mfu = NAN, c->gc_ns = 0, c->explicit_loss = 0;
}

PyObject* core_forget_values(Core* c, PyObject*) {
  forget_values(c);
  Py_RETURN_NONE;
}

bool read_now(PyObject* value, double* out) {  // a float or a tensor that is read without waiting
  if (PyFloat_CheckExact(value)) {
    *out = PyFloat_AS_DOUBLE(value);
    return true;
  }
  if (truth(value, s_is_cpu) != 1) return false;
  PyObject* as_float = PyNumber_Float(value);
  if (as_float == nullptr) return false;
  *out = PyFloat_AS_DOUBLE(as_float);
  Py_DECREF(as_float);
  return true;
}

// True: the step's values are written and forgotten. False: nothing is done; something is on a device or unusual.
PyObject* core_write_values(Core* c, PyObject*) {
  if (c->update_ratio != Py_None || c->checksum != Py_None || !std::isnan(c->nonfinite)) Py_RETURN_FALSE;
  double v[8] = {0.0, NAN, NAN, NAN, NAN, NAN, double(c->gc_ns) * 1e-9, c->mfu};
  uint16_t bits = (c->gc_ns ? 0x40 : 0) | (std::isnan(c->mfu) ? 0 : 0x80);
  const Py_ssize_t n = PyList_GET_SIZE(c->losses);
  bool read = true;
  for (Py_ssize_t i = 0; read && i < n; i++) {
    double one = NAN;
    read = read_now(PyList_GET_ITEM(c->losses, i), &one);
    v[0] += one;
  }
  if (read && c->grad_norm != Py_None) read = read_now(c->grad_norm, &v[2]), bits |= 4;
  if (read && c->local_norm != Py_None) read = read_now(c->local_norm, &v[3]), bits |= 8;
  if (!read || (n && !std::isfinite(v[0])) || (bits & 4 && !std::isfinite(v[2]))) {
    PyErr_Clear();
    Py_RETURN_FALSE;
  }
  if (n) {
    v[1] = spikeness(c, v[0]);
    bits |= std::isnan(v[1]) ? 1 : 3;
  } else {
    v[0] = NAN;
  }
  if (bits) {
    Record* r = begin(c, kMetrics, bits, c->value_ids, c->step, c->at, 0);
    memcpy(r->values, v, sizeof(v));
    end(c, r);
  }
  forget_values(c);
  Py_RETURN_TRUE;
}

// Begin the next step. True on every 16th: then the meter takes stock of ``spent`` and ``boundaries``.
PyObject* core_begin_step(Core* c, PyObject*) {
  c->step++;
  *c->tap_step = c->step;
  c->samples = c->tokens = 0;
  c->began = c->at;
  const int64_t done = now();
  show(c, c->other, c->at, done);
  c->boundaries[c->steps % kBoundaries] = done - c->at;
  c->steps++;
  c->step_ns += (double(c->took) - c->step_ns) * (c->steps > 10 ? 0.1 : 1.0 / double(c->steps));
  const bool was = c->on;
  c->on = c->steps % kShadowEvery == kShadowEvery - 1;
  if (was) Py_RETURN_TRUE;
  c->spent = 0;
  Py_RETURN_FALSE;
}

PyObject* core_recent(Core* c, PyObject*) {
  const Py_ssize_t n = Py_ssize_t(std::min<long long>(c->steps, kBoundaries));
  PyObject* list = PyList_New(n);
  for (Py_ssize_t i = 0; list != nullptr && i < n; i++) PyList_SET_ITEM(list, i, PyLong_FromLongLong(c->boundaries[i]));
  return list;
}

// --- the type ---------------------------------------------------------------------------------------------------

bool mapped(PyObject* from, Py_buffer* into, size_t least) {
  if (PyObject_GetBuffer(from, into, PyBUF_WRITABLE) < 0) return false;
  if (size_t(into->len) >= least) return true;
  PyErr_SetString(PyExc_ValueError, "the mapped file is too small");
  return false;
}

// Core(ring map, offset of the records, number of records, offset of the progress, tap map,
//      offsets (step, backward, hits, squares), string ids of the phases, phases (data_wait … other), window, tensor type)
int core_init(Core* c, PyObject* args, PyObject*) {
  PyObject *ring, *tap, *ids, *tensor;
  Py_ssize_t base, records, progress, at[4];
  int named[6];
  Py_ssize_t window;
  if (!PyArg_ParseTuple(args, "OnnnO(nnnn)O!(iiiiii)nO", &ring, &base, &records, &progress, &tap, &at[0], &at[1],
                        &at[2], &at[3], &PyList_Type, &ids, &named[0], &named[1], &named[2], &named[3], &named[4],
                        &named[5], &window, &tensor))
    return -1;
  c->phases = int(PyList_GET_SIZE(ids));
  if (c->phases > kPhases || records <= 0 || (records & (records - 1)) || base < 0 || window > kWindowMax) {
    PyErr_SetString(PyExc_ValueError, "phases, records or window out of bounds");
    return -1;
  }
  if (!mapped(ring, &c->ring, size_t(base) + size_t(records) * sizeof(Record))) return -1;
  if (!mapped(tap, &c->tap, size_t(at[3]) + 16)) return -1;
  auto* r = static_cast<char*>(c->ring.buf);
  c->records = reinterpret_cast<Record*>(r + base);
  c->progress = reinterpret_cast<Progress*>(r + progress);
  c->mask = uint64_t(records) - 1;
  auto* t = static_cast<char*>(c->tap.buf);
  c->tap_step = reinterpret_cast<int64_t*>(t + at[0]), c->tap_backward = reinterpret_cast<int64_t*>(t + at[1]);
  c->tap_hits = reinterpret_cast<uint64_t*>(t + at[2]), c->tap_squares = reinterpret_cast<double*>(t + at[3]);
  c->tap_buckets = reinterpret_cast<uint64_t*>(t + at[3] + 8);
  c->hits_seen = (long long)*c->tap_hits;
  for (int i = 0; i < c->phases; i++) c->ids[i] = uint32_t(PyLong_AsUnsignedLong(PyList_GET_ITEM(ids, i)));
  c->data_wait = named[0], c->forward = named[1], c->backward = named[2], c->optimizer = named[3], c->eval = named[4];
  c->other = named[5];
  c->window_size = std::max<size_t>(size_t(window), kLeast);
  c->window = static_cast<double*>(PyMem_Calloc(c->window_size, sizeof(double)));
  c->losses = PyList_New(0);
  for (PyObject** kept : {&c->grad_norm, &c->local_norm, &c->update_ratio, &c->checksum})
    *kept = Py_NewRef(Py_None);
  c->tensor = Py_NewRef(tensor);
  c->user_phase = -1, c->rates_every = 10, c->averaging = NAN;
  c->lr = c->lr_planned = c->lr_zero = c->loss_scale = NAN;
  c->nonfinite = c->mfu = NAN;
  c->began = now(), c->cpu = now(CLOCK_PROCESS_CPUTIME_ID);
  return c->window == nullptr || c->losses == nullptr || PyErr_Occurred() ? -1 : 0;
}

void core_dealloc(Core* c) {
  for (PyObject* kept : {c->tensor, c->losses, c->grad_norm, c->local_norm, c->update_ratio, c->checksum}) Py_XDECREF(kept);
  PyMem_Free(c->window);
  if (c->ring.obj != nullptr) PyBuffer_Release(&c->ring);
  if (c->tap.obj != nullptr) PyBuffer_Release(&c->tap);
  PyTypeObject* type = Py_TYPE(c);
  type->tp_free(c);
  Py_DECREF(type);
}

#define FAST(name, call) {name, (PyCFunction)(void (*)())call, METH_FASTCALL, nullptr}
#define ONE(name, call, how) {name, (PyCFunction)(void (*)())call, how, nullptr}
PyMethodDef methods[] = {
    ONE("take", core_take, METH_NOARGS), FAST("span", core_span), FAST("record", core_record),
    ONE("enter", core_enter, METH_O), FAST("leave", core_leave),
    ONE("begin_forward", core_begin_forward, METH_O), ONE("end_forward", core_end_forward, METH_O),
    ONE("begin_backward", core_begin_backward, METH_O), ONE("end_backward", core_end_backward, METH_NOARGS),
    ONE("begin_optimizer", core_begin_optimizer, METH_O), ONE("end_optimizer", core_end_optimizer, METH_NOARGS),
    ONE("hit", core_hit, METH_NOARGS), ONE("take_squares", core_take_squares, METH_NOARGS),
    FAST("loss", core_loss), FAST("took", core_took), ONE("end_step", core_end_step, METH_NOARGS),
    ONE("write_values", core_write_values, METH_NOARGS), ONE("forget_values", core_forget_values, METH_NOARGS),
    ONE("spikeness", core_spikeness, METH_O), ONE("begin_step", core_begin_step, METH_NOARGS),
    ONE("recent", core_recent, METH_NOARGS), {nullptr, nullptr, 0, nullptr}};

#define LONG(name) {#name, T_LONGLONG, offsetof(Core, name), 0, nullptr}
#define REAL(name) {#name, T_DOUBLE, offsetof(Core, name), 0, nullptr}
#define FLAG(name) {#name, T_BOOL, offsetof(Core, name), 0, nullptr}
#define HELD(name) {#name, T_OBJECT_EX, offsetof(Core, name), 0, nullptr}
PyMemberDef members[] = {
    LONG(step), LONG(began), LONG(at), LONG(spent), LONG(samples), LONG(tokens), LONG(gc_ns), LONG(steps),
    LONG(norm_every), LONG(ratio_every), LONG(ranges_every), LONG(hits_seen), LONG(root), LONG(cpu_step), LONG(cpu_due),
    REAL(lr), REAL(lr_planned), REAL(lr_zero), REAL(loss_scale), REAL(flops_per_step), REAL(flops_per_sample),
    REAL(peak_flops), REAL(step_ns), REAL(nonfinite), REAL(mfu), REAL(averaging),
    FLAG(on), FLAG(in_backward), FLAG(explicit_loss),
    HELD(losses), HELD(grad_norm), HELD(local_norm), HELD(update_ratio), HELD(checksum),
    {"taken", T_ULONGLONG, offsetof(Core, taken), 0, nullptr},
    {"user_phase", T_INT, offsetof(Core, user_phase), 0, nullptr},
    {"boundary_ids", T_UINT, offsetof(Core, boundary_ids), 0, nullptr},
    {"value_ids", T_UINT, offsetof(Core, value_ids), 0, nullptr},
    {"batch_id", T_UINT, offsetof(Core, batch_id), 0, nullptr},
    {"fingerprint_id", T_UINT, offsetof(Core, fingerprint_id), 0, nullptr},
    {nullptr, 0, 0, 0, nullptr}};

PyType_Slot slots[] = {{Py_tp_init, (void*)core_init}, {Py_tp_dealloc, (void*)core_dealloc},
                       {Py_tp_methods, methods}, {Py_tp_members, members}, {Py_tp_new, (void*)PyType_GenericNew},
                       {0, nullptr}};
PyType_Spec spec = {"lanterne_core.Core", sizeof(Core), 0, Py_TPFLAGS_DEFAULT, slots};
PyModuleDef module_def = {PyModuleDef_HEAD_INIT, "lanterne_core", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_lanterne_core() {
  struct {
    PyObject** into;
    const char* name;
  } names[] = {{&s_training, "training"}, {&s_is_cpu, "is_cpu"}, {&s_ndim, "ndim"}, {&s_data_ptr, "data_ptr"},
               {&s_nbytes, "nbytes"}, {&s_is_contiguous, "is_contiguous"}, {&s_is_sparse, "is_sparse"},
               {&s_shape, "shape"}, {&s_is_floating_point, "is_floating_point"}, {&s_is_complex, "is_complex"},
               {&s_detach, "detach"}, {&s_param_groups, "param_groups"}, {&s_lr, "lr"}};
  for (auto& n : names)
    if ((*n.into = PyUnicode_InternFromString(n.name)) == nullptr) return nullptr;
  PyObject* module = PyModule_Create(&module_def);
  PyObject* type = module != nullptr ? PyType_FromSpec(&spec) : nullptr;
  if (type == nullptr || PyModule_AddObject(module, "Core", type) < 0) return nullptr;
  return module;
}
