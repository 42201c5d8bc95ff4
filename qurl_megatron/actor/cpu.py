"""Make the real Megatron-Core run without CUDA; the only module that knows.

Megatron-Core is written for GPUs, but few of the parts used here need one: it asks for "the
current device", spells ``device="cuda"`` in a few places, and tells parameters apart by the string
``torch.cuda.FloatTensor``. ``install`` answers these questions for a machine whose device is
the CPU.

Not called when training on GPUs. Each piece names who needs it.
"""

import contextlib
import functools
import importlib
import re
import types
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

CPU = torch.device("cpu")
_current = CPU

# Modules on our paths that spell device="cuda" in a tensor factory, or pin its memory; and the
# tensors they make there.
_SPELL_CUDA = (
    "megatron.core.pipeline_parallel.schedules",  # the running token count
    "megatron.core.optimizer.optimizer",  # overflow flag and loss scale
    "megatron.core.optimizer.clip_grads",  # overflow flag and norms
    "megatron.core.utils",  # local gradient norms
    "megatron.core.dist_checkpointing.exchange_utils",  # receive buffers between data ranks
    "megatron.core.models.common.embeddings.rope_utils",  # which positions a context rank has
)
_FACTORIES = ("tensor", "zeros", "empty", "empty_like")


@functools.cache
def install() -> None:
    """Make ``megatron.core`` run on the CPU; call before any of it is used, again at no cost.

    GPUs that torch sees, and the ranks do not use, are hidden in this process from then on.
    """
    if torch.cuda.is_available():
        # Megatron, and we, choose devices and kernels by these two.
        torch.cuda.is_available = lambda: False
        torch.cuda.device_count = lambda: 0
    # Every communication buffer: "the current device" is where tensors live.
    torch.cuda.current_device = lambda: _current
    # The schedules and the checkpoint writer wait for kernels that here have already finished.
    torch.cuda.synchronize = lambda *_, **__: None
    # Gradient reduction asks for the stream (0.19), and uses it where CUDA graphs ran.
    torch.cuda.current_stream = lambda *_, **__: None
    # The dispatcher of tokens to experts copies their counts to the host on one of its own.
    torch.cuda.Stream = _NoStream
    torch.cuda.stream = lambda stream: stream
    # Gradient clipping and checkpoint loading move tensors "to the GPU".
    torch.Tensor.cuda = lambda self, *_, **__: self

    _leave_compiler_out()
    _use_cpu_generator()
    _exchange_parts()
    _give_counts_as_numbers()
    for name in _SPELL_CUDA:
        module = importlib.import_module(name)
        module.torch = _TorchWithoutCuda()
    # Experts that another rank reads for its neighbours arrive in memory that is made so.
    mapping = importlib.import_module("megatron.core.dist_checkpointing.mapping")
    mapping.ShardedTensor.init_data.__defaults__ = (_on_cpu(torch.empty),)
    _answer_cuda_type_names()


@contextlib.contextmanager
def current_device(device: torch.device) -> Iterator[None]:
    """Inside, Megatron's buffers and optimizer states go to ``device``: cpu, or meta."""
    global _current
    _current = device
    try:
        yield
    finally:
        _current = CPU


def _leave_compiler_out() -> None:
    """Keep Adam as it is: torch wraps its methods to keep torch.compile away from them, and imports
    all of the compiler for that, 1.4 s on each rank, although nothing is compiled."""
    base, adam = torch.optim.Optimizer, torch.optim.Adam
    for name in ("add_param_group", "load_state_dict", "state_dict", "zero_grad"):
        method = getattr(base, name)
        setattr(base, name, getattr(method, "__wrapped__", method))
    if not getattr(adam.step, "hooked", False):  # else one has been made, and the compiler is here
        adam.step = torch.no_grad()(getattr(adam.step, "__wrapped__", adam.step))


def _use_cpu_generator() -> None:
    """Make the model-parallel random state a state of torch's one CPU generator."""
    random = importlib.import_module("megatron.core.tensor_parallel.random")
    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    torch.cuda.get_rng_state = lambda *_: torch.get_rng_state()
    torch.cuda.manual_seed = torch.manual_seed


