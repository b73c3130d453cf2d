"""`memwall estimate`: what a training step needs on a device that is not here, without weights."""

from typing import TYPE_CHECKING, Annotated

import typer

from memwall.cli.options import JsonOption, parse_budget

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
    seq: Annotated[int | None, typer.Option("--seq", min=1, metavar="N", help="Tokens per sample.")] = None,
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
    """Predict the peak of one training step and say what it is made of; nothing is allocated or downloaded."""
    from memwall.predict.hardware import hardware_named

    hardware = hardware_named(device)
    budget_bytes = None if budget is None else parse_budget(budget, whole_bytes=hardware.usable_bytes)
    from memwall.cli.output import show
    from memwall.integrations.spec_trace import device_trace_of_spec
    from memwall.plan.estimate import estimate as predict
    from memwall.report.text import estimate_report

    trace = device_trace_of_spec(
        spec, hardware, batch=batch, sequence=seq, dtype=dtype, optimizer=optimizer, mask_share=mask_share
    )
    found = predict(trace, hardware, budget_bytes=budget_bytes)
    show(estimate_report(trace, found), found, as_json=as_json)
    raise typer.Exit(_status(found))


def _status(found: "Estimate") -> int:
    """As DESIGN fixes it: 0 fits, 3 does not, 4 fits only inside the margin."""
    if found.fits:
        return 0
    return 4 if found.budget_bytes is not None and found.peak.process_bytes <= found.budget_bytes else 3
