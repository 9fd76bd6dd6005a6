// What Python sees of the simulator.

#include <torch/csrc/utils/pybind.h>

#include "device.h"
#include "graph.h"
#include "group.h"
#include "trace.h"

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
  m.def("make_mirror", [](int rank, int size) { return sim::make_group({}, rank, size); },
        "A group of one rank of many that all hold the same.");
  m.def("take_time", [] { sim::trace().clocked = true; },
        "From now on large kernels do not run, and large memory is not touched.");
  m.def("begin_trace", [](bool counts_calls) { sim::trace().begin(counts_calls); });
  m.def("label", [](const std::string& name) { sim::trace().add({.kind = sim::Kind::LABEL}, name); });
  m.def("end_trace", [] {
    sim::trace().end();
    py::list steps;
    for (const sim::Step& step : sim::trace().steps) {
      steps.append(py::make_tuple(
          static_cast<int>(step.kind), step.name < 0 ? "" : sim::trace().names[step.name], step.stream, step.mark,
          step.read, step.written, step.operations, step.dtype, step.group, step.ranks, step.alignment, step.calls));
    }
    return steps;
  }, "What was done since begin_trace: see trace.h.");
  py::class_<sim::Graph, std::shared_ptr<sim::Graph>>(m, "Graph")
      .def("operations", [](const sim::Graph& graph) { return graph.nodes.size(); })
      .def("replay", [](sim::Graph& graph) { order().replay(graph, sim::current_stream(), sim::here("replay")); });
  m.def("begin_capture", [] { return order().begin_capture(sim::current_stream()); }, "See graph.h.");
  m.def("end_capture", [] { order().end_capture(sim::current_stream()); });
  m.def("is_capturing", [] { return order().captures(sim::current_stream()); }, "If the current stream is.");
  m.def("priority", [](int stream) { return order().priority_of(stream); });
  m.def("reset_peak", [] { order().peak_nbytes = order().live_nbytes; });
}
