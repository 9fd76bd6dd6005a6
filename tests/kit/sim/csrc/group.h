// The simulated device's process group, for the bindings.

#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace sim {

c10::intrusive_ptr<c10d::Backend> make_group(c10::intrusive_ptr<c10d::Backend> host, int rank, int size);
void drop_abandoned();

}  // namespace sim
