// See trace.h.

#include "trace.h"

#include <Python.h>

#include <atomic>
#include <unordered_map>

namespace sim {

namespace {

std::atomic<int64_t> calls{0};
std::atomic<bool> counts{false};
thread_local bool is_counted = false;
std::unordered_map<std::string, int> numbers;

int on_call(PyObject*, PyFrameObject*, int what, PyObject*) {
  if (what == PyTrace_CALL || what == PyTrace_C_CALL) calls.fetch_add(1, std::memory_order_relaxed);
  return 0;
}

}  // namespace

Trace& trace() {
  static Trace* only = new Trace();
  return *only;
}

void count_calls_here() {
  if (counts.load() == is_counted) return;
  is_counted = counts.load();
  PyGILState_STATE state = PyGILState_Ensure();
  PyEval_SetProfile(is_counted ? &on_call : nullptr, nullptr);
  PyGILState_Release(state);
}

void Trace::begin(bool counts_calls) {
  steps.clear();
  calls = 0;
  counts = counts_calls;
  count_calls_here();
  on = true;
}

void Trace::end() {
  on = false;
  counts = false;
  count_calls_here();
}

int Trace::number(const std::string& name) {
  auto [found, is_new] = numbers.try_emplace(name, static_cast<int>(names.size()));
  if (is_new) names.push_back(name);
  return found->second;
}

void Trace::add(Step step, const std::string& name) {
  if (!on) return;
  std::lock_guard lock(mutex_);
  if (!name.empty()) step.name = number(name);
  step.calls = calls.load(std::memory_order_relaxed);
  steps.push_back(step);
}

bool skips(int64_t nbytes) { return trace().clocked && nbytes > SMALL_NBYTES; }

}  // namespace sim
