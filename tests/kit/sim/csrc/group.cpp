// A process group of the simulated device, ordered as NCCL's: an asynchronous collective runs in a
// stream of the group's own, a synchronous one in the current stream. Bytes travel over a group of
// the host (gloo) at once; each rank reduces them itself, in the order of ranks.

#include "group.h"

#include "device.h"
#include "graph.h"
#include "trace.h"

#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <cstring>
#include <functional>
#include <optional>

namespace sim {

namespace {

using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

// Tensors of works that nobody waited for. NCCL's watchdog drops them once the device is done.
std::mutex abandoned_mutex;
Tensors abandoned;

class SimWork final : public c10d::Work {
 public:
  SimWork(int rank, c10d::OpType type, int stream, Tensors outputs, Tensors held, bool blocks_host)
      : Work(rank, type), outputs_(std::move(outputs)), held_(std::move(held)), blocks_host_(blocks_host) {
    order().record(over_, stream);
    future_ = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()), std::vector<c10::Device>{device()});
    c10::Stream before = c10::impl::VirtualGuardImpl(c10::DeviceType::PrivateUse1).exchangeStream(stream_of(stream));
    future_->markCompleted(c10::IValue(outputs_));
    c10::impl::VirtualGuardImpl(c10::DeviceType::PrivateUse1).exchangeStream(before);
  }
  ~SimWork() override {
    std::lock_guard lock(abandoned_mutex);
    abandoned.insert(abandoned.end(), held_.begin(), held_.end());
  }
  bool isCompleted() override { return order().query(over_); }
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds) override {
    synchronize();
    return true;
  }
  void synchronize() override {
    order().block(current_stream(), over_);
    if (blocks_host_) order().wait_for(over_, "barrier", here("barrier"));
    held_.clear();
  }
  void blockCurrentStream() override { order().block(current_stream(), over_); }
  std::vector<at::Tensor> result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

 private:
  Event over_;
  Tensors outputs_;
  Tensors held_;  // until somebody waits: NCCL keeps what an asynchronous collective uses
  bool blocks_host_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

at::Tensor bytes_of(const at::Tensor& tensor) {
  return at::from_blob(const_cast<void*>(tensor.storage().data()), {static_cast<int64_t>(tensor.storage().nbytes())}, at::kByte)
      .narrow(0, tensor.storage_offset() * tensor.element_size(), tensor.numel() * tensor.element_size());
}

// The bytes of the tensors, one behind the other: what is sent.
at::Tensor joined(const Tensors& tensors) {
  Tensors parts;
  for (const at::Tensor& tensor : tensors) parts.push_back(bytes_of(tensor));
  return parts.size() == 1 ? parts[0].contiguous() : at::cat(parts);
}

// The same memory as tensors that do not keep it: what a capture holds.
Tensors borrowed(const Tensors& tensors) {
  Tensors made;
  for (const at::Tensor& tensor : tensors) {
    auto& storage = tensor.storage();
    c10::Storage same(c10::Storage::use_byte_size_t(), storage.nbytes(), c10::DataPtr(const_cast<void*>(storage.data()), device()), nullptr, false);
    auto view = at::detail::make_tensor<c10::TensorImpl>(std::move(same), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), tensor.dtype());
    view.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
    made.push_back(view);
  }
  return made;
}

void refuse_float8(const at::Tensor& tensor) {
  // torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp: float8 is moved, and reduced nowhere.
  TORCH_CHECK(!c10::isFloat8Type(tensor.scalar_type()), "Float8 dtypes are not currently supported for NCCL reductions");
}

class SimGroup final : public c10d::Backend {
 public:
  SimGroup(c10::intrusive_ptr<c10d::Backend> host, int rank, int size)
      : Backend(rank, size), host_(std::move(host)), own_(order().add_stream("group")) {}

