// Operations of the simulated device: the host's kernels on the same memory, and what they access.
//
// An operation without a line of its own here goes to ``on_host_memory``: which tensors it reads and
// writes is what its schema says. Where a kernel of CUDA does something else than the host's, it has
// a kernel of its own, with the source of the difference.

#include "device.h"
#include "graph.h"

#include "trace.h"

#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <cstring>
#include <optional>
#include <set>

namespace sim {

at::Tensor HostViews::of(const at::Tensor& tensor) {
  c10::Storage host;
  for (auto& [known, storage] : storages_) {
    if (known.storage().unsafeGetStorageImpl() == tensor.storage().unsafeGetStorageImpl()) host = storage;
  }
  if (!host) {
    auto& storage = tensor.storage();
    host = c10::Storage(
        c10::Storage::use_byte_size_t(), storage.nbytes(),
        c10::DataPtr(const_cast<void*>(storage.data()), c10::Device(c10::kCPU)), nullptr, false);
    storages_.emplace_back(tensor, host);
  }
  auto view = at::detail::make_tensor<c10::TensorImpl>(
      std::move(host), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  view.unsafeGetTensorImpl()->set_sizes_and_strides(
      tensor.sizes(), tensor.strides(), tensor.storage_offset());
  view._set_conj(tensor.is_conj());
  view._set_neg(tensor.is_neg());
  return view;
}

const at::Tensor* HostViews::owner(const at::Tensor& host) const {
  for (auto& [known, storage] : storages_) {
    if (storage.unsafeGetStorageImpl() == host.storage().unsafeGetStorageImpl()) return &known;
  }
  return nullptr;
}

namespace {

using Stack = torch::jit::Stack;

at::Tensor empty_like_host(const at::Tensor& host) {
  return at::detail::empty_strided_generic(
      host.sizes(), host.strides(), allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      host.scalar_type());
}

at::Tensor view_like_host(const at::Tensor& owner, const at::Tensor& host) {
  auto view = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(owner.storage()), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), host.dtype());
  view.unsafeGetTensorImpl()->set_sizes_and_strides(host.sizes(), host.strides(), host.storage_offset());
  view._set_conj(host.is_conj());
  view._set_neg(host.is_neg());
  return view;
}

// Operations whose result's size is in their data: the host waits for it (torch: the kernels call
// nonzero, or copy a count to the host).
const std::set<std::string> SIZES_IN_DATA = {
    "aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim",
    "aten::unique_consecutive", "aten::repeat_interleave", "aten::bincount", "aten::equal",
};

// Operations that take tensors of the host beside the device's (indices are copied: a wait).
const std::set<std::string> TAKE_INDICES_OF_HOST = {
    "aten::index", "aten::index_put_", "aten::_index_put_impl_", "aten::index_put",
};

// What a kernel reads and writes, for the trace. A tensor counts once, whatever its strides.
class Facts {
 public:
  void reads(const at::Tensor& tensor) {
    if (!is_here(tensor) || !seen_.insert(tensor.unsafeGetTensorImpl()).second) return;
    step_.read += tensor.nbytes();
    if (step_.dtype < 0) step_.dtype = static_cast<int>(tensor.scalar_type());
  }
  void writes(const at::Tensor& tensor) {
    if (is_here(tensor)) step_.written += tensor.nbytes();
  }
  void reads(const c10::IValue& value) { each(value, [&](const at::Tensor& t) { reads(t); }); }
  void writes(const c10::IValue& value) { each(value, [&](const at::Tensor& t) { writes(t); }); }
  void reads_rows_only() { step_.read = step_.written; }
  void computes(double operations) { step_.operations = operations; }
  int64_t nbytes() const { return step_.read + step_.written; }
  void tell(int stream, const std::string& name) {
    step_.kind = Kind::KERNEL;
    step_.stream = stream;
    trace().add(step_, name);
  }

 private:
  template <class F>
  static void each(const c10::IValue& value, F&& use) {
    if (value.isTensor()) use(value.toTensor());
    if (value.isTensorList()) {
      for (const at::Tensor& tensor : value.toTensorVector()) use(tensor);
    }
    if (value.isOptionalTensorList()) {
      for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) {
        if (tensor && tensor->defined()) use(*tensor);
      }
    }
  }

  Step step_;
  std::set<const void*> seen_;
};

