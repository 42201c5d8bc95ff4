// One communicator: its ranks and the memory they share.
//
// A file that every rank maps. Collectives go in rounds: each rank shows a window of bytes, and a
// round is over when all have shown theirs. Sends and receives go over wires, one for each pair and
// direction. Nothing notices that a rank is gone: as with NCCL, the others wait for it, until their
// deadline, and are then told what every rank was doing.
#pragma once
#include <c10/core/ScalarType.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace emu {

using Instant = std::chrono::steady_clock::time_point;

// What a rank called. All ranks of a communicator must call the same in the same order.
struct CallInfo {
  char name[32] = {};
  int64_t number = 0;     // of the operations of this communicator, from 1
  int64_t numel_in = 0;   // -1: may differ between ranks
  int64_t numel_out = 0;
  int32_t root = -1;
  int16_t dtype = -1;
  int16_t reduce = -1;
  bool same_call(const CallInfo& other) const;
  std::string text() const;
};

// One of several sends and receives that go on at the same time.
struct Letter {
  bool sends;
  int peer;  // rank in the communicator
  void* bytes;
  int64_t numel;
  int16_t dtype;
  int64_t size;
};

// The wait is over because this process gave the communicator up.
struct Aborted : std::runtime_error {
  using std::runtime_error::runtime_error;
};
struct TimedOut : std::runtime_error {
  using std::runtime_error::runtime_error;
};
// Ranks called what does not fit together.
struct Mismatch : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct LinkOptions {
  std::string group;           // for messages
  std::string key;             // in the store, and for messages
  int rank;
  int size;
  std::vector<int> names;      // what the ranks are called in the group
  std::string gpu;             // which physical device; two ranks on one are refused
  std::chrono::milliseconds timeout;
  std::shared_ptr<std::atomic<bool>> aborted;
};

class Link {
 public:
  // Blocks until all ranks are here.
  Link(c10d::Store& store, LinkOptions options);
  ~Link();
  Link(const Link&) = delete;

  static constexpr size_t kWindow = 1 << 19;
  static constexpr size_t kParcel = 1 << 17;

  int rank() const { return o_.rank; }
  int size() const { return o_.size; }
  const LinkOptions& options() const { return o_; }

  // The operation that the next rounds or letters belong to.
  void begin(const CallInfo& call, std::optional<Instant> deadline);
  // One of several calls that make up an operation.
  void next(CallInfo call);
  // One round. What the others showed stays readable until the round after the next.
  void show(const void* bytes, size_t n);
  const char* window(int rank) const;
  size_t shown(int rank) const;
  // All letters at the same time; those of one pair and direction in their order.
  void exchange(const std::vector<Letter>& letters);

  // For reports of others: what this rank has been asked to do, whether or not it began.
  void enqueued(const CallInfo& call);
  // What this rank waits in, and what the others do.
  std::string report() const;

 private:
  struct Seat;
  struct Wire;
  class Post;

  void map(const std::string& path, bool create);
  void meet();
  void refuse_duplicates() const;
  Seat& seat(int rank) const;
  Wire& wire(int from, int to) const;
  char* window_at(int rank, int parity) const;
  char* parcel_at(int from, int to, int parity) const;
  void ring(int rank) const;
  void await(const std::function<bool()>& ready);
  void compare_calls() const;
  std::string who(int rank) const;
  void write_doing(const std::string& text);
  static void tell_peers(const Link* link, const std::string& text);

  LinkOptions o_;
  std::string path_;
  char* base_ = nullptr;
  size_t bytes_ = 0;
  uint64_t round_ = 0;
  bool first_round_ = false;
  CallInfo call_;
  std::optional<Instant> deadline_;
  // How many letters this rank has put on each wire to (first) and taken from (second) a peer.
  std::vector<uint32_t> sent_, received_;
};

}  // namespace emu
