// Kernels for the CUDA dispatch key: a few native ones, and a boxed fallback that checks devices
// and runs the CPU's kernel on the same bytes.
#include "device.h"

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include <atomic>
#include <mutex>
#include <unordered_set>

namespace emu {

using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;

// ---- one storage, two devices -------------------------------------------------------------------

static void release_storage(void* context) {
  c10::raw::intrusive_ptr::decref(static_cast<c10::StorageImpl*>(context));
}

static Tensor make_tensor_on(const c10::Storage& storage, bool cuda, const c10::TensorImpl* like) {
  auto keys = cuda ? c10::DispatchKeySet(c10::DispatchKey::CUDA) : c10::DispatchKeySet(c10::DispatchKey::CPU);
  auto t = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage), keys, like->dtype());
  auto* impl = t.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(like->sizes(), like->strides(), like->storage_offset());
  if (like->is_conj()) t._set_conj(true);
  if (like->is_neg()) t._set_neg(true);
  return t;
}

// A CPU storage over the memory of a CUDA one, which it keeps alive.
static c10::Storage alias_storage(const c10::Storage& cuda) {
  auto* impl = cuda.unsafeGetStorageImpl();
  c10::raw::intrusive_ptr::incref(impl);
  return c10::Storage(
      c10::Storage::use_byte_size_t(),
      cuda.nbytes(),
      c10::DataPtr(impl->mutable_data(), impl, &release_storage, Device(DeviceType::CPU)),
      c10::GetCPUAllocator(),
      true);
}

Tensor on_cpu(const Tensor& cuda) {
  if (!cuda.defined() || !cuda.is_cuda()) return cuda;
  return make_tensor_on(alias_storage(cuda.storage()), false, cuda.unsafeGetTensorImpl());
}

struct Call {
  struct Seen {
    Tensor cuda, cpu;
    const void* data;
  };
  std::vector<Seen> tensors;
  std::vector<std::pair<c10::StorageImpl*, c10::Storage>> storages;  // CUDA, alias
  std::vector<std::pair<c10::StorageImpl*, c10::Storage>> adopted;   // CPU, CUDA
  std::optional<Device> device;
  const c10::OperatorHandle& op;
  explicit Call(const c10::OperatorHandle& o) : op(o) {}

  void meet(Device d) {
    if (!device) device = d;
    TORCH_CHECK(
        *device == d,
        "Expected all tensors to be on the same device, but found at least two devices, ",
        *device, " and ", d, "! (emulated, in ", op.schema().name(), ")");
  }

  Tensor to_cpu(const Tensor& t) {
    if (!t.defined() || !t.is_cuda()) return t;
    TORCH_CHECK(t.layout() == at::kStrided, "emulated CUDA knows strided tensors alone");
    meet(t.device());
    auto* impl = t.unsafeGetTensorImpl();
    for (auto& seen : tensors)
      if (seen.cuda.unsafeGetTensorImpl() == impl) return seen.cpu;
    auto* storage = t.storage().unsafeGetStorageImpl();
    const c10::Storage* alias = nullptr;
    for (auto& [from, to] : storages)
      if (from == storage) alias = &to;
    if (!alias) {
      storages.emplace_back(storage, alias_storage(t.storage()));
      alias = &storages.back().second;
    }
    Tensor cpu = make_tensor_on(*alias, false, impl);
    if (impl->is_wrapped_number()) cpu.unsafeGetTensorImpl()->set_wrapped_number(true);
    tensors.push_back({t, cpu, alias->data()});
    return cpu;
  }

  Tensor to_cuda(const Tensor& t) {
    if (!t.defined() || !t.is_cpu()) return t;
    for (auto& seen : tensors)
      if (seen.cpu.unsafeGetTensorImpl() == t.unsafeGetTensorImpl()) return seen.cuda;
    auto* storage = t.storage().unsafeGetStorageImpl();
    for (auto& [from, to] : storages)
      if (to.unsafeGetStorageImpl() == storage) {
        // A view of an argument.
        for (auto& seen : tensors)
          if (seen.cuda.storage().unsafeGetStorageImpl() == from)
            return make_tensor_on(seen.cuda.storage(), true, t.unsafeGetTensorImpl());
      }
    for (auto& [from, to] : adopted)
      if (from == storage) return make_tensor_on(to, true, t.unsafeGetTensorImpl());
    adopted.emplace_back(storage, adopt(t.storage(), device->index()));
    return make_tensor_on(adopted.back().second, true, t.unsafeGetTensorImpl());
  }