// Operations that fill what they write to, and read it not.
const std::set<std::string> ONLY_WRITE = {"aten::fill_.Scalar", "aten::fill_.Tensor", "aten::zero_", "aten::copy_"};

// These read as much as they make, whatever lies beside it.
const std::set<std::string> READ_ROWS = {"aten::embedding", "aten::index", "aten::gather", "aten::index_select"};

// Multiplications and additions of products of matrices, each counted as one, as torch counts them
// (torch/utils/flop_counter.py).
double operations_of(const std::string& name, const std::vector<c10::IValue>& given) {
  auto product = [](const at::Tensor& a, const at::Tensor& b) {
    return 2.0 * static_cast<double>(a.numel()) * static_cast<double>(b.size(-1));
  };
  if (name == "aten::mm" || name == "aten::bmm") return product(given[0].toTensor(), given[1].toTensor());
  if (name == "aten::addmm" || name == "aten::baddbmm" || name == "aten::addbmm") {
    return product(given[1].toTensor(), given[2].toTensor());
  }
  return 0.0;
}

// One call of an operation of the device, by a kernel of the host.
class Call {
 public:
  Call(const c10::OperatorHandle& op, Stack* stack)
      : op_(op), schema_(op.schema()), stack_(stack), first_(stack->size() - schema_.arguments().size()),
        stream_(current_stream()), site_(here(schema_.name())) {}

  void run() {
    std::vector<c10::IValue> given(stack_->begin() + first_, stack_->end());
    bool data_decides = SIZES_IN_DATA.count(schema_.name()) > 0;
    bool makes_view = !schema_.returns().empty();
    for (const auto& result : schema_.returns()) {
      makes_view = makes_view && result.alias_info() != nullptr && !result.alias_info()->isWrite();
    }
    Stack host_stack;
    {
      std::lock_guard lock(order().mutex);
      order().begin(stream_);
      for (size_t i = 0; i < given.size(); i++) {
        const auto* alias = schema_.arguments()[i].alias_info();
        host_stack.push_back(to_host(given[i], alias != nullptr && alias->isWrite(), !makes_view));
      }
    }
    refuse_mixed(given);
    if (schema_.name().rfind("aten::index", 0) == 0) {
      for (const auto& value : given) data_decides = data_decides || has_mask(value);
    }
    Facts facts;
    for (size_t i = 0; i < given.size(); i++) {
      const auto* alias = schema_.arguments()[i].alias_info();
      bool writes = alias != nullptr && alias->isWrite();
      if (writes) facts.writes(given[i]);
      bool fills = writes && (schema_.arguments()[i].is_out() || ONLY_WRITE.count(full_name()) > 0);
      if (!fills) facts.reads(given[i]);
    }
    if (skips(facts.nbytes()) && !makes_view) {
      run_without_values(given, data_decides, facts);
      return;
    }
    Stack kept;
    bool is_captured = captures(stream_) && !makes_view;
    if (captures() && data_decides) order().refuse_in_capture("a size that is in data", site_);
    if (is_captured) kept = fixed(host_stack);
    run_on_host(op_, host_stack);
    for (auto& [ours, host] : resized_) {
      if (host.numel() == 0) {  // of another shape, perhaps
        ours.unsafeGetTensorImpl()->set_sizes_contiguous(host.sizes());
        continue;
      }
      TORCH_CHECK(!is_captured, "sim: an operation that makes a tensor larger cannot be captured");
      at::Tensor target = ours;
      at::Tensor memory = empty_like_host(host);
      std::memcpy(memory.mutable_data_ptr(), host.data_ptr(), host.nbytes());
      write(memory, stream_, site_);
      target.set_(memory.storage(), 0, host.sizes(), host.strides());
    }
    torch::jit::drop(*stack_, schema_.arguments().size());
    bool tells_host = false;
    for (size_t i = 0; i < schema_.returns().size(); i++) {
      const auto* alias = schema_.returns()[i].alias_info();
      if (alias != nullptr && alias->isWrite()) {
        stack_->push_back(given[written_by(*alias)]);
      } else {
        tells_host = tells_host || host_stack[i].isBool() || host_stack[i].isInt() || host_stack[i].isDouble();
        stack_->push_back(from_host(host_stack[i]));
        facts.writes(stack_->back());
      }
    }
    if (!makes_view) tell(facts, given);
    if (is_captured) note(stream_, site_, again(std::move(kept), host_stack));
    if (data_decides || tells_host) order().wait_for_stream(stream_, "data", site_);
  }

