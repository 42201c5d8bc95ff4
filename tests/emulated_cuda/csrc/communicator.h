// A communicator at work: its link, the thread that runs its operations in order, its stream.
#pragma once
#include <c10/core/Device.h>

#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>

#include "link.h"
#include "pending.h"

namespace emu {

// Jobs run one after the other in a thread of their own, which ends with the last owner.
class Queue {
 public:
  Queue();
  ~Queue();
  void put(std::function<void()> job);

 private:
  struct State;
  std::shared_ptr<State> state_;
};

// What torch reads from the environment when a group is made, and not later.
struct ErrorHandling {
  int mode;  // TORCH_NCCL_ASYNC_ERROR_HANDLING
  static ErrorHandling now();
  bool tears_down() const { return mode == 1 || mode == 3; }
  bool cleans_up() const { return mode == 1 || mode == 2; }
};

// One operation on its way; who waits is told what went wrong.
class Task final : public Pending {
 public:
  explicit Task(std::chrono::milliseconds timeout)
      : began(std::chrono::steady_clock::now()), timeout(timeout) {}
  bool done() const override;
  bool failed() const override;
  void wait() override;
  // False when the time is over first.
  bool wait_until(Instant deadline);
  void finish(std::exception_ptr error);
  std::exception_ptr error() const;

  const Instant began;
  const std::chrono::milliseconds timeout;

 private:
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool done_ = false;
  std::exception_ptr error_;
};
using TaskPtr = std::shared_ptr<Task>;
using Body = std::function<void(Link&)>;

class Communicator : public std::enable_shared_from_this<Communicator> {
 public:
  Communicator(c10d::Store& store, LinkOptions options, int device, ErrorHandling errors);

  // Runs `body` after `before`, what is on the caller's stream, and after all that came earlier.
  // Messages are between two ranks, so they are counted apart: the others know nothing of them.
  TaskPtr enqueue(
      CallInfo call, bool is_message, std::vector<PendingPtr> before,
      std::chrono::milliseconds timeout, Body body);
  // Blocks until nothing is on its way, whether or not it went well.
  void drain();

  const int device;
  const int stream;
  const ErrorHandling errors;
  Link& link() { return link_; }

 private:
  void run(
      const TaskPtr& task, const CallInfo& call, const std::vector<PendingPtr>& before,
      Body body);
  void await_earlier(
      const CallInfo& call, const std::vector<PendingPtr>& before, std::optional<Instant> deadline);

  Link link_;
  std::shared_ptr<Queue> queue_;
  std::mutex mutex_;
  int64_t collectives_ = 0, messages_ = 0;
  std::deque<TaskPtr> tasks_;
  std::string broken_;
};

[[noreturn]] void throw_backend_error(const std::string& message);

// Every communicator that this process made, in order.
struct Made {
  std::string group, key;
  int size, device;
};
std::vector<Made> communicators_made();

}  // namespace emu
