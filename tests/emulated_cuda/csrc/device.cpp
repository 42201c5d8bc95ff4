// What torch asks of a CUDA build: how many devices, which is current, hooks, generators, guard.
#include "device.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <atomic>
#include <cstdlib>

#include "memory.h"
#include "streams.h"

namespace emu {

using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;

int env_int(const char* name, int otherwise) {
  const char* text = std::getenv(name);
  return text && *text ? std::atoi(text) : otherwise;
}

// Physical numbers of the visible devices, as CUDA_VISIBLE_DEVICES says when first asked.
const std::vector<int>& visible() {
  static const std::vector<int> found = [] {
    int total = std::min(env_int("EMULATED_CUDA_DEVICES", 1), kMaxDevices);
    std::vector<int> ids;
    const char* text = std::getenv("CUDA_VISIBLE_DEVICES");
    if (!text) {
      for (int i = 0; i < total; ++i) ids.push_back(i);
      return ids;
    }
    std::string rest(text);
    size_t at = 0;
    while (at < rest.size()) {
      size_t comma = rest.find(',', at);
      if (comma == std::string::npos) comma = rest.size();
      std::string one = rest.substr(at, comma - at);
      if (one.empty() || one.find_first_not_of("0123456789 ") != std::string::npos) break;
      int id = std::atoi(one.c_str());
      if (id >= total) break;  // CUDA ignores what follows an id that does not exist
      ids.push_back(id);
      at = comma + 1;
    }
    return ids;
  }();
  return found;
}

int device_count() { return static_cast<int>(visible().size()); }

static thread_local int current = 0;

int current_device() { return current; }

void check_device(int device) {
  TORCH_CHECK(
      device >= 0 && device < device_count(),
      "CUDA error: invalid device ordinal (emulated: ", device, " of ", device_count(), ")");
}

void set_device(int device) {
  check_device(device);
  current = device;
}
// ---- random numbers -----------------------------------------------------------------------------

// A CUDA generator whose numbers are those of a CPU generator of its own.
struct CudaGenerator final : c10::GeneratorImpl {
  at::Generator cpu;
  explicit CudaGenerator(int device, at::Generator inner)
      : c10::GeneratorImpl(Device(DeviceType::CUDA, device), c10::DispatchKeySet(c10::DispatchKey::CUDA)),
        cpu(std::move(inner)) {}
  void set_current_seed(uint64_t seed) override { cpu.set_current_seed(seed); }
  void set_offset(uint64_t) override {}
  uint64_t get_offset() const override { return 0; }
  uint64_t current_seed() const override { return cpu.current_seed(); }
  uint64_t seed() override { return const_cast<at::Generator&>(cpu).seed(); }
  void set_state(const c10::TensorImpl& state) override {
    cpu.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return cpu.unsafeGetGeneratorImpl()->get_state();
  }
  CudaGenerator* clone_impl() const override {
    return new CudaGenerator(device_.index(), cpu.clone());
  }
};

at::Generator new_generator(int device) {
  return at::Generator(c10::make_intrusive<CudaGenerator>(
      device, at::make_generator<at::CPUGeneratorImpl>(c10::default_rng_seed_val)));
}

at::Generator& inner_generator(const at::Generator& cuda) {
  return static_cast<CudaGenerator*>(cuda.unsafeGetGeneratorImpl())->cpu;
}

const at::Generator& default_generator(int device) {
  static std::vector<at::Generator> all = [] {
    std::vector<at::Generator> made;
    for (int i = 0; i < device_count(); ++i) made.push_back(new_generator(i));
    return made;
  }();
  if (device < 0) device = current;
  check_device(device);
  return all[device];
}

// ---- hooks and guard ----------------------------------------------------------------------------

static std::atomic<bool> initialized{false};
void mark_initialized() { initialized = true; }

}  // namespace emu

