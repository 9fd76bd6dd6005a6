// What happens before what on the simulated device, and what is wrong with a program's order.
//
// A stream is a vector clock: for each stream, how many of its operations are known to be over.
// Operations run on the host's memory at once, in the order in which the host issues them, so their
// values are always those of one legal schedule. What is checked is that every legal schedule gives
// the same: two accesses to the same bytes, of which one writes, must be ordered by streams and
// events, or by a wait of the host. Nothing here knows torch.

#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace sim {

using Count = uint32_t;  // of operations of a stream
using Site = int;        // of the program: which operation, called from which lines
using Span = std::pair<uintptr_t, uintptr_t>;  // addresses of bytes, the second one exclusive

class Clock {
 public:
  Count of(int stream) const;
  void join(const Clock& other);
  Count tick(int stream);

 private:
  std::vector<Count> at_;
};

struct Event {
  Clock clock;  // of the stream when the event was recorded
  int64_t mark = -1;  // its number in the trace
  bool recorded = false;
  bool asked = false;  // a query was answered with "not yet" once
  int64_t capture = 0;  // the capture that it was recorded in
};

struct Access {
  Span bytes;
  int stream;
  Count count;  // which operation of the stream
  bool writes;
  Site site;
};

// Memory that was freed while work that its own stream does not wait for may still use it.
struct Ghost {
  size_t nbytes;
  int stream;  // of the memory: what is allocated there next may lie in it
  Site allocated, freed;
  std::vector<Access> accesses;
};

class Graph;

// Memory that the device's allocator gave away.
struct Block {
  char* data;
  size_t nbytes;
  int stream;  // current when it was allocated: who may get the memory next, once it is free
  Count born;  // how far that stream was
  Site site;
  std::set<int> recorded;  // streams whose work, at the time of the free, delays it
  std::vector<Access> accesses;
  std::vector<std::shared_ptr<Ghost>> ghosts;  // whose memory it may be
  int64_t number = 0;  // no other block has it
  Graph* graph = nullptr;  // whose pool it is of
  bool is_free = false;  // in that pool
};

// Memory of the host from which the device copies beside the host.
struct Pinned {
  char* data;
  size_t nbytes;
};

// A copy between the device and pinned memory that the host has not waited for.
struct Copy {
  uintptr_t host;            // address of the first byte in pinned memory
  std::vector<char> bytes;   // to the host: what arrives; from it: what was read
  bool to_host;
  int stream;
  Count count;
  Site site;
};

struct Report {
  std::string kind;  // RACE, REUSE, HOST
  std::string text;
  Site first, second;
  int64_t times;
};

struct Wait {
  std::string kind;
  Site site;
  int64_t times;
};

class Order {
 public:
  // Streams. Number 0 is the default one.
  int add_stream(const std::string& name, int priority = 0);
  int priority_of(int stream) const;
  void name_stream(int stream, const std::string& name);
  int streams() const;
  Count begin(int stream);               // an operation; returns its number
  void record(Event& event, int stream);
  void block(int stream, const Event& event);

  // The host.
  void wait_for(const Event& event, const std::string& kind, Site site);
  void wait_for_stream(int stream, const std::string& kind, Site site);
  void wait_for_all(const std::string& kind, Site site);
  void note_wait(const std::string& kind, Site site);  // the host stops, and nothing is ordered by it
  bool query(Event& event);
  bool query_stream(int stream);

  // Memory of the device.
  Block* allocate(size_t nbytes, int stream, Site site);
  void free(Block* block, Site site);
  void touch(Block* block, const std::vector<Span>& spans, int stream, bool writes, Site site);
  void record_stream(Block* block, int stream);
  Block* block_at(const void* data);  // that an address lies in, or none

  // Pinned memory, and copies that run beside the host.
  void* pin(size_t nbytes);
  void unpin(void* data);
  bool is_pinned(const void* data) const;
  void copy_to_host(uintptr_t host, const char* data, size_t nbytes, int stream, Site site);
  void copy_from_host(uintptr_t host, size_t nbytes, int stream, Site site);
  // What an operation of a stream reads in pinned memory has arrived, or it is a race.
  void read_pinned(uintptr_t host, size_t nbytes, int stream, Site site);

  // Captures, see graph.h.
  std::shared_ptr<Graph> capture;  // that is under way
  bool captures(int stream) const;
  void refuse_in_capture(const std::string& what, Site site = -1);
  std::shared_ptr<Graph> begin_capture(int stream);
  void end_capture(int stream);
  void replay(Graph& graph, int stream, Site site);
  void drop(Graph& graph);

  std::vector<Report> reports;
  std::vector<Wait> waits;
  size_t live_nbytes = 0, peak_nbytes = 0;
  int64_t operations = 0, accesses = 0;
  void forget();  // reports, waits and counters

  std::recursive_mutex mutex;

 private:
  void report(const std::string& kind, const std::string& text, Site first, Site second);
  void look_for_writes(const Copy& copy);
  void complete_copies();
  void join_capture(int stream, const Event& event);
  void note_allocation(Block* block, Site site);
  void note_free(Block* block, Site site);
  void note_touch(Block* block, const std::vector<Span>& spans, bool writes);
  void release(Block* block);
  std::string describe(const Access& access) const;
  std::string name_of(int stream) const;

  std::vector<Clock> clocks_ = std::vector<Clock>(1);
  std::vector<std::string> names_ = {"default"};
  std::vector<int> priorities_ = {0};
  Clock host_;
  std::map<uintptr_t, Block*> blocks_;  // by their first addresses
  std::map<uintptr_t, Pinned> pinned_;
  std::map<int, std::vector<std::shared_ptr<Ghost>>> ghosts_;  // by stream
  std::vector<Copy> copies_;
  int64_t captures_ = 0;  // that were begun
  int64_t allocations_ = 0;
};

Order& order();

// Where in the program we are: an operation and the lines that led to it.
Site here(const std::string& operation);
std::string describe(Site site);
std::string resolve(const std::string& text);  // the text of a report, for people
Site site_of_free();  // safe where the interpreter's lock must not be asked for

}  // namespace sim