def _exchange_parts() -> None:
    """Have tensor-parallel ranks send each other only the parts that the receiver needs.

    Gloo's own reduce-scatter is an all-reduce, and its all-gather takes twice as long as this one:
    a training step of the quickstart became an eighth shorter.
    """
    for name in ("layers", "mappings"):
        module = importlib.import_module(f"megatron.core.tensor_parallel.{name}")
        module.dist_all_gather_func = _all_gather
        module.dist_reduce_scatter_func = _reduce_scatter


def _all_gather(
    output: torch.Tensor, input: torch.Tensor, *, group: dist.ProcessGroup, async_op: bool = False
) -> dist.Work | None:
    copies = input.expand(group.size(), *input.shape).flatten(0, 1)
    return dist.all_to_all_single(output, copies, group=group, async_op=async_op)


def _reduce_scatter(
    output: torch.Tensor, input: torch.Tensor, *, group: dist.ProcessGroup, async_op: bool = False
) -> torch.futures.Future:
    """Done when it returns, whatever ``async_op`` is: products meanwhile would share the cores."""
    parts = torch.empty_like(input)
    dist.all_to_all_single(parts, input, group=group)
    torch.sum(parts.view(-1, *output.shape), 0, out=output)
    future: torch.futures.Future[None] = torch.futures.Future()
    future.set_result(None)
    return future


class _NoStream:
    """A stream on which everything is done already."""

    def wait_stream(self, _: object) -> None: ...

    def record_event(self) -> "_NoStream":
        return self

    def synchronize(self) -> None: ...

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def _give_counts_as_numbers() -> None:
    """Have the dispatcher turn its counts of tokens into numbers, as it does for those from a GPU;
    an exchange takes nothing else."""
    dispatcher = importlib.import_module("megatron.core.transformer.moe.token_dispatcher")
    dispatcher.maybe_move_tensor_to_cpu = lambda counts, as_numpy=False, **_: (
        counts.numpy() if as_numpy and torch.is_tensor(counts) else counts
    )


class _TorchWithoutCuda(types.ModuleType):
    """``torch`` as one Megatron module sees it: factories put "cuda" tensors on the CPU.

    Pinned memory is for copies to a GPU; without one, torch refuses to pin any.
    """

    def __init__(self) -> None:
        super().__init__("torch")
        for name in _FACTORIES:
            setattr(self, name, _on_cpu(getattr(torch, name)))

    def __getattr__(self, name: str):
        return getattr(torch, name)


def _on_cpu(factory: Callable) -> Callable:
    @functools.wraps(factory)
    def make(*args, **kwargs):
        if kwargs.get("device") == "cuda":
            kwargs["device"] = CPU
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return make


def _answer_cuda_type_names() -> None:
    """Answer CUDA type names: optimizers sort parameters by ``tensor.type()``, by these alone."""
    optimizer = importlib.import_module("megatron.core.optimizer.optimizer")
    distributed = importlib.import_module("megatron.core.optimizer.distrib_optimizer")
    clip_grads = importlib.import_module("megatron.core.optimizer.clip_grads")
    for cls in (optimizer.Float16OptimizerWithFloat16Params, distributed.DistributedOptimizer):
        cls.__init__ = _cuda_type_names()(cls.__init__)
    clip = _cuda_type_names()(clip_grads.clip_grad_by_total_norm_fp32)
    clip_grads.clip_grad_by_total_norm_fp32 = optimizer.clip_grad_by_total_norm_fp32 = clip


@contextlib.contextmanager
def _cuda_type_names() -> Iterator[None]:
    plain = torch.Tensor.type

    def named(self, *args, **kwargs):
        answer = plain(self, *args, **kwargs)
        return (
            re.sub("^torch.(meta.)?", "torch.cuda.", answer) if isinstance(answer, str) else answer
        )

    torch.Tensor.type = named
    try:
        yield
    finally:
        torch.Tensor.type = plain
