// The c10d backend that behaves like NCCL towards its callers.
#pragma once
#include <pybind11/pybind11.h>

namespace emu {

void bind_nccl(pybind11::module_& m);

}  // namespace emu
