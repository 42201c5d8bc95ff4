// Gloo groups as in a build with CUDA: they take CUDA tensors, by way of the host.
#include <ATen/ATen.h>
#include <pybind11/chrono.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/csrc/utils/pybind.h>

#include "device.h"
#include "late.h"
#include "nccl.h"
#include "pending.h"
#include "streams.h"

namespace py = pybind11;

namespace emu {

namespace {

using at::Tensor;
using Tensors = std::vector<Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

// Gloo's own work, over host tensors; its result are the CUDA tensors.
class GlooWork final : public c10d::Work {
 public:
  GlooWork(WorkPtr inner, Tensors outputs) : inner_(std::move(inner)), outputs_(std::move(outputs)) {}
  bool isCompleted() override { return inner_->isCompleted(); }
  bool isSuccess() const override { return inner_->isSuccess(); }
  std::exception_ptr exception() const override { return inner_->exception(); }
  bool wait(std::chrono::milliseconds timeout) override { return inner_->wait(timeout); }
  void synchronize() override { inner_->wait(kNoTimeout); }
  void abort() override { inner_->abort(); }
  Tensors result() override { return outputs_; }
  int sourceRank() const override { return inner_->sourceRank(); }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    inner_->wait(kNoTimeout);
    auto future = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()),
        std::vector<c10::Device>{c10::Device(c10::kCUDA, current_device())});
    future->markCompleted(c10::IValue(outputs_));
    return future;
  }

 private:
  const WorkPtr inner_;
  const Tensors outputs_;
};

class GlooOnCuda final : public c10d::Backend {
 public:
  explicit GlooOnCuda(c10::intrusive_ptr<c10d::Backend> gloo)
      : Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)) {}

  const std::string getBackendName() const override { return "gloo"; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return gloo_->getBackendOptions(); }
  void setTimeout(std::chrono::milliseconds timeout) override { gloo_->setTimeout(timeout); }
  void setSequenceNumberForGroup() override { gloo_->setSequenceNumberForGroup(); }
  uint64_t getSequenceNumberForGroup() override { return gloo_->getSequenceNumberForGroup(); }
  void abort() override { gloo_->abort(); }
  void shutdown() override { gloo_->shutdown(); }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override {
    auto host = on_host(tensors);
    return work(gloo_->broadcast(host, opts), tensors);
  }
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override {
    auto host = on_host(tensors);
    return work(gloo_->allreduce(host, opts), tensors);
  }
  WorkPtr allreduce_coalesced(
      Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) override {
    auto host = on_host(tensors);
    return work(gloo_->allreduce_coalesced(host, opts), tensors);
  }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override {
    auto host = on_host(tensors);
    return work(gloo_->reduce(host, opts), tensors);
  }
  WorkPtr allgather(
      std::vector<Tensors>& outs, Tensors& ins, const c10d::AllgatherOptions& opts) override {
    auto to = on_host(outs);
    auto from = on_host(ins);
    return work(gloo_->allgather(to, from, opts), outs.at(0));
  }
  WorkPtr _allgather_base(Tensor& out, Tensor& in, const c10d::AllgatherOptions& opts) override {
    Tensor to = on_host(out), from = on_host(in);
    return work(gloo_->_allgather_base(to, from, opts), {out});
  }
  WorkPtr allgather_into_tensor_coalesced(
      Tensors& outs, Tensors& ins, const c10d::AllgatherOptions& opts) override {
    auto to = on_host(outs), from = on_host(ins);
    return work(gloo_->allgather_into_tensor_coalesced(to, from, opts), outs);
  }
  WorkPtr _reduce_scatter_base(
      Tensor& out, Tensor& in, const c10d::ReduceScatterOptions& opts) override {
    Tensor to = on_host(out), from = on_host(in);
    return work(gloo_->_reduce_scatter_base(to, from, opts), {out});
  }
  WorkPtr reduce_scatter_tensor_coalesced(
      Tensors& outs, Tensors& ins, const c10d::ReduceScatterOptions& opts) override {
    auto to = on_host(outs), from = on_host(ins);
    return work(gloo_->reduce_scatter_tensor_coalesced(to, from, opts), outs);
  }
  WorkPtr reduce_scatter(
      Tensors& outs, std::vector<Tensors>& ins, const c10d::ReduceScatterOptions& opts) override {
    auto to = on_host(outs);
    auto from = on_host(ins);
    return work(gloo_->reduce_scatter(to, from, opts), outs);
  }
  WorkPtr gather(
      std::vector<Tensors>& outs, Tensors& ins, const c10d::GatherOptions& opts) override {
    auto to = on_host(outs);
    auto from = on_host(ins);
    return work(gloo_->gather(to, from, opts), outs.empty() ? Tensors{} : outs[0]);
  }
  WorkPtr scatter(
      Tensors& outs, std::vector<Tensors>& ins, const c10d::ScatterOptions& opts) override {
    auto to = on_host(outs);
    auto from = on_host(ins);
    return work(gloo_->scatter(to, from, opts), outs);
  }
  WorkPtr alltoall_base(
      Tensor& out, Tensor& in, std::vector<int64_t>& out_splits, std::vector<int64_t>& in_splits,
      const c10d::AllToAllOptions& opts) override {
    Tensor to = on_host(out), from = on_host(in);
    return work(gloo_->alltoall_base(to, from, out_splits, in_splits, opts), {out});
  }
  WorkPtr alltoall(Tensors& outs, Tensors& ins, const c10d::AllToAllOptions& opts) override {
    auto to = on_host(outs), from = on_host(ins);
    return work(gloo_->alltoall(to, from, opts), outs);
  }
  WorkPtr barrier(const c10d::BarrierOptions& opts) override {
    c10d::BarrierOptions given;
    given.timeout = opts.timeout;
    return work(gloo_->barrier(given), {});
  }
  // Gloo reads the bytes itself here, and cannot read a GPU's.
  WorkPtr send(Tensors&, int, int) override { TORCH_CHECK(false, kNoMessages); }
  WorkPtr recv(Tensors&, int, int) override { TORCH_CHECK(false, kNoMessages); }

 private:
  static constexpr auto kNoMessages = "gloo sends and receives CPU tensors alone (emulated CUDA)";

  // Gloo waits for the stream's work, and the stream for gloo's: nobody overtakes, so the host waits.
  static Tensor on_host(const Tensor& t) {
    if (t.is_cuda()) {
      land_into(t);
      host_wait(record_clock(current_stream(t.device().index())), "gloo with a CUDA tensor");
    }
    return on_cpu(t);
  }
  static Tensors on_host(const Tensors& tensors) {
    Tensors hosts;
    for (auto& t : tensors) hosts.push_back(on_host(t));
    return hosts;
  }
  static std::vector<Tensors> on_host(const std::vector<Tensors>& lists) {
    std::vector<Tensors> hosts;
    for (auto& tensors : lists) hosts.push_back(on_host(tensors));
    return hosts;
  }
  static WorkPtr work(WorkPtr inner, Tensors outputs) {
    return c10::make_intrusive<GlooWork>(std::move(inner), std::move(outputs));
  }

  const c10::intrusive_ptr<c10d::Backend> gloo_;
};

}  // namespace

void bind_gloo(py::module_& m) {
  // Registered under the type Backend: Python has no use for a name of its own.
  m.def("gloo_on_cuda", [](c10::intrusive_ptr<c10d::Backend> gloo) {
    return c10::intrusive_ptr<c10d::Backend>(c10::make_intrusive<GlooOnCuda>(std::move(gloo)));
  });
}

}  // namespace emu
