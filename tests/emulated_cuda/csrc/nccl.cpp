// A backend that behaves like NCCL towards its callers and lets gloo do the work on the same bytes.
#include "nccl.h"

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/csrc/utils/pybind.h>

#include <condition_variable>
#include <thread>

#include "device.h"

namespace emu {

using at::Tensor;
using c10d::Work;
using WorkPtr = c10::intrusive_ptr<Work>;
using Post = std::function<void()>;

// Gloo knows of a send or receive that it is done only when somebody waits: a thread that does.
struct Waiting {
  std::mutex mutex;
  std::condition_variable changed;
  bool done = false;
  std::exception_ptr error;
  static std::shared_ptr<Waiting> on(std::vector<WorkPtr> works, std::vector<Tensor> kept) {
    auto state = std::make_shared<Waiting>();
    std::thread([state, works, kept] {
      std::exception_ptr error;
      try {
        for (auto& w : works) w->wait(kNoTimeout);
      } catch (...) {
        error = std::current_exception();
      }
      std::lock_guard<std::mutex> lock(state->mutex);
      state->error = error;
      state->done = true;
      state->changed.notify_all();
    }).detach();
    return state;
  }
};

struct NcclWork final : Work {
  std::vector<WorkPtr> inner;
  bool point_to_point = false;
  std::shared_ptr<Waiting> polled;
  std::vector<Tensor> keep, outputs;
  Post post;
  std::mutex mutex;
  bool settled = false;

  NcclWork(std::vector<WorkPtr> works, std::vector<Tensor> kept, std::vector<Tensor> out, Post after)
      : inner(std::move(works)), keep(std::move(kept)), outputs(std::move(out)), post(std::move(after)) {}

  void settle() {
    std::lock_guard<std::mutex> lock(mutex);
    if (settled) return;
    settled = true;
    if (post) post();
  }
  bool isCompleted() override {
    if (point_to_point) {
      if (!polled) polled = Waiting::on(inner, keep);
      std::lock_guard<std::mutex> lock(polled->mutex);
      return polled->done;
    }
    for (auto& w : inner)
      if (!w->isCompleted()) return false;
    for (auto& w : inner)
      if (w->exception()) return true;
    settle();
    return true;
  }
  bool isSuccess() const override {
    for (auto& w : inner)
      if (w->exception()) return false;
    return true;
  }
  std::exception_ptr exception() const override {
    for (auto& w : inner)
      if (auto e = w->exception()) return e;
    return nullptr;
  }
  bool wait(std::chrono::milliseconds timeout) override {
    if (polled) {
      std::unique_lock<std::mutex> lock(polled->mutex);
      polled->changed.wait(lock, [this] { return polled->done; });
      if (polled->error) std::rethrow_exception(polled->error);
      return true;
    }
    for (auto& w : inner) w->wait(timeout);
    settle();
    return true;
  }
  void synchronize() override { wait(kNoTimeout); }
  std::vector<Tensor> result() override { return outputs; }
  int sourceRank() const override { return inner.at(0)->sourceRank(); }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    wait(kNoTimeout);
    auto future = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()),
        std::vector<c10::Device>{c10::Device(c10::kCUDA, current_device())});
    future->markCompleted(c10::IValue(outputs));
    return future;
  }
};

struct Nccl final : c10d::Backend {
  c10::intrusive_ptr<c10d::Backend> gloo;
  c10::intrusive_ptr<Options> options;
  const bool strict;  // NCCL; otherwise gloo as it is in a build with CUDA, for CUDA tensors
  bool coalescing = false;
  std::vector<WorkPtr> coalesced;
  int bound = -1;  // the device of the first call; NCCL makes a communicator per device

  Nccl(c10::intrusive_ptr<c10d::Backend> inner, int rank, int size, std::chrono::milliseconds timeout, bool nccl)
      : Backend(rank, size), gloo(std::move(inner)), strict(nccl) {
    options = c10::make_intrusive<Options>(nccl ? "nccl" : "gloo", timeout);
  }

