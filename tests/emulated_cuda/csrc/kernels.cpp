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
#include <memory>
#include <mutex>
#include <span>
#include <unordered_map>
#include <unordered_set>

#include "late.h"
#include "memory.h"
#include "streams.h"

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
  land_into(cuda);
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
  const char* name;
  explicit Call(const char* op) : name(op) {}

  void meet(Device d) {
    if (!device) device = d;
    TORCH_CHECK(
        *device == d,
        "Expected all tensors to be on the same device, but found at least two devices, ",
        *device, " and ", d, "! (emulated, in ", name, ")");
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

  Tensor to_cuda(const Tensor& t, Launch& launch) {
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
    Tensor made = make_tensor_on(adopted.back().second, true, t.unsafeGetTensorImpl());
    launch.writes(made);
    return made;
  }

  // What the kernel did to sizes and memory of an output, done to the CUDA tensor.
  void settle(Launch& launch) {
    for (auto& seen : tensors) {
      auto* cpu = seen.cpu.unsafeGetTensorImpl();
      auto* cuda = seen.cuda.unsafeGetTensorImpl();
      bool moved = false;
      if (cpu->storage().data() != seen.data || cpu->storage().nbytes() > cuda->storage().nbytes()) {
        auto now = adopt(cpu->storage(), device->index());
        auto* impl = cuda->storage().unsafeGetStorageImpl();
        if (impl->data() != now.data()) {
          size_t bytes = now.nbytes();
          impl->set_data_ptr(std::move(now.unsafeGetStorageImpl()->_mutable_data_ptr_no_checks()));
          impl->set_nbytes(bytes);
          moved = true;
        }
      }
      if (cpu->sizes() != cuda->sizes() || cpu->strides() != cuda->strides() ||
          cpu->storage_offset() != cuda->storage_offset())
        cuda->set_sizes_and_strides(cpu->sizes(), cpu->strides(), cpu->storage_offset());
      if (moved) launch.writes(seen.cuda);
    }
  }
};

// ---- what CUDA refuses --------------------------------------------------------------------------

static void refuse(bool is, const std::string& message) {
  TORCH_CHECK(!is, message, " (emulated CUDA)");
}

using Arguments = std::span<const c10::IValue>;

static void check_matmul(Arguments args) {
  for (auto& v : args)
    if (v.isTensor() && v.toTensor().defined())
      refuse(
          at::isIntegralType(v.toTensor().scalar_type(), true),
          c10::str("\"addmm_cuda\" not implemented for '", v.toTensor().scalar_type(), "'"));
}

static void check_wide_mm(Arguments args) {
  for (auto& v : args.first(2))
    refuse(
        !at::isReducedFloatingType(v.toTensor().scalar_type()) ||
            args[2].toScalarType() != at::kFloat,
        "out_dtype must be the same as input dtype or fp32 for fp16/bf16 inputs");
}

static void check_int_mm(Arguments args) {
  const Tensor& a = args[0].toTensor();
  const Tensor& b = args[1].toTensor();
  refuse(a.size(0) <= 16, c10::str("self.size(0) needs to be greater than 16, but got ", a.size(0)));
  auto check = [](const char* what, int64_t n) {
    refuse(n == 0 || n % 8, c10::str(what, " needs to be greater than 0 and a multiple of 8, but got ", n));
  };
  check("self.size(1)", a.size(1));
  check("mat2.size(1)", b.size(1));
}

