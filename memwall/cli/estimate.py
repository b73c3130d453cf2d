"""`memwall estimate`: what a training step needs on a device that is not here, without weights."""

from typing import Annotated

import typer

from memwall.cli.options import JsonOption


def estimate(
    spec: Annotated[
        str,
        typer.Argument(
            metavar="SPEC",
            help="package.module:factory, path/file.py:factory, or a Hugging Face model folder or its config.json.",
        ),
    ],
    device: Annotated[str, typer.Option("--device", metavar="NAME", help="Device to estimate for.")],
    batch: Annotated[int | None, typer.Option("--batch", min=1, metavar="N", help="Samples per forward.")] = None,
    seq: Annotated[int | None, typer.Option("--seq", min=1, metavar="N", help="Tokens per sample.")] = None,
    optimizer: Annotated[
        str | None,
        typer.Option("--optimizer", metavar="O", help="adamw, adamw-fused, adamw-foreach, adam, sgd, adafactor."),
    ] = None,
    dtype: Annotated[str | None, typer.Option("--dtype", metavar="D", help="float32 or bfloat16.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Show the peak of one training step and what it is made of; nothing is allocated or downloaded."""
    from memwall.cli.output import show, trace_summary
    from memwall.integrations.spec_trace import trace_of_spec
    from memwall.report.text import trace_report

    trace = trace_of_spec(
        spec,
        target="cpu" if device == "cpu" else "cuda",
        batch=batch,
        sequence=seq,
        dtype=dtype,
        optimizer=optimizer,
    )
    show(trace_report(trace), trace_summary(trace), as_json=as_json)
