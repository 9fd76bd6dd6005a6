// The device as torch sees it: guard, streams and events, allocators, hooks, random numbers.

#include "device.h"
#include "graph.h"

#include "trace.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <algorithm>
#include <cstring>
#include <utility>

namespace sim {

namespace {

thread_local int current = 0;  // stream of this thread

Block* block_of(const c10::DataPtr& data);

// Memory.

void free_block(void* context) {
  auto* block = static_cast<Block*>(context);
  Site site = site_of_free();
  order().free(block, site);
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    if (nbytes == 0) return {nullptr, device()};  // as CUDA's
    Block* block = order().allocate(nbytes, current, here("allocate"));
    return {block->data, block, &free_block, device()};
  }
  void copy_data(void* to, const void* from, size_t count) const override {
    default_copy_data(to, from, count);
  }
};

// A storage that is a part of another one (``storage[a:b]``) has a deleter of torch's own.
Block* block_of(const c10::DataPtr& data) {
  if (data.get_deleter() == &free_block) return static_cast<Block*>(data.get_context());
  return data.get() == nullptr ? nullptr : order().block_at(data.get());
}

DeviceAllocator device_allocator;

void unpin(void* data) { order().unpin(data); }

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    void* data = order().pin(nbytes);
    return {data, data, &unpin, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &unpin; }
  void copy_data(void* to, const void* from, size_t count) const override {
    default_copy_data(to, from, count);
  }
};

PinnedAllocator pinned_allocator;

// Random numbers: the host's, so that values are those of a run on the host.

struct Randomness final : c10::GeneratorImpl {
  explicit Randomness(at::Generator of_host)
      : GeneratorImpl(sim::device(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        host(std::move(of_host)) {}
  void set_current_seed(uint64_t seed) override { host.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { host.set_offset(offset); }
  uint64_t get_offset() const override { return host.get_offset(); }
  uint64_t current_seed() const override { return host.current_seed(); }
  uint64_t seed() override { return const_cast<at::Generator&>(host).seed(); }
  void set_state(const c10::TensorImpl& state) override {
    host.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return host.unsafeGetGeneratorImpl()->get_state();
  }
  GeneratorImpl* clone_impl() const override { return new Randomness(host.clone()); }

  at::Generator host;
};

const at::Generator& default_randomness() {
  static at::Generator only = at::make_generator<Randomness>(at::detail::getDefaultCPUGenerator());
  return only;
}

// What torch asks of an accelerator.

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  void init() const override {}
  c10::DeviceIndex deviceCount() const override { return 1; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return default_randomness();
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    return at::make_generator<Randomness>(at::detail::createCPUGenerator());
  }
  at::Device getDeviceFromPtr(void*) const override { return device(); }
  bool isPinnedPtr(const void* data) const override { return order().is_pinned(data); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    c10::DataPtr fresh = device_allocator.allocate(nbytes);
    size_t kept = std::min(nbytes, storage.nbytes());
    auto* from = static_cast<Block*>(storage.data_ptr().get_context());
    if (kept > 0 && from != nullptr) {
      auto* to = static_cast<Block*>(fresh.get_context());
      Site site = here("resize_");
      std::lock_guard lock(order().mutex);
      order().begin(current);
      order().touch(from, {{reinterpret_cast<uintptr_t>(from->data), reinterpret_cast<uintptr_t>(from->data) + kept}}, current, false, site);
      order().touch(to, {{reinterpret_cast<uintptr_t>(to->data), reinterpret_cast<uintptr_t>(to->data) + kept}}, current, true, site);
      if (!skips(kept)) std::memcpy(to->data, from->data, kept);
      note(current, site, [to = to->data, from = from->data, kept] { std::memcpy(to, from, kept); });
      auto count = static_cast<int64_t>(kept);
      trace().add({.kind = Kind::KERNEL, .stream = current, .read = count, .written = count}, "resize_");
    }
    const_cast<c10::Storage&>(storage).set_data_ptr(std::move(fresh));
    const_cast<c10::Storage&>(storage).set_nbytes(nbytes);
  }
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::DeviceType::PrivateUse1; }
  c10::Device exchangeDevice(c10::Device) const override { return device(); }
  c10::Device getDevice() const override { return device(); }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }

