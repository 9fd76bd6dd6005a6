// A captured step: what a stream, and those that joined it, were given, to be run again.
//
// As of CUDA (torch/csrc and "CUDA Graphs" of the CUDA programming guide), as far as a program can
// see. While a stream captures:
//
// - nothing runs: values, accesses and random numbers are afterwards what they were before;
// - the host asks and waits for nothing, reads no value, copies from and to pinned memory alone;
// - memory comes from the graph's own pool, for streams of the capture alone, and stays its own;
// - an event belongs to the capture: nothing outside waits for it, and no event of outside is waited
//   for inside; a stream that waits for one joins the capture, and is joined again before its end.
//
// A replay runs the same operations on the same addresses, as one operation of its stream. Memory
// of outside that is gone by then is reported (GRAPH).

#pragma once

#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "order.h"

namespace sim {

struct Touched {
  Span bytes;  // of the block
  int64_t block;
  std::vector<Span> spans;
  bool writes;
};

struct Node {
  Site site;
  std::vector<Touched> touched;
  std::function<void()> run;
};

class Graph {
 public:
  explicit Graph(int origin) : origin(origin), streams{origin} {}
  ~Graph();

  const int origin;
  std::set<int> streams;      // of the capture
  std::string broken;         // what was done that may not be done
  std::vector<Node> nodes;
  std::vector<Touched> touched;  // by the operation that is being issued
  std::set<Block*> pool;      // memory of the graph's own, in use or free
  // As it was before the capture.
  std::map<Block*, std::vector<char>> bytes;
  std::map<Block*, std::vector<Access>> accesses;
  std::vector<Clock> clocks;
  std::map<int, std::vector<std::shared_ptr<Ghost>>> ghosts;
};

// Note an operation that was just issued in a stream, if that captures: what it does, again.
void note(int stream, Site site, std::function<void()> run);
bool captures(int stream);
bool captures();  // any stream

}  // namespace sim
