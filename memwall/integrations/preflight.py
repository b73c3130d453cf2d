"""Settings that end a run late or cost memory for nothing, seen before the first step, without running one.

What is known to fail is refused; what only costs is said once.
"""

import logging
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from memwall.errors import IntegrationError
from memwall.torch_internals.modules import checkpointing_function_of

_log = logging.getLogger(__name__)

_NOT_REENTRANT = "gradient_checkpointing_kwargs={'use_reentrant': False}"


def check_model(model: nn.Module) -> None:
    """Looks at a model as it is trained, wrapped or not.

    Raises:
        IntegrationError: DistributedDataParallel and the model's own checkpointing do not go together.
    """
    is_reentrant = any(map(_is_reentrant, model.modules()))
    for wrapper in (module for module in model.modules() if isinstance(module, DistributedDataParallel)):
        _check_wrapped(
            finds_unused=wrapper.find_unused_parameters and not wrapper.static_graph, is_reentrant=is_reentrant
        )
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    if getattr(getattr(inner, "config", None), "use_cache", False):
        _log.warning(
            "%s has config.use_cache=True: the keys and values of every layer live through the whole step, and "
            "training does not read them; set model.config.use_cache = False",
            type(inner).__name__,
        )


def check_arguments(args: Any) -> None:
    """Looks at the arguments of transformers' Trainer, which wraps the model and turns checkpointing on later.

    Raises:
        IntegrationError: see `check_model`.
    """
    given = (getattr(args, name, None) or {} for name in _checkpointing_names("_kwargs"))
    is_on = any(getattr(args, name, False) for name in _checkpointing_names())
    if getattr(args.parallel_mode, "value", "") == "distributed":
        _check_wrapped(
            finds_unused=bool(args.ddp_find_unused_parameters),
            is_reentrant=is_on and any(kwargs.get("use_reentrant", False) for kwargs in given),
        )
    plugin = getattr(args, "fsdp_plugin_args", None) or {}
    _check_divided(
        by_deepspeed=bool(getattr(args, "deepspeed", None) or getattr(args, "deepspeed_plugin", None)),
        by_fsdp1=bool(getattr(args, "fsdp", None)) and plugin.get("fsdp_version", 2) == 1,
    )
    if getattr(args, "use_cache", False):
        _log.warning(
            "TrainingArguments(use_cache=True): the keys and values of every layer live through the whole step, and "
            "training does not read them; leave it out"
        )


def check_accelerator(accelerator: Any) -> None:
    """Looks at an Accelerator before it prepares anything.

    Raises:
        IntegrationError: it divides the model in a way that memwall does not follow.
    """
    kind = getattr(getattr(accelerator, "distributed_type", None), "value", "")
    is_fsdp1 = kind == "FSDP" and not getattr(accelerator, "is_fsdp2", False)
    _check_divided(by_deepspeed=kind == "DEEPSPEED", by_fsdp1=is_fsdp1)


def check_config(config: Mapping[str, Any]) -> None:
    """Looks at a DeepSpeed configuration that is about to be used as it stands.

    Raises:
        IntegrationError: "auto" is left somewhere in it.
    """
    places = list(_autos(config))
    if places:
        raise IntegrationError(
            f'the DeepSpeed configuration has "auto" at {", ".join(places)}; Trainer and Accelerate fill that in, '
            "DeepSpeed itself does not: give numbers (plan.deepspeed_config() does), or start through one of them"
        )


def _check_divided(*, by_deepspeed: bool, by_fsdp1: bool) -> None:
    if by_deepspeed:
        raise IntegrationError(
            "DeepSpeed moves parameters, gradients and optimizer state itself, and memwall does not plan within it; "
            "train without memwall under a configuration that memwall makes: plan.deepspeed_config(for_hugging_face="
            "True), or `memwall export --to trainer`"
        )
    if by_fsdp1:
        raise IntegrationError(
            "FullyShardedDataParallel (FSDP1) frees gathered parameters while memwall may still move them; set "
            "fsdp_version: 2, which divides the model by torch.distributed.fsdp.fully_shard"
        )


def _check_wrapped(*, finds_unused: bool, is_reentrant: bool) -> None:
    """Refuses what torch's notes on checkpointing under DistributedDataParallel say fails, and warns of the rest."""
    if not is_reentrant:
        return  # what recomputes without reentrance, memwall too, leaves every parameter visible in the graph
    if finds_unused:
        raise IntegrationError(
            "DistributedDataParallel with find_unused_parameters=True and reentrant gradient checkpointing: parameters "
            "inside the checkpoints look unused, and backward fails when their gradients come; checkpoint with "
            f"{_NOT_REENTRANT}, or set find_unused_parameters=False"
        )
    _log.warning(
        "DistributedDataParallel with reentrant gradient checkpointing fails once a layer is called twice or a "
        "parameter is unused, and hides from memwall what its blocks save; checkpoint with %s",
        _NOT_REENTRANT,
    )


def _is_reentrant(module: nn.Module) -> bool:
    """Says if a layer of transformers checkpoints itself so (`_set_gradient_checkpointing` gives it the function)."""
    function = checkpointing_function_of(module)
    keywords = getattr(function, "keywords", {})
    return bool(getattr(module, "gradient_checkpointing", False) and keywords.get("use_reentrant", False))


def _checkpointing_names(suffix: str = "") -> tuple[str, str]:
    """Returns the names in older and newer releases of transformers."""
    return f"gradient_checkpointing{suffix}", f"activation_checkpointing{suffix}"


def _autos(value: Any, path: str = "") -> Iterator[str]:
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _autos(item, f"{path}.{name}" if path else str(name))
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield from _autos(item, f"{path}[{number}]")
    elif value == "auto":
        yield path
