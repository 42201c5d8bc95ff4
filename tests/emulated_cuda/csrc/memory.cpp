// Device memory, counted; memory that processes share; pinned host memory.
#include "device.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstdlib>
#include <map>
#include <cstring>
#include <mutex>
#include <vector>

namespace emu {

using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;

struct Stats {
  std::atomic<int64_t> current{0}, peak{0}, reserved{0}, allocations{0};
};
static Stats stats_[kMaxDevices];

std::array<int64_t, 4> memory_counts(int device) {
  auto& s = stats_[device];
  return {s.current.load(), s.peak.load(), s.reserved.load(), s.allocations.load()};
}
void reset_peak(int device) { stats_[device].peak = stats_[device].current.load(); }
void empty_cache() {
  for (int i = 0; i < device_count(); ++i) stats_[i].reserved = stats_[i].current.load();
}

static int64_t rounded(size_t n) { return static_cast<int64_t>((n + 511) / 512 * 512); }

static void took(int device, size_t n) {
  auto& s = stats_[device];
  int64_t now = s.current.fetch_add(rounded(n)) + rounded(n);
  s.allocations++;
  int64_t peak = s.peak.load();
  while (now > peak && !s.peak.compare_exchange_weak(peak, now)) {
  }
  int64_t reserved = s.reserved.load();
  while (now > reserved && !s.reserved.compare_exchange_weak(reserved, now)) {
  }
}

static void gave(int device, size_t n) { stats_[device].current -= rounded(n); }

static int64_t limit() {
  static const int64_t bytes = static_cast<int64_t>(
      (std::getenv("EMULATED_CUDA_MEMORY_GB") ? std::atof(std::getenv("EMULATED_CUDA_MEMORY_GB"))
                                              : 80.0) * (1 << 30));
  return bytes;
}

int64_t memory_total() { return limit(); }

struct Block {
  size_t bytes;
  int device;
  c10::intrusive_ptr<c10::StorageImpl> cpu;  // whose memory it is; null: from posix_memalign
  bool shared = false;                       // a mapped file
  std::string path;                          // to unlink, where this process made it
};

static std::mutex blocks_mutex;
static std::unordered_map<const void*, int> device_of_ptr;

static void free_block(void* context);

static void* raw_of(void* data) { return data; }

struct Owned {
  Block block;
  void* data;
};

static void free_block(void* context) {
  auto* owned = static_cast<Owned*>(context);
  gave(owned->block.device, owned->block.bytes);
  if (owned->block.shared) {
    munmap(owned->data, std::max<size_t>(owned->block.bytes, 1));
    if (!owned->block.path.empty()) unlink(owned->block.path.c_str());
  } else if (!owned->block.cpu) {
    std::free(raw_of(owned->data));
  }
  delete owned;
}

static bool poison() {
  static const bool on = env_int("EMULATED_CUDA_POISON", 0) != 0;
  return on;
}

static void check_room(int device, size_t n) {
  TORCH_CHECK_WITH(
      OutOfMemoryError,
      stats_[device].current.load() + rounded(n) <= limit(),
      "CUDA out of memory. Tried to allocate ", n, " bytes. GPU ", device,
      " (emulated) has a total capacity of ", limit(), " bytes of which ",
      limit() - stats_[device].current.load(), " are free.");
}

struct CudaAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t n) override {
    int device = current_device();
    check_device(device);
    Device where(DeviceType::CUDA, static_cast<DeviceIndex>(device));
    if (n == 0) return c10::DataPtr(nullptr, where);
    check_room(device, n);
    void* data = nullptr;
    TORCH_CHECK(posix_memalign(&data, 512, rounded(n)) == 0, "host memory is exhausted");
    if (poison()) memset(data, 0xff, n);
    took(device, n);
    auto* owned = new Owned{{n, device, {}, false, {}}, data};
    return c10::DataPtr(data, owned, &free_block, where);
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, std::size_t n) const override { memcpy(to, from, n); }
};