  const std::string getBackendName() const override { return strict ? "nccl" : "gloo"; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return options; }
  bool supportsCoalescing() const override { return strict; }
  void setTimeout(std::chrono::milliseconds timeout) override { options->timeout = timeout; }
  void setSequenceNumberForGroup() override { gloo->setSequenceNumberForGroup(); }
  uint64_t getSequenceNumberForGroup() override { return gloo->getSequenceNumberForGroup(); }
  void abort() override { gloo->abort(); }
  void shutdown() override { gloo->shutdown(); }
  c10d::ErrorType getError() override { return c10d::ErrorType::SUCCESS; }

  // -- what NCCL refuses ---------------------------------------------------------------------------

  void check(const Tensor& t, bool contiguous = true) {
    TORCH_CHECK(t.is_cuda() && !t.is_sparse(), "Tensors must be CUDA and dense (emulated NCCL, got ", t.device(), ")");
    if (contiguous)
      TORCH_CHECK(t.is_contiguous(t.suggest_memory_format()), "Tensors must be contiguous");
    auto type = t.scalar_type();
    TORCH_CHECK(
        type != at::kShort && type != at::kUInt16 && type != at::kUInt32 && type != at::kUInt64,
        "Unconvertible NCCL type ", type);
    if (!strict) return;
    if (bound < 0) bound = t.device().index();
    TORCH_CHECK(
        t.device().index() == bound,
        "emulated NCCL: this process used the group with cuda:", bound, " and now with ", t.device());
  }
  void check(const std::vector<Tensor>& all, bool contiguous = true) {
    TORCH_CHECK(!all.empty(), "Tensor list must be nonempty");
    for (auto& t : all) check(t, contiguous);
  }

  // At the first collective, as NCCL does when it makes the communicator.
  bool met = false;
  void meet() {
    if (met || !strict || getSize() == 1) return;
    met = true;
    Tensor mine = at::full({1}, visible().at(bound < 0 ? current_device() : bound), at::kLong);
    std::vector<std::vector<Tensor>> all(1);
    for (int i = 0; i < getSize(); ++i) all[0].push_back(at::empty({1}, at::kLong));
    std::vector<Tensor> one{mine};
    gloo->allgather(all, one, c10d::AllgatherOptions())->wait(kNoTimeout);
    for (int i = 0; i < getSize(); ++i)
      for (int j = 0; j < i; ++j)
        TORCH_CHECK_WITH(
            DistBackendError, all[0][i].item<int64_t>() != all[0][j].item<int64_t>(),
            "NCCL error: invalid usage: Duplicate GPU detected : rank ", i, " and rank ", j,
            " both on CUDA device ", all[0][i].item<int64_t>(), " (emulated)");
  }

  static Tensor bytes(const Tensor& t) {
    Tensor flat = on_cpu(t);
    if (!flat.is_contiguous()) {  // channels last and the like: same bytes in storage order
      flat = flat.as_strided({flat.numel()}, {1}, flat.storage_offset());
    }
    if (t.numel() == 0) return at::empty({0}, at::kByte);
    return flat.view({-1}).view(at::kByte);
  }
  static std::vector<Tensor> bytes(const std::vector<Tensor>& all) {
    std::vector<Tensor> out;
    for (auto& t : all) out.push_back(bytes(t));
    return out;
  }

  WorkPtr done(std::vector<WorkPtr> works, std::vector<Tensor> kept, std::vector<Tensor> out, Post post = {}) {
    auto work = c10::make_intrusive<NcclWork>(std::move(works), std::move(kept), std::move(out), std::move(post));
    if (coalescing) coalesced.push_back(work);
    return work;
  }

  void startCoalescing() override {
    coalescing = true;
    coalesced.clear();
  }
  WorkPtr endCoalescing() override {
    coalescing = false;
    auto all = std::move(coalesced);
    coalesced.clear();
    return c10::make_intrusive<NcclWork>(std::move(all), std::vector<Tensor>{}, std::vector<Tensor>{}, Post{});
  }