  // What the kernel did to sizes and memory of an output, done to the CUDA tensor.
  void settle() {
    for (auto& seen : tensors) {
      auto* cpu = seen.cpu.unsafeGetTensorImpl();
      auto* cuda = seen.cuda.unsafeGetTensorImpl();
      if (cpu->storage().data() != seen.data || cpu->storage().nbytes() > cuda->storage().nbytes()) {
        auto now = adopt(cpu->storage(), device->index());
        auto* impl = cuda->storage().unsafeGetStorageImpl();
        if (impl->data() != now.data()) {
          size_t bytes = now.nbytes();
          impl->set_data_ptr(std::move(now.unsafeGetStorageImpl()->_mutable_data_ptr_no_checks()));
          impl->set_nbytes(bytes);
        }
      }
      if (cpu->sizes() != cuda->sizes() || cpu->strides() != cuda->strides() ||
          cpu->storage_offset() != cuda->storage_offset())
        cuda->set_sizes_and_strides(cpu->sizes(), cpu->strides(), cpu->storage_offset());
    }
  }
};

// ---- what CUDA refuses --------------------------------------------------------------------------

static void refuse(bool is, const std::string& message) {
  TORCH_CHECK(!is, message, " (emulated CUDA)");
}

static const std::unordered_set<std::string> kMatmuls = {
    "aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm", "aten::addmv", "aten::dot", "aten::mv",
    "aten::addbmm", "aten::_addmm_activation"};
// Operators that take CPU tensors of any size beside CUDA tensors.
static const std::unordered_set<std::string> kMixed = {
    "aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_",
    "aten::_unsafe_index", "aten::_unsafe_index_put", "aten::_pack_padded_sequence",
    "aten::_pin_memory", "aten::_pad_packed_sequence"};

static void check_like_cuda(const std::string& name, const torch::jit::Stack& args) {
  if (kMatmuls.count(name)) {
    for (auto& v : args)
      if (v.isTensor() && v.toTensor().defined())
        refuse(
            at::isIntegralType(v.toTensor().scalar_type(), true),
            "\"addmm_cuda\" not implemented for '" +
                std::string(c10::toString(v.toTensor().scalar_type())) + "'");
  } else if (name == "aten::_int_mm") {
    const Tensor a = args[0].toTensor(), b = args[1].toTensor();
    refuse(a.size(0) <= 16, c10::str("self.size(0) needs to be greater than 16, but got ", a.size(0)));
    refuse(a.size(1) == 0 || a.size(1) % 8, c10::str("self.size(1) needs to be greater than 0 and a multiple of 8, but got ", a.size(1)));
    refuse(b.size(1) == 0 || b.size(1) % 8, c10::str("mat2.size(1) needs to be greater than 0 and a multiple of 8, but got ", b.size(1)));
  } else if (name == "aten::_scaled_mm") {
    const Tensor a = args[0].toTensor(), b = args[1].toTensor();
    refuse(a.stride(1) != 1 || b.stride(0) != 1, "_scaled_mm: mat1 must be row-major, mat2 column-major");
    refuse(a.size(1) % 16, c10::str("Expected trailing dimension of mat1 to be divisible by 16 but got mat1 shape: ", a.sizes()));
    refuse(b.size(0) % 16 || b.size(1) % 16, c10::str("mat2 shape ", b.sizes(), " must be divisible by 16"));
    const Tensor sa = args[2].toTensor(), sb = args[3].toTensor();
    refuse(sa.scalar_type() != at::kFloat || sb.scalar_type() != at::kFloat, "Both scale_a and scale_b must be float (fp32) tensors.");
    bool rowwise = sa.numel() == a.size(0) && sb.numel() == b.size(1) && sa.dim() == 2 && sb.dim() == 2 && (sa.numel() > 1 || sb.numel() > 1);
    refuse(!rowwise && (sa.numel() != 1 || sb.numel() != 1), "Invalid scaling configuration.");
    refuse(rowwise && (!sa.is_contiguous() || !sb.is_contiguous()), "Both scale_a and scale_b must be contiguous.");
    if (rowwise && args.size() > 6 && args[6].isInt())
      refuse(static_cast<c10::ScalarType>(args[6].toInt()) != at::kBFloat16, "Only bf16 high precision output types are supported for row-wise scaling.");
  }
}

