"""Holds `memwall.estimate`: what a training run needs on a device that is not here; the command prints it."""

from os import PathLike, fspath

from memwall.errors import UsageError
from memwall.integrations.spec_trace import device_run_of_spec
from memwall.machine.collector import without_collector
from memwall.machine.hardware import hardware_named
from memwall.planning.estimate import Estimate
from memwall.planning.estimate import estimate as estimate_of_trace
from memwall.predict.cuda.context import with_measured_context
from memwall.predict.cuda_allocator.torch_releases import profile_for
from memwall.trace.records import Route
from memwall.trace.workload import Workload
from memwall.units import parse_size


def estimate(
    spec: str | PathLike[str] | Workload,
    device: str,
    *,
    budget: int | str | None = None,
    batch: int | None = None,
    sequence: int | None = None,
    accumulate: int = 1,
    eval_batch: int | None = None,
    dtype: str | None = None,
    optimizer: str | None = None,
    autocast: str | None = None,
    checkpointing: bool = False,
    lora: str | None = None,
    mask_share: float | None = None,
    torch_version: str | None = None,
    route: Route = "translate",
) -> Estimate:
    """Returns the forecast of a training run on a device that is not here; nothing is allocated or downloaded.

    Args:
        spec: a workload, `package.module:factory`, `path/file.py:factory`, a Hugging Face model folder, or its
            config.json.
        device: a name as `h100-80gb`; an unknown one lists those that are known.
        budget: what the process may use, in bytes or as "10GiB" or "50%"; None for all of the device.
        batch, sequence: samples in a forward and tokens in a sample, with a configuration.
        accumulate: forwards and backwards in an optimizer step.
        eval_batch: samples that are evaluated at once, with a configuration; None takes `batch`.
        dtype: of the weights, with a configuration; None takes what the configuration names, or float32.
        optimizer: with a configuration, as "adamw" (the default) or "sgd-momentum".
        autocast: the dtype of forward under autocast; None for none.
        checkpointing: the model recomputes its layers in backward, with a configuration.
        lora: the adapters that are trained while the weights are frozen, with a configuration, as
            "r=16,targets=q_proj,v_proj"; without targets every linear layer but the output's gets one; with
            "base=nf4" these layers' weights are in 4 bits.
        mask_share: the share of rows that a data-dependent mask selects.
        torch_version: the release whose allocator is simulated; None for the one that the step was recorded with.
        route: "translate" records the step on fake tensors and translates its operations to those of the device;
            "phantom" has torch's own CUDA build run it on a phantom device, in a process of its own.

    Example:
        >>> import torch, memwall
        >>> workload = memwall.Workload(
        ...     model=lambda: torch.nn.Linear(64, 64),
        ...     batch=lambda: torch.zeros(8, 64),
        ...     loss=lambda model, batch: model(batch).sum(),
        ...     optimizer=lambda parameters: torch.optim.AdamW(parameters),
        ... )
        >>> memwall.estimate(workload, "l4", budget="8GiB").fits
        True

    Raises:
        UsageError: the spec, the device or an option can't be used.
        TraceError: the step can't be recorded without data.
    """
    if accumulate < 1 or (eval_batch is not None and eval_batch < 1):
        raise UsageError(f"accumulate is {accumulate}, eval_batch {eval_batch}; expected at least 1 of each")
    hardware = with_measured_context(hardware_named(device))
    if torch_version is not None:
        profile_for(torch_version)  # before the step is recorded, which takes longer
    budget_bytes = None if budget is None else parse_size(budget, whole_bytes=hardware.usable_bytes)
    if not isinstance(spec, Workload):
        spec = fspath(spec)
    with without_collector():
        run = device_run_of_spec(
            spec,
            hardware,
            batch=batch,
            sequence=sequence,
            dtype=dtype,
            optimizer=optimizer,
            autocast=autocast,
            is_checkpointed=checkpointing,
            lora=lora,
            mask_share=mask_share,
            eval_batch=eval_batch,
            num_micro_batches=accumulate,
            route=route,
        )
        return estimate_of_trace(
            run.training,
            hardware,
            budget_bytes=budget_bytes,
            torch_version=torch_version or run.training.torch_version,
            evaluation=run.evaluation,
            eval_failure=run.failure,
            num_micro_batches=accumulate,
        )
