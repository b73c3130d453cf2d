"""`memwall estimate`: what a training run needs on a device that is not here, without weights."""

from typing import TYPE_CHECKING, Annotated

import typer

from memwall.cli.options import DataOption, JsonOption, WorstBatchOption, parse_budget, parse_worst_batch

if TYPE_CHECKING:
    from memwall.plan.estimate import Estimate


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
    eval_batch: Annotated[
        int | None,
        typer.Option("--eval-batch", min=1, metavar="N", help="Samples evaluated at once; by default --batch."),
    ] = None,
    optimizer: Annotated[
        str | None,
        typer.Option("--optimizer", metavar="O", help="adamw, adamw-fused, adamw-foreach, adam, sgd, adafactor."),
    ] = None,
    dtype: Annotated[str | None, typer.Option("--dtype", metavar="D", help="float32 or bfloat16.")] = None,
    budget: Annotated[
        str | None,
        typer.Option("--budget", metavar="SIZE", help="What the process may use; by default all of the device."),
    ] = None,
    mask_share: Annotated[
        float | None,
        typer.Option("--mask-share", metavar="X", help="Share of rows that a data-dependent mask selects, as 0.25."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Predict the peak of each phase of a run and say what it is made of; nothing is allocated or downloaded."""
    from memwall.predict.hardware import hardware_named

    hardware = hardware_named(device)
    budget_bytes = None if budget is None else parse_budget(budget, whole_bytes=hardware.usable_bytes)
    rule = parse_worst_batch(worst_batch, data)
    from memwall.cli.output import show
    from memwall.integrations.spec_trace import batch_of_spec, device_run_of_spec
    from memwall.plan.estimate import estimate as predict
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
        mask_share=mask_share,
        is_padded=choice is not None and choice.is_padded,
        eval_batch=eval_batch,
        num_micro_batches=accumulate,
    )
    found = predict(
        run.training,
        hardware,
        budget_bytes=budget_bytes,
        evaluation=run.evaluation,
        eval_failure=run.failure,
        num_micro_batches=accumulate,
        worst_batch=choice,
    )
    show(estimate_report(run.training, found), found, as_json=as_json)
    raise typer.Exit(_status(found))


def _status(found: "Estimate") -> int:
    """As DESIGN fixes it: 0 fits, 3 does not, 4 fits only inside the margin."""
    if found.fits:
        return 0
    return 4 if found.budget_bytes is not None and found.peak.process_bytes <= found.budget_bytes else 3
