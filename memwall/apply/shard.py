"""Divides a model among the ranks of this process group as a plan for so many ranks says."""

import logging
from collections import Counter
from typing import Any

import torch
from torch import nn

from memwall.errors import UsageError
from memwall.machine.process_group import num_processes
from memwall.planning.planfile import Plan
from memwall.planning.ranks.forecast import RanksForecast
from memwall.predict.sharding.ddp import Ddp
from memwall.predict.sharding.fsdp2 import Fsdp2

_log = logging.getLogger(__name__)


def shard(model: nn.Module, plan: Plan) -> nn.Module:
    """Wraps a model by what a plan of `memwall plan --ranks` chose; to be called before the optimizer is made.

    FSDP2 changes the model in place, its blocks each by itself; DistributedDataParallel returns a wrapper.

    Args:
        model: on the device of this rank, or for FSDP2 on the CPU or the meta device; not divided by anything yet.
        plan: one that `memwall plan SPEC --device NAME --ranks N -o plan.json` wrote, with N the ranks that are here.

    Returns:
        The model to train.

    Raises:
        UsageError: the plan divides nothing, is for another number of ranks or another model, or is DeepSpeed's to
            carry out.
    """
    ranks = plan.forecast.ranks
    if ranks is None or ranks.chosen is None:
        raise UsageError("the plan is for one process; make one for ranks: memwall plan SPEC --device NAME --ranks N")
    num_here = num_processes()
    if num_here != ranks.network.num_ranks:
        raise UsageError(
            f"the plan is for {ranks.network.num_ranks} ranks, and there are {num_here} (the process group must be "
            f"there before memwall.shard); make one with --ranks {num_here}"
        )
    if isinstance(ranks.chosen, Fsdp2):
        return _fully_sharded(model, ranks, ranks.chosen)
    if isinstance(ranks.chosen, Ddp):
        return _replicated(model, ranks.chosen)
    raise UsageError(
        f"the plan chose {ranks.chosen.words}: hand plan.deepspeed_config(model=model) to deepspeed.initialize, and "
        "apply the rest of the plan by memwall.integrations.apply_rest(engine, plan)"
    )


def _replicated(model: nn.Module, chosen: Ddp) -> nn.Module:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

    if chosen.divides_state:
        _log.warning(
            "the plan divides the optimizer's state: make the optimizer as "
            "torch.distributed.optim.ZeroRedundancyOptimizer(parameters, optimizer_class=...)"
        )
    divided = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=chosen.are_views)
    if chosen.is_compressed:
        try:
            divided.register_comm_hook(None, bf16_compress_hook)
        except TypeError as error:
            raise UsageError(
                f"the plan has gradients averaged in bfloat16, which this torch does not do: {error}; make one without "
                f"--allow {chosen.allow}"
            ) from error
    return divided


def _fully_sharded(model: nn.Module, ranks: RanksForecast, chosen: Fsdp2) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    modules = dict(model.named_modules())
    absent = [path for path in ranks.units if path not in modules]
    if absent:
        raise UsageError(
            f"the plan divides modules that {type(model).__name__} does not have: {', '.join(absent[:4])}"
            f"{f' and {len(absent) - 4} more' if len(absent) > 4 else ''}; make the plan for this model"
        )
    units = [modules[path] for path in ranks.units]
    # What several units share is gathered once, by the root.
    holders = Counter(parameter for unit in units for parameter in set(nn.Module.parameters(unit)))
    shared = {parameter for parameter, num_units in holders.items() if num_units > 1}
    per_node = ranks.network.size("node")
    kept, others = chosen.kept_of(ranks.units), per_node if chosen.reshard == "node" else True
    options: dict[str, Any] = {}
    if chosen.is_hybrid:
        options["mesh"] = init_device_mesh(
            _device_type(model), (ranks.network.num_nodes, per_node), mesh_dim_names=("replicate", "shard")
        )
    if chosen.is_offloaded:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
    for path, unit in zip(ranks.units, units, strict=True):
        left = shared & set(nn.Module.parameters(unit)) or None
        fully_shard(unit, ignored_params=left, reshard_after_forward=False if path in kept else others, **options)
    # The root's parameters stay from its forward to the end of its backward whatever is said.
    fully_shard(model, reshard_after_forward=None, **options)
    if chosen.num_ahead > 1:
        _gather_ahead([model, *units], chosen.num_ahead)
    return model


def _gather_ahead(units: list[Any], num_ahead: int) -> None:
    """Has each unit begin the gathers of so many that follow it; the root, which is first, those of the first ones."""
    for number, unit in enumerate(units):
        unit.set_modules_to_forward_prefetch(units[number + 1 : number + 1 + num_ahead])
        earlier = units[1:number] if number else units[1:]
        unit.set_modules_to_backward_prefetch(earlier[::-1][:num_ahead])


def _device_type(model: nn.Module) -> str:
    found = next((parameter.device.type for parameter in nn.Module.parameters(model)), "cpu")
    return "cuda" if found == "meta" and torch.cuda.is_available() else found
