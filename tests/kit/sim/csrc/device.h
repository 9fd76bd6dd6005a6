// The simulated device, for the files that run operations on it.

#pragma once

#include <ATen/ATen.h>
#include <c10/core/Allocator.h>
#include <c10/core/Stream.h>

#include "order.h"

namespace sim {

c10::Device device();
c10::Stream stream_of(int number);
int current_stream();  // of this thread
c10::Allocator* allocator();

at::Generator host_generator(const at::Generator& generator);  // whose numbers a device's one gives

Block* block_of(const c10::Storage& storage);  // null for memory that is not the device's
std::vector<Span> spans_of(const at::Tensor& tensor);
void read(const at::Tensor& tensor, int stream, Site site);
void write(const at::Tensor& tensor, int stream, Site site);

inline bool is_here(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == c10::DeviceType::PrivateUse1;
}

// The same memory as a tensor of the host, for kernels of the host.
class HostViews {
 public:
  at::Tensor of(const at::Tensor& tensor);
  // The tensor of the device whose memory a tensor of the host has; null if none of ours.
  const at::Tensor* owner(const at::Tensor& host) const;

 private:
  std::vector<std::pair<at::Tensor, c10::Storage>> storages_;
};

}  // namespace sim