 private:
  // Nothing above the host's kernels may see the host's views.
  static void run_on_host(const c10::OperatorHandle& op, Stack& stack) {
    at::AutoDispatchBelowADInplaceOrView below;
    c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
  }

  // Arguments as a capture keeps them: what is the host's has the values that it has now.
  Stack fixed(const Stack& stack) const {
    Stack kept;
    for (const c10::IValue& value : stack) {
      bool is_hosts = value.isTensor() && value.toTensor().defined() && views_.owner(value.toTensor()) == nullptr;
      kept.push_back(is_hosts ? c10::IValue(value.toTensor().clone()) : value);
    }
    return kept;
  }

  // What a replay does: the same kernel, and its results to where they were put.
  std::function<void()> again(Stack kept, const Stack& results) {
    std::vector<std::vector<at::Tensor>> places;
    for (size_t i = 0; i < schema_.returns().size(); i++) {
      const auto* alias = schema_.returns()[i].alias_info();
      places.emplace_back();
      if (alias != nullptr && alias->isWrite()) continue;
      const c10::IValue& made = (*stack_)[stack_->size() - schema_.returns().size() + i];
      std::vector<at::Tensor> list;
      if (made.isTensor()) list.push_back(made.toTensor());
      if (made.isTensorList()) list = made.toTensorVector();
      for (const at::Tensor& tensor : list) {
        places.back().push_back(is_here(tensor) && tensor.storage().nbytes() > 0 ? HostViews().of(tensor) : at::Tensor());
      }
    }
    return [op = op_, kept = std::move(kept), places = std::move(places)] {
      Stack stack = kept;
      run_on_host(op, stack);
      for (size_t i = 0; i < places.size(); i++) {
        std::vector<at::Tensor> made;
        if (stack[i].isTensor()) made = {stack[i].toTensor()};
        if (stack[i].isTensorList()) made = stack[i].toTensorVector();
        for (size_t j = 0; j < places[i].size(); j++) if (places[i][j].defined()) places[i][j].copy_(made[j]);
      }
    };
  }

  std::string full_name() const {
    return schema_.overload_name().empty() ? schema_.name() : schema_.name() + "." + schema_.overload_name();
  }

  void tell(Facts& facts, const std::vector<c10::IValue>& given) {
    if (!trace().on) return;
    facts.computes(operations_of(schema_.name(), given));
    if (READ_ROWS.count(schema_.name())) facts.reads_rows_only();
    facts.tell(stream_, schema_.name());
  }

