// The emulated device: N GPUs whose memory is host memory and whose kernels are the CPU's.
// Declarations that the other sources share; everything lives in namespace emu.
#pragma once
#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

namespace emu {

constexpr int kMaxDevices = 16;

// -- device.cpp: devices, hooks, guard, random numbers ---------------------------------------------

int env_int(const char* name, int otherwise);
// Physical numbers of the visible devices, as CUDA_VISIBLE_DEVICES said when first asked.
const std::vector<int>& visible();
int device_count();
int current_device();
void set_device(int device);
void check_device(int device);
void mark_initialized();
bool hooks_are_ours();
at::Generator new_generator(int device);
const at::Generator& default_generator(int device);
// The CPU generator that makes the numbers of a CUDA generator.
at::Generator& inner_generator(const at::Generator& cuda);

// -- memory.cpp: the allocators --------------------------------------------------------------------

c10::Allocator* device_allocator();
c10::Allocator* pinned_allocator();
bool is_pinned(const void* data);
// CPU memory that a kernel made becomes device memory without a copy.
c10::Storage adopt(const c10::Storage& cpu, int device);
// Storage of the device that other processes can map: its bytes move into a file of /dev/shm.
std::pair<std::string, size_t> share(const c10::Storage& storage);
c10::Storage open_shared(const std::string& path, size_t n, int device);

// -- kernels.cpp: the fallback and the native kernels ----------------------------------------------

// A CPU tensor over the bytes of a CUDA one, which it keeps alive.
at::Tensor on_cpu(const at::Tensor& cuda);
void resize_storage(const c10::Storage& storage, size_t n);

}  // namespace emu
