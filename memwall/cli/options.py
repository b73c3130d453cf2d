"""Holds what several commands share: reading sizes, tiers, files and scripts from text, writing the JSON object."""

import difflib
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import typer
from msgspec import Struct

from memwall.errors import UsageError
from memwall.trace.records import Route
from memwall.units import parse_size

PASS_ARGUMENTS: dict[Any, Any] = {"allow_interspersed_args": False, "ignore_unknown_options": True}
"""Context settings of commands that end in SCRIPT [ARGS...]: what follows SCRIPT belongs to the script."""


def _list_allowed(text: str | None) -> str | None:
    """Lists what `--allow` takes, where it is asked for help, and ends the command."""
    if text is None or "help" not in _words_of(text):
        return text
    from memwall.planning.modes import MODES, every_word

    for kind, means in every_word().items():
        typer.echo(f"{kind}: {means}")
    for mode, (means, _) in MODES.items():
        typer.echo(f"{mode}: {means}; as --mode {mode}")
    raise typer.Exit


def _words_of(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object on standard output; text on standard error.")]
HostOption = Annotated[
    str | None, typer.Option("--host", metavar="SIZE", help="Host memory that offloaded bytes may use.")
]
DiskOption = Annotated[
    str | None,
    typer.Option("--disk", metavar="DIR[:SIZE]", help="Folder, and bytes of it, that offloaded bytes may use."),
]
NoDiskOption = Annotated[
    bool,
    typer.Option("--no-disk", help="No plan writes to the disk; a run's first step alone moves tensors there, once."),
]
AllowOption = Annotated[
    str | None,
    typer.Option(
        "--allow",
        metavar="KIND,...",
        help="Allow what is not bit-exact for every loop; --allow help lists the kinds.",
        is_eager=True,
        callback=_list_allowed,
    ),
]
ModeOption = Annotated[
    str | None,
    typer.Option(
        "--mode",
        metavar="exact|balanced|smallest",
        help="Allow nothing; what rounds at other points; or all that --allow knows, as far as it is possible.",
    ),
]
EvalBatchOption = Annotated[
    int | None,
    typer.Option("--eval-batch", min=1, metavar="N", help="Samples evaluated at once; by default --batch."),
]
MaskShareOption = Annotated[
    float | None,
    typer.Option("--mask-share", metavar="X", help="Share of rows that a data-dependent mask selects, as 0.25."),
]
DtypeOption = Annotated[
    str | None,
    typer.Option("--dtype", metavar="D", help="With a config.json: fp32, bf16 or fp16 weights; by default as it says."),
]
OptimizerOption = Annotated[
    str | None,
    typer.Option("--optimizer", metavar="O", help="With a config.json: adamw, adamw-fused, sgd, sgd-momentum, ..."),
]
AutocastOption = Annotated[
    str | None,
    typer.Option("--autocast", metavar="D", help="As the Trainer's bf16 and fp16: bf16 or fp16."),
]
CheckpointingOption = Annotated[
    bool, typer.Option("--checkpointing", help="With a config.json: as the Trainer's gradient_checkpointing.")
]
LoraOption = Annotated[
    str | None,
    typer.Option(
        "--lora",
        metavar="r=N,...",
        help="With a config.json: trains adapters, as r=16,targets=q_proj,v_proj; without targets all-linear, unlike "
        "PEFT's own default; with base=nf4 the base's linear layers are in 4 bits, as QLoRA's.",
    ),
]
RouteOption = Annotated[
    Route,
    typer.Option(
        "--route",
        help="How the step is recorded for the device: translate records it on fake tensors, phantom has torch's own "
        "CUDA build run it on a phantom card, with cuDNN's choices (`make phantom` once; no GPU).",
    ),
]
TorchOption = Annotated[
    str | None,
    typer.Option(
        "--torch", metavar="VERSION", help="Release whose allocator is simulated, as 2.11; by default the one here."
    ),
]
CommandArgument = Annotated[
    list[str],
    typer.Argument(metavar="SCRIPT [ARGS]...", help="Training script, or -m MODULE, and its own arguments."),
]


# What measuring the disk takes; a disk without that much room is of no use to a step.
_LEAST_DISK_BYTES = 64 << 20


class DiskChoice(Struct, frozen=True, kw_only=True):
    """Names a folder for offloaded bytes; `limit_bytes` None means all its free space."""

    directory: Path
    limit_bytes: int | None


class Script(Struct, frozen=True, kw_only=True):
    """Says what to run: a path, or a module name, with its arguments."""

    name: str
    is_module: bool
    arguments: tuple[str, ...]

    @property
    def target(self) -> str:
        """Returns it as a person types it: `train.py` or `-m package.train`."""
        return f"-m {self.name}" if self.is_module else self.name


def parse_budget(text: str, *, device: str | None = None, whole_bytes: int | None = None) -> int:
    """Returns the bytes of `--budget`; a percentage is of what this process has of the device.

    Args:
        device: `cpu`, `cuda` or `cuda:N`; None for the CUDA device of this process's rank, or the CPU where there is
            none.
        whole_bytes: what a percentage is of, where that is known already.

    Raises:
        UsageError: the text is no size, or the device is unknown.
    """
    if whole_bytes is None and text.strip().endswith("%"):
        from memwall.machine.limits import own_bytes, own_device

        whole_bytes = own_bytes(device or own_device())
    return _parse_size_of("--budget", text, whole_bytes)


def parse_host(text: str | None) -> int | None:
    """Returns the bytes of `--host`; a percentage is of this process's part of the memory limit in force."""
    if text is None:
        return None
    whole_bytes = None
    if text.strip().endswith("%"):
        from memwall.machine.limits import own_bytes

        whole_bytes = own_bytes("cpu")
    return _parse_size_of("--host", text, whole_bytes)


def parse_disk(text: str | None) -> DiskChoice | None:
    """Returns the tier of `--disk DIR[:SIZE]`, checked to be a real disk with that much space.

    Raises:
        UsageError: the size is no size.
        StoreError: the folder cannot hold offloaded bytes.
    """
    if text is None:
        return None
    from memwall.machine.disk_location import check_directory

    directory, separator, size = text.rpartition(":")
    if not separator or Path(text).is_dir():
        directory, size = text, ""
    limit_bytes = _parse_size_of("--disk", size, None) if size else None
    check_directory(directory, limit_bytes or _LEAST_DISK_BYTES)
    return DiskChoice(directory=Path(directory), limit_bytes=limit_bytes)


def require_disk() -> None:
    """Checks the disk that is used where `--disk` is left out.

    Raises:
        StoreError: the temporary directory cannot hold offloaded bytes; the message asks for `--disk`.
    """
    from memwall.machine.disk_location import check_directory, default_directory

    check_directory(default_directory(), _LEAST_DISK_BYTES)


def parse_allow(text: str | None, mode: str | None = None) -> tuple[str, ...]:
    """Returns what `--allow` and `--mode` allow, each word once, in a fixed order, after the mode.

    Raises:
        UsageError: a word is unknown, or the mode rules it out.
    """
    words = _words_of(text or "")
    if not words and mode is None:
        return ()
    from memwall.planning.modes import MODES, allowed_words

    if mode is not None and mode not in MODES:
        raise UsageError(f"--mode: '{mode}' is not known; expected one of {', '.join(MODES)}")
    return allowed_words([*([] if mode is None else [mode]), *words], option="--allow")


def parse_count(text: str | None, option: str) -> int | Literal["max"] | None:
    """Returns the number that an option gives, or "max" for one to be found."""
    if text is None or text == "max":
        return text  # type: ignore[return-value]
    if not text.isdecimal() or int(text) < 1:
        raise UsageError(f"{option} {text}: expected a whole number from 1 on, or max for the largest that fits")
    return int(text)


def parse_command(command: Sequence[str], ctx: typer.Context) -> Script:
    """Returns the script to run, from everything that followed memwall's own options.

    Raises:
        UsageError: an option before SCRIPT is not known, or the script or module does not exist.
    """
    first, *rest = command
    if Path(first).name.startswith("python") and rest and Path(first).suffix != ".py":
        first, *rest = _after_interpreter(first, rest)
    if first == "-m":
        if not rest:
            raise UsageError("-m needs the name of a module, as in: -m package.train")
        name, *arguments = rest
        if str(Path.cwd()) not in sys.path:
            sys.path.insert(0, str(Path.cwd()))
        try:
            found = importlib.util.find_spec(name)
        except (ImportError, ValueError) as error:
            raise UsageError(f"-m {name}: {error}; expected a module that Python can import from here") from error
        if found is None:
            raise UsageError(f"-m {name}: there is no such module in {Path.cwd()} or installed")
        return Script(name=name, is_module=True, arguments=tuple(arguments))
    if first.startswith("-"):
        known = [option for parameter in ctx.command.params for option in parameter.opts if option.startswith("--")]
        near = difflib.get_close_matches(first.partition("=")[0], known, n=1)
        meant = f", did you mean {near[0]}" if near else ""
        raise UsageError(f"{ctx.info_name}: no such option {first}{meant}; the script's own options go after SCRIPT")
    path = Path(first)
    if not path.exists():
        hint = "expected a Python file" if first.endswith(".py") else f"for a module write -m {first}"
        raise UsageError(f"there is no script {path} in {Path.cwd()}; {hint}")
    if not path.is_file():
        raise UsageError(f"{path} is a folder; expected a Python script, or -m MODULE")
    return Script(name=first, is_module=False, arguments=tuple(rest))


def _after_interpreter(interpreter: str, rest: Sequence[str]) -> Sequence[str]:
    """Returns what an interpreter was to run: memwall runs it in its own."""
    if rest[0].startswith("-") and rest[0] != "-m":
        raise UsageError(
            f"memwall runs the script in its own Python, {sys.executable}, without {interpreter}'s option {rest[0]}; "
            f"leave out {interpreter}, or write {interpreter} {rest[0]} -m memwall ..."
        )
    return rest


def require_file(path: Path, *, expected: str) -> Path:
    """Returns the path of an input file, which exists.

    Raises:
        UsageError: there is no such file; the message says what was expected.
    """
    if not path.exists():
        raise UsageError(f"there is no file {path}; expected {expected}")
    if not path.is_file():
        raise UsageError(f"{path} is a folder; expected {expected}")
    return path


def require_writable(path: Path, *, option: str) -> Path:
    """Returns the path of an output file, whose folder exists: found out before the work, not after it.

    Raises:
        UsageError: the folder is missing, or the path is a folder itself.
    """
    if path.is_dir():
        raise UsageError(f"{option}: {path} is a folder; expected a file name in it")
    folder = path.absolute().parent
    if not folder.is_dir():
        raise UsageError(f"{option}: there is no folder {folder} to write {path.name} in; create it first")
    return path


def write_json(value: object) -> None:
    """Writes the one object of `--json` to standard output."""
    typer.echo(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def _parse_size_of(option: str, text: str, whole_bytes: int | None, *, may_be_zero: bool = False) -> int:
    try:
        return parse_size(text, whole_bytes=whole_bytes, may_be_zero=may_be_zero)
    except UsageError as error:
        raise UsageError(f"{option}: {error}") from error
