// Copies between the device and pinned memory that do not block the host are really late: the host
// finds the bytes once it has waited, the device reads its source when a kernel touches the
// destination. Both sides are contiguous and of one type.
#pragma once
#include <ATen/core/Tensor.h>

namespace emu {

struct Block;

// `snapshot`: what the device held when the copy was launched, in host memory.
void copy_late_to_host(const at::Tensor& pinned, at::Tensor snapshot, int stream, int64_t time);
void copy_late_to_device(const at::Tensor& device, const at::Tensor& pinned, int stream, int64_t time);
// Copies that are under way into the tensor's memory arrive.
void land_into(const at::Tensor& device);
void land_into_block(const Block* block);
// So do all that the host has waited for.
void land_what_is_done();
// The memory goes away.
void forget_late(const Block* block);
// A copy on `stream` reads or writes host memory: what is under way there must come before it.
void order_host_memory(const at::Tensor& host, bool write, int stream, int64_t time);

}  // namespace emu