  // -- collectives ---------------------------------------------------------------------------------

  static c10d::ReduceOp plain(const c10d::ReduceOp& op) {
    auto kind = static_cast<c10d::ReduceOp::RedOpType>(op);
    TORCH_CHECK(kind != c10d::ReduceOp::PREMUL_SUM, "emulated NCCL: no PREMUL_SUM");
    TORCH_CHECK(
        kind != c10d::ReduceOp::BAND && kind != c10d::ReduceOp::BOR && kind != c10d::ReduceOp::BXOR,
        "Cannot use ReduceOp.BAND, BOR or BXOR with NCCL");
    if (kind == c10d::ReduceOp::AVG) return c10d::ReduceOp(c10d::ReduceOp::SUM);
    return op;
  }
  static Tensor summand(const Tensor& t, c10d::ReduceOp& op) {  // NCCL sums bools as a maximum
    Tensor cpu = on_cpu(t);
    if (t.scalar_type() != at::kBool) return cpu;
    if (op == c10d::ReduceOp::SUM) op = c10d::ReduceOp(c10d::ReduceOp::MAX);
    return cpu.view(at::kByte);
  }
  void average(Tensor t, const c10d::ReduceOp& op) const {
    if (static_cast<c10d::ReduceOp::RedOpType>(op) == c10d::ReduceOp::AVG) t.div_(getSize());
  }

  WorkPtr broadcast(std::vector<Tensor>& tensors, const c10d::BroadcastOptions& opts) override {
    check(tensors);
    meet();
    auto cpu = bytes(tensors);
    return done({gloo->broadcast(cpu, opts)}, tensors, tensors);
  }

  WorkPtr allreduce(std::vector<Tensor>& tensors, const c10d::AllreduceOptions& opts) override {
    check(tensors);
    meet();
    auto given = opts;
    given.reduceOp = plain(opts.reduceOp);
    std::vector<Tensor> cpu{summand(tensors.at(0), given.reduceOp)};
    auto op = opts.reduceOp;
    return done({gloo->allreduce(cpu, given)}, tensors, tensors, [this, cpu, op] { average(cpu[0], op); });
  }

  WorkPtr allreduce_coalesced(std::vector<Tensor>& tensors, const c10d::AllreduceCoalescedOptions& opts) override {
    check(tensors);
    std::vector<WorkPtr> works;
    for (auto& t : tensors) {
      std::vector<Tensor> one{t};
      bool before = coalescing;
      coalescing = false;
      works.push_back(allreduce(one, opts));
      coalescing = before;
    }
    return done(works, tensors, tensors);
  }

  WorkPtr reduce(std::vector<Tensor>& tensors, const c10d::ReduceOptions& opts) override {
    check(tensors);
    meet();
    auto given = opts;
    given.reduceOp = plain(opts.reduceOp);
    std::vector<Tensor> cpu{summand(tensors.at(0), given.reduceOp)};
    auto op = opts.reduceOp;
    bool root = opts.rootRank == getRank();
    return done({gloo->reduce(cpu, given)}, tensors, tensors, [this, cpu, op, root] { if (root) average(cpu[0], op); });
  }

  WorkPtr allgather(std::vector<std::vector<Tensor>>& outs, std::vector<Tensor>& ins, const c10d::AllgatherOptions& opts) override {
    check(ins);
    check(outs.at(0), false);
    meet();
    // Through contiguous memory, as NCCL does where the outputs are not one flat buffer.
    Tensor in = bytes(ins.at(0)).clone();
    std::vector<std::vector<Tensor>> cpu(1);
    for (auto& t : outs[0]) {
      TORCH_CHECK(t.numel() == ins[0].numel() && t.scalar_type() == ins[0].scalar_type(), "emulated NCCL: uneven all_gather");
      cpu[0].push_back(at::empty({in.numel()}, at::kByte));
    }
    std::vector<Tensor> from{in};
    auto targets = outs[0];
    auto got = cpu[0];
    return done({gloo->allgather(cpu, from, opts)}, ins, targets, [targets, got] {
      for (size_t i = 0; i < got.size(); ++i) {
        Tensor to = on_cpu(targets[i]);
        if (got[i].numel()) to.copy_(got[i].view(to.scalar_type()).view(to.sizes()));
      }
    });
  }

