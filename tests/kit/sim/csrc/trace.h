// What a program gave the device to do, in the order in which the host issued it.
//
// A clock plays it afterwards (fsdp2/_tools/plan/device_clock.py). While it is written, kernels on large
// tensors do not run, and large memory is never touched: a model of any size fits. Shapes are right,
// values of large tensors are not. Nothing here knows what anything costs.

#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

namespace sim {

constexpr int64_t SMALL_NBYTES = 1 << 20;  // kernels on so many bytes in all run on the host

enum class Kind : uint8_t {
  KERNEL,      // name, stream; read, written: bytes; operations: of products; itemsize
  COPY,        // name: "to device" or "to host"; written: bytes
  // name, stream; read: how many collectives are one; written: bytes of the larger buffers; group,
  // ranks; alignment: bytes
  COLLECTIVE,
  RECORD,      // stream; mark: the event's number from here on
  BLOCK,       // stream; mark: what it waits for
  WAIT,        // mark, that the host waits for; -1: for all that stream (-1: any) has
  LABEL,       // name: what follows belongs to it
};

struct Step {
  Kind kind;
  int name = -1;
  int stream = -1;
  int64_t mark = -1;
  int64_t read = 0, written = 0;
  double operations = 0;
  int dtype = -1;  // number of the dtype of what is multiplied
  int group = -1, ranks = 0;
  int64_t alignment = 0;
  int64_t calls = 0;  // of Python's, since the trace began: the host's work
};

class Trace {
 public:
  bool clocked = false;  // kernels on large tensors do not run; for good
  bool on = false;
  void begin(bool counts_calls);
  void end();
  void add(Step step, const std::string& name = "");
  int64_t next_mark() { return ++marks_; }
  std::vector<Step> steps;
  std::vector<std::string> names;

  int number(const std::string& name);

 private:
  std::mutex mutex_;
  int64_t marks_ = 0;
};

Trace& trace();

// Let Python's calls of this thread be counted, if they are to be.
void count_calls_here();

bool skips(int64_t nbytes);  // a kernel on so many bytes does not run

}  // namespace sim
