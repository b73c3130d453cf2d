"""Values for the phantom device: what a kernel that does nothing should have written, computed by torch's CPU kernels.

Device memory of the phantom is host memory, so a CPU tensor can lie over every CUDA tensor. A dispatch mode lets each
operation run on CUDA first, for its allocations, streams and choices, and then queues the same operation on CPU tensors
over the same memory, on the stream where its kernels are. It is computed when that stream has come to it
(PHANTOM_ORDER), as copies are: a missing wait, a use after free or a reuse across streams shows up as wrong numbers.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_flatten, tree_map

from phantom.laid_over import laid_over
from phantom.own_values import OWN_VALUES
from phantom.queued import failures, finish, queue

__all__ = ["failures", "install", "keep", "prepare"]

aten = torch.ops.aten
RANDOM = ("native_dropout", "bernoulli", "normal", "uniform", "random", "rand", "multinomial", "exponential")
"""Beginnings of the names of operations that draw from a generator."""
# Values decide about the shape of their results, or their result is a number: the CPU's comes first.
ASKED_FIRST = {
    aten.nonzero.default,
    aten.masked_select.default,
    aten._unique2.default,
    aten.unique_dim.default,
    aten.unique_consecutive.default,
    aten.bincount.default,
    aten.repeat_interleave.Tensor,
    aten.equal.default,
}
WITHOUT_VALUES = (
    *("empty", "new_empty", "resize_", "set_", "record_stream", "detach", "alias", "lift_fresh", "_pin_memory"),
    *("is_pinned", "_resize", "sym_", "_efficientzerotensor", "_local_scalar_dense", "_record_function"),
)
"""Beginnings of the names of operations that write nothing, or read by a copy of the runtime's."""
COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
"""Namespaces whose operations are the communication library's, which moves the bytes itself."""


class Numerics(TorchDispatchMode):
    """Lets every operation with a CUDA tensor run on CUDA for its allocations, and queues its values."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        leaves = tree_flatten((args, kwargs))[0]
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if _is_without_memory(tensors):
            return func(*args, **kwargs)
        if any(_has_own_dispatch(tensor) for tensor in tensors):
            return NotImplemented  # its own dispatch comes first, and what it does is seen here then
        if _is_asked_first(func, args) and any(tensor.is_cuda for tensor in tensors):
            return _asked_first(func, args, kwargs, tensors)
        seed = _seed(func, leaves)
        out = func(*args, **kwargs)
        outs = tree_flatten(out)[0]
        device = _device_of(outs, tensors)
        if device is not None and not _writes_nothing(func) and not _is_plain_copy(func, args, out):
            _queue_values(func, args, kwargs, outs, tensors, seed, device)
        return out


def _has_own_dispatch(tensor: Tensor) -> bool:
    return is_traceable_wrapper_subclass(tensor) or type(tensor).__torch_dispatch__ != Tensor.__torch_dispatch__


def _is_without_memory(tensors: Sequence[Tensor]) -> bool:
    if any(isinstance(tensor, FakeTensor | FunctionalTensor) or tensor.is_meta for tensor in tensors):
        return True
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def _name(func: Any) -> str:
    return str(func.name()).removeprefix("aten::")


def _writes_nothing(func: Any) -> bool:
    return func.is_view or func.namespace in COLLECTIVES or _name(func).startswith(WITHOUT_VALUES)


def _device_of(outs: Sequence[Any], tensors: Sequence[Tensor]) -> torch.device | None:
    """Returns where an operation ran: on the device of what it wrote, or else of what it read; None: not on CUDA."""
    for each in (*outs, *tensors):
        if isinstance(each, Tensor) and each.is_cuda:
            return each.device
    return None


def _is_asked_first(func: Any, args: tuple[Any, ...]) -> bool:
    if func in ASKED_FIRST:
        return True
    if func is not aten.index.Tensor:
        return False
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])


def _asked_first(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: Sequence[Tensor]) -> Any:
    """Returns an operation's results as the CPU has them, brought to the device."""
    device = next(tensor.device for tensor in tensors if tensor.is_cuda)
    for each in {tensor.device for tensor in tensors if tensor.is_cuda}:
        finish(each)
    found = _computed(func, tree_map(_on_host, args), tree_map(_on_host, kwargs))
    return tree_map(lambda value: value.to(device) if isinstance(value, Tensor) else value, found)


def _is_plain_copy(func: Any, args: tuple[Any, ...], out: Any) -> bool:
    """Returns whether an operation is a copy of whole memory between two devices, which is the runtime's."""
    if func is aten.copy_.default:
        to, source = args[0], args[1]
    elif func is aten._to_copy.default:
        to, source = out, args[0]
    else:
        return False
    if to.device == source.device or to.dtype != source.dtype or to.shape != source.shape:
        return False
    return bool(to.is_contiguous() and source.is_contiguous() and not to.is_neg() and not source.is_neg())