  c10::Stream getStream(c10::Device) const override { return stream_of(current); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream_of(0); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override { return fresh(); }
  c10::Stream getNewStream(c10::Device, int priority) const override { return fresh(priority); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return stream_of(std::exchange(current, static_cast<int>(stream.id())));
  }

  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag)
      const override {
    if (*event == nullptr) *event = new Event();
    order().record(*static_cast<Event*>(*event), static_cast<int>(stream.id()));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) order().block(static_cast<int>(stream.id()), *static_cast<Event*>(event));
  }
  bool queryEvent(void* event) const override {
    return event == nullptr || order().query(*static_cast<Event*>(event));
  }
  void synchronizeEvent(void* event) const override {
    if (event == nullptr) return;
    order().wait_for(*static_cast<Event*>(event), "event", here("synchronize"));
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  double elapsedTime(void*, void*, c10::DeviceIndex) const override { return 0.0; }

  bool queryStream(const c10::Stream& stream) const override {
    return order().query_stream(static_cast<int>(stream.id()));
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    order().wait_for_stream(static_cast<int>(stream.id()), "stream", here("synchronize"));
  }
  void synchronizeDevice(c10::DeviceIndex) const override {
    order().wait_for_all("device", here("synchronize"));
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    if (Block* block = block_of(data)) order().record_stream(block, static_cast<int>(stream.id()));
  }

 private:
  static c10::Stream fresh(int priority = 0) {
    return stream_of(order().add_stream("stream " + std::to_string(order().streams()), priority));
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

bool registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  c10::SetAllocator(c10::DeviceType::PrivateUse1, &device_allocator);
  return true;
}();

}  // namespace

c10::Device device() { return {c10::DeviceType::PrivateUse1, 0}; }

c10::Stream stream_of(int number) { return c10::Stream(c10::Stream::UNSAFE, device(), number); }

int current_stream() { return current; }

c10::Allocator* allocator() { return &device_allocator; }

at::Generator host_generator(const at::Generator& generator) {
  if (!generator.defined() || generator.device().type() != c10::DeviceType::PrivateUse1) return generator;
  return static_cast<Randomness*>(generator.unsafeGetGeneratorImpl())->host;
}

Block* block_of(const c10::Storage& storage) { return block_of(storage.data_ptr()); }

std::vector<Span> spans_of(const at::Tensor& tensor) {
  constexpr int64_t MANY = 256;  // rows of a strided view that are looked at one by one
  if (tensor.numel() == 0) return {};
  auto item = static_cast<uintptr_t>(tensor.element_size());
  auto base = reinterpret_cast<uintptr_t>(tensor.storage().data()) + tensor.storage_offset() * item;
  if (tensor.is_non_overlapping_and_dense()) return {{base, base + tensor.numel() * item}};
  // Dimensions by stride, the ones that are dense together at the end.
  std::vector<std::pair<int64_t, int64_t>> dims;  // stride, size
  for (int64_t dim = 0; dim < tensor.dim(); dim++) {
    if (tensor.size(dim) > 1 && tensor.stride(dim) > 0) dims.emplace_back(tensor.stride(dim), tensor.size(dim));
  }
  std::sort(dims.begin(), dims.end());
  int64_t run = 1, rows = 1;
  size_t inner = 0;
  for (; inner < dims.size() && dims[inner].first <= run; inner++) {
    run = (dims[inner].second - 1) * dims[inner].first + run;
  }
  std::vector<uintptr_t> begins = {base};
  for (size_t dim = inner; dim < dims.size(); dim++) rows *= dims[dim].second;
  if (rows > MANY) {
    int64_t last = 0;
    for (auto& [stride, size] : dims) last += stride * (size - 1);
    return {{base, base + (last + 1) * item}};
  }
  for (size_t dim = inner; dim < dims.size(); dim++) {
    std::vector<uintptr_t> more;
    for (uintptr_t begin : begins) {
      for (int64_t i = 0; i < dims[dim].second; i++) more.push_back(begin + i * dims[dim].first * item);
    }
    begins = std::move(more);
  }
  std::vector<Span> spans;
  for (uintptr_t begin : begins) spans.emplace_back(begin, begin + run * item);
  return spans;
}

void read(const at::Tensor& tensor, int stream, Site site) {
  if (Block* block = block_of(tensor.storage())) order().touch(block, spans_of(tensor), stream, false, site);
}

void write(const at::Tensor& tensor, int stream, Site site) {
  if (Block* block = block_of(tensor.storage())) order().touch(block, spans_of(tensor), stream, true, site);
}

}  // namespace sim
