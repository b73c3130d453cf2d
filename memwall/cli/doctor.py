"""Runs `memwall doctor`: says what this machine offers, measured, with advice."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from memwall.cli.options import JsonOption, write_json
from memwall.errors import UsageError
from memwall.patches import active
from memwall.units import format_bytes

if TYPE_CHECKING:
    from memwall.observe.doctor import Finding, Inspection
    from memwall.patches import InEffect


def doctor(
    script: Annotated[
        Path | None,
        typer.Argument(
            metavar="[SCRIPT]",
            help="Script whose source is looked through for mistakes; it is not run. Or a DeepSpeed configuration, "
            "as ds.json: bytes of each buffer.",
        ),
    ] = None,
    disk: Annotated[
        Path | None,
        typer.Option("--disk", metavar="DIR", help="Folder whose disk is measured; by default the temporary one."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Look at devices, memory, disk and libraries, at a training script, or at ds.json, and say what to mend.

    The exit status is 0 whatever is found.
    """
    if script is not None and disk is not None:
        raise UsageError("doctor: SCRIPT is read, and --disk is of the machine; give one of them")
    if script is not None and script.suffix == ".json":
        _show_buffers(script, as_json=as_json)
        return
    if script is not None:
        from memwall.observe.script_mistakes import mistakes_in

        mistakes = mistakes_in(script)
        if as_json:
            write_json({"schema": "memwall.script-mistakes/1", "script": str(script), "mistakes": mistakes})
            return
        for mistake in mistakes:
            typer.echo(f"{script}:{mistake.line}: {mistake.found}\n  -> {mistake.advice}")
        if not mistakes:
            typer.echo(f"{script}: nothing to mend")
        return
    from memwall.observe.doctor import inspect_machine, warnings_of  # with torch, which takes a second

    machine = inspect_machine(disk)
    warnings = warnings_of(machine)
    changes = active()
    if as_json:
        patches = [
            {"what": one.what, "where": one.where, "why": one.why, "permanent": one.permanent} for one in changes
        ]
        write_json({"schema": "memwall.doctor/1", "machine": machine, "warnings": warnings, "patches": patches})
    else:
        _show(machine, warnings, changes)


def _show_buffers(config: Path, *, as_json: bool) -> None:
    """Prints what DeepSpeed's buffers take in each rank, a line for each key."""
    from memwall.observe.deepspeed_buffers import buffers_in

    buffers = buffers_in(config)
    if as_json:
        write_json({"schema": "memwall.deepspeed-buffers/1", "config": str(config), "buffers": buffers})
        return
    for one in buffers:
        size = "depends on the model" if one.nbytes is None else format_bytes(one.nbytes)
        typer.echo(f"{one.key}: {size} of each rank's {one.where}, {one.when} ({one.value})")
    if not buffers:
        typer.echo(f"{config}: stage 0 has no buffers of ZeRO's")


def _show(machine: "Inspection", warnings: "tuple[Finding, ...]", changes: "tuple[InEffect, ...]") -> None:
    """Prints a table of facts, then the warnings."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, markup=False)
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in _rows(machine):
        table.add_row(name, text)
    console.print(table)
    patches = "".join(f"\n  {one.where} ({one.what}): {one.why}" for one in changes)
    console.print(f"\npatches in effect:{patches or ' none'}", soft_wrap=True)
    for warning in warnings:
        console.print(f"\nwarning: {warning.found}\n  -> {warning.advice}", soft_wrap=True)
    if not warnings:
        console.print("\nnothing to mend")


def _rows(machine: "Inspection") -> list[tuple[str, str]]:
    """Returns name and text of every fact, as a person reads them."""
    rows = [
        (
            device.name,
            f"{device.description}: {format_bytes(device.total_bytes)}, {format_bytes(device.free_bytes)} free",
        )
        for device in machine.devices
    ]
    rows.append(("cores", f"{machine.num_cores}, torch computes with {machine.num_threads} threads"))
    ram = f"{format_bytes(machine.ram_total_bytes)}, {format_bytes(machine.ram_available_bytes)} available"
    rows.append(("memory", ram))
    cgroup = machine.cgroup
    limit = (
        "none" if cgroup is None else f"{format_bytes(cgroup.limit_bytes)} (cgroup v{cgroup.version}, {cgroup.path})"
    )
    rows.append(("memory limit", limit))
    swap = "none"
    if machine.swap_total_bytes:
        swap = f"{format_bytes(machine.swap_total_bytes)}, {format_bytes(machine.swap_used_bytes)} used"
    rows.append(("swap", swap))
    rows.append(("malloc", machine.malloc))
    rows.append(("tensor heap", machine.heap_problem or "available"))
    rows.append(("/dev/shm", "none" if machine.shm_total_bytes is None else format_bytes(machine.shm_total_bytes)))
    disk = machine.disk
    speed = "not measured"
    if disk is not None:
        speed = (
            f"{disk.directory}: {format_bytes(disk.free_bytes)} free, write "
            f"{format_bytes(disk.write_bytes_per_second)}/s, read {format_bytes(disk.read_bytes_per_second)}/s"
        )
    rows.append(("disk", speed))
    for library in machine.libraries:
        missing = f"not installed (pip install 'torch-memwall[{library.extra}]')" if library.extra else "not installed"
        rows.append((library.name, library.version or missing))
    return rows
