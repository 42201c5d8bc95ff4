// The Python module of the emulated device; emulated_cuda/*.py is its only user.
#include <ATen/ATen.h>
#include <pybind11/stl.h>
#include <torch/csrc/Generator.h>
#include <torch/csrc/Storage.h>
#include <torch/csrc/utils/device_lazy_init.h>
#include <torch/csrc/utils/pybind.h>

#include "device.h"
#include "nccl.h"

namespace py = pybind11;

namespace emu {

static c10::Storage storage_of(const py::handle& object) {
  return THPStorage_Unpack(object.ptr());
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
  m.def("memory", [](int device) {
    return memory_counts(device);
  });
  m.def("memory_total", &memory_total);
  m.def("reset_peak", &reset_peak);
  m.def("empty_cache", &empty_cache);
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
  m.def("count_ops", &count_ops);
  m.def("op_counts", &op_counts);
}

}  // namespace emu
