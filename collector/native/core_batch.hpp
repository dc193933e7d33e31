// How much work a batch carries and what it is (see core.cpp).
#pragma once
#include "core_state.hpp"

namespace {

uint32_t crc32(const uint8_t* data, size_t n, uint32_t crc) {  // the one of zlib
  static uint32_t table[256];
  if (table[1] == 0)
    for (uint32_t i = 0; i < 256; i++) {
      uint32_t x = i;
      for (int k = 0; k < 8; k++) x = x & 1 ? 0xEDB88320u ^ (x >> 1) : x >> 1;
      table[i] = x;
    }
  crc = ~crc;
  for (size_t i = 0; i < n; i++) crc = table[(crc ^ data[i]) & 255] ^ (crc >> 8);
  return ~crc;
}

int truth(PyObject* owner, PyObject* name) {  // of an attribute, or of what the method of that name gives
  PyObject* found = PyObject_GetAttr(owner, name);
  if (found != nullptr && PyCallable_Check(found)) Py_SETREF(found, PyObject_CallNoArgs(found));
  if (found == nullptr) return -1;
  const int is = PyObject_IsTrue(found);
  Py_DECREF(found);
  return is;
}

long long number(PyObject* owner, PyObject* name) {
  PyObject* found = PyObject_GetAttr(owner, name);
  if (found != nullptr && PyCallable_Check(found)) Py_SETREF(found, PyObject_CallNoArgs(found));
  if (found == nullptr) return -1;
  const long long is = PyLong_AsLongLong(found);
  Py_DECREF(found);
  return is;
}

// True: counted, and its fingerprint written where ``marked``. False: not a plain CPU tensor, nor a list of those.
PyObject* core_took(Core* c, PyObject* const* a, Py_ssize_t n) {
  if (!arguments("took", n, 2, 2)) return nullptr;
  PyObject* batch = a[0];
  if (PyList_CheckExact(batch) && PyList_GET_SIZE(batch)) batch = PyList_GET_ITEM(batch, 0);
  else if (PyTuple_CheckExact(batch) && PyTuple_GET_SIZE(batch)) batch = PyTuple_GET_ITEM(batch, 0);
  if ((PyObject*)Py_TYPE(batch) != c->tensor || truth(batch, s_is_cpu) != 1 || truth(batch, s_is_sparse) != 0 ||
      truth(batch, s_is_contiguous) != 1) {
    PyErr_Clear();
    Py_RETURN_FALSE;
  }
  PyObject* shape = PyObject_GetAttr(batch, s_shape);
  if (shape == nullptr || !PyTuple_Check(shape) || PyTuple_GET_SIZE(shape) == 0) {
    Py_XDECREF(shape);
    PyErr_Clear();
    Py_RETURN_FALSE;
  }
  const Py_ssize_t dims = PyTuple_GET_SIZE(shape);
  const long long rows = PyLong_AsLongLong(PyTuple_GET_ITEM(shape, 0));
  const long long length = dims == 2 ? PyLong_AsLongLong(PyTuple_GET_ITEM(shape, 1)) : 0;
  Py_DECREF(shape);
  const long long size = number(batch, s_nbytes), at = size > 0 ? number(batch, s_data_ptr) : 0;
  if (PyErr_Occurred()) return nullptr;
  c->samples += rows;
  if (dims == 2 && truth(batch, s_is_floating_point) == 0 && truth(batch, s_is_complex) == 0) c->tokens += rows * length;
  if (size <= 0 || at == 0 || PyObject_IsTrue(a[1]) != 1) Py_RETURN_TRUE;
  const auto* data = reinterpret_cast<const uint8_t*>(at);
  const size_t part = std::min<size_t>(kBytesHashed, size_t(size));
  const uint32_t head = crc32(data + (size_t(size) - part) / 2, part, crc32(data, part, 0));
  const uint32_t tail = crc32(data + size_t(size) - part, part, uint32_t(size));
  Record* r = begin(c, kEvent, 0, c->batch_id, c->step, now(), 0);
  r->text = c->fingerprint_id, r->aux = int64_t(uint64_t(head) << 32 | tail);
  end(c, r);
  Py_RETURN_TRUE;
}

}  // namespace
