"""Ways to train on several devices under which a session would train wrongly or do nothing: refused, in words.

Everything here goes by the names of classes: none of these libraries is imported to find that it is not used.
"""

from collections.abc import Iterable
from typing import Any

from torch import nn

from memwall.errors import UsageError
from memwall.torch_internals.sharding import is_divided_otherwise

_ENGINE = "deepspeed.runtime.engine.DeepSpeedEngine"
_FSDP1 = "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel"
_DEEPSPEED = (
    "DeepSpeed moves parameters, gradients and optimizer state itself, from buffers of its own; make its configuration "
    "by plan.deepspeed_config(), and apply the rest of the plan by memwall.integrations.apply_rest(engine, plan)"
)


def check_parallel(model: nn.Module, optimizers: Iterable[Any] = ()) -> None:
    """Refuses a model whose parameters others move about, in ways that memwall does not follow.

    Raises:
        UsageError: it is in a DeepSpeed engine, or divided by ZeRO-3, FullyShardedDataParallel or DataParallel, or by
            tensor parallelism; or an optimizer of it is DeepSpeed's.
    """
    for module in model.modules():
        names = _names(type(module))
        if _ENGINE in names:
            raise UsageError(f"the model is in a DeepSpeedEngine, which memwall does not plan within: {_DEEPSPEED}")
        if _FSDP1 in names:
            raise UsageError(
                "the model is wrapped in FullyShardedDataParallel (FSDP1), whose gathered parameters look like other "
                "tensors and are freed while memwall may still move them; wrap it with "
                "torch.distributed.fsdp.fully_shard (FSDP2) instead, as Accelerate does with fsdp_version: 2"
            )
        if isinstance(module, nn.DataParallel):
            raise UsageError(
                "the model is wrapped in DataParallel, which copies it to each device in every step, with what memwall "
                "has put on the first one; start one process for each device with torchrun, and wrap the model in "
                "DistributedDataParallel"
            )
    if any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        raise UsageError(f"the model's parameters are divided among ranks by DeepSpeed's ZeRO-3: {_DEEPSPEED}")
    if is_divided_otherwise(model):
        raise UsageError(
            "the model's parameters are DTensors that fully_shard did not make, or not alone, as by parallelize_module "
            "(tensor parallelism): what a rank computes and keeps of them is not planned; train it without memwall, or "
            "divide the model by fully_shard (FSDP2) alone"
        )
    for optimizer in optimizers:
        check_optimizer(optimizer)


def check_optimizer(optimizer: Any) -> None:
    """Refuses an optimizer that is DeepSpeed's own: it steps partitions in place of the parameters.

    Raises:
        UsageError: it is.
    """
    if any(name.startswith("deepspeed.runtime.") for name in _names(type(optimizer))):
        raise UsageError(
            f"the optimizer is a {type(optimizer).__name__} of DeepSpeed's, which steps flat partitions, not the "
            f"model's parameters: {_DEEPSPEED}"
        )


def _names(kind: type) -> Iterable[str]:
    return [f"{base.__module__}.{base.__qualname__}" for base in kind.__mro__]
