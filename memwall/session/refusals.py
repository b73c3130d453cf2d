"""Refuses, before the first step, what a session would train wrongly, in part, or not at all: with what to do.

Libraries for several devices go by the names of their classes: none is imported to find that it is not used.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from memwall.errors import ApplyError, UsageError
from memwall.torch_internals.sharding import is_divided_otherwise


def check_is_trainable_here(model: nn.Module) -> None:
    """Looks at how a model is spread, and at layers that count their calls.

    Raises:
        UsageError: its parameters are on several CUDA devices, or it has layers of TransformerEngine.
    """
    devices = sorted({str(p.device) for p in model.parameters() if p.device.type == "cuda"})
    if len(devices) > 1:
        raise UsageError(
            f"the model is spread over {len(devices)} devices ({', '.join(devices)}), and a budget is for one; load "
            'it onto one of them (device_map={"": 0}), where a plan makes it fit, or shard it with DeepSpeed or FSDP'
        )
    engine = next((m for m in model.modules() if type(m).__module__.partition(".")[0] == "transformer_engine"), None)
    if engine is not None:
        raise UsageError(
            f"the model has layers of TransformerEngine ({type(engine).__name__}), whose scaling factors of FP8 follow "
            "every forward: one that runs again in backward would count twice; use torch's own layers, or train "
            "without memwall"
        )


def check_not_captured(device: torch.device) -> None:
    """Looks at whether a step is being captured into a CUDA graph.

    Raises:
        ApplyError: it is.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise ApplyError(
            "a training step is being captured into a CUDA graph, which would play back its kernels without what "
            "memwall does between them; train without the graph (torch.cuda.graph, make_graphed_callables), or "
            "without memwall"
        )


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