static CudaAllocator cuda_allocator;
c10::Allocator* device_allocator() { return &cuda_allocator; }

// CPU memory that a kernel made becomes device memory without a copy.
c10::Storage adopt(const c10::Storage& cpu, int device) {
  check_room(device, cpu.nbytes());
  void* data = const_cast<void*>(cpu.data());
  took(device, cpu.nbytes());
  auto* owned = new Owned{
      {cpu.nbytes(), device, cpu.getWeakStorageImpl().lock(), false, {}}, data};
  return c10::Storage(
      c10::Storage::use_byte_size_t(),
      cpu.nbytes(),
      c10::DataPtr(data, owned, &free_block, Device(DeviceType::CUDA, device)),
      &cuda_allocator,
      true);
}

// Storage of the device that other processes can map: moves its bytes into a file of /dev/shm.
std::pair<std::string, size_t> share(const c10::Storage& storage) {
  TORCH_CHECK(storage.device().is_cuda(), "_share_cuda_: only available on CUDA");
  auto* impl = storage.unsafeGetStorageImpl();
  auto* owned = static_cast<Owned*>(impl->data_ptr().get_context());
  if (owned && owned->block.shared) return {owned->block.path, owned->block.bytes};
  static std::atomic<int> number{0};
  std::string path = c10::str("/dev/shm/emucuda-", getpid(), "-", number++);
  size_t n = std::max<size_t>(storage.nbytes(), 1);
  int file = open(path.c_str(), O_RDWR | O_CREAT | O_EXCL, 0600);
  TORCH_CHECK(file >= 0 && ftruncate(file, n) == 0, "cannot make ", path);
  void* data = mmap(nullptr, n, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  TORCH_CHECK(data != MAP_FAILED, "cannot map ", path);
  memcpy(data, storage.data(), storage.nbytes());
  int device = storage.device().index();
  took(device, n);
  impl->set_data_ptr(c10::DataPtr(
      data, new Owned{{n, device, {}, true, path}, data}, &free_block, storage.device()));
  return {path, n};
}

c10::Storage open_shared(const std::string& path, size_t n, int device) {
  check_device(device);
  int file = open(path.c_str(), O_RDWR);
  TORCH_CHECK(file >= 0, "CUDA error: invalid resource handle (emulated: ", path, " is gone)");
  void* data = mmap(nullptr, n, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  TORCH_CHECK(data != MAP_FAILED, "cannot map ", path);
  // The memory is the sender's; here it is not counted, as in CUDA.
  struct Mapped { void* data; size_t n; };
  auto* mapped = new Mapped{data, n};
  auto unmap = [](void* context) {
    auto* m = static_cast<Mapped*>(context);
    munmap(m->data, m->n);
    delete m;
  };
  return c10::Storage(
      c10::Storage::use_byte_size_t(), n,
      c10::DataPtr(data, mapped, +unmap, Device(DeviceType::CUDA, device)), &cuda_allocator, false);
}

// ---- pinned memory ------------------------------------------------------------------------------

static std::mutex pinned_mutex;
static std::map<const char*, size_t> pinned;

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t n) override {
    void* data = nullptr;
    if (n) {
      TORCH_CHECK(posix_memalign(&data, 512, rounded(n)) == 0, "host memory is exhausted");
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
  void copy_data(void* to, const void* from, std::size_t n) const override { memcpy(to, from, n); }
};

static PinnedAllocator the_pinned_allocator;
c10::Allocator* pinned_allocator() { return &the_pinned_allocator; }

bool is_pinned(const void* data) {
  std::lock_guard<std::mutex> lock(pinned_mutex);
  auto next = pinned.upper_bound(static_cast<const char*>(data));
  if (next == pinned.begin()) return false;
  --next;
  return static_cast<const char*>(data) < next->first + next->second;
}
}  // namespace emu
