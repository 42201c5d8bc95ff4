// ProcessGroupNCCL as torch knows it, over communicators in shared memory.
//
// Operations are put on a stream, and the host runs on; wait() orders streams and does not block.
// Which communicator an operation uses, when one is made, what is refused, and what happens when
// time is over, follow torch's ProcessGroupNCCL.
#include "nccl.h"

#include <ATen/ATen.h>
#include <c10/core/StreamGuard.h>
#include <pybind11/chrono.h>
#include <pybind11/stl.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/csrc/utils/pybind.h>
#include <unistd.h>

#include <cstring>
#include <map>
#include <set>

#include "collectives.h"
#include "communicator.h"
#include "device.h"
#include "late.h"
#include "memory.h"
#include "streams.h"

namespace py = pybind11;

namespace emu {

namespace {

using at::Tensor;
using c10d::OpType;
using Tensors = std::vector<Tensor>;
using Millis = std::chrono::milliseconds;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

// ---- what NCCL refuses ---------------------------------------------------------------------------

bool is_float8(at::ScalarType type) {
  return type == at::kFloat8_e4m3fn || type == at::kFloat8_e5m2;
}

void check_type(const Tensor& t) {
  switch (t.scalar_type()) {
    case at::kChar:
    case at::kByte:
    case at::kBool:
    case at::kInt:
    case at::kLong:
    case at::kHalf:
    case at::kFloat:
    case at::kDouble:
    case at::kBFloat16:
    case at::kFloat8_e4m3fn:
    case at::kFloat8_e5m2:
      return;
    default:
      TORCH_CHECK_TYPE(
          false, "Input tensor data type is not supported for NCCL process group: ",
          t.scalar_type());
  }
}

// Complex numbers travel as pairs of reals.
Tensor as_reals(const Tensor& t) { return t.is_complex() ? at::view_as_real(t) : t; }

Tensor checked(const Tensor& given) {
  TORCH_CHECK_VALUE(given.is_cuda() && !given.is_sparse(), "Tensors must be CUDA and dense");
  TORCH_CHECK_VALUE(
      given.is_contiguous(given.suggest_memory_format()), "Tensors must be contiguous");
  Tensor t = as_reals(given);
  check_type(t);
  return t;
}

Tensor checked(const Tensors& one) {
  TORCH_CHECK_VALUE(
      one.size() == 1, "Expecting one tensor only but got ", one.size());
  return checked(one[0]);
}

Reduce checked_reduce(const c10d::ReduceOp& op, at::ScalarType type) {
  auto kind = static_cast<c10d::ReduceOp::RedOpType>(op);
  TORCH_CHECK_TYPE(!is_float8(type), "Float8 dtypes are not currently supported for NCCL reductions");
  TORCH_CHECK_TYPE(
      kind != c10d::ReduceOp::AVG || type != at::kBool, "Cannot use ReduceOp.AVG with boolean inputs");
  TORCH_CHECK_VALUE(
      kind <= c10d::ReduceOp::MAX,
      "Cannot use ReduceOp.BAND, BOR or BXOR with NCCL, and the emulated one has no PREMUL_SUM");
  // Bytes that are 0 or 1: their sum must not become 2.
  if (type == at::kBool && kind == c10d::ReduceOp::SUM) return Reduce::kMax;
  return static_cast<Reduce>(kind);
}

at::ScalarType summed_as(at::ScalarType type) { return type == at::kBool ? at::kByte : type; }

// ---- bytes ---------------------------------------------------------------------------------------

// Host tensors over the device's bytes: they keep the memory alive until the operation is done.
Bytes bytes_of(const Tensor& host) {
  return {static_cast<char*>(host.data_ptr()), static_cast<int64_t>(host.nbytes())};
}

std::vector<Bytes> bytes_of(const Tensors& hosts) {
  std::vector<Bytes> all;
  for (auto& host : hosts) all.push_back(bytes_of(host));
  return all;
}

Tensors on_host(const Tensors& tensors) {
  Tensors hosts;
  for (auto& t : tensors) hosts.push_back(on_cpu(t));
  return hosts;
}

std::vector<Bytes> pieces(Bytes whole, int count) {
  std::vector<Bytes> all;
  const int64_t size = whole.size / count;
  for (int i = 0; i < count; ++i) all.push_back({whole.data + i * size, size});
  return all;
}

std::vector<Bytes> pieces(Bytes whole, std::vector<int64_t> rows, int count, int64_t row) {
  if (rows.empty()) return pieces(whole, count);
  std::vector<Bytes> all;
  char* at = whole.data;
  for (int64_t n : rows) {
    all.push_back({at, n * row});
    at += n * row;
  }
  return all;
}

// ---- operations ----------------------------------------------------------------------------------

// What the communicator's thread does: a collective, or one side of a message. It holds host tensors
// alone, because that thread must not be the last owner of anything that Python knows.
struct Step {
  CallInfo call;
  Body body;
  std::optional<Letter> letter;
  Tensor held;  // what the letter points into
};

// One call, ready to be put on a stream alone or together with others.
struct Operation {
  OpType type;
  const char* label;  // of the launch; outlives everything
  CallInfo call;
  Tensors reads, writes, outputs;
  Body body;
  std::optional<Letter> letter;
  Tensor held;
};

CallInfo call_info(const char* name, const Tensor& in, int64_t numel_out = -1) {
  CallInfo call;
  std::strncpy(call.name, name, sizeof(call.name) - 1);
  call.numel_in = in.numel();
  call.numel_out = numel_out < 0 ? in.numel() : numel_out;
  call.dtype = static_cast<int16_t>(in.scalar_type());
  return call;
}

// Launches an operation on a communicator for its caller: between clocks, tensors and threads.
struct Launched {
  TaskPtr task;
  Clock done;
};

Launched launch(
    Communicator& communicator, const std::vector<Operation>& operations, CallInfo call,
    bool async_op, Millis timeout) {
  const int caller = current_stream(communicator.device);
  const Clock before = record_clock(caller);
  // An operation that nobody waits for separately runs on the caller's own stream.
  const int stream = async_op ? communicator.stream : caller;
  auto earlier = pending_in(before);
  wait_clock(stream, before);
  Launch launch(stream, operations.at(0).label, false);
  for (auto& one : operations) {
    for (auto& t : one.reads) land_into(t), launch.reads(t);
    for (auto& t : one.writes) land_into(t), launch.writes(t);
  }
  Clock done = record_clock(stream);
  std::vector<Step> steps;
  for (auto& one : operations) steps.push_back({one.call, one.body, one.letter, one.held});
  auto body = [steps = std::move(steps)](Link& link) {
    std::vector<Letter> letters;
    for (auto& one : steps) {
      if (one.body) link.next(one.call), one.body(link);
      if (one.letter) letters.push_back(*one.letter);
    }
    if (!letters.empty()) link.exchange(letters);
  };
  const bool is_message = operations[0].letter.has_value();
  auto task = communicator.enqueue(call, is_message, std::move(earlier), timeout, std::move(body));
  put_pending(stream, done.at(stream), task);
  return {std::move(task), std::move(done)};
}

// What the caller gets: it orders streams, and blocks the host only where NCCL's does.
class NcclWork final : public c10d::Work {
 public:
  NcclWork(
      int rank, OpType type, uint64_t number, std::shared_ptr<Communicator> communicator,
      Launched launched, Tensors outputs, Tensors stash)
      : Work(rank, type),
        number_(number),
        communicator_(std::move(communicator)),
        task_(std::move(launched.task)),
        done_(std::move(launched.done)),
        outputs_(std::move(outputs)),
        stash_(std::move(stash)) {}

