"""Everything of memwall that reads a stranger's file, each as a function of bytes that must not fail.

A reader may refuse its file in one clear error. It may not raise anything else, take long, take much memory, write
outside of the folder that it is given, or print what a terminal acts on.
"""

import io
import os
import re
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import zstandard
from packed_checkpoint import unpacked
from plans import a_plan

from memwall.cli.app import main
from memwall.errors import MemwallError
from memwall.store.commit_format import COMMIT_NAME, DATA_NAME

__all__ = ["READERS", "check"]

_EXPECTED = {0, 2, 3, 4, 5, 6}
_ACTED_ON = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f‎‏‪-‮⁦-⁩]")


def _commands(path: Path, *commands: tuple[str, ...]) -> None:
    for command in commands:
        status = main([*command])
        if status not in _EXPECTED:
            raise AssertionError(f"memwall {' '.join(command)} ended with {status} for {path}")


def _trace(data: bytes, folder: Path) -> None:
    """Has the payload alone changed: behind a checksum nothing else would be reached."""
    path = folder / "x.trace"
    path.write_bytes(b"memwall.trace/2\n" + zstandard.ZstdCompressor(level=1, write_checksum=True).compress(data))
    _commands(path, ("explain", str(path)), ("plan", str(path), "--budget", "300MiB"))


def _trace_file(data: bytes, folder: Path) -> None:
    path = folder / "x.trace"
    path.write_bytes(data)
    _commands(path, ("explain", str(path)))


def _plan(data: bytes, folder: Path) -> None:
    path = folder / "plan.json"
    path.write_bytes(data)
    written = ("-o", str(folder / "out"))
    _commands(path, ("explain", str(path)), ("export", str(path), "--to", "env", *written))


def _run(data: bytes, folder: Path) -> None:
    path = folder / "run.json"
    path.write_bytes(data)
    _commands(path, ("report", str(path), "-o", str(folder / "out"), "--format", "json"))


def _snapshot(data: bytes, folder: Path) -> None:
    path = folder / "x.pickle"
    path.write_bytes(data)
    _commands(path, ("explain", str(path)))


def _steps(data: bytes, folder: Path) -> None:
    path = folder / "steps.jsonl"
    path.write_bytes(data)
    _commands(path, ("top", "--once", str(path)))


def _config(data: bytes, folder: Path) -> None:
    from memwall.integrations.hugging_face.hf_config import read_config

    path = folder / "config.json"
    path.write_bytes(data)
    read_config(path)


def _diffusers(data: bytes, folder: Path) -> None:
    from memwall.integrations.hugging_face.diffusers_spec import diffusers_workload

    path = folder / "config.json"
    path.write_bytes(data)
    diffusers_workload(str(path))


def _dlrover(data: bytes, folder: Path) -> None:
    """Has a file read that tells a batch, and one to which a plan's batch is added."""
    from memwall.integrations.dlrover import tuned_batch, tuning_file

    path = folder / "auto_paral_config.json"
    path.write_bytes(data)
    tuned_batch(path)
    tuning_file(a_plan(), path)


def _deepspeed(data: bytes, folder: Path) -> None:
    from memwall.observe.deepspeed_buffers import buffers_in

    path = folder / "ds.json"
    path.write_bytes(data)
    buffers_in(path)


def _next_budget(data: bytes, folder: Path) -> None:
    from memwall.session.next_budget import read_next_budget

    (folder / "out-of-memory.json").write_bytes(data)
    read_next_budget(folder, 100)


def _checkpoint(data: bytes, folder: Path) -> None:
    """Has contents changed behind digests that are right: without them nothing else would be reached."""
    found = unpacked(data)
    if found is None:
        return
    commit, whole = found
    (folder / COMMIT_NAME).write_bytes(commit)
    (folder / DATA_NAME).write_bytes(whole)
    _commands(folder, ("checkpoint", str(folder)), ("checkpoint", str(folder), "-o", str(folder / "out.safetensors")))


def _allocator_settings(data: bytes, folder: Path) -> None:
    from memwall.predict.cuda_allocator.allocator_settings import parse_settings
    from memwall.predict.cuda_allocator.torch_releases import profile_for

    parse_settings(data.decode("latin-1"), profile_for("2.13.0")[0])


READERS: dict[str, Callable[[bytes, Path], None]] = {
    "trace": _trace,
    "trace_file": _trace_file,
    "plan": _plan,
    "run": _run,
    "snapshot": _snapshot,
    "steps": _steps,
    "config": _config,
    "allocator_settings": _allocator_settings,
    "deepspeed": _deepspeed,
    "diffusers": _diffusers,
    "dlrover": _dlrover,
    "next_budget": _next_budget,
    "checkpoint": _checkpoint,
}


def check(name: str, data: bytes, folder: Path) -> None:
    """Lets a reader read these bytes as its file.

    Args:
        folder: an empty folder, which is emptied again.

    Raises:
        AssertionError: it printed what a terminal acts on, or left a file that nobody asked for.
        BaseException: whatever else it raised.
    """
    before = set(os.listdir("."))
    shown = io.StringIO()
    with redirect_stdout(shown), redirect_stderr(shown):
        try:
            READERS[name](data, folder)
        except MemwallError as error:
            shown.write(str(error) if name in ("trace", "plan") else "")
    found = _ACTED_ON.search(shown.getvalue())
    if found is not None:
        raise AssertionError(f"{name}: {found[0]!r} is printed: {shown.getvalue()!r}")
    if set(os.listdir(".")) != before:
        raise AssertionError(f"{name}: {set(os.listdir('.')) - before} lie in the current folder")
    for path in folder.iterdir():
        path.unlink()