namespace at {
struct EmulatedCUDAHooks final : CUDAHooksInterface {
  explicit EmulatedCUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  const Generator& getDefaultGenerator(DeviceIndex i) const override {
    return emu::default_generator(i);
  }
  Generator getNewGenerator(DeviceIndex i) const override {
    return emu::new_generator(i < 0 ? emu::current_device() : i);
  }
  Device getDeviceFromPtr(void*) const override {
    return Device(DeviceType::CUDA, emu::current_device());
  }
  bool isPinnedPtr(const void* data) const override { return emu::is_pinned(data); }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return emu::device_count() > 0; }
  bool hasCUDA() const override { return emu::device_count() > 0; }
  bool hasCUDART() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return emu::initialized.load(); }
  DeviceIndex deviceCount() const override { return emu::device_count(); }
  void setCurrentDevice(DeviceIndex d) const override { emu::set_device(d); }
  DeviceIndex getCurrentDevice() const override { return emu::current_device(); }
  DeviceIndex exchangeDevice(DeviceIndex d) const override {
    int before = emu::current_device();
    if (d >= 0) emu::set_device(d);
    return before;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex d) const override { return exchangeDevice(d); }
  DeviceIndex current_device() const override { return emu::current_device(); }
  Allocator* getPinnedMemoryAllocator() const override { return emu::pinned_allocator(); }
  Allocator* getCUDADeviceAllocator() const override { return emu::device_allocator(); }
  int getNumGPUs() const override { return emu::device_count(); }
  void deviceSynchronize(DeviceIndex device) const override {
    emu::host_wait(emu::device_clock(device), "torch.cuda.synchronize");
  }
  std::string showConfig() const override { return "emulated CUDA"; }
  long versionCUDART() const override { return 12080; }
  long versionRuntimeCuDNN() const override { return 0; }
};
}  // namespace at

namespace at {
using EmulatedHooks = EmulatedCUDAHooks;
static ::c10::Registerer<std::string, std::unique_ptr<CUDAHooksInterface>, CUDAHooksArgs>
    register_hooks(
        "CUDAHooks",
        CUDAHooksRegistry(),
        [](CUDAHooksArgs args) -> std::unique_ptr<CUDAHooksInterface> {
          return std::make_unique<EmulatedCUDAHooks>(args);
        });
}  // namespace at

namespace emu {

bool hooks_are_ours() { return at::detail::getCUDAHooks().hasCUDART(); }

namespace {

int device_or_current(DeviceIndex index) { return index < 0 ? current : index; }

c10::Stream stream_on(int device, int64_t id) {
  return c10::Stream(
      c10::Stream::UNSAFE, Device(DeviceType::CUDA, static_cast<DeviceIndex>(device)), id);
}

int number_of(const c10::Stream& stream) {
  return stream_number(stream.device_index(), stream.id());
}

}  // namespace

struct Guard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  Device exchangeDevice(Device d) const override {
    Device before = getDevice();
    setDevice(d);
    return before;
  }
  Device getDevice() const override {
    return Device(DeviceType::CUDA, static_cast<DeviceIndex>(current));
  }
  void setDevice(Device d) const override {
    if (d.index() >= 0 && d.index() != current) set_device(d.index());
  }
  void uncheckedSetDevice(Device d) const noexcept override {
    if (d.index() >= 0 && d.index() < device_count()) current = d.index();
  }
  c10::Stream getStream(Device d) const override {
    int device = device_or_current(d.index());
    return stream_on(device, current_stream_id(device));
  }
  c10::Stream getDefaultStream(Device d) const override {
    return stream_on(device_or_current(d.index()), 0);
  }
  c10::Stream getNewStream(Device d, int) const override {
    int device = device_or_current(d.index());
    return stream_on(device, next_stream_id(device));
  }
  c10::Stream getStreamFromGlobalPool(Device d, bool) const override { return getNewStream(d, 0); }
  c10::Stream exchangeStream(c10::Stream s) const override {
    auto before = getStream(s.device());
    set_current_stream(s.device_index(), s.id());
    return before;
  }
  void* getStreamNativeHandle(const c10::Stream s) const override {
    return reinterpret_cast<void*>(s.id());
  }
  DeviceIndex deviceCount() const noexcept override {
    return static_cast<DeviceIndex>(device_count());
  }
  void record(void** event, const c10::Stream& s, DeviceIndex, c10::EventFlag) const override {
    if (!*event) *event = new Event;
    static_cast<Event*>(*event)->clock = record_clock(number_of(s));
  }
  void block(void* event, const c10::Stream& s) const override {
    if (event) wait_clock(number_of(s), static_cast<Event*>(event)->clock);
  }
  bool queryEvent(void* event) const override {
    return !event || host_poll(static_cast<Event*>(event)->clock);
  }
  void synchronizeEvent(void* event) const override {
    if (event) host_wait(static_cast<Event*>(event)->clock, "Event.synchronize");
  }
  void destroyEvent(void* event, DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  bool queryStream(const c10::Stream& s) const override {
    return host_poll(record_clock(number_of(s)));
  }
  void synchronizeStream(const c10::Stream& s) const override {
    host_wait(record_clock(number_of(s)), "Stream.synchronize");
  }
  void synchronizeDevice(DeviceIndex device) const override {
    host_wait(device_clock(device_or_current(device)), "torch.cuda.synchronize");
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& s) const override {
    record_use(data, number_of(s));
  }
};

C10_REGISTER_GUARD_IMPL(CUDA, Guard)

}  // namespace emu