// ---- the fallback -------------------------------------------------------------------------------

static std::atomic<bool> counting{false};
static std::mutex count_mutex;
static std::map<std::string, int64_t> counts;

std::map<std::string, int64_t> op_counts() {
  std::lock_guard<std::mutex> lock(count_mutex);
  return counts;
}
void count_ops(bool on) { counting = on; }

static void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const size_t arity = schema.arguments().size();
  if (counting) {
    std::lock_guard<std::mutex> lock(count_mutex);
    counts[c10::toString(op.operator_name())]++;
  }
  TORCH_CHECK(
      op.hasKernelForDispatchKey(c10::DispatchKey::CPU) ||
          op.hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd) ||
          op.hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutogradNonFunctional),
      "emulated CUDA: no CPU kernel for ", c10::toString(op.operator_name()));
  Call call(op);
  const size_t first = stack->size() - arity;
  const bool mixed = kMixed.count(schema.name());
  bool strangers = false;
  auto stranger = [&](const Tensor& t, const c10::Argument& arg) {
    if (!t.defined() || t.is_cuda()) return;
    const bool written = arg.alias_info() && arg.alias_info()->isWrite();
    if (t.device().is_cpu() && !written && (t.dim() == 0 || mixed)) return;
    strangers = true;
    call.meet(t.device());
  };
  // Devices first, so that a mismatch is told before anything ran.
  for (size_t i = 0; i < arity; ++i) {
    const auto& value = (*stack)[first + i];
    if (value.isTensor()) {
      if (value.toTensor().defined() && value.toTensor().is_cuda()) call.meet(value.toTensor().device());
    } else if (value.isTensorList()) {
      for (const Tensor& t : value.toTensorVector())
        if (t.defined() && t.is_cuda()) call.meet(t.device());
    }
  }
  for (size_t i = 0; i < arity; ++i) {
    auto& value = (*stack)[first + i];
    const auto& arg = schema.arguments()[i];
    if (value.isTensor()) {
      stranger(value.toTensor(), arg);
      value = c10::IValue(call.to_cpu(value.toTensor()));
    } else if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& t : value.toTensorVector()) {
        stranger(t, arg);
        list.push_back(call.to_cpu(t));
      }
      value = c10::IValue(std::move(list));
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> list;
      for (const std::optional<Tensor>& t : value.toOptionalTensorVector()) {
        if (!t) {
          list.push_back(std::nullopt);
          continue;
        }
        stranger(*t, arg);
        list.push_back(call.to_cpu(*t));
      }
      value = c10::IValue(std::move(list));
    } else if (value.isDevice()) {
      Device d = value.toDevice();
      if (d.is_cuda()) {
        if (d.index() < 0) d = Device(DeviceType::CUDA, current_device());
        check_device(d.index());
        call.meet(d);
        value = c10::IValue(Device(DeviceType::CPU));
      }
    }
  }
  if (!call.device) call.device = Device(DeviceType::CUDA, current_device());
  check_like_cuda(schema.name(), torch::jit::Stack(stack->begin() + first, stack->end()));
  at::Generator swapped;
  for (size_t i = 0; i < arity; ++i) {
    auto& value = (*stack)[first + i];
    const auto& type = schema.arguments()[i].type();
    if (value.isGenerator()) {
      auto generator = value.toGenerator();
      TORCH_CHECK(
          generator.device() == *call.device || generator.device() == Device(DeviceType::CUDA),
          "Expected a 'cuda' device type for generator but found '", generator.device().type(), "'");
      value = c10::IValue(inner_generator(generator));
    } else if (value.isNone() && type->kind() == c10::TypeKind::OptionalType &&
               type->castRaw<c10::OptionalType>()->getElementType()->kind() == c10::TypeKind::GeneratorType) {
      auto& generator = default_generator(call.device->index());
      value = c10::IValue(inner_generator(generator));
    }
  }
  // This one asks for no generator, and takes the CPU's.
  const bool dropout = schema.name() == "aten::native_dropout";
  std::optional<Tensor> kept;
  if (dropout) {
    auto mine = inner_generator(default_generator(call.device->index()));
    auto cpu = at::detail::getDefaultCPUGenerator();
    kept = cpu.get_state();
    cpu.set_state(mine.get_state());
  }
  {
    at::AutoDispatchBelowADInplaceOrView below;
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  }
  if (dropout) {
    auto mine = inner_generator(default_generator(call.device->index()));
    auto cpu = at::detail::getDefaultCPUGenerator();
    mine.set_state(cpu.get_state());
    cpu.set_state(*kept);
  }
  call.settle();
  const size_t returns = schema.returns().size();
  for (size_t i = stack->size() - returns; i < stack->size(); ++i) {
    auto& value = (*stack)[i];
    if (value.isTensor()) {
      value = c10::IValue(call.to_cuda(value.toTensor()));
    } else if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& t : value.toTensorVector()) list.push_back(call.to_cuda(t));
      value = c10::IValue(std::move(list));
    }
  }
}