  // Tensors are too large to be there: find the shapes of what is made.
  void run_without_values(const std::vector<c10::IValue>& given, bool data_decides, Facts& facts) {
    TORCH_CHECK(!data_decides, "sim: the size of what ", schema_.name(), " makes is in values that are not there");
    bool makes = false;
    for (const auto& result : schema_.returns()) {
      makes = makes || result.alias_info() == nullptr || !result.alias_info()->isWrite();
    }
    Stack shapes;
    if (makes) {
      for (const auto& value : given) shapes.push_back(without_memory(value));
      at::AutoDispatchBelowADInplaceOrView below;
      c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
      op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::Meta), &shapes);
    }
    torch::jit::drop(*stack_, schema_.arguments().size());
    for (size_t i = 0; i < schema_.returns().size(); i++) {
      const auto* alias = schema_.returns()[i].alias_info();
      if (alias != nullptr && alias->isWrite()) {
        stack_->push_back(given[written_by(*alias)]);
        continue;
      }
      stack_->push_back(of_shape(shapes[i]));
      facts.writes(stack_->back());
    }
    tell(facts, given);
  }

  static at::Tensor without_memory(const at::Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(c10::kMeta));
  }

  static c10::IValue without_memory(const c10::IValue& value) {
    if (value.isTensor()) return without_memory(value.toTensor());
    if (value.isTensorList()) {
      std::vector<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(without_memory(tensor));
      return c10::List<at::Tensor>(list);
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) {
        list.push_back(tensor ? std::optional(without_memory(*tensor)) : std::nullopt);
      }
      return list;
    }
    if (value.isDevice()) return c10::Device(c10::kMeta);
    return value;
  }

  static c10::IValue of_shape(const c10::IValue& value) {
    if (value.isTensor()) return value.toTensor().defined() ? empty_like_host(value.toTensor()) : value.toTensor();
    if (value.isTensorList()) {
      std::vector<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(empty_like_host(tensor));
      return c10::List<at::Tensor>(list);
    }
    return value;
  }

  at::Tensor to_host(const at::Tensor& tensor, bool writes, bool touches) {
    if (!is_here(tensor)) return tensor;
    if (touches) (writes ? write : read)(tensor, stream_, site_);
    if (writes && tensor.numel() == 0) {  // a kernel may make it larger
      at::Tensor host = at::empty(tensor.sizes(), tensor.options().device(c10::kCPU));
      resized_.emplace_back(tensor, host);
      return host;
    }
    return views_.of(tensor);
  }

  c10::IValue to_host(const c10::IValue& value, bool writes, bool touches) {
    if (value.isTensor()) return to_host(value.toTensor(), writes, touches);
    if (value.isTensorList()) {
      std::vector<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(to_host(tensor, writes, touches));
      return c10::List<at::Tensor>(list);
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) {
        list.push_back(tensor ? std::optional(to_host(*tensor, writes, touches)) : std::nullopt);
      }
      return list;
    }
    if (value.isDevice() && value.toDevice().type() == c10::DeviceType::PrivateUse1) {
      return c10::Device(c10::kCPU);
    }
    if (value.isGenerator()) return host_generator(value.toGenerator());
    return value;
  }

  at::Tensor from_host(const at::Tensor& host) {
    if (!host.defined()) return host;
    if (const at::Tensor* owner = views_.owner(host)) return view_like_host(*owner, host);
    at::Tensor made = empty_like_host(host);
    if (made.storage().nbytes() > 0) {
      auto* from = static_cast<const char*>(host.data_ptr());
      std::memcpy(made.mutable_data_ptr(), from, std::min(made.storage().nbytes(), host.storage().nbytes() - host.storage_offset() * host.element_size()));
      write(made, stream_, site_);
    }
    return made;
  }

  c10::IValue from_host(const c10::IValue& value) {
    if (value.isTensor()) return from_host(value.toTensor());
    if (value.isTensorList()) {
      std::vector<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(from_host(tensor));
      return c10::List<at::Tensor>(list);
    }
    return value;
  }

  // Which argument a return is.
  size_t written_by(const c10::AliasInfo& alias) const {
    for (size_t i = 0; i < schema_.arguments().size(); i++) {
      const auto* known = schema_.arguments()[i].alias_info();
      if (known != nullptr && known->beforeSets() == alias.beforeSets()) return i;
    }
    TORCH_CHECK(false, "sim: ", schema_.name(), " returns what it was not given");
  }

  static bool is_mask(const at::Tensor& tensor) {
    return is_here(tensor) && (tensor.scalar_type() == at::kBool || tensor.scalar_type() == at::kByte);
  }

  static bool has_mask(const c10::IValue& value) {
    if (!value.isOptionalTensorList()) return false;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) {
      if (tensor && tensor->defined() && is_mask(*tensor)) return true;
    }
    return false;
  }

  void refuse_mixed(const std::vector<c10::IValue>& given) const {
    auto of_host = [](const at::Tensor& t) { return t.defined() && !is_here(t) && t.dim() > 0; };
    auto refuse = [&] {
      if (TAKE_INDICES_OF_HOST.count(schema_.name())) {
        order().note_wait("indices of the host", site_);
        return;
      }
      TORCH_CHECK(false, "Expected all tensors to be on the same device: ", schema_.name(), " was given one of the host");
    };
    bool any_here = false;
    for (const auto& value : given) {
      if (value.isTensor()) any_here = any_here || is_here(value.toTensor());
      if (value.isTensorList()) {
        for (const at::Tensor& tensor : value.toTensorVector()) any_here = any_here || is_here(tensor);
      }
    }
    if (!any_here) return;
    for (const auto& value : given) {
      if (value.isTensor() && of_host(value.toTensor())) refuse();
      if (value.isTensorList()) {
        for (const at::Tensor& tensor : value.toTensorVector()) if (of_host(tensor)) refuse();
      }
      if (value.isOptionalTensorList()) {
        for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) {
          if (tensor && of_host(*tensor)) refuse();
        }
      }
    }
  }

  const c10::OperatorHandle& op_;
  const c10::FunctionSchema& schema_;
  Stack* stack_;
  size_t first_;
  int stream_;
  Site site_;
  HostViews views_;
  std::vector<std::pair<at::Tensor, at::Tensor>> resized_;
};

