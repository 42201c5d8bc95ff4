// The Python module of the emulated device; emulated_cuda/*.py is its only user.
#include <ATen/ATen.h>
#include <pybind11/stl.h>
#include <torch/csrc/Generator.h>
#include <torch/csrc/Storage.h>
#include <torch/csrc/utils/device_lazy_init.h>
#include <torch/csrc/utils/pybind.h>

#include "device.h"
#include "memory.h"
#include "nccl.h"
#include "streams.h"

namespace py = pybind11;

namespace emu {

static c10::Storage storage_of(const py::handle& object) {
  return THPStorage_Unpack(object.ptr());
}

static void bind_streams(py::module_& m) {
  using Released = py::call_guard<py::gil_scoped_release>;  // collectives may be waited for
  py::class_<Event>(m, "Event")
      .def(py::init<>())
      .def("record", [](Event& e, int device, int64_t id) {
        e.clock = record_clock(stream_number(device, id));
      })
      .def("wait", [](Event& e, int device, int64_t id) { wait_clock(stream_number(device, id), e.clock); })
      .def("poll", [](Event& e) { return host_poll(e.clock); })
      .def("synchronize", [](Event& e) { host_wait(e.clock, "Event.synchronize"); },
           Released());
  m.def("stream_new", &next_stream_id);
  m.def("stream_current", &current_stream_id);
  m.def("stream_choose", &set_current_stream);
  m.def("stream_wait", [](int device, int64_t id, int other_device, int64_t other) {
    wait_clock(stream_number(device, id), record_clock(stream_number(other_device, other)));
  });
  m.def("stream_poll", [](int device, int64_t id) {
    return host_poll(record_clock(stream_number(device, id)));
  });
  m.def("stream_synchronize", [](int device, int64_t id) {
    host_wait(record_clock(stream_number(device, id)), "Stream.synchronize");
  }, Released());
  m.def("device_synchronize", [](int device) {
    host_wait(device_clock(device), "torch.cuda.synchronize");
  }, Released());
  m.def("synchronizations", &synchronizations);
  m.def("reset_synchronizations", &reset_synchronizations);
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  bind_nccl(m);
  m.def("visible", [] { return visible(); });
  m.def("device_count", &device_count);
  m.def("current_device", &current_device);
  m.def("set_device", &set_device);
  m.def("mark_initialized", &mark_initialized);
  m.def("hooks_are_ours", &hooks_are_ours);
  m.def("default_generator", [](int device) {
    return py::reinterpret_steal<py::object>(THPGenerator_initDefaultGenerator(default_generator(device)));
  });
  m.def("memory_total", &memory_total);
  m.def("memory_reserved", &memory_reserved);
  m.def("memory_stats", [](int device) {
    py::dict all;
    for (auto& [name, row] : memory_counts(device)) {
      py::dict pools;
      const char* names[] = {"all", "small_pool", "large_pool"};
      for (int i = 0; i < 3; ++i) {
        py::dict one;
        one["current"] = row[i].current;
        one["peak"] = row[i].peak;
        one["allocated"] = row[i].allocated;
        one["freed"] = row[i].freed;
        pools[names[i]] = one;
      }
      all[name.c_str()] = pools;
    }
    for (auto& [name, n] : memory_events(device)) all[name.c_str()] = n;
    return all;
  });
  m.def("reset_peak", &reset_peak);
  m.def("reset_accumulated", &reset_accumulated);
  m.def("release_cached", &release_cached);
  m.def("set_memory_fraction", &set_memory_fraction);
  m.def("on_cpu", &on_cpu);
  m.def("share", [](py::handle storage) {
    auto [path, n] = share(storage_of(storage));
    return std::make_tuple(path, n);
  });
  m.def("open_shared", [](const std::string& path, size_t n, int device) {
    auto storage = open_shared(path, n, device);
    auto options = at::TensorOptions().dtype(at::kByte).device(c10::Device(c10::kCUDA, device));
    at::Tensor t = at::empty({0}, options);
    t.set_(storage);
    return t;
  });
  m.def("resize_storage", [](py::handle storage, size_t n) { resize_storage(storage_of(storage), n); });
  m.def("require_init", [] { torch::utils::set_requires_device_init(at::kCUDA, true); });
  bind_streams(m);
}

}  // namespace emu