  // Nobody waited: as after record_stream, the memory is not given to others before it is done.
  ~NcclWork() override {
    for (auto& t : stash_)
      record_use(t.storage().unsafeGetStorageImpl()->data_ptr(), communicator_->stream);
  }

  bool isCompleted() override {
    if (!task_->done()) return false;
    // The host knows now, as after an event that it asked.
    return task_->failed() || host_poll(done_);
  }
  bool isSuccess() const override { return task_->done() && !task_->failed(); }
  std::exception_ptr exception() const override { return task_->error(); }
  // What the operation uses stays here until somebody's stream waits for it.
  void synchronize() override {
    wait_clock(current_stream(communicator_->device), done_);
    stash_.clear();
  }
  void blockCurrentStream() override { synchronize(); }
  void abort() override { *communicator_->link().options().aborted = true; }
  Tensors result() override { return outputs_; }
  uint64_t getSequencenumber() const override { return number_; }

  bool wait(Millis timeout) override {
    synchronize();
    if (opType_ == OpType::BARRIER) host_wait(done_, "torch.distributed.barrier");
    if (auto error = task_->error()) {
      forget_pending(task_);
      std::rethrow_exception(error);
    }
    return true;
  }

  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    if (future_) return future_;
    const c10::Device device(c10::kCUDA, communicator_->device);
    future_ = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()), std::vector<c10::Device>{device});
    // Complete already for the host; its event lies on a stream that waits for the operation.
    const auto id = next_stream_id(device.index());
    wait_clock(stream_number(device.index(), id), done_);
    c10::StreamGuard guard(c10::Stream(c10::Stream::UNSAFE, device, id));
    future_->markCompleted(c10::IValue(outputs_));
    return future_;
  }

 private:
  const uint64_t number_;
  const std::shared_ptr<Communicator> communicator_;
  const TaskPtr task_;
  const Clock done_;
  const Tensors outputs_;
  Tensors stash_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