// ---- native kernels -----------------------------------------------------------------------------

static Device placed(std::optional<Device> device) {
  Device d = device.value_or(Device(DeviceType::CUDA, current_device()));
  return d.index() < 0 ? Device(DeviceType::CUDA, current_device()) : d;
}

static Tensor empty(
    c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
    std::optional<Device> device, std::optional<bool> pin, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  c10::DeviceGuard guard(placed(device));
  return at::detail::empty_generic(
      size, device_allocator(), c10::DispatchKeySet(c10::DispatchKey::CUDA),
      c10::dtype_or_default(dtype), format);
}

static Tensor empty_strided(
    c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout> layout, std::optional<Device> device, std::optional<bool> pin) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  c10::DeviceGuard guard(placed(device));
  return at::detail::empty_strided_generic(
      size, stride, device_allocator(), c10::DispatchKeySet(c10::DispatchKey::CUDA),
      c10::dtype_or_default(dtype));
}

// Between any two devices. What a copy from the host that does not wait reads later, is read now.
static Tensor& copy_(Tensor& self, const Tensor& from, bool non_blocking) {
  if (self.is_same(from)) return self;
  if (counting) {
    std::lock_guard<std::mutex> lock(count_mutex);
    counts[c10::str("copy ", from.device().type(), ">", self.device().type())]++;
  }
  Tensor to = on_cpu(self), source = on_cpu(from);
  at::AutoDispatchBelowADInplaceOrView below;
  if (self.is_same(from)) return self;
  // One memory seen as two tensors: the CPU kernel must know.
  if (self.is_cuda() && from.is_cuda() && self.storage().is_alias_of(from.storage()))
    source = make_tensor_on(to.storage(), false, from.unsafeGetTensorImpl());
  to.copy_(source);
  return self;
}

static c10::Scalar local_scalar(const Tensor& self) {
  at::AutoDispatchBelowADInplaceOrView below;
  return at::_local_scalar_dense(on_cpu(self));
}

static const Tensor& resize_(
    const Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(self.device());
  return at::native::resize_(self, size, format);
}

static Tensor& set_storage_offset(
    Tensor& self, c10::Storage storage, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  c10::DeviceGuard guard(self.device());
  return at::native::set_storage_cpu_(self, storage, offset, size, stride);
}

static Tensor& set_storage(Tensor& self, c10::Storage storage) {
  int64_t n = static_cast<int64_t>(storage.nbytes() / self.dtype().itemsize());
  return set_storage_offset(self, storage, 0, {n}, {});
}

static Tensor& set_nothing(Tensor& self) {
  c10::DeviceGuard guard(self.device());
  c10::Storage none(c10::Storage::use_byte_size_t(), 0, device_allocator()->allocate(0), device_allocator(), true);
  return set_storage_offset(self, none, 0, {0}, {});
}

static void record_stream(Tensor&, c10::Stream) {}

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("resize_", &resize_);
  m.impl("set_", &set_nothing);
  m.impl("set_.source_Storage", &set_storage);
  m.impl("set_.source_Storage_storage_offset", &set_storage_offset);
  m.impl("set_.source_Tensor", &at::native::set_tensor_);
  m.impl("copy_", &copy_);
  m.impl("_local_scalar_dense", &local_scalar);
  m.impl("record_stream", &record_stream);
}

TORCH_LIBRARY_IMPL(_, CUDA, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

void resize_storage(const c10::Storage& storage, size_t n) {
  c10::DeviceGuard guard(storage.device());
  at::native::resize_bytes_cpu(storage.unsafeGetStorageImpl(), n);
}

}  // namespace emu
