"""Runs `memwall estimate`: says what a training run needs on a device that is not here, without weights."""

from typing import Annotated

import typer

from memwall.cli.options import (
    AutocastOption,
    CheckpointingOption,
    DataOption,
    DtypeOption,
    EvalBatchOption,
    JsonOption,
    MaskShareOption,
    OptimizerOption,
    TorchOption,
    WorstBatchOption,
    parse_budget,
    parse_worst_batch,
)


def estimate(
    spec: Annotated[
        str,
        typer.Argument(
            metavar="SPEC",
            help="package.module:factory, path/file.py:factory, or a Hugging Face model folder or its config.json.",
        ),
    ],
    device: Annotated[str, typer.Option("--device", metavar="NAME", help="Device to estimate for, as h100-80gb.")],
    batch: Annotated[int | None, typer.Option("--batch", min=1, metavar="N", help="Samples per forward.")] = None,
    seq: Annotated[
        int | None, typer.Option("--seq", min=1, metavar="N", help="Tokens per sample; longer ones of --data are cut.")
    ] = None,
    worst_batch: WorstBatchOption = None,
    data: DataOption = None,
    accumulate: Annotated[
        int, typer.Option("--accumulate", min=1, metavar="N", help="Forwards per optimizer step, as the Trainer's.")
    ] = 1,
    eval_batch: EvalBatchOption = None,
    optimizer: OptimizerOption = None,
    dtype: DtypeOption = None,
    autocast: AutocastOption = None,
    checkpointing: CheckpointingOption = False,
    budget: Annotated[
        str | None,
        typer.Option("--budget", metavar="SIZE", help="What the process may use; by default all of the device."),
    ] = None,
    mask_share: MaskShareOption = None,
    torch_version: TorchOption = None,
    as_json: JsonOption = False,
) -> None:
    """Predict the peak of each phase of a run and say what it is made of; nothing is allocated or downloaded.

    Only a step that hangs on values of its tensors is run for real, on this CPU, where there is room.

    What no option says, as LoRA, an 8-bit optimizer or a loss of one's own, a factory does: it returns the Workload.
    """
    from memwall.machine.hardware import hardware_named

    hardware = hardware_named(device)
    budget_bytes = None if budget is None else parse_budget(budget, whole_bytes=hardware.usable_bytes)
    rule = parse_worst_batch(worst_batch, data)
    from memwall.cli.output import forecast_status, show
    from memwall.integrations.estimate import estimate as predict
    from memwall.report.text import estimate_report

    found = predict(
        spec,
        device,
        budget=budget_bytes,
        batch=batch,
        sequence=seq,
        accumulate=accumulate,
        eval_batch=eval_batch,
        dtype=dtype,
        optimizer=optimizer,
        autocast=autocast,
        checkpointing=checkpointing,
        mask_share=mask_share,
        worst_batch=rule,
        data=data,
        torch_version=torch_version,
    )
    show(estimate_report(found), found, as_json=as_json)
    raise typer.Exit(forecast_status(found))
