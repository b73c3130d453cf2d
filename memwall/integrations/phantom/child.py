"""Records one SPEC on the phantom device, in a process of its environment: run by `route.py`.

    phantom/run python -m memwall.integrations.phantom.child FOLDER

Reads FOLDER/request.json, and leaves FOLDER/answer.json there, beside the traces. Its standard input is a pipe that the
process holds open that asked: once that one is gone, however it ended, so are this one and FOLDER.
"""

import os
import shutil
import signal
import sys
import threading
from pathlib import Path

import msgspec

from memwall.errors import MemwallError, UsageError
from memwall.integrations.phantom.messages import ANSWER, EVALUATION, REQUEST, TRAINING, Answer, Request
from memwall.integrations.phantom.recording import record_on_phantom
from memwall.integrations.spec_trace import workloads_of_spec
from memwall.machine.hardware import hardware_named
from memwall.trace.file import save_trace
from memwall.trace.spec import describe_error


def _recorded(request: Request, folder: Path) -> Answer:
    training, evaluated = workloads_of_spec(request.spec, request.eval_batch, **request.options)
    run = record_on_phantom(
        training,
        evaluated.make_batch,
        hardware_named(request.device),
        num_micro_batches=request.num_micro_batches,
        mask_share=request.mask_share,
    )
    save_trace(run.training, folder / TRAINING)
    if run.evaluation is not None:
        save_trace(run.evaluation, folder / EVALUATION)
    return Answer(failure=run.failure)


def _end_with_parent(pipe: int, folder: Path) -> None:
    """Waits until nobody holds the pipe's other end, and ends this process and all that it started."""
    os.read(pipe, 1)
    shutil.rmtree(folder, ignore_errors=True)
    os.killpg(os.getpid(), signal.SIGKILL)


def main() -> None:
    folder = Path(sys.argv[1])
    pipe, nothing = os.dup(0), os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)  # a model's code that asks for input finds none
    threading.Thread(target=_end_with_parent, args=(pipe, folder), daemon=True).start()
    request = msgspec.json.decode((folder / REQUEST).read_bytes(), type=Request)
    try:
        answer = _recorded(request, folder)
    except MemwallError as error:
        answer = Answer(error=str(error), is_usage=isinstance(error, UsageError))
    except Exception as error:  # whatever a model's own code raises
        answer = Answer(error=f"'{request.spec}': a step on the phantom device failed: {describe_error(error)}")
    (folder / ANSWER).write_bytes(msgspec.json.encode(answer))


if __name__ == "__main__":
    main()
