"""Runs `memwall checkpoint`: shows what a folder of committed steps holds, and writes the last for other programs."""

from pathlib import Path
from typing import Annotated

import typer

from memwall.cli.options import JsonOption, require_writable, write_json
from memwall.errors import UsageError

_KINDS = ("safetensors", "torch", "distributed")


def checkpoint(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Folder given to memwall run --checkpoint.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write the last step there.")
    ] = None,
    kind: Annotated[
        str | None,
        typer.Option(
            "--to",
            metavar="safetensors|torch|distributed",
            help="Weights alone, or everything, the last as a folder of torch.distributed.checkpoint; by default what "
            "FILE ends in says, or torch.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Verify every byte of a folder of committed steps, of one process or of all ranks; show or export the last one."""
    if kind is not None and output is None:
        raise UsageError(f"checkpoint: --to {kind} needs --output FILE")
    if output is not None:
        if kind != "distributed":
            require_writable(output, option="--output")
        kind = kind or ("safetensors" if output.suffix == ".safetensors" else "torch")
    if kind is not None and kind not in _KINDS:
        raise UsageError(f"--to: '{kind}' is not known; expected one of {', '.join(_KINDS)}")
    from memwall.checkpoint.files import export_distributed, export_safetensors, export_torch, read_summary
    from memwall.units import format_bytes

    found = read_summary(directory)
    if output is not None:
        exports = {"safetensors": export_safetensors, "torch": export_torch, "distributed": export_distributed}
        exports[kind or ""](directory, output)
    if as_json:
        write_json(found)
        return
    of_ranks = f" of {found.num_ranks} ranks" if found.num_ranks > 1 else ""
    typer.echo(
        f"{directory}: step {found.step}{of_ranks}, {found.num_parameters:,} parameters "
        f"({format_bytes(found.weight_bytes)}), {format_bytes(found.state_bytes)} of {found.optimizer} state, "
        f"{format_bytes(found.disk_bytes)} on disk; every byte as it was written"
    )
    if output is not None:
        typer.echo(f"step {found.step} written to {output}")
