"""Runs `memwall export`: writes a plan as the configuration of what launches training, and says what is not in it."""

import shlex
from pathlib import Path
from typing import Annotated

import typer
from msgspec import Struct

from memwall.cli.options import JsonOption, require_file, require_writable
from memwall.errors import UsageError
from memwall.trace.records import Tag


class ExportSummary(Struct, frozen=True, kw_only=True):
    """Says what was written, for scripts."""

    schema: str = "memwall.exported/1"
    tag: Tag = "simulated"
    source: str
    target: str
    files: tuple[str, ...]
    kept_by_memwall: tuple[dict[str, object], ...]
    """Actions that are in none of the files: memwall applies them in the process that trains."""
    remarks: tuple[str, ...]


def export(
    plan_path: Annotated[Path, typer.Argument(metavar="plan.json", help="Plan written by memwall plan.")],
    target: Annotated[
        str,
        typer.Option("--to", metavar="trainer|accelerate|deepspeed|env|kubernetes|dlrover", help="What reads it."),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="Where the configuration is written.")],
    world_size: Annotated[
        int, typer.Option("--world-size", min=1, metavar="N", help="Ranks that train, each with the plan's batch.")
    ] = 1,
    disk: Annotated[
        str | None, typer.Option("--disk", metavar="DIR", help="Folder for what DeepSpeed moves to NVMe.")
    ] = None,
    job: Annotated[
        str | None,
        typer.Option(
            "--job", metavar="trainjob|volcano|job", help="Of Kubernetes: which kind of job, by default trainjob."
        ),
    ] = None,
    image: Annotated[
        str | None, typer.Option("--image", metavar="IMAGE", help="Of Kubernetes: a container's image with memwall.")
    ] = None,
    script: Annotated[
        str | None,
        typer.Option("--script", metavar="'SCRIPT ARGS'", help="Of Kubernetes: what each rank runs under memwall."),
    ] = None,
    ranks_per_node: Annotated[
        int | None,
        typer.Option(
            "--ranks-per-node", min=1, metavar="N", help="Of Kubernetes: ranks, and GPUs, of a pod, by default 8."
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Write a plan as configuration: Trainer, Accelerate, DeepSpeed, Kubernetes, DLRover, or environment variables."""
    require_file(plan_path, expected="a plan written by memwall plan -o plan.json")
    require_writable(output, option="--output")
    if output.exists() and output.samefile(plan_path):
        raise UsageError(f"--output: {output} is the plan that is read; choose another name")
    from msgspec import to_builtins
    from rich.text import Text

    from memwall.cli.output import show
    from memwall.integrations.export import TARGETS, exported
    from memwall.integrations.kubernetes import JobCommand
    from memwall.planning.planfile import Plan
    from memwall.report.plan_grids import action_grid
    from memwall.versioned_files import whole_file

    of_jobs = {"--image": image, "--script": script, "--job": job, "--ranks-per-node": ranks_per_node}
    unused = [name for name, value in of_jobs.items() if value is not None] if target in TARGETS else []
    if unused and target != "kubernetes":
        raise UsageError(f"--to {target} has no place for {', '.join(unused)}: of --to kubernetes alone; leave it out")
    if disk is not None and target == "kubernetes":
        raise UsageError("--to kubernetes has no place for --disk: each pod has a volume of its own; leave it out")
    launch = None
    if image is not None and script is not None:
        launch = JobCommand(
            image=image,
            script=_words_of(script),
            num_ranks=world_size,
            num_ranks_per_node=ranks_per_node or 8,
        )
    plan = Plan.load(plan_path)
    found = exported(plan, target, output, world_size=world_size, disk=disk, job=job or "trainjob", launch=launch)
    if not found.expresses_any:
        names = ", ".join(f"{name} ({where})" for name, where, *_ in action_grid(found.kept).rows) or "no action at all"
        raise UsageError(
            f"--to {target}: nothing of {plan_path} can be written there, and {output} was not: the plan is {names}; "
            f"memwall applies it in the process that trains: memwall run --plan {plan_path} SCRIPT, or "
            "MemwallCallback(plan=...)"
        )
    for path, content in found.files.items():
        with whole_file(Path(path)) as file:
            file.write(content)
    summary = ExportSummary(
        source=str(plan_path),
        target=target,
        files=tuple(found.files),
        kept_by_memwall=tuple(to_builtins(action) for action in found.kept),
        remarks=found.remarks,
    )
    lines = [f"wrote {path}" for path in found.files]
    if found.kept:
        lines.append("not in it, memwall must still apply:")
        lines += [f"  {name}: {where}" for name, where, *_ in action_grid(found.kept).rows]
    else:
        lines.append("the whole plan is in it")
    lines += [f"note: {remark}" for remark in found.remarks]
    show(Text("\n".join(lines)), summary, as_json=as_json)


def _words_of(script: str) -> tuple[str, ...]:
    """Returns a script and its arguments."""
    try:
        words = tuple(shlex.split(script))
    except ValueError as error:
        raise UsageError(f"--script {script!r}: {error}; expected SCRIPT ARGS as a shell takes them") from error
    if not words:
        raise UsageError("--script is empty; expected SCRIPT ARGS, what each rank runs, as 'train.py --epochs 3'")
    return words
