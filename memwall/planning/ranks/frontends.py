"""How Accelerate and the Trainer are told what divides a model; what they have no word for is refused.

Keys and classes: accelerate 1.15, utils/dataclasses.py; transformers 5.23, training_args.py (`_process_fsdp_args`).
"""

from typing import Any

from memwall.errors import UsageError
from memwall.planning.ranks.forecast import RanksForecast
from memwall.predict.sharding.ddp import Ddp
from memwall.predict.sharding.fsdp2 import Fsdp2

_WRAP = "TRANSFORMER_BASED_WRAP"


def accelerate_sharding(ranks: RanksForecast | None) -> dict[str, Any]:
    """Returns arguments of Accelerator that divide a model as chosen; {} where nothing was.

    Raises:
        UsageError: Accelerate cannot do it, or another function makes its configuration.
    """
    chosen = None if ranks is None else ranks.chosen
    if ranks is None or chosen is None:
        return {}
    if isinstance(chosen, Ddp):
        if chosen.divides_state:
            raise _no_word(chosen, "Accelerate")
        if not chosen.are_views:
            return {}
        from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs

        hook = DDPCommunicationHookType.BF16 if chosen.is_compressed else DDPCommunicationHookType.NO
        return {"kwargs_handlers": [DistributedDataParallelKwargs(gradient_as_bucket_view=True, comm_hook=hook)]}
    from accelerate import FullyShardedDataParallelPlugin
    from accelerate.parallelism_config import ParallelismConfig

    chosen = _expressible(chosen, "Accelerate")
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward=chosen.reshard == "yes",
        auto_wrap_policy=_WRAP.lower(),
        transformer_cls_names_to_wrap=list(ranks.block_classes),
        cpu_offload=chosen.is_offloaded,
        mixed_precision_policy=_kept_precision(),
    )
    if not chosen.is_hybrid:
        return {"fsdp_plugin": plugin}
    sizes = {"dp_replicate_size": ranks.network.num_nodes, "dp_shard_size": ranks.network.size("node")}
    return {"fsdp_plugin": plugin, "parallelism_config": ParallelismConfig(**sizes)}


def trainer_sharding(ranks: RanksForecast | None) -> dict[str, Any]:
    """Returns fields of TrainingArguments that divide a model as chosen; {} where nothing was.

    Raises:
        UsageError: the Trainer cannot do it, or another function makes its configuration.
    """
    chosen = None if ranks is None else ranks.chosen
    if ranks is None or chosen is None or chosen == Ddp():
        return {}
    if isinstance(chosen, Ddp):
        raise _no_word(chosen, "the Trainer")
    chosen = _expressible(chosen, "the Trainer")
    config = {
        "version": 2,
        "reshard_after_forward": chosen.reshard == "yes",
        "auto_wrap_policy": _WRAP,
        "transformer_layer_cls_to_wrap": list(ranks.block_classes),
        "cpu_offload": chosen.is_offloaded,
    }
    fields: dict[str, Any] = {"fsdp": True, "fsdp_config": config}
    if chosen.is_hybrid:
        from accelerate.parallelism_config import ParallelismConfig

        sizes = {"dp_replicate_size": ranks.network.num_nodes, "dp_shard_size": ranks.network.size("node")}
        fields["parallelism_config"] = ParallelismConfig(**sizes)
    return fields


def accelerate_reducing_each(ranks: RanksForecast | None, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Returns arguments of Accelerator with which FSDP2 reduces the gradients of each micro-batch, as is foreseen.

    Gradients that wait for the last micro-batch, Accelerate's default, are whole on every rank.
    """
    if "gradient_accumulation_steps" not in kwargs or not _is_fsdp2(ranks):
        return kwargs
    from accelerate.utils import GradientAccumulationPlugin

    num_steps = kwargs["gradient_accumulation_steps"]
    plugin = GradientAccumulationPlugin(num_steps=num_steps, sync_each_batch=True)
    others = {name: value for name, value in kwargs.items() if name != "gradient_accumulation_steps"}
    return others | {"gradient_accumulation_plugin": plugin}


def trainer_reducing_each(ranks: RanksForecast | None, changes: dict[str, Any], args: Any) -> dict[str, Any]:
    """Returns fields of TrainingArguments with which FSDP2 does so, beside what the arguments say to Accelerate."""
    accumulated = changes.get("gradient_accumulation_steps", args.gradient_accumulation_steps)
    if accumulated == 1 or not _is_fsdp2(ranks):
        return changes
    said = args.accelerator_config
    own = {} if said is None else dict(said) if isinstance(said, dict) else said.to_dict()
    each = (own.get("gradient_accumulation_kwargs") or {}) | {"sync_each_batch": True}
    return changes | {"accelerator_config": own | {"gradient_accumulation_kwargs": each}}


def in_kept_precision(args: Any) -> Any:
    """Returns the TrainingArguments, of which FSDP2 is to gather parameters as they are kept."""
    args.fsdp_plugin_args["mixed_precision_policy"] = _kept_precision()  # its configuration has no word for it
    return args


def _kept_precision() -> Any:
    """Returns the policy without which Accelerate casts every parameter, norms too, where it is told to autocast."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    return MixedPrecisionPolicy()


def _is_fsdp2(ranks: RanksForecast | None) -> bool:
    return ranks is not None and isinstance(ranks.chosen, Fsdp2)


def _expressible(chosen: Any, frontend: str) -> Fsdp2:
    if not isinstance(chosen, Fsdp2):
        raise UsageError(
            f"the plan chose {chosen.words}: plan.deepspeed_config(for_hugging_face=True) makes the configuration that "
            f"{frontend} takes"
        )
    if chosen.reshard == "node" or chosen.num_kept or chosen.num_ahead > 1:
        raise _no_word(chosen, frontend)
    return chosen


def _no_word(chosen: Ddp | Fsdp2, frontend: str) -> UsageError:
    return UsageError(f"{frontend} has no word for {chosen.words}; divide the model by memwall.shard(model, plan)")