// ---- the group -----------------------------------------------------------------------------------

struct Config {  // of NCCL itself; kept for who reads them back
  int blocking = 1, cga_cluster_size = 4, min_ctas = 1, max_ctas = 32, split_share = 0;
  int traffic_class = 0;
  std::string net_name;
};

struct NcclOptions final : c10d::Backend::Options {
  explicit NcclOptions(bool high_priority = false)
      : c10d::Backend::Options("nccl", Millis(10 * 60 * 1000)), is_high_priority_stream(high_priority) {}
  bool is_high_priority_stream;
  Config config;
};

// Who may talk over the same PCI bus: two ranks of one machine with one GPU number have one GPU.
std::string gpu_name(int device) {
  std::string machine;
  if (const char* given = std::getenv("NCCL_HOSTID")) {
    machine = given;
  } else {
    char host[256] = {}, network[256] = {};
    gethostname(host, sizeof(host) - 1);
    // Machines that are only pretended live in network namespaces of their own.
    if (readlink("/proc/self/ns/net", network, sizeof(network) - 1) < 0) network[0] = 0;
    machine = c10::str(host, " ", network);
  }
  return c10::str(visible().at(device), " of ", machine);
}

class Nccl final : public c10d::Backend {
 public:
  Nccl(
      c10::intrusive_ptr<c10d::Store> store, int rank, int size,
      c10::intrusive_ptr<NcclOptions> options)
      : Backend(rank, size),
        store_(std::move(store)),
        options_(std::move(options)),
        errors_(ErrorHandling::now()),
        aborted_(std::make_shared<std::atomic<bool>>(false)) {
    TORCH_CHECK_VALUE(
        device_count() > 0,
        "ProcessGroupNCCL is only supported with GPUs, no GPUs found!");
  }
  ~Nccl() override { *aborted_ = true; }

  const std::string getBackendName() const override { return "nccl"; }
  c10::intrusive_ptr<Backend::Options> getBackendOptions() override { return options_; }
  c10::intrusive_ptr<NcclOptions> options() { return options_; }
  bool supportsCoalescing() const override { return true; }
  void setTimeout(Millis timeout) override { options_->timeout = timeout; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return collectives_; }
  c10d::ErrorType getError() override { return c10d::ErrorType::SUCCESS; }
  bool initialized() const { return !communicators_.empty(); }

  void abort() override { *aborted_ = true; }

  // Finalizing a communicator waits for what is on its way.
  void shutdown() override {
    for (auto& [_, communicator] : communicators_) communicator->drain();
    *aborted_ = true;
  }

  // -- coalescing: what is called between these two goes together ----------------------------------

