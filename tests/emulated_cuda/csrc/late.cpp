#include "late.h"

#include <atomic>
#include <cstring>
#include <mutex>

#include "device.h"
#include "memory.h"

namespace emu {

namespace {

struct Copy {
  bool to_host;
  int stream;
  int64_t time;
  void* to;
  const void* from;
  size_t bytes;
  at::Tensor pinned;    // held: the host's caching allocator keeps memory that a copy uses
  at::Tensor snapshot;  // of the device, where it goes to the host
  const Block* block;   // of the device, where it goes there

  const char* host_bytes() const { return static_cast<const char*>(to_host ? to : from); }
  void land() const { std::memcpy(to, from, bytes); }
};

std::mutex mutex;
std::vector<Copy> under_way;  // in the order of their launch
std::atomic<int> how_many{0};

// Those that `which` names leave the list, in order. Their tensors are let go by the caller, after
// the lock: that may ask for Python's lock.
template <typename Which>
std::vector<Copy> take(Which which, bool land) {
  std::vector<Copy> taken, kept;
  std::lock_guard<std::mutex> lock(mutex);
  for (auto& one : under_way) {
    if (!which(one)) {
      kept.push_back(std::move(one));
      continue;
    }
    if (land) one.land();
    taken.push_back(std::move(one));
  }
  under_way = std::move(kept);
  how_many = static_cast<int>(under_way.size());
  return taken;
}

bool none() { return how_many.load(std::memory_order_acquire) == 0; }

void begin(Copy copy) {
  std::lock_guard<std::mutex> lock(mutex);
  under_way.push_back(std::move(copy));
  how_many = static_cast<int>(under_way.size());
}

}  // namespace

void copy_late_to_host(const at::Tensor& pinned, at::Tensor snapshot, int stream, int64_t time) {
  static const bool poison = env_int("EMULATED_CUDA_POISON", 0) != 0;
  const void* from = snapshot.const_data_ptr();
  const size_t n = pinned.nbytes();
  if (poison) std::memset(pinned.data_ptr(), 0xff, n);
  begin({true, stream, time, pinned.data_ptr(), from, n, pinned, std::move(snapshot), nullptr});
}

void copy_late_to_device(const at::Tensor& device, const at::Tensor& pinned, int stream, int64_t time) {
  const Block* block = block_of(device.storage().unsafeGetStorageImpl());
  begin({false, stream, time, device.data_ptr(), pinned.const_data_ptr(), pinned.nbytes(), pinned, {}, block});
}

void land_into(const at::Tensor& device) {
  if (none() || !device.has_storage()) return;
  land_into_block(block_of(device.storage().unsafeGetStorageImpl()));
}

void land_into_block(const Block* block) {
  if (block && !none()) take([&](const Copy& one) { return one.block == block; }, true);
}

void land_what_is_done() {
  if (none()) return;
  take([](const Copy& one) { return host_has_waited(one.stream, one.time); }, true);
}

void forget_late(const Block* block) {
  if (!none()) take([&](const Copy& one) { return one.block == block; }, false);
}

void order_host_memory(const at::Tensor& host, bool write, int stream, int64_t time) {
  if (none() || host.numel() == 0) return;
  const char* low = static_cast<const char*>(host.const_data_ptr());
  const char* high = low + host.nbytes();
  auto same = [&](const Copy& one) {
    return one.host_bytes() < high && low < one.host_bytes() + one.bytes && (write || one.to_host);
  };
  for (auto& one : take(same, true)) {
    if (comes_before(one.stream, one.time, stream)) continue;
    TORCH_CHECK(
        false,
        "emulated CUDA: race: a copy on ", stream_name(stream), write ? " writes" : " reads",
        " pinned memory that a copy on ", stream_name(one.stream),
        one.to_host ? " writes" : " reads", ", and nothing orders the two (", one.bytes, " bytes).");
  }
}

}  // namespace emu
