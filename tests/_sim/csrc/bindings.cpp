// What Python sees of the simulator.

#include <torch/csrc/utils/pybind.h>

#include "device.h"
#include "group.h"

namespace py = pybind11;
using sim::order;

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("reports", [] {
    std::vector<std::tuple<std::string, std::string, int64_t>> found;
    std::vector<sim::Report> copies;
    {
      py::gil_scoped_release unlocked;
      std::lock_guard lock(order().mutex);
      copies = order().reports;
    }
    for (const auto& report : copies) found.emplace_back(report.kind, sim::resolve(report.text), report.times);
    return found;
  }, "What is wrong: (kind, text, times).");
  m.def("waits", [] {
    std::vector<std::tuple<std::string, std::string, int64_t>> found;
    std::vector<sim::Wait> copies;
    {
      py::gil_scoped_release unlocked;
      std::lock_guard lock(order().mutex);
      copies = order().waits;
    }
    for (const auto& wait : copies) found.emplace_back(wait.kind, sim::describe(wait.site), wait.times);
    return found;
  }, "Where the host waited for the device: (kind, site, times).");
  m.def("forget", [] { order().forget(); }, "Forget reports, waits and counters.");
  m.def("finish", [] {
    order().wait_for_all("", 0);
    sim::drop_abandoned();
  }, "Let the device finish; this is not counted as a wait.");
  m.def("counts", [] {
    return std::make_tuple(order().operations, order().accesses, order().live_nbytes, order().peak_nbytes);
  });
  m.def("name_stream", [](int stream, const std::string& name) { order().name_stream(stream, name); });
  m.def("make_group", &sim::make_group, py::arg("host"), py::arg("rank"), py::arg("size"));
}