  void startCoalescing() override {
    coalescing_ = true;
    coalesced_.clear();
    coalesced_with_ = nullptr;
  }

  WorkPtr endCoalescing() override {
    coalescing_ = false;
    auto operations = std::exchange(coalesced_, {});
    auto communicator = std::exchange(coalesced_with_, nullptr);
    if (operations.empty()) return {};
    CallInfo call;
    if (operations.size() == 1) {
      call = operations[0].call;
    } else {
      // Between pairs alone, so not all ranks need to call the same.
      std::strncpy(call.name, "coalesced", sizeof(call.name) - 1);
      call.numel_in = call.numel_out = operations.size();
    }
    const bool letters = operations[0].letter.has_value();
    (letters ? letters_ : collectives_)++;
    return submit(std::move(communicator), std::move(operations), call, OpType::COALESCED, true);
  }

  // -- collectives ---------------------------------------------------------------------------------

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override {
    Tensor t = checked(tensors), host = on_cpu(t);
    const int root = opts.rootRank;
    auto call = call_info("broadcast", t);
    call.root = root;
    const bool mine = root == getRank();
    return collective(
        {OpType::BROADCAST, "nccl:broadcast", call, mine ? Tensors{t} : Tensors{},
         mine ? Tensors{} : Tensors{t}, tensors,
         [host, root](Link& link) { emu::broadcast(link, bytes_of(host), root); }},
        opts.asyncOp);
  }

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override {
    return collective(allreduce_of(checked(tensors), opts.reduceOp, tensors), opts.asyncOp);
  }

  WorkPtr allreduce_coalesced(
      Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) override {
    std::vector<Operation> all;
    for (auto& t : tensors) all.push_back(allreduce_of(checked(t), opts.reduceOp, {t}));
    return together(std::move(all), opts.asyncOp);
  }

  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override {
    Tensor t = checked(tensors), host = on_cpu(t);
    const auto type = t.scalar_type();
    const auto op = checked_reduce(opts.reduceOp, type);
    const int root = opts.rootRank;
    auto call = call_info("reduce", t);
    call.root = root;
    call.reduce = static_cast<int16_t>(op);
    return collective(
        {OpType::REDUCE, "nccl:reduce", call, {t}, root == getRank() ? Tensors{t} : Tensors{},
         tensors,
         [host, type, op, root](Link& link) {
           emu::reduce(link, bytes_of(host), summed_as(type), op, root);
         }},
        opts.asyncOp);
  }

  WorkPtr allgather(
      std::vector<Tensors>& outs, Tensors& ins, const c10d::AllgatherOptions& opts) override {
    Tensor in = checked(ins);
    Tensors to = list_of(outs, in, "all_gather");
    Tensor from = on_cpu(in);
    Tensors hosts = on_host(to);
    return collective(
        {OpType::ALLGATHER, "nccl:all_gather", call_info("all_gather", in, in.numel() * getSize()),
         {in}, to, outs[0],
         [from, hosts](Link& link) { through_contiguous(link, from, hosts); }},
        opts.asyncOp);
  }

  WorkPtr _allgather_base(Tensor& out, Tensor& in, const c10d::AllgatherOptions& opts) override {
    return collective(allgather_of(out, in), opts.asyncOp);
  }

  WorkPtr allgather_into_tensor_coalesced(
      Tensors& outs, Tensors& ins, const c10d::AllgatherOptions& opts) override {
    std::vector<Operation> all;
    for (size_t i = 0; i < outs.size(); ++i) all.push_back(allgather_of(outs[i], ins.at(i)));
    return together(std::move(all), opts.asyncOp);
  }

  WorkPtr _reduce_scatter_base(
      Tensor& out, Tensor& in, const c10d::ReduceScatterOptions& opts) override {
    return collective(reduce_scatter_of(out, in, opts.reduceOp), opts.asyncOp);
  }

  WorkPtr reduce_scatter_tensor_coalesced(
      Tensors& outs, Tensors& ins, const c10d::ReduceScatterOptions& opts) override {
    std::vector<Operation> all;
    for (size_t i = 0; i < outs.size(); ++i)
      all.push_back(reduce_scatter_of(outs[i], ins.at(i), opts.reduceOp));
    return together(std::move(all), opts.asyncOp);
  }