static void check_scaled_mm(Arguments args) {
  const Tensor &a = args[0].toTensor(), &b = args[1].toTensor();
  const Tensor &scale_a = args[2].toTensor(), &scale_b = args[3].toTensor();
  refuse(a.stride(1) != 1 || b.stride(0) != 1, "_scaled_mm: mat1 must be row-major, mat2 column-major");
  refuse(a.size(1) % 16, c10::str("Expected trailing dimension of mat1 to be divisible by 16 but got mat1 shape: ", a.sizes()));
  refuse(b.size(0) % 16 || b.size(1) % 16, c10::str("mat2 shape ", b.sizes(), " must be divisible by 16"));
  refuse(
      scale_a.scalar_type() != at::kFloat || scale_b.scalar_type() != at::kFloat,
      "Both scale_a and scale_b must be float (fp32) tensors.");
  const bool by_row = scale_a.dim() == 2 && scale_b.dim() == 2 && scale_a.numel() == a.size(0) &&
      scale_b.numel() == b.size(1) && (scale_a.numel() > 1 || scale_b.numel() > 1);
  refuse(!by_row && (scale_a.numel() != 1 || scale_b.numel() != 1), "Invalid scaling configuration.");
  if (!by_row) return;
  refuse(!scale_a.is_contiguous() || !scale_b.is_contiguous(), "Both scale_a and scale_b must be contiguous.");
  if (args.size() > 6 && args[6].isInt())
    refuse(
        static_cast<c10::ScalarType>(args[6].toInt()) != at::kBFloat16,
        "Only bf16 high precision output types are supported for row-wise scaling.");
}

using Names = std::unordered_set<std::string>;

static const Names kMatmuls = {
    "aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm", "aten::addmv", "aten::dot", "aten::mv",
    "aten::addbmm", "aten::_addmm_activation"};
// Kernels that read all their tensors on the device; elsewhere a CPU tensor of no dimension is a
// number that the host passes along.
static const Names kNoHostNumbers = {
    "aten::gather", "aten::scatter", "aten::scatter_", "aten::scatter_add", "aten::scatter_add_",
    "aten::scatter_reduce", "aten::index_select", "aten::index_add", "aten::index_add_",
    "aten::index_copy", "aten::index_copy_", "aten::embedding", "aten::take", "aten::cat",
    "aten::nll_loss_forward", "aten::searchsorted", "aten::bucketize", "aten::_fused_adam_",
    "aten::_fused_adamw_", "aten::_fused_sgd_"};
// Kernels whose results are as large as the data says: the host waits for the size.
static const Names kWaitForSize = {
    "aten::nonzero", "aten::masked_select", "aten::_unique", "aten::_unique2", "aten::unique_dim",
    "aten::unique_consecutive", "aten::unique_dim_consecutive", "aten::equal", "aten::bincount",
    "aten::linalg_eig", "aten::linalg_eigvals", "aten::linalg_lstsq", "aten::_ctc_loss"};
static const Names kIndexing = {
    "aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_",
    "aten::_unsafe_index", "aten::_unsafe_index_put"};

// ---- what is known of an operator ---------------------------------------------------------------

enum class Touch { none, read, write };  // none: a view is made, and no byte is touched

struct Operator {
  const char* name;
  size_t arity, returns;
  bool on_cpu;  // the CPU has a kernel of it
  std::vector<Touch> touches;
  std::vector<bool> generators;  // arguments that are one, perhaps none
  void (*check)(Arguments) = nullptr;
  bool host_numbers = true, waits = false, indexing = false, puts = false, dropout = false, multinomial = false,
       repeats = false, packs = false;
};

