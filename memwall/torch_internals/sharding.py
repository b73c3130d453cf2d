"""Tensors that are one rank's part of a larger one, and the parameters that FSDP2 gathers from such parts."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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


def are_resettable(root: nn.Module) -> bool:
    """Returns whether a step of the units of a model may fail on one rank: what they begin together can be watched.

    Source: torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py, `DefaultAllGather`, `DefaultReduceScatter` (2.13).
    """
    if not hasattr(root, "reset_iter_state"):
        return False
    groups = _groups_in(root)
    kinds = {type(getattr(group, name, None)).__name__ for group in groups for name in _COMMUNICATES}
    return (
        kinds <= {"DefaultAllGather", "DefaultReduceScatter"}
        and all(hasattr(group, name) for group in groups for name in _SYNCS)
        and not any(group._is_hsdp or group._all_reduce_hook is not None for group in groups)
    )


def reset_step(root: nn.Module) -> None:
    """Leaves nothing in the units of a model of a step that has failed, gradients of gathered parameters included.

    Source: torch/distributed/fsdp/_fully_shard/_fsdp_param.py, `unsharded_accumulated_grad` (2.13).
    """
    root.reset_iter_state()  # type: ignore[operator]
    for part in (part for group in _groups_in(root) for part in group.fsdp_params):
        part.unsharded_accumulated_grad = None
        whole = getattr(part, "_unsharded_param", None)
        if whole is not None:
            whole.grad = None


@contextmanager
def meeting_before_collectives(root: nn.Module, meet: Callable[[], None]) -> Iterator[None]:
    """Calls something before each collective of a model's units, of which all ranks begin equally many.

    Their buffers are there by then, so that nothing is allocated between the call and the collective.
    """
    places = [(group, name, getattr(group, name)) for group in _groups_in(root) for name in _COMMUNICATES]
    try:
        for group, name, original in places:
            setattr(group, name, _Meeting(original, meet))
        yield
    finally:
        for group, name, original in places:
            setattr(group, name, original)


class _Meeting:
    """Stands before what a unit communicates by."""

    def __init__(self, original: Any, meet: Callable[[], None]) -> None:
        self._original, self._meet = original, meet
        self.allocate = original.allocate

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._meet()
        return self._original(*args, **kwargs)


def gradient_syncs(root: nn.Module) -> list[tuple[bool, ...]]:
    """Returns for each unit what the next backward does with its gradients and its parameters."""
    return [tuple(getattr(group, name) for name in _SYNCS) for group in _groups_in(root)]


@contextmanager
def with_gradient_syncs(root: nn.Module, syncs: Sequence[tuple[bool, ...]]) -> Iterator[None]:
    """Has backward do what `gradient_syncs` has said before, and later what it does now."""
    present = gradient_syncs(root)
    try:
        _set_syncs(root, syncs)
        yield
    finally:
        _set_syncs(root, present)


def _set_syncs(root: nn.Module, syncs: Sequence[tuple[bool, ...]]) -> None:
    for group, values in zip(_groups_in(root), syncs, strict=True):
        for name, value in zip(_SYNCS, values, strict=True):
            setattr(group, name, value)


def resharding_of(unit: nn.Module) -> list[Any]:
    """Returns what becomes of a unit's parameters after forward, for `set_resharding`; None keeps a group whole.

    Source: torch/distributed/fsdp/_fully_shard/_fully_shard.py, `set_reshard_after_forward` (2.13).
    """
    return [group.post_forward_mesh_info for group in _groups_of(unit)]


def set_resharding(unit: nn.Module, found: Sequence[Any]) -> None:
    """Has a unit do after forward what it did when that was read."""
    for group, ranks in zip(_groups_of(unit), found, strict=True):
        group.post_forward_mesh_info = ranks


def gathers_ahead(unit: nn.Module) -> bool:
    """Returns whether the script has said which units are gathered ahead in backward, in place of the next one.

    Source: torch/distributed/fsdp/_fully_shard/_fsdp_state.py, `_states_to_backward_prefetch` (2.13).
    """
    state: Any = unit._get_fsdp_state()  # type: ignore[operator]
    return bool(getattr(state, "_states_to_backward_prefetch", ()))


_COMMUNICATES = ("_all_gather_comm", "_reduce_scatter_comm")
_SYNCS = ("reduce_grads", "all_reduce_grads", "reshard_after_backward")


def _groups_in(root: nn.Module) -> list[Any]:
    return [group for module in root.modules() if is_sharding_unit(module) for group in _groups_of(module)]


def _groups_of(unit: nn.Module) -> list[Any]:
    state: Any = unit._get_fsdp_state()  # type: ignore[operator]
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    return [group for group in groups if group is not None]


def _parts_of(unit: nn.Module) -> list[Any]:
    return [part for group in _groups_of(unit) for part in group.fsdp_params]


def gathered_parameters(unit: nn.Module) -> list[Tensor] | None:
    """Returns the whole parameters of a unit, whose storages are emptied and filled again in each step.

    Source: torch/distributed/fsdp/_fully_shard/_fsdp_param.py, `init_unsharded_param`, `free_unsharded_param` (2.13).

    Returns:
        None until it has gathered them for the first time, or where this torch keeps them elsewhere.
    """
    found = [getattr(part, "_unsharded_param", None) for part in _parts_of(unit)]
    known = [whole for whole in found if whole is not None]
    return known if len(known) == len(found) else None