  WorkPtr alltoall_base(
      Tensor& out, Tensor& in, std::vector<int64_t>& out_splits, std::vector<int64_t>& in_splits,
      const c10d::AllToAllOptions& opts) override {
    Tensor to = checked(out), from = checked(in);
    TORCH_CHECK_VALUE(
        to.scalar_type() == from.scalar_type(), "Tensors are not equal in data type");
    check_splits(in_splits, in, "input");
    check_splits(out_splits, out, "output");
    auto call = call_info("all_to_all_single", from);
    call.numel_in = call.numel_out = -1;
    Tensor to_host = on_cpu(to), from_host = on_cpu(from);
    auto row = [](const Tensor& t) { return t.dim() && t.size(0) ? t.nbytes() / t.size(0) : 0; };
    const int64_t to_row = row(to), from_row = row(from);
    return collective(
        {OpType::ALLTOALL_BASE, "nccl:all_to_all_single", call, {from}, {to}, {out},
         [=](Link& link) {
           emu::all_to_all(
               link, pieces(bytes_of(to_host), out_splits, link.size(), to_row),
               pieces(bytes_of(from_host), in_splits, link.size(), from_row));
         }},
        opts.asyncOp);
  }

  WorkPtr barrier(const c10d::BarrierOptions& opts) override {
    at::Device device = some_device();
    if (!opts.device_ids.empty())
      device = at::Device(c10::kCUDA, opts.device_ids[0]);
    else if (opts.device && opts.device->is_cuda())
      device = *opts.device;
    CallInfo call;
    std::strncpy(call.name, "barrier", sizeof(call.name) - 1);
    auto communicator = communicator_of(device);
    collectives_++;
    return submit(
        communicator,
        {{OpType::BARRIER, "nccl:barrier", call, {}, {}, {}, [](Link& link) { meet(link); }}},
        call, OpType::BARRIER, opts.asyncOp);
  }

  // -- from one rank to another --------------------------------------------------------------------

  // NCCL has no tags: what goes from one rank to another arrives in order.
  WorkPtr send(Tensors& tensors, int to, int) override { return message(checked(tensors), to, true); }
  WorkPtr recv(Tensors& tensors, int from, int) override {
    return message(checked(tensors), from, false);
  }
 private:
  Operation allreduce_of(const Tensor& t, const c10d::ReduceOp& given, const Tensors& outputs) {
    const auto type = t.scalar_type();
    const auto op = checked_reduce(given, type);
    auto call = call_info("all_reduce", t);
    call.reduce = static_cast<int16_t>(op);
    Tensor host = on_cpu(t);
    return {OpType::ALLREDUCE, "nccl:all_reduce", call, {t}, {t}, outputs,
            [host, type, op](Link& link) {
              emu::all_reduce(link, bytes_of(host), summed_as(type), op);
            }};
  }

  Operation allgather_of(const Tensor& out, const Tensor& in) {
    Tensor from = checked(in), to = checked(out);
    TORCH_CHECK_TYPE(
        in.dtype() == out.dtype(), "output tensor must have the same type as input tensor");
    TORCH_CHECK_VALUE(
        in.numel() * getSize() == out.numel(),
        "output tensor size must be equal to world_size times input tensor size");
    Tensor from_host = on_cpu(from), to_host = on_cpu(to);
    return {OpType::_ALLGATHER_BASE, "nccl:all_gather_into_tensor",
            call_info("all_gather_into_tensor", from, to.numel()), {from}, {to}, {out},
            [from_host, to_host](Link& link) {
              // In place is allowed: the input may be this rank's part of the output.
              Tensor kept = from_host.clone();
              emu::all_gather(link, bytes_of(kept), pieces(bytes_of(to_host), link.size()));
            }};
  }