static Operator look_at(const c10::OperatorHandle& op) {
  using Key = c10::DispatchKey;
  const auto& schema = op.schema();
  const std::string& name = schema.name();
  Operator known{name.c_str(), schema.arguments().size(), schema.returns().size()};
  known.on_cpu = op.hasKernelForDispatchKey(Key::CPU) ||
      op.hasKernelForDispatchKey(Key::CompositeExplicitAutograd) ||
      op.hasKernelForDispatchKey(Key::CompositeExplicitAutogradNonFunctional);
  for (auto& arg : schema.arguments()) {
    auto* alias = arg.alias_info();
    known.touches.push_back(!alias ? Touch::read : alias->isWrite() ? Touch::write : Touch::none);
    auto& type = arg.type();
    known.generators.push_back(
        type->kind() == c10::TypeKind::OptionalType &&
        type->castRaw<c10::OptionalType>()->getElementType()->kind() == c10::TypeKind::GeneratorType);
  }
  if (name == "aten::is_set_to") known.touches.assign(known.arity, Touch::none);
  if (kMatmuls.count(name)) known.check = &check_matmul;
  if (name == "aten::mm" && schema.overload_name() == "dtype") known.check = &check_wide_mm;
  if (name == "aten::_int_mm") known.check = &check_int_mm;
  if (name == "aten::_scaled_mm") known.check = &check_scaled_mm;
  known.host_numbers = !kNoHostNumbers.count(name);
  known.waits = kWaitForSize.count(name) > 0;
  known.indexing = kIndexing.count(name) > 0;
  known.puts = known.indexing && name != "aten::index";  // index: torch itself turns masks into positions
  known.dropout = name == "aten::native_dropout";
  known.multinomial = name == "aten::multinomial";
  known.repeats = name == "aten::repeat_interleave";
  known.packs = name == "aten::_pack_padded_sequence" || name == "aten::_pad_packed_sequence";
  return known;
}

static const Operator& known_of(const c10::OperatorHandle& op) {
  static thread_local std::unordered_map<const void*, std::unique_ptr<Operator>> all;
  auto& found = all[&op.schema()];
  if (!found) found = std::make_unique<Operator>(look_at(op));
  return *found;
}

// ---- the fallback -------------------------------------------------------------------------------

// The one device of all tensors, before anything is done to any of them.
static void find_device(Call& call, Arguments args) {
  for (auto& value : args) {
    if (value.isTensor()) {
      const Tensor& t = value.toTensor();
      if (t.defined() && t.is_cuda()) call.meet(t.device());
    } else if (value.isTensorList()) {
      for (const Tensor& t : value.toTensorList())
        if (t.defined() && t.is_cuda()) call.meet(t.device());
    } else if (value.isDevice() && value.toDevice().is_cuda()) {
      Device d = value.toDevice();
      if (d.index() < 0) d = Device(DeviceType::CUDA, static_cast<DeviceIndex>(current_device()));
      check_device(d.index());
      call.meet(d);
    }
  }
}

// A tensor that is not on the device: a number, or indices, or a mistake.
static void meet_stranger(Call& call, const Operator& known, const Tensor& t, Touch touch) {
  if (!t.defined() || t.is_cuda()) return;
  if (t.device().is_cpu() && touch != Touch::write && known.host_numbers && t.dim() == 0) return;
  if (t.device().is_cpu() && known.packs && t.scalar_type() == at::kLong) return;
  call.meet(t.device());
}

static void arguments_to_cpu(
    Call& call, const Operator& known, Launch& launch, std::span<c10::IValue> args) {
  auto one = [&](const Tensor& t, Touch touch) {
    meet_stranger(call, known, t, touch);
    if (touch == Touch::read) launch.reads(t);
    if (touch == Touch::write) launch.writes(t);
    return call.to_cpu(t);
  };
  for (size_t i = 0; i < known.arity; ++i) {
    auto& value = args[i];
    const Touch touch = known.touches[i];
    if (value.isTensor()) {
      value = c10::IValue(one(value.toTensor(), touch));
    } else if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& t : value.toTensorVector()) list.push_back(one(t, touch));
      value = c10::IValue(std::move(list));
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> list;
      for (const std::optional<Tensor>& t : value.toOptionalTensorVector()) {
        const bool host_indices = t && t->defined() && known.indexing && t->is_cpu();
        if (!t || host_indices) {
          list.push_back(t);
        } else {
          list.push_back(one(*t, touch));
        }
      }
      value = c10::IValue(std::move(list));
    } else if (value.isDevice() && value.toDevice().is_cuda()) {
      value = c10::IValue(Device(DeviceType::CPU));
    }
  }
}

