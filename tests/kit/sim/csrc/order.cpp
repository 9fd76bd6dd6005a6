// The rules: see order.h.

#include "order.h"

#include "graph.h"
#include "trace.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <new>
#include <stdexcept>

namespace sim {

namespace {

constexpr int NAN_BYTE = 0xff;  // NaN in every floating-point dtype, -1 in integers

bool overlap(const Span& a, const Span& b) { return a.first < b.second && b.first < a.second; }

// Stands for a site in a report, until somebody reads it: what a site is called is for the
// interpreter to say, whose lock must not be asked for under ours.
std::string at(Site site) { return "\1" + std::to_string(site) + "\1"; }

// Memory that takes none of the host's before it is written to.
char* take(size_t nbytes) {
  if (!trace().clocked) {
    return static_cast<char*>(::operator new(std::max<size_t>(nbytes, 1), std::align_val_t(64)));
  }
  void* data = mmap(nullptr, std::max<size_t>(nbytes, 1), PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (data == MAP_FAILED) throw std::bad_alloc();
  return static_cast<char*>(data);
}

void give_back(char* data, size_t nbytes) {
  if (trace().clocked) {
    munmap(data, std::max<size_t>(nbytes, 1));
    return;
  }
  ::operator delete(data, std::align_val_t(64));
}

bool within(const Span& inner, const Span& outer) {
  return outer.first <= inner.first && inner.second <= outer.second;
}

}  // namespace

Count Clock::of(int stream) const {
  return static_cast<size_t>(stream) < at_.size() ? at_[stream] : 0;
}

void Clock::join(const Clock& other) {
  if (at_.size() < other.at_.size()) at_.resize(other.at_.size());
  for (size_t i = 0; i < other.at_.size(); i++) at_[i] = std::max(at_[i], other.at_[i]);
}

Count Clock::tick(int stream) {
  if (at_.size() <= static_cast<size_t>(stream)) at_.resize(stream + 1);
  return ++at_[stream];
}

Order& order() {
  static Order* only = new Order();  // never destroyed: tensors may outlive this library's end
  return *only;
}

// Streams.

int Order::add_stream(const std::string& name, int priority) {
  std::lock_guard lock(mutex);
  clocks_.emplace_back();
  names_.push_back(name);
  priorities_.push_back(priority);
  return static_cast<int>(clocks_.size()) - 1;
}

void Order::name_stream(int stream, const std::string& name) {
  std::lock_guard lock(mutex);
  names_.at(stream) = name;
}

int Order::streams() const { return static_cast<int>(clocks_.size()); }

int Order::priority_of(int stream) const { return priorities_.at(stream); }

std::string Order::name_of(int stream) const { return names_.at(stream); }

Count Order::begin(int stream) {
  operations++;
  if (captures(stream)) capture->touched.clear();
  Clock& clock = clocks_.at(stream);
  clock.join(host_);  // what the host has seen was over before it issued this
  return clock.tick(stream);
}

void Order::record(Event& event, int stream) {
  std::lock_guard lock(mutex);
  event.clock = clocks_.at(stream);
  event.clock.join(host_);
  event.recorded = true;
  event.asked = false;
  event.capture = captures(stream) ? captures_ : 0;
  if (trace().on) {
    event.mark = trace().next_mark();
    trace().add({.kind = Kind::RECORD, .stream = stream, .mark = event.mark});
  }
}

void Order::block(int stream, const Event& event) {
  std::lock_guard lock(mutex);
  if (event.recorded) join_capture(stream, event);
  if (event.recorded) clocks_.at(stream).join(event.clock);
  if (event.mark >= 0) trace().add({.kind = Kind::BLOCK, .stream = stream, .mark = event.mark});
}

// The host.

void Order::note_wait(const std::string& kind, Site site) {
  std::lock_guard lock(mutex);
  refuse_in_capture("a wait of the host (" + kind + ")", site);
  for (Wait& known : waits) {
    if (known.site == site && known.kind == kind) {
      known.times++;
      return;
    }
  }
  waits.push_back({kind, site, 1});
}

void Order::wait_for(const Event& event, const std::string& kind, Site site) {
  std::lock_guard lock(mutex);
  refuse_in_capture("a wait of the host (" + kind + ")", site);
  if (!kind.empty()) note_wait(kind, site);
  if (event.recorded) host_.join(event.clock);
  if (event.mark >= 0) trace().add({.kind = Kind::WAIT, .mark = event.mark});
  complete_copies();
}

void Order::wait_for_stream(int stream, const std::string& kind, Site site) {
  std::lock_guard lock(mutex);
  refuse_in_capture("a wait of the host (" + kind + ")", site);
  if (!kind.empty()) note_wait(kind, site);
  host_.join(clocks_.at(stream));
  trace().add({.kind = Kind::WAIT, .stream = stream});
  complete_copies();
}

void Order::wait_for_all(const std::string& kind, Site site) {
  std::lock_guard lock(mutex);
  refuse_in_capture("a wait of the host (" + kind + ")", site);
  if (!kind.empty()) note_wait(kind, site);
  for (const Clock& clock : clocks_) host_.join(clock);
  trace().add({.kind = Kind::WAIT});
  complete_copies();
}

bool Order::query(Event& event) {
  std::lock_guard lock(mutex);
  refuse_in_capture("a query of an event");
  if (event.capture != 0) throw std::runtime_error("sim: a query of an event of a capture");
  if (!event.recorded) return true;
  bool known = true;
  for (int stream = 0; stream < streams(); stream++) {
    known = known && event.clock.of(stream) <= host_.of(stream);
  }
  if (!known && !event.asked) {  // a device may be slow, but a program that polls goes on
    event.asked = true;
    return false;
  }
  host_.join(event.clock);
  complete_copies();
  return true;
}

bool Order::query_stream(int stream) {
  std::lock_guard lock(mutex);
  refuse_in_capture("a query of a stream");
  const Clock& clock = clocks_.at(stream);
  for (int other = 0; other < streams(); other++) {
    if (clock.of(other) > host_.of(other)) return false;
  }
  return true;
}

// Memory of the device.

Block* Order::allocate(size_t nbytes, int stream, Site site) {
  std::lock_guard lock(mutex);
  char* data = take(nbytes);
  if (!trace().clocked) std::memset(data, NAN_BYTE, nbytes);
  live_nbytes += nbytes;
  peak_nbytes = std::max(peak_nbytes, live_nbytes);
  Clock now = clocks_.at(stream);
  now.join(host_);
  // c10/cuda/CUDACachingAllocator.cpp: what is freed goes to the pool of its own stream, and the next
  // allocation there may get it (or a part of it). What is enqueued in that stream from then on runs
  // behind all that was: only what it has not waited for by now can still disturb.
  auto& ghosts = ghosts_[stream];
  auto is_over = [&](const std::shared_ptr<Ghost>& ghost) {
    return std::all_of(ghost->accesses.begin(), ghost->accesses.end(), [&](const Access& access) {
      return access.count <= now.of(access.stream);
    });
  };
  ghosts.erase(std::remove_if(ghosts.begin(), ghosts.end(), is_over), ghosts.end());
  auto* block = new Block{data, nbytes, stream, now.of(stream), site, {}, {}, ghosts};
  blocks_[reinterpret_cast<uintptr_t>(data)] = block;
  block->number = ++allocations_;
  if (capture != nullptr) note_allocation(block, site);
  return block;
}

void Order::free(Block* block, Site site) {
  std::lock_guard lock(mutex);
  Clock next = clocks_.at(block->stream);  // of whoever gets the memory next
  next.join(host_);
  std::vector<Access> running;
  for (const Access& access : block->accesses) {
    if (access.count > next.of(access.stream) && !block->recorded.count(access.stream)) running.push_back(access);
  }
  bool is_idle = block->graph != nullptr && block->graph != capture.get();  // in a pool that nothing else gets
  if (!running.empty() && !is_idle) {
    ghosts_[block->stream].push_back(std::make_shared<Ghost>(
        Ghost{block->nbytes, block->stream, block->site, site, std::move(running)}));
  }
  if (block->graph != nullptr) {
    note_free(block, site);
    return;
  }
  live_nbytes -= block->nbytes;
  release(block);
}

void Order::release(Block* block) {
  blocks_.erase(reinterpret_cast<uintptr_t>(block->data));
  if (!trace().clocked) std::memset(block->data, NAN_BYTE, block->nbytes);
  give_back(block->data, block->nbytes);
  delete block;
}

Block* Order::block_at(const void* data) {
  std::lock_guard lock(mutex);
  auto address = reinterpret_cast<uintptr_t>(data);
  auto next = blocks_.upper_bound(address);
  if (next == blocks_.begin()) return nullptr;
  Block* block = std::prev(next)->second;
  return address < reinterpret_cast<uintptr_t>(block->data) + block->nbytes ? block : nullptr;
}

void Order::record_stream(Block* block, int stream) {
  std::lock_guard lock(mutex);
  block->recorded.insert(stream);
}

void Order::touch(
    Block* block, const std::vector<Span>& spans, int stream, bool writes, Site site) {
  if (trace().clocked) return;  // the order is checked in scenarios, on models of a size that fits
  std::lock_guard lock(mutex);
  accesses++;
  if (captures(stream)) note_touch(block, spans, writes);
  const Clock& clock = clocks_.at(stream);
  Access now{{0, 0}, stream, clock.of(stream), writes, site};
  if (stream != block->stream && clock.of(block->stream) < block->born && !spans.empty()) {
    now.bytes = spans.front();
    report(
        "REUSE",
        describe(now) + "\nuses " + std::to_string(block->nbytes) + " bytes allocated in " +
            name_of(block->stream) + "\n  at " + at(block->site) +
            "\nwithout waiting for it: who had the memory before may still use it.",
        site, block->site);
  }
  for (const auto& ghost : block->ghosts) {
    for (const Access& before : ghost->accesses) {
      if (before.stream == stream || before.count <= clock.of(before.stream) || spans.empty()) continue;
      report(
          "REUSE",
          std::to_string(ghost->nbytes) + " bytes allocated in " + name_of(ghost->stream) + "\n  at " +
              at(ghost->allocated) + "\nwere freed\n  at " + at(ghost->freed) + "\nwhile " +
              describe(before) + "\nmay still run. The memory may be that of " + std::to_string(block->nbytes) +
              " bytes allocated\n  at " + at(block->site) + "\nfor " + describe(now) +
              "\nwhich does not wait for it.",
          before.site, ghost->freed);
    }
  }
  for (const Span& span : spans) {
    now.bytes = span;
    for (const Access& before : block->accesses) {
      if (before.stream == stream || !(before.writes || writes)) continue;
      if (!overlap(before.bytes, span) || before.count <= clock.of(before.stream)) continue;
      report(
          "RACE",
          describe(now) + "\ndoes not wait for " + describe(before) + "\nin " +
              std::to_string(block->nbytes) + " bytes allocated\n  at " +
              at(block->site),
          before.site, site);
    }
    auto covered = [&](const Access& before) {
      return within(before.bytes, span) && (writes || (before.stream == stream && !before.writes));
    };
    auto& kept = block->accesses;
    kept.erase(std::remove_if(kept.begin(), kept.end(), covered), kept.end());
    kept.push_back(now);
  }
}

// Pinned memory.

void* Order::pin(size_t nbytes) {
  std::lock_guard lock(mutex);
  refuse_in_capture("an allocation of pinned memory");
  char* data = take(nbytes);
  pinned_[reinterpret_cast<uintptr_t>(data)] = {data, nbytes};
  return data;
}

void Order::unpin(void* data) {
  // A pinning allocator waits for the copies that it was told of before it gives memory away.
  std::lock_guard lock(mutex);
  auto found = pinned_.find(reinterpret_cast<uintptr_t>(data));
  Span bytes{found->first, found->first + found->second.nbytes};
  auto inside = [&](const Copy& copy) { return overlap({copy.host, copy.host + copy.bytes.size()}, bytes); };
  copies_.erase(std::remove_if(copies_.begin(), copies_.end(), inside), copies_.end());
  give_back(found->second.data, found->second.nbytes);
  pinned_.erase(found);
}

bool Order::is_pinned(const void* data) const {
  auto address = reinterpret_cast<uintptr_t>(data);
  auto next = pinned_.upper_bound(address);
  if (next == pinned_.begin()) return false;
  --next;
  return address < next->first + std::max<size_t>(next->second.nbytes, 1);
}

void Order::copy_to_host(uintptr_t host, const char* data, size_t nbytes, int stream, Site site) {
  if (trace().clocked) {  // at once: who reads too early is found by scenarios
    if (!skips(nbytes)) std::memcpy(reinterpret_cast<void*>(host), data, nbytes);
    return;
  }
  std::lock_guard lock(mutex);
  // Two copies to the same memory, or one from it that may still read: both must be ordered.
  Span bytes{host, host + nbytes};
  const Clock& clock = clocks_.at(stream);
  auto is_before = [&](const Copy& copy) {
    if (!overlap({copy.host, copy.host + copy.bytes.size()}, bytes)) return false;
    if (copy.stream == stream || copy.count <= clock.of(copy.stream)) return true;
    report("RACE", "a copy to pinned memory\n  at " + at(site) +
        "\ndoes not wait for another copy of it\n  at " + at(copy.site), copy.site, site);
    return false;
  };
  // What is before this one is over when it runs: the host may have touched the bytes until now.
  auto replaced = std::stable_partition(
      copies_.begin(), copies_.end(), [&](const Copy& copy) { return !is_before(copy); });
  std::for_each(replaced, copies_.end(), [&](const Copy& copy) { look_for_writes(copy); });
  copies_.erase(replaced, copies_.end());
  copies_.push_back({host, std::vector<char>(data, data + nbytes), true, stream, clock.of(stream), site});
  std::memset(reinterpret_cast<void*>(host), NAN_BYTE, nbytes);
}

void Order::read_pinned(uintptr_t host, size_t nbytes, int stream, Site site) {
  std::lock_guard lock(mutex);
  Span bytes{host, host + nbytes};
  const Clock& clock = clocks_.at(stream);
  for (Copy& copy : copies_) {
    if (!copy.to_host || !overlap({copy.host, copy.host + copy.bytes.size()}, bytes)) continue;
    if (copy.stream != stream && copy.count > clock.of(copy.stream)) {
      report("RACE", "a read of pinned memory\n  at " + at(site) +
          "\ndoes not wait for the copy that fills it\n  at " + at(copy.site), copy.site, site);
    }
    // In stream order the bytes are there, though the host has not seen them yet.
    std::memcpy(reinterpret_cast<void*>(copy.host), copy.bytes.data(), copy.bytes.size());
    copy.to_host = false;
  }
}

void Order::copy_from_host(uintptr_t host, size_t nbytes, int stream, Site site) {
  if (trace().clocked) return;
  std::lock_guard lock(mutex);
  auto* data = reinterpret_cast<const char*>(host);
  copies_.push_back(
      {host, std::vector<char>(data, data + nbytes), false, stream, clocks_.at(stream).of(stream), site});
}

void Order::look_for_writes(const Copy& copy) {
  auto* data = reinterpret_cast<const char*>(copy.host);
  if (copy.to_host) {
    auto untouched = [](char byte) { return byte == static_cast<char>(NAN_BYTE); };
    if (!std::all_of(data, data + copy.bytes.size(), untouched)) {
      report("HOST", "the host wrote to pinned memory that a copy was to fill\n  at " + at(copy.site),
          copy.site, copy.site);
    }
  } else if (std::memcmp(data, copy.bytes.data(), copy.bytes.size()) != 0) {
    report(
        "HOST",
        "the host wrote to pinned memory that was still being copied to the device\n  at " +
            at(copy.site),
        copy.site, copy.site);
  }
}

void Order::complete_copies() {
  auto done = [&](const Copy& copy) { return copy.count <= host_.of(copy.stream); };
  for (const Copy& copy : copies_) {
    if (!done(copy)) continue;
    look_for_writes(copy);
    if (copy.to_host) std::memcpy(reinterpret_cast<char*>(copy.host), copy.bytes.data(), copy.bytes.size());
  }
  copies_.erase(std::remove_if(copies_.begin(), copies_.end(), done), copies_.end());
}

// Reports.

std::string Order::describe(const Access& access) const {
  return std::string(access.writes ? "a write" : "a read") + " in " + name_of(access.stream) +
      "\n  at " + at(access.site);
}

void Order::report(const std::string& kind, const std::string& text, Site first, Site second) {
  for (Report& known : reports) {
    if (known.kind == kind && known.first == first && known.second == second) {
      known.times++;
      return;
    }
  }
  reports.push_back({kind, text, first, second, 1});
}

void Order::forget() {
  std::lock_guard lock(mutex);
  reports.clear();
  waits.clear();
  operations = accesses = 0;
  peak_nbytes = live_nbytes;
}

}  // namespace sim
