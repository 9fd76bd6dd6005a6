// See graph.h.

#include "graph.h"

#include "trace.h"

#include <cstring>
#include <stdexcept>

namespace sim {

namespace {

constexpr int NAN_BYTE = 0xff;

void forget_values(Block* block) {
  if (!trace().clocked) std::memset(block->data, NAN_BYTE, block->nbytes);
}

Span bytes_of(const Block* block) {
  auto begin = reinterpret_cast<uintptr_t>(block->data);
  return {begin, begin + block->nbytes};
}

}  // namespace

Graph::~Graph() { order().drop(*this); }

bool captures(int stream) { return order().captures(stream); }

bool captures() { return order().capture != nullptr; }

void note(int stream, Site site, std::function<void()> run) {
  std::lock_guard lock(order().mutex);
  if (!order().captures(stream)) return;
  Graph& graph = *order().capture;
  graph.nodes.push_back({site, std::move(graph.touched), std::move(run)});
  graph.touched.clear();
}

bool Order::captures(int stream) const { return capture != nullptr && capture->streams.count(stream) > 0; }

void Order::refuse_in_capture(const std::string& what, Site site) {
  std::lock_guard lock(mutex);
  if (capture == nullptr) return;
  capture->broken = what;
  throw std::runtime_error(
      "sim: operation not permitted when stream is capturing: " + what + (site < 0 ? "" : ", site " + std::to_string(site)));
}

std::shared_ptr<Graph> Order::begin_capture(int stream) {
  std::lock_guard lock(mutex);
  if (capture != nullptr) throw std::runtime_error("sim: a stream is capturing already");
  if (stream == 0) throw std::runtime_error("sim: the default stream cannot capture");
  auto graph = std::make_shared<Graph>(stream);
  for (auto& [address, block] : blocks_) {
    if (!trace().clocked) graph->bytes[block].assign(block->data, block->data + block->nbytes);
    graph->accesses[block] = block->accesses;
  }
  graph->clocks = clocks_;
  graph->ghosts = ghosts_;
  captures_++;
  capture = graph;
  return graph;
}

void Order::end_capture(int stream) {
  std::lock_guard lock(mutex);
  std::shared_ptr<Graph> graph = std::move(capture);
  capture = nullptr;
  if (graph == nullptr) throw std::runtime_error("sim: no stream is capturing");
  std::string broken = graph->broken;
  if (stream != graph->origin) broken = "capture was ended in another stream than it began in";
  for (int joined : graph->streams) {
    if (clocks_.at(joined).of(joined) > clocks_.at(graph->origin).of(joined) && broken.empty()) {
      broken = "the capture was not joined to its first stream by " + name_of(joined);
    }
  }
  for (auto& [address, block] : blocks_) {
    if (graph->pool.count(block)) {
      block->accesses.clear();
      block->ghosts.clear();
      block->born = 0;
      continue;
    }
    auto known = graph->accesses.find(block);
    if (known == graph->accesses.end()) continue;
    block->accesses = known->second;
    auto& bytes = graph->bytes[block];
    if (!bytes.empty()) std::memcpy(block->data, bytes.data(), bytes.size());
  }
  for (size_t i = 0; i < graph->clocks.size(); i++) clocks_[i] = graph->clocks[i];
  for (size_t i = graph->clocks.size(); i < clocks_.size(); i++) clocks_[i] = Clock();
  ghosts_ = graph->ghosts;
  graph->bytes.clear();
  graph->accesses.clear();
  graph->ghosts.clear();
  if (!broken.empty()) throw std::runtime_error("sim: capture failed: " + broken);
}

void Order::join_capture(int stream, const Event& event) {
  bool is_inside = captures(stream);
  if (event.capture != 0 && (capture == nullptr || event.capture != captures_)) {
    if (capture != nullptr) capture->broken = "an event of another capture";
    throw std::runtime_error("sim: a stream waits for an event of a capture that is over");
  }
  if (event.capture != 0) {
    capture->streams.insert(stream);
  } else if (is_inside) {
    capture->broken = "a wait for an event that was recorded outside of the capture";
    throw std::runtime_error("sim: " + capture->broken);
  }
}

void Order::replay(Graph& graph, int stream, Site site) {
  if (capture != nullptr) refuse_in_capture("a replay", site);
  for (Node& node : graph.nodes) {
    bool is_there = true;
    {
      std::lock_guard lock(mutex);
      if (!node.touched.empty()) begin(stream);
      for (const Touched& touched : node.touched) {
        Block* block = block_at(reinterpret_cast<const void*>(touched.bytes.first));
        if (block == nullptr || block->number != touched.block) {
          is_there = false;
          report("GRAPH",
              "a replay uses " + std::to_string(touched.bytes.second - touched.bytes.first) +
                  " bytes that were freed after they were captured\n  at \1" + std::to_string(node.site) + "\1",
              node.site, site);
          continue;
        }
        if (graph.pool.count(block)) {
          block->stream = stream;
          block->born = clocks_.at(stream).of(stream);
        }
        touch(block, touched.spans, stream, touched.writes, node.site);
      }
    }
    if (is_there) node.run();
  }
}

void Order::drop(Graph& graph) {
  std::lock_guard lock(mutex);
  for (Block* block : graph.pool) {
    block->graph = nullptr;
    if (block->is_free) release(block);
  }
  graph.pool.clear();
}

void Order::note_allocation(Block* block, Site site) {
  if (!captures(block->stream)) {
    std::string stream = name_of(block->stream);
    live_nbytes -= block->nbytes;
    release(block);
    refuse_in_capture("an allocation outside of the graph's pool, in " + stream, site);
  }
  block->graph = capture.get();
  capture->pool.insert(block);
  capture->nodes.push_back({site, {}, [block] { forget_values(block); }});
}

void Order::note_free(Block* block, Site site) {
  block->is_free = true;
  live_nbytes -= block->nbytes;
  if (capture.get() == block->graph) capture->nodes.push_back({site, {}, [block] { forget_values(block); }});
}

void Order::note_touch(Block* block, const std::vector<Span>& spans, bool writes) {
  capture->touched.push_back({bytes_of(block), block->number, spans, writes});
}

}  // namespace sim