static void generators_to_cpu(
    const Call& call, const Operator& known, std::span<c10::IValue> args) {
  for (size_t i = 0; i < known.arity; ++i) {
    auto& value = args[i];
    if (value.isGenerator()) {
      auto generator = value.toGenerator();
      TORCH_CHECK(
          generator.device() == *call.device || generator.device() == Device(DeviceType::CUDA),
          "Expected a 'cuda' device type for generator but found '", generator.device().type(), "'");
      value = c10::IValue(inner_generator(generator));
    } else if (known.generators[i] && value.isNone()) {
      value = c10::IValue(inner_generator(default_generator(call.device->index())));
    }
  }
}

// Why the host would wait for the device here, or null.
static const char* why_it_waits(const Operator& known, Arguments args) {
  if (known.waits) return known.name;
  if (known.multinomial && (args[1].toInt() == 1 || !args[2].toBool())) return known.name;
  if (known.repeats && args.size() == 2 && args[1].isNone()) return known.name;
  if (!known.puts) return nullptr;
  bool masked = false, hosted = false;
  const auto indices = args[1].toOptionalTensorVector();
  for (const std::optional<Tensor>& t : indices) {
    if (!t || !t->defined()) continue;
    masked |= t->scalar_type() == at::kBool || t->scalar_type() == at::kByte;
    hosted |= t->is_cpu();
  }
  // self[mask] = number fills, and needs no positions.
  if (masked && indices.size() == 1 && args.size() > 3 && args[2].isTensor()) {
    const Tensor& to = args[2].toTensor();
    if (to.numel() == 1 && to.is_cpu() && !args[3].toBool()) masked = false;
  }
  // By the names of what torch would run for it.
  if (hosted) return "aten::copy_ to the device";
  return masked ? "aten::nonzero" : nullptr;
}

// The CPU's dropout asks for no generator and takes the default one.
class BorrowedGenerator {
 public:
  BorrowedGenerator(bool borrow, int device) : borrow_(borrow) {
    if (!borrow_) return;
    mine_ = inner_generator(default_generator(device));
    cpu_ = at::detail::getDefaultCPUGenerator();
    kept_ = cpu_.get_state();
    cpu_.set_state(mine_.get_state());
  }
  ~BorrowedGenerator() {
    if (!borrow_) return;
    mine_.set_state(cpu_.get_state());
    cpu_.set_state(kept_);
  }

 private:
  bool borrow_;
  at::Generator mine_, cpu_;
  Tensor kept_;
};

static void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const Operator& known = known_of(op);
  TORCH_CHECK(
      known.on_cpu, "emulated CUDA: no CPU kernel for ", c10::toString(op.operator_name()));
  Call call(known.name);
  std::span<c10::IValue> args(
      stack->data() + stack->size() - known.arity, known.arity);
  find_device(call, args);
  if (!call.device)
    call.device = Device(DeviceType::CUDA, static_cast<DeviceIndex>(current_device()));
  const char* waits = why_it_waits(known, args);
  const int stream = current_stream(call.device->index());
  Launch launch(stream, known.name);
  arguments_to_cpu(call, known, launch, args);
  if (known.check) known.check(args);
  generators_to_cpu(call, known, args);
  {
    BorrowedGenerator borrowed(known.dropout, call.device->index());
    at::AutoDispatchBelowADInplaceOrView below;
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  }
  call.settle(launch);
  for (size_t i = stack->size() - known.returns; i < stack->size(); ++i) {
    auto& value = (*stack)[i];
    if (value.isTensor()) {
      value = c10::IValue(call.to_cuda(value.toTensor(), launch));
    } else if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& t : value.toTensorVector()) list.push_back(call.to_cuda(t, launch));
      value = c10::IValue(std::move(list));
    }
  }
  if (waits) host_wait(record_clock(stream), waits);
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

