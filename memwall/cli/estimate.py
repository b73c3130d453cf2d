"""`memwall estimate`: what a training run needs on a device that is not here, without weights."""

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
    from memwall.predict.cuda.context import with_measured_context

    hardware = with_measured_context(hardware_named(device))
    if torch_version is not None:
        from memwall.predict.cuda_allocator.versions import profile_for

        profile_for(torch_version)  # before the step is recorded, which takes longer
    budget_bytes = None if budget is None else parse_budget(budget, whole_bytes=hardware.usable_bytes)
    rule = parse_worst_batch(worst_batch, data)
    from memwall.cli.output import forecast_status, show
    from memwall.integrations.spec_trace import batch_of_spec, device_run_of_spec
    from memwall.planning.estimate import estimate as predict
    from memwall.report.text import estimate_report

    choice = None
    if rule is not None:
        choice = batch_of_spec(spec, rule, data=data, batch=batch, sequence=seq, num_micro_batches=accumulate)
    run = device_run_of_spec(
        spec,
        hardware,
        batch=batch,
        sequence=seq if choice is None else choice.padded_length,
        dtype=dtype,
        optimizer=optimizer,
        autocast=autocast,
        is_checkpointed=checkpointing,
        mask_share=mask_share,
        is_padded=choice is not None and choice.is_padded,
        eval_batch=eval_batch,
        num_micro_batches=accumulate,
    )
    found = predict(
        run.training,
        hardware,
        budget_bytes=budget_bytes,
        torch_version=torch_version,
        evaluation=run.evaluation,
        eval_failure=run.failure,
        num_micro_batches=accumulate,
        worst_batch=choice,
    )
    show(estimate_report(run.training, found), found, as_json=as_json)
    raise typer.Exit(forecast_status(found))