void on_host_memory(const c10::OperatorHandle& op, Stack* stack) { Call(op, stack).run(); }

// Memory and views.

at::Tensor empty(
    c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(
      size, allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(
      size, stride, allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype));
}

const at::Tensor& resize_(
    const at::Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  if (format && *format != at::MemoryFormat::Preserve) impl->empty_tensor_restride(*format);
  size_t needed = (self.storage_offset() + self.numel()) * self.element_size();
  if (needed > self.storage().nbytes()) self.storage().unsafeGetStorageImpl()->set_resizable(true);
  if (needed > self.storage().nbytes()) at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(self.storage(), needed);
  return self;
}

at::Tensor& set_storage(
    at::Tensor& self, at::Storage source, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  if (stride.data() == nullptr || (stride.empty() && !size.empty())) {
    impl->set_storage_offset(offset);
    impl->set_sizes_contiguous(size);
  } else {
    impl->set_sizes_and_strides(size, stride, offset);
  }
  return self;
}

at::Tensor& set_whole_storage(at::Tensor& self, at::Storage source) {
  auto count = static_cast<int64_t>(source.nbytes() / self.element_size());
  return set_storage(self, std::move(source), 0, {count}, {});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

at::Tensor& set_nothing(at::Tensor& self) {
  auto fresh = empty({0}, self.scalar_type(), {}, {}, {}, {});
  return set_storage(self, fresh.storage(), 0, {0}, {});
}

void record_stream(at::Tensor& self, c10::Stream stream) {
  if (Block* block = block_of(self.storage())) order().record_stream(block, static_cast<int>(stream.id()));
}

// Copies.

bool is_pinned(const at::Tensor& tensor) {
  return tensor.numel() > 0 && order().is_pinned(tensor.const_data_ptr());
}

// A copy beside the host, again; ``host`` is the address there.
void copy_beside(const at::Tensor& source, const at::Tensor& target, bool to_device, uintptr_t host, Site site) {
  int stream = current_stream();
  size_t nbytes = source.nbytes();
  if (!to_device) {
    order().copy_to_host(host, static_cast<const char*>(source.const_data_ptr()), nbytes, stream, site);
    return;
  }
  order().read_pinned(host, nbytes, stream, site);
  order().copy_from_host(host, nbytes, stream, site);
  target.copy_(source);
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  if (to.numel() == 0) return to;
  int stream = current_stream();
  Site site = here(is_here(from) ? (is_here(to) ? "copy" : "copy to the host") : "copy from the host");
  HostViews views;
  at::Tensor source = is_here(from) ? views.of(from) : from;
  at::Tensor target = is_here(to) ? views.of(to) : to;
  // aten/src/ATen/native/cuda/Copy.cu, copy_requires_temporaries: a copy between host and device of
  // another dtype, or of memory that is not dense alike, goes through pageable memory of the host.
  bool direct = from.scalar_type() == to.scalar_type() && from.is_conj() == to.is_conj() &&
      ((from.is_contiguous() && to.is_contiguous()) ||
       (from.is_non_overlapping_and_dense() && from.strides() == to.strides() && from.sizes() == to.sizes()));
  bool beside = non_blocking && direct && is_pinned(is_here(from) ? to : from);
  at::AutoDispatchBelowADInplaceOrView below;
  {
    std::lock_guard lock(order().mutex);
    order().begin(stream);
    if (is_here(from)) read(from, stream, site);
    if (is_here(to)) write(to, stream, site);
    bool is_skipped = skips(to.nbytes());
    if (is_here(from) && is_here(to)) {
      Facts facts;
      facts.reads(from);
      facts.writes(to);
      facts.tell(stream, "aten::copy_");
      if (!is_skipped) target.copy_(source);
      note(stream, site, [target, source] { target.copy_(source); });
      return to;
    }
    Step moved{.kind = Kind::COPY, .stream = stream, .written = static_cast<int64_t>(to.nbytes())};
    trace().add(moved, is_here(from) ? "to host" : "to device");
    if (is_skipped) {
      source = source.narrow(0, 0, 0);
      target = target.narrow(0, 0, 0);
    }
    if (captures(stream)) {
      if (!beside) order().refuse_in_capture("a copy for which the host waits, or from pageable memory", site);
      note(stream, site, [=] {
        auto* place = reinterpret_cast<const char*>((is_here(from) ? target : source).const_data_ptr());
        copy_beside(source, target, !is_here(from), reinterpret_cast<uintptr_t>(place), site);
      });
      return to;
    }
    if (beside && is_here(from)) {
      auto* data = static_cast<const char*>(source.const_data_ptr());
      order().copy_to_host(reinterpret_cast<uintptr_t>(to.const_data_ptr()), data, to.nbytes(), stream, site);
      return to;
    }
    if (beside) {
      order().read_pinned(reinterpret_cast<uintptr_t>(from.const_data_ptr()), from.nbytes(), stream, site);
      order().copy_from_host(reinterpret_cast<uintptr_t>(from.const_data_ptr()), from.nbytes(), stream, site);
    }
  }
  if (!is_here(to)) {  // to the host: it waits, whatever was asked for
    order().wait_for_stream(stream, "copy to the host", site);
    target.copy_(source);
  } else if (beside) {
    target.copy_(source);
  } else if (non_blocking) {
    // CUDA runtime, "API synchronization behavior": pageable memory is staged; the host may wait,
    // and nothing may count on it.
    order().note_wait("copy from pageable memory", site);
    target.copy_(source);
  } else {
    target.copy_(source);
    order().wait_for_stream(stream, "copy from the host", site);
  }
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  resize_(to, from.sizes(), std::nullopt);
  return copy_from(from, to, false);
}

at::Scalar local_scalar(const at::Tensor& self) {
  int stream = current_stream();
  Site site = here("item");
  HostViews views;
  {
    std::lock_guard lock(order().mutex);
    order().begin(stream);
    read(self, stream, site);
    trace().add({.kind = Kind::COPY, .stream = stream, .written = static_cast<int64_t>(self.nbytes())}, "to host");
  }
  order().wait_for_stream(stream, "item", site);
  return at::_local_scalar_dense(views.of(self));
}

// Kernels of CUDA that are not the host's.

// aten/src/ATen/native/cuda/TensorShape.cu, _chunk_cat_out_cuda: where every input is dense, its
// bytes are copied in the order in which they lie in memory, whatever its strides say. That is one
// kernel; else there is one for each input.
at::Tensor& chunk_cat_out(at::TensorList tensors, int64_t dim, int64_t chunks, at::Tensor& out) {
  int stream = current_stream();
  Site site = here("_chunk_cat");
  HostViews views;
  std::vector<at::Tensor> host;
  {
    std::lock_guard lock(order().mutex);
    order().begin(stream);
    bool dense = true;
    for (const at::Tensor& tensor : tensors) dense = dense && tensor.is_non_overlapping_and_dense();
    if (!dense) for (size_t i = 1; i < tensors.size(); i++) order().begin(stream);
    for (const at::Tensor& tensor : tensors) {
      read(tensor, stream, site);
      at::Tensor view = views.of(tensor);
      if (dense && !view.is_contiguous()) view = view.as_strided({view.numel()}, {1}).view(view.sizes());
      host.push_back(view);
    }
    write(out, stream, site);
    // One kernel, or one for each input.
    Facts all;
    for (const at::Tensor& tensor : tensors) {
      if (!dense) all = Facts();
      all.reads(tensor);
      if (!dense) {
        all.writes(tensor);
        all.tell(stream, "aten::_chunk_cat");
      }
    }
    if (dense) {
      all.writes(out);
      all.tell(stream, "aten::_chunk_cat");
    }
  }
  at::AutoDispatchBelowADInplaceOrView below;
  if (skips(out.nbytes())) {  // values of small ones are there
    int64_t begin = 0;
    at::Tensor columns = views.of(out).view({chunks, -1});
    for (const at::Tensor& tensor : host) {
      int64_t rows = (tensor.size(0) + chunks - 1) / chunks;
      int64_t count = tensor.size(0) == 0 ? 0 : rows * (tensor.numel() / tensor.size(0));
      if (!skips(tensor.nbytes())) columns.narrow(1, begin, count).copy_(at::_chunk_cat({tensor}, dim, chunks));
      begin += count;
    }
    return out;
  }
  at::Tensor result = at::_chunk_cat(host, dim, chunks), place = views.of(out);
  TORCH_CHECK(result.sizes() == out.sizes(), "sim: _chunk_cat expected out of ", result.sizes(), ", found ", out.sizes());
  place.copy_(result);
  note(stream, site, [=] { place.copy_(at::_chunk_cat(host, dim, chunks)); });
  return out;
}

at::Tensor chunk_cat(at::TensorList tensors, int64_t dim, int64_t chunks) {
  HostViews views;
  std::vector<at::Tensor> host;
  for (const at::Tensor& tensor : tensors) host.push_back(views.of(tensor));
  at::Tensor shape;
  {
    at::AutoDispatchBelowADInplaceOrView below;
    shape = at::_chunk_cat(host, dim, chunks);
  }
  at::Tensor out = empty_like_host(shape);
  chunk_cat_out(tensors, dim, chunks, out);
  return out;
}

// aten/src/ATen/native/cuda/TensorShape.cu, split_with_sizes_copy_out_cuda: blocks of threads are
// shared out by bytes, and a group without any divides by zero.
void split_with_sizes_copy_out(const at::Tensor& self, c10::IntArrayRef sizes, int64_t dim, at::TensorList out) {
  int stream = current_stream();
  Site site = here("split_with_sizes_copy");
  int64_t bytes = 0;
  for (const at::Tensor& tensor : out) bytes += tensor.nbytes();
  TORCH_CHECK(bytes > 0, "sim: split_with_sizes_copy of no bytes divides by zero");
  HostViews views;
  std::vector<at::Tensor> host;
  {
    std::lock_guard lock(order().mutex);
    order().begin(stream);
    read(self, stream, site);
    for (const at::Tensor& tensor : out) {
      write(tensor, stream, site);
      host.push_back(views.of(tensor));
    }
    Facts facts;
    facts.reads(self);
    for (const at::Tensor& tensor : out) facts.writes(tensor);
    facts.tell(stream, "aten::split_with_sizes_copy");
  }
  at::AutoDispatchBelowADInplaceOrView below;
  at::Tensor whole = views.of(self);
  auto parts = whole.split_with_sizes(sizes, dim);
  note(stream, site, [=, lengths = sizes.vec()] {
    auto again = whole.split_with_sizes(lengths, dim);
    for (size_t i = 0; i < host.size(); i++) host[i].copy_(again[i]);
  });
  for (size_t i = 0; i < host.size(); i++) {
    TORCH_CHECK(host[i].sizes() == parts[i].sizes(), "sim: split_with_sizes_copy found out of another shape");
    if (!skips(host[i].nbytes())) host[i].copy_(parts[i]);
  }
}

// torch leaves convolutions of a device that it does not know to these two.

at::Tensor convolution(
    const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
    c10::SymIntArrayRef stride, c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation, bool transposed,
    c10::SymIntArrayRef output_padding, c10::SymInt groups) {
  static auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution", "");
  Stack stack;
  torch::jit::push(stack, input, weight, bias, stride, padding, dilation, transposed, output_padding, groups);
  Call(op, &stack).run();
  return stack[0].toTensor();
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& grad, const at::Tensor& input, const at::Tensor& weight, c10::SymIntArrayRef stride,
    c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation, bool transposed,
    c10::SymIntArrayRef output_padding, c10::SymInt groups, std::array<bool, 3> mask) {
  static auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution_backward", "");
  Stack stack;
  std::optional<std::vector<int64_t>> bias;
  if (mask[2]) bias = std::vector<int64_t>{transposed ? weight.size(1) * groups.expect_int() : weight.size(0)};
  torch::jit::push(stack, grad, input, weight, bias, stride, padding, dilation, transposed, output_padding, groups, mask);
  Call(op, &stack).run();
  auto undefined = [&](int i) { return stack[i].isNone() ? at::Tensor() : stack[i].toTensor(); };
  return {undefined(0), undefined(1), undefined(2)};
}

// torch asks a stub which attention a device has, and the operation where a program asks itself.
int64_t sdp_choice(
    const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, double, bool,
    std::optional<double>, bool) {
  constexpr int64_t OF_OTHER_OPERATIONS = 0, OVERRIDEABLE = 4;  // at::SDPBackend
  return trace().clocked ? OVERRIDEABLE : OF_OTHER_OPERATIONS;
}

// Attention as one kernel, which a GPU has; for the trace alone, without values. Operations are
// counted as torch counts them, whatever a causal mask leaves out.
double attention_operations(const at::Tensor& query, const at::Tensor& key, double products) {
  return products * 2.0 * static_cast<double>(query.numel()) * static_cast<double>(key.size(2));
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, c10::SymInt, c10::SymInt, at::Tensor, at::Tensor, at::Tensor>
attention(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const std::optional<at::Tensor>&,
    double, bool, bool, std::optional<double>) {
  int stream = current_stream();
  count_calls_here();
  at::Tensor out = at::empty_like(query), sums = at::empty({query.size(0), query.size(1), query.size(2)}, query.options().dtype(at::kFloat));
  at::Tensor none = at::empty({0}, query.options()), seed = at::empty({}, query.options().dtype(at::kLong));
  Facts facts;
  for (const at::Tensor& tensor : {query, key, value}) facts.reads(tensor);
  facts.writes(out);
  facts.writes(sums);
  facts.computes(attention_operations(query, key, 2.0));
  facts.tell(stream, "aten::attention");
  return {out, sums, none, none, query.size(2), key.size(2), seed, seed, none};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> attention_backward(
    const at::Tensor& grad, const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const at::Tensor&,
    std::array<bool, 4>, const at::Tensor& out, const at::Tensor& sums, const at::Tensor&, const at::Tensor&,
    c10::SymInt, c10::SymInt, double, bool, const at::Tensor&, const at::Tensor&, std::optional<double>) {
  int stream = current_stream();
  count_calls_here();
  at::Tensor of_query = at::empty_like(query), of_key = at::empty_like(key), of_value = at::empty_like(value);
  Facts facts;
  for (const at::Tensor& tensor : {grad, query, key, value, out, sums}) facts.reads(tensor);
  for (const at::Tensor& tensor : {of_query, of_key, of_value}) facts.writes(tensor);
  facts.computes(attention_operations(query, key, 5.0));
  facts.tell(stream, "aten::attention_backward");
  return {of_query, of_key, of_value, at::Tensor()};
}

}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_host_memory>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", TORCH_FN(empty));
  m.impl("empty_strided", TORCH_FN(empty_strided));
  m.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  m.impl("view", TORCH_FN(at::native::view));
  m.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  m.impl("resize_", TORCH_FN(resize_));
  m.impl("set_", TORCH_FN(set_nothing));
  m.impl("set_.source_Storage", TORCH_FN(set_whole_storage));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(set_storage));
  m.impl("set_.source_Tensor", TORCH_FN(set_tensor));
  m.impl("record_stream", TORCH_FN(record_stream));
  m.impl("_copy_from", TORCH_FN(copy_from));
  m.impl("_copy_from_and_resize", TORCH_FN(copy_from_and_resize));
  m.impl("_local_scalar_dense", TORCH_FN(local_scalar));
  m.impl("_chunk_cat", TORCH_FN(chunk_cat));
  m.impl("_chunk_cat.out", TORCH_FN(chunk_cat_out));
  m.impl("split_with_sizes_copy.out", TORCH_FN(split_with_sizes_copy_out));
  m.impl("convolution_overrideable", TORCH_FN(convolution));
  m.impl("convolution_backward_overrideable", TORCH_FN(convolution_backward));
  m.impl("_fused_sdp_choice", TORCH_FN(sdp_choice));
  // One kernel of CUDA's; torch makes it of others on a device that it does not know.
  m.impl("silu_backward", torch::CppFunction::makeFromBoxedFunction<&on_host_memory>());
  m.impl("_scaled_dot_product_fused_attention_overrideable", TORCH_FN(attention));
  m.impl("_scaled_dot_product_fused_attention_overrideable_backward", TORCH_FN(attention_backward));
}

// Autocast, as CUDA's (aten/src/ATen/autocast_mode.cpp): what torch lists runs in the narrow dtype.

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

#define SIM_NARROW(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define SIM_FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  AT_FORALL_LOWER_PRECISION_FP(SIM_NARROW)
  AT_FORALL_FP32(SIM_FP32)
}

}  // namespace sim

namespace at::native {

REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &sim::sdp_choice)

}  // namespace at::native
