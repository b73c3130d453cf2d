"""Tensors that are one rank's part of a larger one, and the parameters that FSDP2 gathers from such parts."""

import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from memwall.errors import ApplyError
from memwall.torch_internals.names import instance_attribute

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


def place_in_whole(tensor: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the shape of the whole that a DTensor is, and where in it the part of this rank begins.

    Source: torch/distributed/tensor/placement_types.py, `Shard.local_shard_size_and_offset` (2.13): as torch.chunk.

    Raises:
        ApplyError: it is not divided along whole dimensions, as under tensor parallelism beside FSDP2.
    """
    whole: Any = tensor
    sizes, offsets, mesh = list(whole.shape), [0] * whole.ndim, whole.device_mesh
    coordinate = mesh.get_coordinate()  # known to the mesh itself: the script may have closed its groups
    for number, placement in enumerate(whole.placements):
        if type(placement).__name__ == "Replicate":
            continue
        if type(placement).__name__ != "Shard":
            raise ApplyError(
                f"a parameter is divided as {placement} among ranks, and where such a part lies in the whole is not "
                "known; run without --checkpoint"
            )
        dim = placement.dim
        chunk = -(-sizes[dim] // mesh.size(number))
        begin = min(coordinate[number] * chunk, sizes[dim])
        offsets[dim] += begin
        sizes[dim] = min(chunk, sizes[dim] - begin)
    return tuple(whole.shape), tuple(offsets)


def is_sharding_unit(module: nn.Module) -> bool:
    """Returns whether `fully_shard` was applied to this module itself."""
    known = sys.modules.get("torch.distributed.fsdp")
    return known is not None and isinstance(module, known.FSDPModule)


def standing_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Returns the parameters that an optimizer steps, by name: of a unit that is gathered now its shards.

    Source: torch/distributed/fsdp/_fully_shard/_fsdp_param.py, `_module_info`, `sharded_param` (2.13).
    """
    found = dict(model.named_parameters())
    paths = {id(module): path for path, module in model.named_modules()}
    for unit in (module for module in model.modules() if is_sharding_unit(module)):
        for part in _parts_of(unit):
            place = part._module_info
            path = paths[id(place.module)]
            found[f"{path}.{place.param_name}" if path else place.param_name] = part.sharded_param
    return found


def is_divided_otherwise(model: nn.Module) -> bool:
    """Returns whether parameters are DTensors that not `fully_shard` alone has made, as under tensor parallelism."""
    units = [module for module in model.modules() if is_sharding_unit(module)]
    known = {id(part.sharded_param) for unit in units for part in _parts_of(unit)}
    parameters: list[Any] = [value for value in standing_parameters(model).values() if is_sharded(value)]
    return any(
        id(parameter) not in known or sum(not one.is_replicate() for one in parameter.placements) > 1
        for parameter in parameters
    )


def like_shard(local: Tensor, parameter: Tensor) -> Tensor:
    """Returns a DTensor that is divided as a parameter is, of what this rank holds of it."""
    from torch.distributed.tensor import DTensor

    whole: Any = parameter
    return DTensor.from_local(
        local, whole.device_mesh, whole.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def _parts_of(unit: nn.Module) -> list[Any]:
    state: Any = unit._get_fsdp_state()  # type: ignore[operator]
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    return [part for group in groups if group is not None for part in group.fsdp_params]


def gathered_parameters(unit: nn.Module) -> list[Tensor] | None:
    """Returns the whole parameters of a unit, whose storages are emptied and filled again in each step.

    Source: torch/distributed/fsdp/_fully_shard/_fsdp_param.py, `init_unsharded_param`, `free_unsharded_param` (2.13).

    Returns:
        None until it has gathered them for the first time, or where this torch keeps them elsewhere.
    """
    found = [getattr(part, "_unsharded_param", None) for part in _parts_of(unit)]
    known = [whole for whole in found if whole is not None]
    return known if len(known) == len(found) else None