  Operation reduce_scatter_of(const Tensor& out, const Tensor& in, const c10d::ReduceOp& given) {
    Tensor from = checked(in), to = checked(out);
    TORCH_CHECK_TYPE(
        in.dtype() == out.dtype(), "input tensor must be the same type as the output tensor.");
    TORCH_CHECK_VALUE(
        in.numel() == out.numel() * getSize(),
        "input tensor must be the same size as output size times world size");
    const auto type = from.scalar_type();
    const auto op = checked_reduce(given, type);
    auto call = call_info("reduce_scatter_tensor", from, to.numel());
    call.reduce = static_cast<int16_t>(op);
    Tensor from_host = on_cpu(from), to_host = on_cpu(to);
    return {OpType::_REDUCE_SCATTER_BASE, "nccl:reduce_scatter_tensor", call, {from}, {to}, {out},
            [from_host, to_host, type, op](Link& link) {
              // In place is allowed: parts still to be read must not be overwritten.
              Tensor kept = from_host.clone();
              emu::reduce_scatter(
                  link, bytes_of(to_host), pieces(bytes_of(kept), link.size()), summed_as(type), op);
            }};
  }

  // The one list of tensors, one for each rank, all of the size of `like`.
  Tensors list_of(const std::vector<Tensors>& lists, const Tensor& like, const char* name) {
    TORCH_CHECK_VALUE(
        lists.size() == 1 && static_cast<int>(lists[0].size()) == getSize(), name,
        " needs one tensor for each of the ", getSize(), " ranks");
    Tensors all;
    for (auto& given : lists[0]) {
      TORCH_CHECK_VALUE(given.is_cuda() && !given.is_sparse(), "Tensors must be CUDA and dense");
      TORCH_CHECK_VALUE(
          given.is_non_overlapping_and_dense(), "Tensors must be non-overlapping and dense");
      Tensor t = as_reals(given);
      TORCH_CHECK(
          t.numel() == like.numel() && t.scalar_type() == like.scalar_type(), "emulated NCCL: uneven ",
          name, " (torch makes broadcasts of it, which this has not)");
      all.push_back(t);
    }
    return all;
  }

  static void through_contiguous(Link& link, const Tensor& from, const Tensors& hosts) {
    Tensor kept = from.clone();
    Tensors flat;
    for (auto& t : hosts) flat.push_back(t.is_contiguous() ? t : at::empty(t.sizes(), t.options()));
    emu::all_gather(link, bytes_of(kept), bytes_of(flat));
    for (size_t i = 0; i < hosts.size(); ++i)
      if (!hosts[i].is_contiguous()) Tensor(hosts[i]).copy_(flat[i]);
  }

  void check_splits(const std::vector<int64_t>& splits, const Tensor& t, const char* which) {
    if (splits.empty()) {
      TORCH_CHECK(
          t.size(0) % getSize() == 0, "Tensor's dim 0 does not divide equally across group size");
      return;
    }
    int64_t sum = 0;
    for (int64_t n : splits) sum += n;
    TORCH_CHECK(
        static_cast<int>(splits.size()) == getSize() && sum == t.size(0), "Split sizes of the ",
        which, " doesn't match total dim 0 size");
  }

  WorkPtr collective(Operation operation, bool async_op) {
    const auto& tensors = operation.reads.empty() ? operation.writes : operation.reads;
    auto communicator = communicator_of(tensors.at(0).device());
    if (coalescing_) return coalesce(std::move(operation), std::move(communicator));
    collectives_++;
    const auto call = operation.call;
    const auto type = operation.type;
    return submit(std::move(communicator), {std::move(operation)}, call, type, async_op);
  }

  // Several at once, of one kind, as one operation.
  WorkPtr together(std::vector<Operation> operations, bool async_op) {
    TORCH_CHECK_VALUE(!operations.empty(), "Tensor list must be nonempty");
    auto communicator = communicator_of(operations[0].reads.at(0).device());
    if (coalescing_) {
      for (auto& one : operations) coalesce(std::move(one), communicator);
      return {};
    }
    collectives_++;
    auto call = operations[0].call;
    for (size_t i = 1; i < operations.size(); ++i) {
      call.numel_in += operations[i].call.numel_in;
      call.numel_out += operations[i].call.numel_out;
    }
    const auto type = operations[0].type;
    return submit(std::move(communicator), std::move(operations), call, type, async_op);
  }

