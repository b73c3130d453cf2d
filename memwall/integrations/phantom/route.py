"""Has a SPEC recorded on the phantom device by a process of its environment, and reads the traces that it leaves.

The process gets the card by name and more memory than any card has: whether a run fits is for the forecast to say.
"""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import torch

from memwall.errors import TraceError, UsageError
from memwall.integrations.phantom.messages import ANSWER, EVALUATION, REQUEST, TRAINING, Answer, Request
from memwall.machine.hardware import Hardware
from memwall.predict.cuda.cuda_device import cuda_device_of
from memwall.trace.fake import RecordedRun
from memwall.trace.file import load_trace

_MOST_SECONDS = 900.0
_MEMORY_BYTES = 2 << 40
_LAST_LINES = 3


def recorded_on_phantom(
    spec: str,
    hardware: Hardware,
    *,
    eval_batch: int | None,
    num_micro_batches: int,
    mask_share: float | None,
    options: dict[str, Any],
) -> RecordedRun:
    """Returns two training steps of a SPEC and an evaluation, recorded on a phantom card.

    Raises:
        UsageError: there is no such environment or card, or the SPEC or an option cannot be used.
        TraceError: the step cannot be recorded without values, failed there, or took too long.
    """
    if cuda_device_of(hardware).is_rocm:
        raise UsageError(
            f"--route phantom: {hardware.name} is not NVIDIA's; leave the option out for --route translate"
        )
    environment = phantom_environment()
    request = Request(
        spec=spec,
        device=hardware.name,
        eval_batch=eval_batch,
        num_micro_batches=num_micro_batches,
        mask_share=mask_share,
        options={name: value for name, value in options.items() if value is not None},
    )
    with tempfile.TemporaryDirectory(prefix="memwall-phantom-") as name:
        folder = Path(name)
        (folder / REQUEST).write_bytes(msgspec.json.encode(request))
        answer = _asked(environment, hardware, folder)
        if answer.error:
            raise (UsageError if answer.is_usage else TraceError)(answer.error)
        has_evaluation = (folder / EVALUATION).exists()
        return RecordedRun(
            training=load_trace(folder / TRAINING),
            evaluation=load_trace(folder / EVALUATION) if has_evaluation else None,
            failure=answer.failure,
        )


def _asked(environment: Path, hardware: Hardware, folder: Path) -> Answer:
    """Runs the process to its end; what it prints goes to a file.

    It is ended where waiting is interrupted, and ends itself where this one is ended by a signal (`child.py`).
    """
    settings = {"ENV": str(environment), "CARD": hardware.name, "MEMORY_BYTES": str(_MEMORY_BYTES), "CUDNN": "real"}
    own = {
        name: value for name, value in os.environ.items() if not name.startswith("PHANTOM_") and name != "LD_PRELOAD"
    }
    with (
        (folder / "output").open("wb") as output,
        subprocess.Popen(
            [str(phantom_runner(environment)), "python", "-m", "memwall.integrations.phantom.child", str(folder)],
            env=own | {f"PHANTOM_{name}": value for name, value in settings.items()},
            stdin=subprocess.PIPE,  # never written to: it ends with this process
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        ) as process,
    ):
        try:
            status = process.wait(_MOST_SECONDS)
        except subprocess.TimeoutExpired:
            raise TraceError(
                f"--route phantom: the step was not recorded within {_MOST_SECONDS:.0f} s, and its process was ended; "
                "take a smaller batch or fewer layers, or --route translate"
            ) from None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    if not (folder / ANSWER).exists():
        said = (folder / "output").read_text(errors="replace").strip().splitlines()[-_LAST_LINES:]
        raise TraceError(
            f"--route phantom: the process on the phantom device of {environment} ended with status {status} and "
            f"without an answer; it said: {' / '.join(said) or 'nothing'}"
        )
    return msgspec.json.decode((folder / ANSWER).read_bytes(), type=Answer)


_VARIABLE = "PHANTOM_ENV"
_LIBRARY = Path("device") / "libphantom.so"
_RUN = "lib/python*/site-packages/phantom/run"


def phantom_environment() -> Path:
    """Returns the folder of the environment: the one that PHANTOM_ENV names, or .venv/phantom of a clone.

    Raises:
        UsageError: there is none, or it was not built to its end.
    """
    asked, clone = os.environ.get(_VARIABLE), Path(__file__).resolve().parents[3]
    has_sources = (clone / "phantom" / "environment.py").is_file()
    folder = Path(asked) if asked else clone / ".venv" / "phantom"
    if phantom_runner(folder) is not None:
        return folder.resolve()
    if asked:
        found = f"{_VARIABLE} names {folder}, " + (
            "where that was not built" if folder.is_dir() else "which is no folder"
        )
    elif has_sources:
        found = f"{folder} was not built, and {_VARIABLE} is not set"
    else:
        found = f"this memwall is installed without phantom/, and {_VARIABLE} is not set"
    build = "no CUDA build" if torch.version.cuda is None else f"a build for CUDA {torch.version.cuda}"
    at = f"`{sys.executable} phantom/environment.py FOLDER`"
    way = (
        f"run `make phantom` in {clone}"
        if has_sources
        else f"in a clone of memwall run {at}, and set {_VARIABLE}=FOLDER"
    )
    raise UsageError(
        f"--route phantom: needs an environment with a CUDA build of torch over stub libraries; {found} (torch "
        f"{torch.__version__} here is {build}). No GPU is needed: {way} (Linux on x86_64, g++, once), or leave "
        "the option out for --route translate"
    )


def phantom_runner(folder: Path) -> Path | None:
    """Returns the program that runs a command on the phantom device of an environment; None where it was not built."""
    found = next(folder.glob(_RUN), None)
    return found if (folder / _LIBRARY).is_file() else None