def _seed(func: Any, leaves: Sequence[Any]) -> int:
    """Returns a number for the place in the sequence of an operation's generator; 0: it draws nothing."""
    if not _name(func).startswith(RANDOM) and func not in OWN_VALUES:
        return 0
    generators = [leaf for leaf in leaves if isinstance(leaf, torch.Generator) and leaf.device.type == "cuda"]
    if not generators:
        if not torch.cuda.is_initialized():
            return 0
        device = _device_of((), [leaf for leaf in leaves if isinstance(leaf, Tensor)])
        index = torch.cuda.current_device() if device is None else device.index
        generators = [torch.cuda.default_generators[index]]
    return (generators[0].initial_seed() * 1000003 + generators[0].get_offset() + 1) % (1 << 62)


def _on_host(value: Any) -> Any:
    """Returns an argument for the CPU: a tensor laid over the same memory, or a copy of what is read at the launch."""
    if isinstance(value, Tensor):
        if value.is_cuda or (value.device.type == "cpu" and value.is_pinned()):
            return laid_over(value)
        return value.clone() if value.ndim == 0 else value
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("cpu")
    return None if isinstance(value, torch.Generator) else value


def _queue_values(
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    outs: Sequence[Any],
    tensors: Sequence[Tensor],
    seed: int,
    device: torch.device,
) -> None:
    written = {id(tensor) for tensor in tensors}
    host_args, host_kwargs = tree_map(_on_host, args), tree_map(_on_host, kwargs)
    targets = [
        # Of a tensor on the host its memory is written and not itself: autograd counts what changes it.
        (laid_over(each) if each.is_cuda or each.is_pinned() else each.data)
        if isinstance(each, Tensor) and id(each) not in written
        else None
        for each in outs
    ]
    # What is written in place is a tensor of the arguments: the operation on the CPU writes it likewise.
    own = OWN_VALUES.get(func)
    for each in outs if own is not None else ():
        # The seed of an attention's dropout lies on the host, and is read when its backward is launched.
        if isinstance(each, Tensor) and each.ndim == 0 and each.dtype == torch.int64 and each.device.type == "cpu":
            each.data.fill_(seed)

    def compute() -> None:
        if own is not None:
            own(targets, seed, *host_args, **host_kwargs)
            return
        found = tree_flatten(_drawn(seed, lambda: _computed(func, host_args, host_kwargs)))[0]
        for target, value in zip(targets, found, strict=True):
            if target is not None and isinstance(value, Tensor) and target.numel():
                target.copy_(value if value.shape == target.shape else value.view(target.shape))

    queue(_name(func), compute, device)
    pageable = [
        each for each in (*outs, *tensors) if isinstance(each, Tensor) and each.device.type == "cpu" and each.ndim > 0
    ]
    if any(not each.is_pinned() for each in pageable):
        finish(device)  # the host goes on only when it was read, or written


def _drawn(seed: int, work: Callable[[], Any]) -> Any:
    """Returns what a function returns whose random numbers depend on the seed alone; 0: it draws none."""
    if not seed:
        return work()
    before = torch.default_generator.get_state()
    torch.default_generator.manual_seed(seed)
    try:
        return work()
    finally:
        torch.default_generator.set_state(before)


def _computed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    kwargs = {name: value for name, value in kwargs.items() if name not in ("pin_memory", "non_blocking")}
    if func in (aten._log_softmax.default, aten._softmax.default) and args[2]:
        args = (args[0].float(), args[1], False)  # half to float in one kernel
    if func in (aten._log_softmax_backward_data.default, aten._softmax_backward_data.default):
        found = func(args[0], args[1].to(args[0].dtype), args[2], args[0].dtype)
        return found.to(args[3])
    try:
        return func(*args, **kwargs)
    except (RuntimeError, NotImplementedError) as error:
        # Mixed or low precision that the CPU has no kernel for; what is written in place has to be of its own dtype.
        if func._schema.is_mutable:
            raise
        try:
            return func(*tree_map(_wide, args), **tree_map(_wide, kwargs))
        except Exception:
            raise error from None


def _wide(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value


_kept: list[TorchDispatchMode] = []
_hide_from_modes = _python_dispatch._disable_current_modes
_hide_from_dispatch = torch._C._DisableTorchDispatch


@contextmanager
def _hidden_but_for_ours() -> Iterator[None]:
    """Hides operations from all modes but ours, which are no part of the program: on a device kernels run anyway."""
    with _hide_from_modes(), ExitStack() as stack:
        for mode in _kept:
            stack.enter_context(mode)
        yield


def _without_dispatch() -> AbstractContextManager[Any]:
    """Hides operations from modes, and from tensors as well where fake ones compute shapes: they have no values."""
    is_fake = sys._getframe(1).f_globals.get("__name__") == FakeTensor.__module__
    return _hide_from_dispatch() if is_fake or not _kept else _hidden_but_for_ours()


def prepare() -> None:
    """Has what hides operations from modes leave them their values; to be called before others import those names."""
    _python_dispatch._disable_current_modes = _hidden_but_for_ours  # type: ignore[assignment]
    torch._C._DisableTorchDispatch = _without_dispatch  # type: ignore[assignment,misc]


def keep(mode: TorchDispatchMode) -> None:
    """Has a mode see every operation from here on, in this thread and in backward."""
    _kept.append(mode)
    mode.__enter__()


def install() -> None:
    """Gives CUDA tensors values; what is to see operations on CUDA alone is kept before."""
    keep(Numerics())
