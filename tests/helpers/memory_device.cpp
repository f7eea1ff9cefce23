// A device of PyTorch whose memory is the CPU's: each operation is the CPU's, on copies, and refuses
// tensors that are not all on the device. So a test finds those that were left behind, without a GPU.
// Beyond `limit` bytes an allocation fails as a GPU's does.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/native_batch_norm.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>
#include <torch/library.h>

#include <atomic>
#include <limits>

namespace {

constexpr auto TYPE = c10::DeviceType::PrivateUse1;
std::atomic<int64_t> held{0};
std::atomic<int64_t> limit{std::numeric_limits<int64_t>::max()};

struct Block {
  void* data;
  int64_t nbytes;
};

void release(void* context) {
  auto* block = static_cast<Block*>(context);
  held -= block->nbytes;
  c10::free_cpu(block->data);
  delete block;
}

struct BoundedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    TORCH_CHECK_WITH(OutOfMemoryError, held + int64_t(nbytes) <= limit, "out of memory: ", nbytes, " bytes");
    held += nbytes;
    auto* block = new Block{c10::alloc_cpu(nbytes), int64_t(nbytes)};
    return {block->data, block, &release, c10::Device(TYPE, 0)};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return nullptr;
  }
  void copy_data(void* to, const void* from, std::size_t count) const override {
    default_copy_data(to, from, count);
  }
};

BoundedAllocator allocator;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = TYPE;
  c10::DeviceType type() const override { return TYPE; }
  c10::Device exchangeDevice(c10::Device) const override { return getDevice(); }
  c10::Device getDevice() const override { return {TYPE, 0}; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream getDefaultStream(c10::Device device) const override { return getStream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::Device getDeviceFromPtr(void*) const override { return {TYPE, 0}; }
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    return at::make_generator<at::CPUGeneratorImpl>();
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
};

at::Tensor empty(
    c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(
      size, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(
      size, stride, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

// The same memory as a tensor of the CPU.
at::Tensor here(const at::Tensor& tensor) {
  if (tensor.device().type() != TYPE) {
    return tensor;
  }
  return at::from_blob(
      tensor.data_ptr(), tensor.sizes(), tensor.strides(), tensor.options().device(c10::kCPU));
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool) {
  at::NoGradGuard constant;
  here(to).copy_(here(from));
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar local_scalar(const at::Tensor& tensor) {
  return here(tensor).item();
}

// Like a GPU's kernels: numbers may be the host's.
void check(const at::Tensor& tensor, const std::string& operation) {
  TORCH_CHECK(
      !tensor.defined() || tensor.device().type() == TYPE || tensor.dim() == 0,
      "a tensor of ", operation, " was left on ", tensor.device(), ": ", tensor.sizes());
}

at::Tensor convolution(
    const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
    c10::SymIntArrayRef stride, c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation, bool transposed,
    c10::SymIntArrayRef output_padding, c10::SymInt groups) {
  check(input, "convolution");
  check(weight, "convolution");
  std::optional<at::Tensor> bias_here;
  if (bias && bias->defined()) {
    check(*bias, "convolution");
    bias_here = here(*bias);
  }
  return at::convolution_symint(
             here(input), here(weight), bias_here, stride, padding, dilation, transposed, output_padding, groups)
      .to(input.device());
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& grad, const at::Tensor& input, const at::Tensor& weight, c10::SymIntArrayRef stride,
    c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation, bool transposed, c10::SymIntArrayRef output_padding,
    c10::SymInt groups, std::array<bool, 3> mask) {
  for (const auto* tensor : {&grad, &input, &weight}) {
    check(*tensor, "convolution_backward");
  }
  const auto channels = c10::SymInt(grad.size(1));
  auto [of_input, of_weight, of_bias] = at::convolution_backward_symint(
      here(grad), here(input), here(weight), c10::SymIntArrayRef(&channels, 1), stride, padding, dilation, transposed,
      output_padding, groups, mask);
  const auto there = [&](const at::Tensor& tensor) {
    return tensor.defined() ? tensor.to(grad.device()) : tensor;
  };
  return {there(of_input), there(of_weight), there(of_bias)};
}

// The fallback would lose the running statistics, as the operation's schema does not name them.
std::tuple<at::Tensor, at::Tensor, at::Tensor> batch_norm(
    const at::Tensor& input, const std::optional<at::Tensor>& weight, const std::optional<at::Tensor>& bias,
    const std::optional<at::Tensor>& mean, const std::optional<at::Tensor>& variance, bool training, double momentum,
    double epsilon) {
  const auto given = [](const std::optional<at::Tensor>& tensor) -> std::optional<at::Tensor> {
    if (!tensor || !tensor->defined()) {
      return std::nullopt;
    }
    check(*tensor, "batch_norm");
    return here(*tensor);
  };
  check(input, "batch_norm");
  auto [output, found_mean, found_variance] = at::native_batch_norm(
      here(input), given(weight), given(bias), given(mean), given(variance), training, momentum, epsilon);
  return {output.to(input.device()), found_mean.to(input.device()), found_variance.to(input.device())};
}

// Whose operands may be on the host, as on a GPU: https://pytorch.org/docs/stable/notes/cuda.html
bool takes_both(const c10::OperatorHandle& op) {
  const auto& name = op.operator_name().name;
  return name == "aten::index.Tensor" || name == "aten::index" || name == "aten::index_put_" ||
      name == "aten::_index_put_impl_" || name == "aten::copy_" || name == "aten::_foreach_copy_";
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  if (!takes_both(op)) {
    for (const auto& value : torch::jit::last(*stack, op.schema().arguments().size())) {
      if (value.isTensor()) {
        check(value.toTensor(), c10::toString(op.operator_name()));
      } else if (value.isTensorList()) {
        for (const auto& tensor : value.toTensorVector()) {
          check(tensor, c10::toString(op.operator_name()));
        }
      }
    }
  }
  at::native::cpu_fallback(op, stack);
}

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

} // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar);
  m.impl("convolution_overrideable", &convolution);
  m.impl("convolution_backward_overrideable", &convolution_backward);
  m.impl("native_batch_norm", &batch_norm);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("resize_", at::native::resize_);
  m.impl("set_.source_Tensor", at::native::set_tensor_);
  m.impl("set_.source_Storage_storage_offset", at::native::set_storage_cpu_);
  m.impl("set_.source_Storage", at::native::set_);
}

// Registers what no macro does, before any tensor is on the device.
extern "C" void memory_device_begin() {
  c10::SetAllocator(TYPE, &allocator);
  at::RegisterPrivateUse1HooksInterface(new Hooks());
}

extern "C" int64_t memory_device_held() {
  return held;
}

extern "C" void memory_device_limit(int64_t bytes) {
  limit = bytes;
}
