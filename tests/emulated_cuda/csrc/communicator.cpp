#include "communicator.h"

#include <c10/util/Exception.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <thread>

#include "device.h"

namespace emu {

using namespace std::chrono_literals;
using SteadyClock = std::chrono::steady_clock;

// ---- queue ---------------------------------------------------------------------------------------

struct Queue::State {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::function<void()>> jobs;
  bool closed = false;
};

Queue::Queue() : state_(std::make_shared<State>()) {
  // Detached: a thread that hangs in a collective must not keep the process from ending.
  std::thread([state = state_] {
    while (true) {
      std::function<void()> job;
      {
        std::unique_lock<std::mutex> lock(state->mutex);
        state->changed.wait(lock, [&] { return state->closed || !state->jobs.empty(); });
        if (state->jobs.empty()) return;
        job = std::move(state->jobs.front());
        state->jobs.pop_front();
      }
      job();
    }
  }).detach();
}

Queue::~Queue() {
  std::lock_guard<std::mutex> lock(state_->mutex);
  state_->closed = true;
  state_->changed.notify_all();
}

void Queue::put(std::function<void()> job) {
  std::lock_guard<std::mutex> lock(state_->mutex);
  state_->jobs.push_back(std::move(job));
  state_->changed.notify_all();
}

namespace {

int env_of(std::initializer_list<const char*> names, int otherwise) {
  for (auto* name : names)
    if (const char* text = std::getenv(name); text && *text) return std::atoi(text);
  return otherwise;
}

std::mutex made_mutex;
std::vector<Made>& made() {
  static auto* all = new std::vector<Made>;
  return *all;
}

}  // namespace

std::vector<Made> communicators_made() {
  std::lock_guard<std::mutex> lock(made_mutex);
  return made();
}

ErrorHandling ErrorHandling::now() {
  return {
      env_of({"TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING"}, 3)};
}

void throw_backend_error(const std::string& message) { C10_THROW_ERROR(DistBackendError, message); }

// ---- task ----------------------------------------------------------------------------------------

bool Task::done() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return done_;
}

bool Task::failed() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return done_ && error_;
}

std::exception_ptr Task::error() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return error_;
}

void Task::wait() {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this] { return done_; });
  if (error_) std::rethrow_exception(error_);
}

bool Task::wait_until(Instant deadline) {
  std::unique_lock<std::mutex> lock(mutex_);
  return changed_.wait_until(lock, deadline, [this] { return done_; });
}

void Task::finish(std::exception_ptr error) {
  std::lock_guard<std::mutex> lock(mutex_);
  done_ = true;
  error_ = std::move(error);
  changed_.notify_all();
}

// ---- communicator --------------------------------------------------------------------------------

Communicator::Communicator(
    c10d::Store& store, LinkOptions options, int device, ErrorHandling errors)
    : device(device),
      stream(new_stream(device, c10::str("NCCL group '", options.group, "' ", options.key))),
      errors(errors),
      link_(store, std::move(options)),
      queue_(std::make_shared<Queue>()) {
  std::lock_guard<std::mutex> lock(made_mutex);
  made().push_back({link_.options().group, link_.options().key, link_.size(), device});
}

TaskPtr Communicator::enqueue(
    CallInfo call, bool is_message, std::vector<PendingPtr> before,
    std::chrono::milliseconds timeout, Body body) {
  auto task = std::make_shared<Task>(timeout);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!broken_.empty()) throw_backend_error(broken_);
    call.number = ++(is_message ? messages_ : collectives_);
    link_.enqueued(call);
    while (!tasks_.empty() && tasks_.front()->done()) tasks_.pop_front();
    tasks_.push_back(task);
  }
  queue_->put([self = shared_from_this(), task, call, before = std::move(before),
               body = std::move(body)]() mutable { self->run(task, call, before, std::move(body)); });
  return task;
}

void Communicator::drain() {
  std::deque<TaskPtr> tasks;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    tasks = tasks_;
  }
  for (auto& task : tasks) task->wait_until(Instant::max());
}

// The job of the GPU and of the watchdog in one.
void Communicator::run(
    const TaskPtr& task, const CallInfo& call, const std::vector<PendingPtr>& before,
    Body body) {
  const Instant deadline = task->began + task->timeout;
  std::string wrong;
  bool timed_out = false;
  try {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (!broken_.empty()) throw Aborted(broken_);
    }
    link_.begin(call, deadline);
    await_earlier(call, before, deadline);
    body(link_);
    body = nullptr;  // who waits may count memory: what the operation held is free by then
    task->finish(nullptr);
    return;
  } catch (const TimedOut& error) {
    timed_out = true;
    wrong = c10::str(
        "Watchdog caught collective operation timeout: ", call.text(), " of group '",
        link_.options().group, "' ran for ", task->timeout.count(),
        " milliseconds before timing out (emulated NCCL).\n", error.what());
  } catch (const std::exception& error) {
    wrong = error.what();
  }
  if (timed_out && errors.tears_down()) {
    std::fprintf(
        stderr,
        "[emulated NCCL] %s\nTo avoid data inconsistency, the entire process is taken down.\n",
        wrong.c_str());
    std::fflush(stderr);
    std::abort();
  }
  if (timed_out && errors.cleans_up()) *link_.options().aborted = true;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (broken_.empty()) broken_ = wrong;
  }
  body = nullptr;
  try {
    throw_backend_error(wrong);
  } catch (...) {
    task->finish(std::current_exception());
  }
}

// Collectives of other groups that the caller's stream held, or waited for, when it called this one.
void Communicator::await_earlier(
    const CallInfo& call, const std::vector<PendingPtr>& before, std::optional<Instant> deadline) {
  for (auto& work : before) {
    auto task = std::dynamic_pointer_cast<Task>(work);
    while (task && !task->wait_until(SteadyClock::now() + 50ms)) {
      if (*link_.options().aborted)
        throw Aborted("NCCL communicator was aborted on this rank.");
      if (deadline && SteadyClock::now() > *deadline)
        throw TimedOut(c10::str(
            "It never began: its stream still waits for a collective of another group.\n",
            link_.report()));
    }
  }
}

}  // namespace emu