  const std::string getBackendName() const override { return "sim"; }
  bool supportsCoalescing() const override { return true; }
  void setTimeout(std::chrono::milliseconds timeout) override {
    if (host_) host_->setTimeout(timeout);
  }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return sequence_; }

  void startCoalescing() override {
    coalescing_ = true;
    coalesced_.clear();
    late_.clear();
    coalesced_stream_ = -1;
    coalesced_step_ = Step{.kind = Kind::COLLECTIVE, .alignment = BEST_ALIGNMENT};
  }

  WorkPtr endCoalescing() override {
    coalescing_ = false;
    for (auto& receive : late_) receive();
    late_.clear();
    int stream = coalesced_stream_ < 0 ? current_stream() : coalesced_stream_;
    if (coalesced_step_.ranks > 0) trace().add(coalesced_step_);
    return c10::make_intrusive<SimWork>(getRank(), c10d::OpType::COALESCED, stream, coalesced_, coalesced_, false);
  }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    auto root = options.rootRank;
    return run(c10d::OpType::BROADCAST, "broadcast", options.asyncOp, tensors, tensors, [this, root, tensors = borrowed(tensors)] {
      at::Tensor all = gather(joined(tensors));
      spread(all.select(0, root), tensors);
    });
  }

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return run(c10d::OpType::ALLREDUCE, "all_reduce", options.asyncOp, tensors, tensors, [this, options, tensors = borrowed(tensors)] {
      for (const at::Tensor& tensor : tensors) put(reduced(tensor, options.reduceOp), tensor);
    });
  }

  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    return allreduce(tensors, options);
  }

  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    return run(c10d::OpType::REDUCE, "reduce", options.asyncOp, tensors, tensors, [this, options, tensors = borrowed(tensors)] {
      for (const at::Tensor& tensor : tensors) {
        at::Tensor sum = reduced(tensor, options.reduceOp);
        if (getRank() == options.rootRank) put(sum, tensor);
      }
    });
  }

  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    Tensors flat;
    for (Tensors& list : outputs) flat.insert(flat.end(), list.begin(), list.end());
    std::vector<Tensors> places;
    for (const Tensors& list : outputs) places.push_back(borrowed(list));
    return run(c10d::OpType::ALLGATHER, "all_gather", options.asyncOp, inputs, flat, [this, outputs = places, inputs = borrowed(inputs)] {
      for (size_t i = 0; i < inputs.size(); i++) {
        bool even = true;
        for (const at::Tensor& output : outputs[i]) even = even && output.nbytes() == inputs[i].nbytes();
        // ProcessGroupNCCL sends inputs of other sizes as broadcasts.
        int64_t longest = inputs[i].nbytes();
        for (const at::Tensor& output : outputs[i]) longest = std::max<int64_t>(longest, output.nbytes());
        at::Tensor sent = at::zeros({longest}, at::kByte);
        sent.narrow(0, 0, inputs[i].nbytes()).copy_(bytes_of(inputs[i]));
        at::Tensor all = gather(sent);
        for (size_t rank = 0; rank < outputs[i].size(); rank++) {
          bytes_of(outputs[i][rank]).copy_(all.select(0, rank).narrow(0, 0, outputs[i][rank].nbytes()));
        }
      }
    });
  }

  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    Tensors outputs = {output}, inputs = {input};
    return allgather_into_tensor_coalesced(outputs, inputs, options);
  }

  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    for (size_t i = 0; i < inputs.size(); i++) {
      TORCH_CHECK(inputs[i].scalar_type() == outputs[i].scalar_type(), "output tensor must have the same type as input tensor");
      TORCH_CHECK(inputs[i].numel() * getSize() == outputs[i].numel(), "output tensor size must be equal to world_size times input tensor size");
    }
    return run(c10d::OpType::_ALLGATHER_BASE, "all_gather_into_tensor", options.asyncOp, inputs, outputs, [this, inputs = borrowed(inputs), outputs = borrowed(outputs)] {
      at::Tensor all = gather(joined(inputs));
      int64_t begin = 0;
      for (size_t i = 0; i < inputs.size(); i++) {
        auto count = static_cast<int64_t>(inputs[i].nbytes());
        bytes_of(outputs[i]).copy_(all.narrow(1, begin, count).reshape({-1}));
        begin += count;
      }
    });
  }

  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override {
    Tensors outputs = {output}, inputs = {input};
    return reduce_scatter_tensor_coalesced(outputs, inputs, options);
  }

  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) override {
    for (size_t i = 0; i < inputs.size(); i++) {
      TORCH_CHECK(inputs[i].scalar_type() == outputs[i].scalar_type(), "input tensor must be the same type as the output tensor.");
      TORCH_CHECK(inputs[i].numel() == outputs[i].numel() * getSize(), "input tensor must be the same size as output size times world size");
    }
    return run(c10d::OpType::_REDUCE_SCATTER_BASE, "reduce_scatter", options.asyncOp, inputs, outputs, [this, options, inputs = borrowed(inputs), outputs = borrowed(outputs)] {
      for (size_t i = 0; i < inputs.size(); i++) {
        at::Tensor sum = reduced(inputs[i], options.reduceOp);
        put(sum.reshape({-1}).narrow(0, getRank() * outputs[i].numel(), outputs[i].numel()), outputs[i]);
      }
    });
  }

  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& options) override {
    Tensors flat;
    std::vector<Tensors> lists;
    for (Tensors& list : inputs) flat.insert(flat.end(), list.begin(), list.end());
    for (const Tensors& list : inputs) lists.push_back(borrowed(list));
    return run(c10d::OpType::REDUCE_SCATTER, "reduce_scatter", options.asyncOp, flat, outputs, [this, options, inputs = lists, outputs = borrowed(outputs)] {
      for (size_t i = 0; i < outputs.size(); i++) {
        for (int rank = 0; rank < getSize(); rank++) {
          at::Tensor sum = reduced(inputs[i][rank], options.reduceOp);
          if (rank == getRank()) put(sum, outputs[i]);
        }
      }
    });
  }

  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                        std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& options) override {
    Tensors outputs = {output}, inputs = {input};
    return run(c10d::OpType::ALLTOALL_BASE, "all_to_all", options.asyncOp, inputs, outputs, [&] {
      at::Tensor sent = host_of(input).clone(), received = at::empty(output.sizes(), sent.options());
      if (!host_) return;
      c10d::AllToAllOptions host_options;
      host_->alltoall_base(received, sent, output_splits, input_splits, host_options)->wait();
      put(received, output);
    });
  }

  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override {
    return run(c10d::OpType::ALLTOALL, "all_to_all", options.asyncOp, inputs, outputs, [&] {
      if (!host_) return;
      std::vector<int64_t> sent_sizes, received_sizes;
      int64_t total = 0;
      for (const at::Tensor& tensor : inputs) sent_sizes.push_back(tensor.nbytes());
      for (const at::Tensor& tensor : outputs) {
        received_sizes.push_back(tensor.nbytes());
        total += tensor.nbytes();
      }
      at::Tensor sent = joined(inputs), received = at::empty({total}, at::kByte);
      c10d::AllToAllOptions host_options;
      host_->alltoall_base(received, sent, received_sizes, sent_sizes, host_options)->wait();
      spread(received, outputs);
    });
  }

  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override {
    Tensors flat;
    for (Tensors& list : inputs) flat.insert(flat.end(), list.begin(), list.end());
    return run(c10d::OpType::SCATTER, "scatter", options.asyncOp, flat, outputs, [&] {
      int64_t count = outputs[0].nbytes();
      at::Tensor sent = flat.empty() ? at::zeros({count * getSize()}, at::kByte) : joined(flat);
      at::Tensor all = gather(sent);
      bytes_of(outputs[0]).copy_(all.select(0, options.rootRank).narrow(0, getRank() * count, count));
    });
  }

  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    Tensors flat;
    for (Tensors& list : outputs) flat.insert(flat.end(), list.begin(), list.end());
    return run(c10d::OpType::GATHER, "gather", options.asyncOp, inputs, flat, [&] {
      at::Tensor all = gather(joined(inputs));
      for (size_t rank = 0; rank < flat.size(); rank++) bytes_of(flat[rank]).copy_(all.select(0, rank));
    });
  }

  WorkPtr send(Tensors& tensors, int to, int tag) override {
    Tensors none;
    return run(c10d::OpType::SEND, "send", true, tensors, none, [&] {
      if (!host_) return;
      Tensors copies = {host_of(tensors[0]).clone()};
      sent_.push_back({host_->send(copies, to, tag), copies[0]});
    });
  }

  WorkPtr recv(Tensors& tensors, int from, int tag) override {
    Tensors none;
    auto receive = [this, tensor = tensors[0], from, tag] {
      if (!host_) return;
      Tensors copies = {at::empty(tensor.sizes(), tensor.options().device(c10::kCPU))};
      host_->recv(copies, from, tag)->wait();
      put(copies[0], tensor);
    };
    return run(c10d::OpType::RECV, "recv", true, none, tensors, [&] {
      // Both sides of a coalesced exchange may receive first: the host sends all before.
      if (coalescing_) late_.push_back(receive); else receive();
    });
  }

  WorkPtr barrier(const c10d::BarrierOptions&) override {
    order().refuse_in_capture("a barrier");
    if (host_) host_->barrier()->wait();
    return c10::make_intrusive<SimWork>(getRank(), c10d::OpType::BARRIER, current_stream(), Tensors{}, Tensors{}, true);
  }

 private:
  WorkPtr run(c10d::OpType type, const std::string& name, bool asynchronous, const Tensors& inputs,
              const Tensors& outputs, const std::function<void()>& move) {
    sequence_++;
    // NCCL makes a communicator at the first operation, which waits for all ranks of the group. Only
    // a pair that is not in a batch gets one of its own (ProcessGroupNCCL::pointToPoint).
    bool is_simple = type != c10d::OpType::ALLTOALL && type != c10d::OpType::ALLTOALL_BASE && type != c10d::OpType::SCATTER &&
        type != c10d::OpType::GATHER && type != c10d::OpType::SEND && type != c10d::OpType::RECV;
    TORCH_CHECK(is_simple || !captures(), "sim: ", name, " is not captured yet");
    if (!connected_ && captures()) order().refuse_in_capture("a communicator that is made");
    bool is_pair = !coalescing_ && (type == c10d::OpType::SEND || type == c10d::OpType::RECV);
    if (!connected_ && !is_pair) {
      connected_ = true;
      if (host_) host_->barrier()->wait();
    }
    for (const Tensors* list : {&inputs, &outputs}) {
      for (const at::Tensor& tensor : *list) {
        TORCH_CHECK(is_here(tensor), "Tensors must be CUDA and dense");
        TORCH_CHECK(tensor.is_non_overlapping_and_dense(), "Tensors must be contiguous");
        // torch/csrc/distributed/c10d/NCCLUtils.cpp: no type of NCCL's is complex.
        TORCH_CHECK(!tensor.is_complex(), "Input tensor data type is not supported for NCCL process group: ", tensor.scalar_type());
      }
    }
    int stream = asynchronous ? own_ : current_stream();
    Site site = here(name);
    {
      std::lock_guard lock(order().mutex);
      if (asynchronous) {
        Event now;
        order().record(now, current_stream());
        order().block(own_, now);
      }
      order().begin(stream);
      for (const at::Tensor& tensor : inputs) read(tensor, stream, site);
      for (const at::Tensor& tensor : outputs) write(tensor, stream, site);
    }
    tell(name, stream, inputs, outputs);
    if (skips(nbytes_of(inputs) + nbytes_of(outputs))) {
      keep_own_end(type, inputs, outputs);
    } else {
      at::AutoDispatchBelowADInplaceOrView below;
      if (captures(stream)) {
        note(stream, site, [move] {
          at::AutoDispatchBelowADInplaceOrView below;
          move();
        });
      } else {
        if (captures()) order().refuse_in_capture("a collective in a stream outside of the capture", site);
        move();
      }
    }
    Tensors held;
    if (asynchronous) {
      held = inputs;
      held.insert(held.end(), outputs.begin(), outputs.end());
    }
    if (coalescing_) {
      coalesced_.insert(coalesced_.end(), held.begin(), held.end());
      coalesced_stream_ = stream;
    }
    return c10::make_intrusive<SimWork>(getRank(), type, stream, outputs, held, false);
  }

  static int64_t nbytes_of(const Tensors& tensors) {
    int64_t sum = 0;
    for (const at::Tensor& tensor : tensors) sum += tensor.nbytes();
    return sum;
  }

  // Ranks read and write rows: an address or a length that is no multiple of so many bytes.
  static constexpr int64_t BEST_ALIGNMENT = 128;

  void tell(const std::string& name, int stream, const Tensors& inputs, const Tensors& outputs) {
    if (!trace().on || getSize() == 1) return;
    Step step{.kind = Kind::COLLECTIVE, .stream = stream, .group = own_, .ranks = getSize(), .alignment = BEST_ALIGNMENT};
    step.read = static_cast<int64_t>(std::max<size_t>({inputs.size(), outputs.size(), 1}));
    step.written = std::max(nbytes_of(inputs), nbytes_of(outputs));
    for (const Tensors* list : {&inputs, &outputs}) {
      for (const at::Tensor& tensor : *list) {
        auto begin = static_cast<int64_t>(reinterpret_cast<uintptr_t>(tensor.storage().data())) +
            tensor.storage_offset() * tensor.element_size();
        int64_t nbytes = tensor.nbytes();
        bool larger = nbytes_of(*list) == step.written;  // which has a row for each rank
        if (name != "all_reduce" && larger) nbytes /= getSize();
        while (step.alignment > 1 && (begin % step.alignment != 0 || nbytes % step.alignment != 0)) step.alignment /= 2;
      }
    }
    if (!coalescing_) {
      trace().add(step, name);
      return;
    }
    step.read += coalesced_step_.read;
    step.written += coalesced_step_.written;
    step.alignment = std::min(step.alignment, coalesced_step_.alignment);
    coalesced_step_ = step;
    coalesced_step_.name = trace().number(name);
  }

  // Nothing of a large collective is moved but the end of this rank's own row, where counts are. All
  // ranks hold the same.
  void keep_own_end(c10d::OpType type, const Tensors& inputs, const Tensors& outputs) {
    constexpr int64_t END = 4096;  // elements
    if (type != c10d::OpType::_REDUCE_SCATTER_BASE) return;
    at::AutoDispatchBelowADInplaceOrView below;
    for (size_t i = 0; i < inputs.size(); i++) {
      int64_t count = outputs[i].numel(), end = std::min(END, count);
      HostViews views;
      at::Tensor own = views.of(inputs[i]).reshape({-1}).narrow(0, getRank() * count + count - end, end);
      views.of(outputs[i]).reshape({-1}).narrow(0, count - end, end).copy_(own);
    }
  }

  // Bytes of every rank, a row each.
  at::Tensor gather(at::Tensor sent) {
    at::Tensor all = at::empty({getSize(), sent.numel()}, at::kByte);
    if (sent.numel() == 0) return all;
    if (!host_) return all.copy_(sent.view({1, -1}).expand({getSize(), -1}));
    at::Tensor flat = all.view({-1});
    host_->_allgather_base(flat, sent, c10d::AllgatherOptions())->wait();
    return all;
  }

  static at::Tensor host_of(const at::Tensor& tensor) {
    HostViews views;
    return views.of(tensor).contiguous();
  }

  static void put(const at::Tensor& values, const at::Tensor& tensor) {
    bytes_of(tensor).copy_(values.contiguous().reshape({-1}).view(at::kByte));
  }

  static void spread(const at::Tensor& bytes, const Tensors& tensors) {
    int64_t begin = 0;
    for (const at::Tensor& tensor : tensors) {
      auto count = static_cast<int64_t>(tensor.nbytes());
      bytes_of(tensor).copy_(bytes.narrow(0, begin, count));
      begin += count;
    }
  }

  // What NCCL's reduction of a tensor over the ranks is, flat.
  at::Tensor reduced(const at::Tensor& tensor, const c10d::ReduceOp& op) {
    refuse_float8(tensor);
    at::Tensor rows = gather(joined({tensor})).view(tensor.scalar_type());
    if (rows.numel() == 0) return rows.reshape({-1});
    switch (op.op_) {
      case c10d::ReduceOp::AVG:  // ncclAvg multiplies by 1/n before it adds, in the dtype
        if (c10::isIntegralType(tensor.scalar_type(), true)) return at::floor_divide(sum(rows), getSize()).to(tensor.scalar_type());
        rows = rows.mul(1.0 / getSize());
        return sum(rows);
      case c10d::ReduceOp::PREMUL_SUM: {
        auto* factor = static_cast<c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());  // 2.11's name, kept since
        if (!factor->tensor_factor.defined()) return sum(rows.mul(factor->double_factor));
        return sum(rows.mul(host_of(factor->tensor_factor)));
      }
      case c10d::ReduceOp::SUM: return tensor.scalar_type() == at::kBool ? rows.any(0) : sum(rows);
      case c10d::ReduceOp::PRODUCT: return rows.prod(0).to(tensor.scalar_type());
      case c10d::ReduceOp::MIN: return rows.amin(0);
      case c10d::ReduceOp::MAX: return rows.amax(0);
      default: TORCH_CHECK(false, "Cannot use this ReduceOp with NCCL");
    }
  }

  static at::Tensor sum(const at::Tensor& rows) {
    at::Tensor total = rows.select(0, 0).clone();
    for (int64_t row = 1; row < rows.size(0); row++) total.add_(rows.select(0, row));
    return total;
  }

  c10::intrusive_ptr<c10d::Backend> host_;
  int own_;
  uint64_t sequence_ = 0;
  bool connected_ = false;
  bool coalescing_ = false;
  Tensors coalesced_;
  int coalesced_stream_ = -1;
  Step coalesced_step_;
  std::vector<std::function<void()>> late_;
  std::vector<std::pair<WorkPtr, at::Tensor>> sent_;
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_group(c10::intrusive_ptr<c10d::Backend> host, int rank, int size) {
  return c10::make_intrusive<SimGroup>(std::move(host), rank, size);
}

void drop_abandoned() {
  Tensors dropped;
  std::lock_guard lock(abandoned_mutex);
  dropped.swap(abandoned);
}

}  // namespace sim