// On the stream of the source's device, as torch does; another device's stream comes before and after.
static void copy_on_devices(Tensor& self, const Tensor& from) {
  const int stream = current_stream(from.device().index());
  const int other = current_stream(self.device().index());
  if (other != stream) wait_clock(stream, record_clock(other));
  Launch launch(stream, "aten::copy_");
  launch.reads(from);
  launch.writes(self);
  Tensor to = on_cpu(self), source = on_cpu(from);
  // One memory seen as two tensors: the CPU kernel must know.
  if (self.storage().is_alias_of(from.storage()))
    source = make_tensor_on(to.storage(), false, from.unsafeGetTensorImpl());
  at::AutoDispatchBelowADInplaceOrView below;
  to.copy_(source);
  if (other != stream) wait_clock(other, record_clock(stream));
}

// Whether CUDA does such a copy without the host, in one piece.
static bool is_late(const Tensor& host, const Tensor& device, bool non_blocking) {
  return non_blocking && host.numel() && host.dtype() == device.dtype() && host.is_contiguous() &&
      host.sizes() == device.sizes() && is_pinned(host.const_data_ptr());
}

static void copy_to_host(Tensor& self, const Tensor& from, bool non_blocking) {
  const bool late = is_late(self, from, non_blocking);
  const int stream = current_stream(from.device().index());
  Launch launch(stream, "aten::copy_");
  launch.reads(from);
  order_host_memory(self, true, stream, launch.time());
  at::AutoDispatchBelowADInplaceOrView below;
  if (late) {
    Tensor snapshot = on_cpu(from).clone(at::MemoryFormat::Contiguous);
    return copy_late_to_host(self, std::move(snapshot), stream, launch.time());
  }
  self.copy_(on_cpu(from));
  host_wait(record_clock(stream), "aten::copy_ from the device");
}

static void copy_to_device(Tensor& self, const Tensor& from, bool non_blocking) {
  const bool late = is_late(from, self, non_blocking) && self.is_contiguous();
  const int stream = current_stream(self.device().index());
  Launch launch(stream, "aten::copy_");
  launch.writes(self);
  order_host_memory(from, false, stream, launch.time());
  if (late) return copy_late_to_device(self, from, stream, launch.time());
  at::AutoDispatchBelowADInplaceOrView below;
  on_cpu(self).copy_(from);
  if (!non_blocking) host_wait(record_clock(stream), "aten::copy_ to the device");
}

static Tensor& copy_(Tensor& self, const Tensor& from, bool non_blocking) {
  if (self.is_same(from)) return self;
  if (self.is_cuda() && from.is_cuda()) {
    copy_on_devices(self, from);
  } else if (self.is_cuda()) {
    copy_to_device(self, from, non_blocking);
  } else {
    copy_to_host(self, from, non_blocking);
  }
  return self;
}

static c10::Scalar local_scalar(const Tensor& self) {
  const int stream = current_stream(self.device().index());
  Launch(stream, "aten::_local_scalar_dense").reads(self);
  at::AutoDispatchBelowADInplaceOrView below;
  auto value = at::_local_scalar_dense(on_cpu(self));
  host_wait(record_clock(stream), "aten::_local_scalar_dense");
  return value;
}

static const Tensor& resize_(
    const Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(self.device());
  land_into(self);
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
  c10::Storage none(
      c10::Storage::use_byte_size_t(), 0, device_allocator()->allocate(0), device_allocator(), true);
  return set_storage_offset(self, none, 0, {0}, {});
}

static void record_stream(Tensor& self, c10::Stream stream) {
  record_use(
      self.storage().unsafeGetStorageImpl()->data_ptr(),
      stream_number(stream.device_index(), stream.id()));
}

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

// torch has this one for GPUs alone.
static Tensor wide_mm(const Tensor& a, const Tensor& b, at::ScalarType dtype) {
  return at::mm(a.to(dtype), b.to(dtype));
}

TORCH_LIBRARY_IMPL(aten, CPU, m) {
  m.impl("mm.dtype", &wide_mm);
}

TORCH_LIBRARY_IMPL(_, CUDA, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

void resize_storage(const c10::Storage& storage, size_t n) {
  c10::DeviceGuard guard(storage.device());
  at::native::resize_bytes_cpu(storage.unsafeGetStorageImpl(), n);
}

}  // namespace emu