  WorkPtr _allgather_base(Tensor& out, Tensor& in, const c10d::AllgatherOptions& opts) override {
    check(in);
    check(out);
    meet();
    TORCH_CHECK(in.dtype() == out.dtype(), "output tensor must have the same type as input tensor");
    TORCH_CHECK(in.numel() * getSize() == out.numel(), "output tensor size must be equal to world_size times input tensor size");
    Tensor to = bytes(out), from = bytes(in).clone();  // NCCL allows in place
    return done({gloo->_allgather_base(to, from, opts)}, {out, in}, {out});
  }

  WorkPtr allgather_into_tensor_coalesced(std::vector<Tensor>& outs, std::vector<Tensor>& ins, const c10d::AllgatherOptions& opts) override {
    std::vector<WorkPtr> works;
    bool before = coalescing;
    coalescing = false;
    for (size_t i = 0; i < outs.size(); ++i) works.push_back(_allgather_base(outs[i], ins[i], opts));
    coalescing = before;
    return done(works, outs, outs);
  }

  WorkPtr scattered(Tensor out, Tensor summed, const c10d::ReduceScatterOptions& opts, std::vector<Tensor> kept) {
    c10d::AllreduceOptions given;
    given.reduceOp = plain(opts.reduceOp);
    given.timeout = opts.timeout;
    std::vector<Tensor> all{summed};
    auto op = opts.reduceOp;
    return done({gloo->allreduce(all, given)}, kept, {out}, [this, out, summed, op] {
      Tensor mine = summed.view({getSize(), -1})[getRank()];
      average(mine, op);
      Tensor to = on_cpu(out);
      to.copy_(mine.view(to.sizes()));
    });
  }

  WorkPtr _reduce_scatter_base(Tensor& out, Tensor& in, const c10d::ReduceScatterOptions& opts) override {
    check(in);
    check(out);
    meet();
    TORCH_CHECK(in.dtype() == out.dtype(), "input tensor must be the same type as the output tensor.");
    TORCH_CHECK(in.numel() == out.numel() * getSize(), "input tensor must be the same size as output size times world size");
    return scattered(out, on_cpu(in).clone(at::MemoryFormat::Contiguous), opts, {out, in});
  }

  WorkPtr reduce_scatter(std::vector<Tensor>& outs, std::vector<std::vector<Tensor>>& ins, const c10d::ReduceScatterOptions& opts) override {
    check(outs);
    check(ins.at(0), false);
    meet();
    std::vector<Tensor> flat;
    for (auto& t : ins[0]) {
      TORCH_CHECK(t.numel() == outs[0].numel(), "emulated NCCL: uneven reduce_scatter");
      flat.push_back(on_cpu(t).reshape({-1}));
    }
    return scattered(outs[0], at::cat(flat), opts, outs);
  }

  WorkPtr reduce_scatter_tensor_coalesced(std::vector<Tensor>& outs, std::vector<Tensor>& ins, const c10d::ReduceScatterOptions& opts) override {
    std::vector<WorkPtr> works;
    bool before = coalescing;
    coalescing = false;
    for (size_t i = 0; i < outs.size(); ++i) works.push_back(_reduce_scatter_base(outs[i], ins[i], opts));
    coalescing = before;
    return done(works, outs, outs);
  }

  WorkPtr gather(std::vector<std::vector<Tensor>>& outs, std::vector<Tensor>& ins, const c10d::GatherOptions& opts) override {
    check(ins);
    meet();
    auto from = bytes(ins);
    std::vector<std::vector<Tensor>> to;
    std::vector<Tensor> kept(ins);
    for (auto& list : outs) {
      check(list);
      to.push_back(bytes(list));
      kept.insert(kept.end(), list.begin(), list.end());
    }
    return done({gloo->gather(to, from, opts)}, kept, outs.empty() ? std::vector<Tensor>{} : outs[0]);
  }