  WorkPtr coalesce(Operation operation, std::shared_ptr<Communicator> communicator) {
    TORCH_CHECK(
        !coalesced_with_ || coalesced_with_ == communicator,
        "Expecting one communicator in a coalesced group");
    coalesced_with_ = std::move(communicator);
    coalesced_.push_back(std::move(operation));
    return {};
  }

  WorkPtr message(const Tensor& t, int peer, bool sends) {
    TORCH_CHECK_VALUE(peer >= 0 && peer < getSize(), "invalid rank ", peer);
    // Alone, a pair has a communicator of its own.
    const bool pair = !coalescing_;
    auto communicator = pair ? communicator_of_pair(t.device(), peer) : communicator_of(t.device());
    Operation one{sends ? OpType::SEND : OpType::RECV, sends ? "nccl:send" : "nccl:recv"};
    one.call = call_info(c10::str(sends ? "send to rank " : "recv from rank ", peer).c_str(), t);
    (sends ? one.reads : one.writes) = {t};
    one.outputs = {t};
    one.held = on_cpu(t);
    const int low = std::min(getRank(), peer);
    one.letter = Letter{
        sends, pair ? (peer == getRank() ? 0 : peer != low) : peer, one.held.data_ptr(), t.numel(),
        static_cast<int16_t>(t.scalar_type()), static_cast<int64_t>(one.held.nbytes())};
    if (coalescing_) return coalesce(std::move(one), std::move(communicator));
    letters_++;
    const auto call = one.call;
    const auto type = one.type;
    return submit(std::move(communicator), {std::move(one)}, call, type, true);
  }

  WorkPtr submit(
      std::shared_ptr<Communicator> communicator, std::vector<Operation> operations, CallInfo call,
      OpType type, bool async_op) {
    Tensors outputs, stash;
    for (auto& one : operations) {
      outputs.insert(outputs.end(), one.outputs.begin(), one.outputs.end());
      stash.insert(stash.end(), one.reads.begin(), one.reads.end());
      stash.insert(stash.end(), one.writes.begin(), one.writes.end());
    }
    auto launched = launch(*communicator, operations, call, async_op, options_->timeout);
    return c10::make_intrusive<NcclWork>(
        getRank(), type, collectives_, std::move(communicator), std::move(launched),
        std::move(outputs), std::move(stash));
  }

  // -- communicators -------------------------------------------------------------------------------

  at::Device some_device() {
    if (!used_.empty()) return at::Device(c10::kCUDA, *used_.begin());
    return at::Device(c10::kCUDA, getRank() % device_count());
  }

  std::string name() const {
    return options_->group_name.empty() ? getGroupUid() : options_->group_name;
  }

  // One for each device, made by the first operation, for which all ranks must come.
  std::shared_ptr<Communicator> communicator_of(at::Device device) {
    const auto key = std::to_string(device.index());
    if (auto found = communicators_.find(key); found != communicators_.end()) return usable(found->second);
    LinkOptions o;
    o.key = std::to_string(count_++);
    o.rank = getRank();
    o.size = getSize();
    for (int r = 0; r < o.size; ++r) o.names.push_back(r);
    return connect(key, std::move(o), device);
  }

  std::shared_ptr<Communicator> communicator_of_pair(at::Device device, int peer) {
    const int low = std::min(getRank(), peer), high = std::max(getRank(), peer);
    const auto key = c10::str(low, ":", high);
    if (auto found = communicators_.find(key); found != communicators_.end()) return usable(found->second);
    LinkOptions o;
    o.key = key;
    o.rank = getRank() == low ? 0 : 1;
    o.size = low == high ? 1 : 2;
    o.names = {low, high};
    return connect(key, std::move(o), device);
  }

  std::shared_ptr<Communicator> connect(
      const std::string& key, LinkOptions options, at::Device device) {
    check_not_aborted();
    used_.insert(device.index());
    options.group = name();
    options.gpu = gpu_name(device.index());
    options.timeout = options_->timeout;
    options.aborted = aborted_;
    auto made = std::make_shared<Communicator>(*store_, std::move(options), device.index(), errors_);
    communicators_[key] = made;
    return made;
  }

