"""Modules: where parameters and buffers stand, and what modules of torch and transformers keep to themselves."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from memwall.patches import Patches
from memwall.torch_internals.names import find, instance_attribute

own_parameters: Callable[[nn.Module], dict[str, nn.Parameter | None]] = instance_attribute(
    "torch.nn.Module._parameters", "putting parameters in their places without their module's checks"
)
"""Returns a module's own parameters by name, in the dict that the module itself reads.

Raises NotAvailableError at a module without it.
"""

own_buffers: Callable[[nn.Module], dict[str, Tensor | None]] = instance_attribute(
    "torch.nn.Module._buffers", "putting buffers in their places without their module's checks"
)
"""Returns a module's own buffers by name, in the dict that the module itself reads.

Raises NotAvailableError at a module without it.
"""

own_modules: Callable[[nn.Module], dict[str, nn.Module | None]] = instance_attribute(
    "torch.nn.Module._modules", "noticing cheaply in each step that a loop has changed a model's layers"
)
"""Returns a module's own modules by name, in the dict that the module itself reads.

Raises NotAvailableError at a module without it.
"""

without_state_dict_entry: Callable[[nn.Module], set[str]] = instance_attribute(
    "torch.nn.Module._non_persistent_buffers_set", "telling which buffers a state dict leaves out"
)
"""Returns the names of a module's own buffers that its state dict leaves out.

Raises NotAvailableError at a module without it.
"""


def with_parameters(module: nn.Module, parameters: Mapping[str, nn.Parameter | None]) -> None:
    """Gives a copy of a module a dict of own parameters in place of the one that it shares with the original."""
    own_parameters(module)  # a release without it must not get an attribute that nothing reads
    vars(module)["_parameters"] = dict(parameters)


_loader_iterator: Any = find("torch.utils.data.dataloader._BaseDataLoaderIter", "naming where in its data a run is")


def is_loader_iterator(value: object) -> bool:
    """Returns whether a value goes through a data loader; False of all where torch has no such class."""
    return isinstance(_loader_iterator, type) and isinstance(value, _loader_iterator)


_PUBLIC_NORMS = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
)
_norm_base: Any = find("torch.nn.modules.batchnorm._NormBase", "seeing that a layer keeps running statistics")


def is_running_norm(module: nn.Module) -> bool:
    """Returns whether a module updates running statistics from the batches it sees (BatchNorm and its kin).

    Without torch's common base, the public classes stand for it, and those that users derive from the base are missed.
    """
    return isinstance(module, _PUBLIC_NORMS if _norm_base is None else _norm_base) and bool(module.track_running_stats)


_move: Any = find("torch.nn.Module._apply", "having parameters leave a device again as their model is moved there")


def when_moved(patches: Patches, do: Callable[[nn.Module], object]) -> None:
    """Has `do(module)` called once a module's own parameters were moved or cast, as by `model.cuda()`.

    Modules inside a module come before it. Where torch has no such method, nothing is called.
    """

    def run(original: Callable[..., nn.Module], module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        result = original(module, *args, **kwargs)
        do(module)
        return result

    if _move is not None:
        patches.wrap(nn.Module, "_apply", run)


def checkpointing_function_of(module: nn.Module) -> Any:
    """Returns the function by which a layer of transformers checkpoints itself; None where it has none.

    Source: transformers/modeling_utils.py, `_set_gradient_checkpointing` (5.23).
    """
    return getattr(module, "_gradient_checkpointing_func", None)


def waits_for_new_buckets(parallel: nn.Module) -> bool:
    """Returns whether DistributedDataParallel is still to make its buckets anew; False where this torch does not tell.

    Then nothing returns the memory of the old ones to the system, up to 32 MiB.
    """
    return getattr(parallel, "_has_rebuilt_buckets", None) is False