  WorkPtr scatter(std::vector<Tensor>& outs, std::vector<std::vector<Tensor>>& ins, const c10d::ScatterOptions& opts) override {
    check(outs);
    meet();
    auto to = bytes(outs);
    std::vector<std::vector<Tensor>> from;
    std::vector<Tensor> kept(outs);
    for (auto& list : ins) {
      check(list);
      from.push_back(bytes(list));
      kept.insert(kept.end(), list.begin(), list.end());
    }
    return done({gloo->scatter(to, from, opts)}, kept, outs);
  }

  WorkPtr alltoall_base(Tensor& out, Tensor& in, std::vector<int64_t>& out_splits, std::vector<int64_t>& in_splits, const c10d::AllToAllOptions& opts) override {
    check(in);
    check(out);
    meet();
    Tensor to = on_cpu(out), from = on_cpu(in);
    return done({gloo->alltoall_base(to, from, out_splits, in_splits, opts)}, {out, in}, {out});
  }

  WorkPtr alltoall(std::vector<Tensor>& outs, std::vector<Tensor>& ins, const c10d::AllToAllOptions& opts) override {
    check(outs);
    check(ins);
    meet();
    std::vector<int64_t> in_splits, out_splits;
    std::vector<Tensor> flat;
    int64_t total = 0;
    for (auto& t : ins) {
      flat.push_back(on_cpu(t).reshape({-1}));
      in_splits.push_back(t.numel());
    }
    for (auto& t : outs) {
      out_splits.push_back(t.numel());
      total += t.numel();
    }
    Tensor from = at::cat(flat), to = at::empty({total}, from.options());
    auto targets = outs;
    std::vector<Tensor> kept(outs);
    kept.push_back(from);
    return done({gloo->alltoall_base(to, from, out_splits, in_splits, opts)}, kept, outs, [targets, to, out_splits] {
      auto parts = to.split_with_sizes(out_splits);
      for (size_t i = 0; i < targets.size(); ++i) {
        Tensor one = on_cpu(targets[i]);
        one.copy_(parts[i].view(one.sizes()));
      }
    });
  }

  static WorkPtr peer(WorkPtr work) {
    static_cast<NcclWork*>(work.get())->point_to_point = true;
    return work;
  }
  // NCCL has no tags: what goes from one rank to another arrives in order.
  WorkPtr send(std::vector<Tensor>& tensors, int to, int) override {
    TORCH_CHECK(strict, "gloo sends CPU tensors alone (emulated)");
    check(tensors);
    auto cpu = bytes(tensors);
    return peer(done({gloo->send(cpu, to, 0)}, tensors, tensors));
  }
  WorkPtr recv(std::vector<Tensor>& tensors, int from, int) override {
    check(tensors);
    auto cpu = bytes(tensors);
    return peer(done({gloo->recv(cpu, from, 0)}, tensors, tensors));
  }
  WorkPtr recvAnysource(std::vector<Tensor>&, int) override {
    TORCH_CHECK(false, "NCCL does not support recvAnysource");
  }

  WorkPtr barrier(const c10d::BarrierOptions& opts) override {
    meet();
    c10d::BarrierOptions given;
    given.timeout = opts.timeout;
    return done({gloo->barrier(given)}, {}, {});
  }
};

static c10::intrusive_ptr<c10d::Backend> make_nccl(
    c10::intrusive_ptr<c10d::Backend> gloo, int rank, int size, double timeout_s, bool nccl) {
  return c10::make_intrusive<Nccl>(
      std::move(gloo), rank, size, std::chrono::milliseconds(static_cast<int64_t>(timeout_s * 1000)), nccl);
}

void bind_nccl(pybind11::module_& m) {
  m.def("make_nccl", &make_nccl);
}

}  // namespace emu
