"""Tensors that are one rank's part of a larger one, and the parameters that FSDP2 gathers from such parts."""

import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from memwall.torch_internals.names import instance_attribute

__all__ = ["gathered_parameters", "is_sharded", "is_sharding_unit", "local_part", "shard_of"]

shard_of: Callable[[Any], Tensor] = instance_attribute(
    "torch.distributed.tensor.DTensor._local_tensor", "training with parameters that are DTensors"
)
"""Returns what this rank holds of a DTensor.

Raises NotAvailableError where it does not tell: models with DTensors are not planned then.
"""


def is_sharded(tensor: Tensor) -> bool:
    """Returns whether a tensor is a DTensor, whose own storage has the size of the whole and no bytes."""
    if type(tensor) is Tensor or type(tensor) is nn.Parameter:
        return False
    known = sys.modules.get("torch.distributed.tensor")  # not imported: there is none then
    return known is not None and isinstance(tensor, known.DTensor)


def local_part(tensor: Tensor) -> Tensor:
    """Returns what this rank holds of a DTensor, and any other tensor itself."""
    return shard_of(tensor) if is_sharded(tensor) else tensor


def is_sharding_unit(module: nn.Module) -> bool:
    """Returns whether `fully_shard` was applied to this module itself."""
    known = sys.modules.get("torch.distributed.fsdp")
    return known is not None and isinstance(module, known.FSDPModule)


def gathered_parameters(unit: nn.Module) -> list[Tensor] | None:
    """Returns the whole parameters of a unit, whose storages are emptied and filled again in each step.

    Source: torch/distributed/fsdp/_fully_shard/_fsdp_param.py, `init_unsharded_param`, `free_unsharded_param` (2.13).

    Returns:
        None until it has gathered them for the first time, or where this torch keeps them elsewhere.
    """
    state: Any = unit._get_fsdp_state()  # type: ignore[operator]
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    parts = [part for group in groups if group is not None for part in group.fsdp_params]
    found = [getattr(part, "_unsharded_param", None) for part in parts]
    known = [whole for whole in found if whole is not None]
    return known if len(known) == len(found) else None
