// The allocators: device memory that is host memory, memory that processes share, pinned memory.
#include "memory.h"

#include <ATen/core/Tensor.h>
#include <c10/core/CPUAllocator.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>

#include "device.h"
#include "late.h"

namespace emu {

using c10::Device;
using c10::DeviceType;

namespace {

bool poison() {
  static const bool on = env_int("EMULATED_CUDA_POISON", 0) != 0;
  return on;
}

void free_block(void* context) {
  auto* block = static_cast<Block*>(context);
  forget_late(block);
  if (block->place)
    give_place(block->place, block->accesses.history(static_cast<int64_t>(block->bytes)));
  if (block->mapped) {
    munmap(block->data, block->bytes);
    if (!block->path.empty()) unlink(block->path.c_str());
  } else if (!block->cpu) {
    std::free(block->data);
  }
  delete block;
}

// A block with its place in the books; what used the place before comes before its own work.
std::unique_ptr<Block> new_block(int device, size_t bytes) {
  auto block = std::make_unique<Block>();
  block->bytes = bytes;
  block->device = device;
  block->stream = current_stream(device);
  block->place = take_place(device, block->stream, bytes);
  block->accesses.entries = history_of(block->place);
  for (auto& one : block->accesses.entries)
    block->accesses.last.emplace_back(one.stream, one.time);
  return block;
}

c10::DataPtr data_ptr(std::unique_ptr<Block> block) {
  Device where(DeviceType::CUDA, static_cast<c10::DeviceIndex>(block->device));
  void* data = block->data;
  return c10::DataPtr(data, block.release(), &free_block, where);
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t n) override {
    const int device = current_device();
    check_device(device);
    if (n == 0)
      return c10::DataPtr(nullptr, Device(DeviceType::CUDA, static_cast<c10::DeviceIndex>(device)));
    auto block = new_block(device, n);
    if (posix_memalign(&block->data, 512, n) != 0) {
      give_place(block->place, {});
      TORCH_CHECK(false, "host memory is exhausted");
    }
    if (poison()) std::memset(block->data, 0xff, n);
    return data_ptr(std::move(block));
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, std::size_t n) const override {
    std::memcpy(to, from, n);
  }
};

DeviceAllocator the_device_allocator;

struct RegisterAllocator {
  RegisterAllocator() { c10::SetAllocator(DeviceType::CUDA, &the_device_allocator, 1); }
} register_allocator;

}  // namespace

c10::Allocator* device_allocator() { return &the_device_allocator; }

Block* block_of(const c10::DataPtr& data) {
  return data.get_deleter() == &free_block ? static_cast<Block*>(data.get_context()) : nullptr;
}

void record_use(const c10::DataPtr& data, int stream) {
  Block* block = block_of(data);
  if (block && block->place) use_place(block->place, stream);
}

c10::Storage adopt(const c10::Storage& cpu, int device) {
  c10::DataPtr data(nullptr, Device(DeviceType::CUDA, static_cast<c10::DeviceIndex>(device)));
  if (cpu.nbytes()) {
    auto block = new_block(device, cpu.nbytes());
    block->data = const_cast<void*>(cpu.data());
    block->cpu = cpu.getWeakStorageImpl().lock();
    data = data_ptr(std::move(block));
  }
  return c10::Storage(
      c10::Storage::use_byte_size_t(), cpu.nbytes(), std::move(data), &the_device_allocator, true);
}

// -- memory that processes share -------------------------------------------------------------------

namespace {

void* map_file(int file, size_t n, const std::string& path) {
  void* data = mmap(nullptr, n, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  TORCH_CHECK(data != MAP_FAILED, "cannot map ", path);
  return data;
}

}  // namespace

std::pair<std::string, size_t> share(const c10::Storage& storage) {
  TORCH_CHECK(storage.device().is_cuda(), "_share_cuda_: only available on CUDA");
  auto* impl = storage.unsafeGetStorageImpl();
  land_into_block(block_of(impl));
  Block* old = block_of(impl);
  if (old && old->mapped) return {old->path, old->bytes};
  // A name no file has: a process of this number may have left one when it was killed.
  std::string path = "/dev/shm/emulated-cuda-XXXXXX";
  const size_t n = std::max<size_t>(storage.nbytes(), 1);
  int file = mkstemp(path.data());
  TORCH_CHECK(file >= 0 && ftruncate(file, static_cast<off_t>(n)) == 0, "cannot make ", path);
  if (!old) {
    auto made = new_block(storage.device().index(), n);
    made->data = map_file(file, n, path);
    made->mapped = true;
    made->path = path;
    impl->set_data_ptr(data_ptr(std::move(made)));
    return {path, n};
  }
  // Same block, other bytes: the device's memory does not move when it is shared.
  void* data = map_file(file, n, path);
  std::memcpy(data, old->data, storage.nbytes());
  if (old->cpu) {
    old->cpu.reset();
  } else {
    std::free(old->data);
  }
  old->data = data;
  old->bytes = n;
  old->mapped = true;
  old->path = path;
  auto same = impl->set_data_ptr(c10::DataPtr(nullptr, storage.device()));
  same.release_context();
  impl->set_data_ptr(data_ptr(std::unique_ptr<Block>(old)));
  return {path, n};
}

c10::Storage open_shared(const std::string& path, size_t n, int device) {
  check_device(device);
  int file = open(path.c_str(), O_RDWR);
  TORCH_CHECK(file >= 0, "CUDA error: invalid resource handle (emulated: ", path, " is gone)");
  auto block = std::make_unique<Block>();
  block->data = map_file(file, n, path);
  block->bytes = n;
  block->device = device;
  block->mapped = true;  // the memory is the sender's: here it has no place, as in CUDA
  return c10::Storage(
      c10::Storage::use_byte_size_t(), n, data_ptr(std::move(block)), &the_device_allocator, false);
}

// -- pinned memory ---------------------------------------------------------------------------------

namespace {

std::mutex pinned_mutex;
std::map<const char*, size_t> pinned;

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t n) override {
    void* data = nullptr;
    if (n) {
      TORCH_CHECK(posix_memalign(&data, 512, n) == 0, "host memory is exhausted");
      std::lock_guard<std::mutex> lock(pinned_mutex);
      pinned[static_cast<char*>(data)] = n;
    }
    return c10::DataPtr(data, data, &release, Device(DeviceType::CPU));
  }
  static void release(void* data) {
    if (!data) return;
    {
      std::lock_guard<std::mutex> lock(pinned_mutex);
      pinned.erase(static_cast<char*>(data));
    }
    std::free(data);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t n) const override {
    std::memcpy(to, from, n);
  }
};

PinnedAllocator the_pinned_allocator;

}  // namespace

c10::Allocator* pinned_allocator() { return &the_pinned_allocator; }

bool is_pinned(const void* data) {
  std::lock_guard<std::mutex> lock(pinned_mutex);
  auto next = pinned.upper_bound(static_cast<const char*>(data));
  if (next == pinned.begin()) return false;
  --next;
  return static_cast<const char*>(data) < next->first + next->second;
}

}  // namespace emu