  std::shared_ptr<Communicator> usable(std::shared_ptr<Communicator> communicator) const {
    check_not_aborted();
    return communicator;
  }

  void check_not_aborted() const {
    if (*aborted_)
      throw_backend_error(c10::str("NCCL communicator was aborted on rank ", getRank(), "."));
  }

  const c10::intrusive_ptr<c10d::Store> store_;
  const c10::intrusive_ptr<NcclOptions> options_;
  const ErrorHandling errors_;
  const std::shared_ptr<std::atomic<bool>> aborted_;
  std::map<std::string, std::shared_ptr<Communicator>> communicators_;
  std::set<int> used_;
  int count_ = 0;
  uint64_t collectives_ = 0, letters_ = 0;
  bool coalescing_ = false;
  std::vector<Operation> coalesced_;
  std::shared_ptr<Communicator> coalesced_with_;
};

}  // namespace

void bind_nccl(py::module_& m) {
  using Released = py::call_guard<py::gil_scoped_release>;
  py::class_<Config>(m, "NCCLConfig")
      .def(py::init<>())
      .def_readwrite("blocking", &Config::blocking)
      .def_readwrite("cga_cluster_size", &Config::cga_cluster_size)
      .def_readwrite("min_ctas", &Config::min_ctas)
      .def_readwrite("max_ctas", &Config::max_ctas)
      .def_readwrite("split_share", &Config::split_share)
      .def_readwrite("traffic_class", &Config::traffic_class)
      .def_readwrite("net_name", &Config::net_name);

  using Pointer = c10::intrusive_ptr<Nccl>;
  py::class_<Nccl, c10d::Backend, Pointer> group(m, "ProcessGroupNCCL");
  py::class_<NcclOptions, c10d::Backend::Options, c10::intrusive_ptr<NcclOptions>>(group, "Options")
      .def(py::init<bool>(), py::arg("is_high_priority_stream") = false)
      .def_readwrite("is_high_priority_stream", &NcclOptions::is_high_priority_stream)
      .def_readwrite("config", &NcclOptions::config)
      .def("__copy__", [](const NcclOptions& o) { return c10::make_intrusive<NcclOptions>(o); })
      .def("__deepcopy__", [](const NcclOptions& o, const py::dict&) {
        return c10::make_intrusive<NcclOptions>(o);
      });

  auto with_timeout = [](const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                         const Millis& timeout) {
    auto options = c10::make_intrusive<NcclOptions>();
    options->timeout = timeout;
    return c10::make_intrusive<Nccl>(store, rank, size, options);
  };
  auto with_options = [](const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                         const c10::intrusive_ptr<NcclOptions>& options) {
    return c10::make_intrusive<Nccl>(
        store, rank, size, options ? options : c10::make_intrusive<NcclOptions>());
  };
  group
      .def(py::init(with_options), py::arg("store"), py::arg("rank"), py::arg("size"),
           py::arg("options") = c10::intrusive_ptr<NcclOptions>(), Released())
      .def(py::init(with_timeout), py::arg("store"), py::arg("rank"), py::arg("size"),
           py::arg("timeout"), Released())
      // Groups of NCCL calls exist so that aborts cannot block each other; here none blocks.
      .def("_group_start", [](Nccl&) {})
      .def("_group_end", [](Nccl&) {})
      .def("_set_default_timeout", &Nccl::setTimeout, py::arg("timeout"))
      .def("_is_initialized", &Nccl::initialized)
      .def_property_readonly("options", &Nccl::options)
      .def_property_readonly("uid", &Nccl::getID)
      .def_property("bound_device_id", &Nccl::getBoundDeviceId, &Nccl::setBoundDeviceId);

  m.def("communicators", [] {
    std::vector<std::tuple<std::string, std::string, int, int>> all;
    for (auto& one : communicators_made())
      all.emplace_back(one.group, one.key, one.size, one.device);
    return all;
  });
}

}  // namespace emu
