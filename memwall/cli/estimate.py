"""Runs `memwall estimate`: says what a training run needs on a device that is not here, without weights."""

from typing import Annotated

import typer

from memwall.cli.options import (
    AutocastOption,
    CheckpointingOption,
    DtypeOption,
    EvalBatchOption,
    JsonOption,
    LoraOption,
    MaskShareOption,
    OptimizerOption,
    RouteOption,
    TorchOption,
    parse_budget,
    parse_count,
)
from memwall.cli.verbosity import is_verbose


def estimate(
    spec: Annotated[
        str,
        typer.Argument(
            metavar="SPEC",
            help="package.module:factory, path/file.py:factory, or a Hugging Face model folder or its config.json.",
        ),
    ],
    device: Annotated[
        str,
        typer.Option(
            "--device", metavar="NAME", help="Device to estimate for, as h100-80gb; several, with commas, are compared."
        ),
    ],
    batch: Annotated[
        str | None,
        typer.Option("--batch", metavar="N|max", help="Samples per forward; max finds the most that fit."),
    ] = None,
    seq: Annotated[
        str | None,
        typer.Option(
            "--seq",
            metavar="N|max",
            help="Tokens per sample; max finds the most that fit.",
        ),
    ] = None,
    accumulate: Annotated[
        int, typer.Option("--accumulate", min=1, metavar="N", help="Forwards per optimizer step, as the Trainer's.")
    ] = 1,
    eval_batch: EvalBatchOption = None,
    optimizer: OptimizerOption = None,
    dtype: DtypeOption = None,
    autocast: AutocastOption = None,
    checkpointing: CheckpointingOption = False,
    lora: LoraOption = None,
    budget: Annotated[
        str | None,
        typer.Option("--budget", metavar="SIZE", help="What the process may use; by default all of the device."),
    ] = None,
    mask_share: MaskShareOption = None,
    torch_version: TorchOption = None,
    route: RouteOption = "translate",
    as_json: JsonOption = False,
) -> None:
    """Predict the peak of each phase of a run and say what it is made of; nothing is allocated or downloaded.

    -v shows every table, and what is not modelled.

    Only a step that hangs on values of its tensors is run for real, on this CPU, where there is room.

    Of several devices the status is that of the one where it fits best.

    What no option says, as an 8-bit optimizer or a loss of one's own, a factory does: it returns the Workload.
    """
    from memwall.machine.collector import without_collector
    from memwall.machine.hardware import hardware_named

    devices = [hardware_named(name.strip()) for name in device.split(",")]
    budgets = [None if budget is None else parse_budget(budget, whole_bytes=each.usable_bytes) for each in devices]
    num_samples, num_tokens = parse_count(batch, "--batch"), parse_count(seq, "--seq")
    with without_collector():  # torch's modules are many records, too
        from memwall.cli.estimate_search import Question, searched
    from memwall.cli.output import forecast_status, show
    from memwall.report.estimate_comparison import compared
    from memwall.report.summary import estimate_summary
    from memwall.report.text import estimate_report

    question = Question(
        spec=spec,
        batch=num_samples,
        sequence=num_tokens,
        options={
            "accumulate": accumulate,
            "eval_batch": eval_batch,
            "dtype": dtype,
            "optimizer": optimizer,
            "autocast": autocast,
            "checkpointing": checkpointing,
            "lora": lora,
            "mask_share": mask_share,
            "torch_version": torch_version,
            "route": route,
        },
    )
    found = [searched(question, each.name, size) for each, size in zip(devices, budgets, strict=True)]
    if len(found) == 1:
        shown = estimate_report if is_verbose() else estimate_summary
        show(shown(found[0].estimate, found[0].searched), found[0].estimate, as_json=as_json)
    else:
        table, record = compared(found)
        show(table, record, as_json=as_json)
    raise typer.Exit(min(forecast_status(each.estimate) for each in found))
