"""Runs a script or a module as Python itself would."""

import os
import runpy
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, Self

from memwall.errors import MemwallError
from memwall.integrations.scripts.threads import ThreadFailures
from memwall.patches import Patches
from memwall.torch_internals.compiler import num_compiled
from memwall.torch_internals.transforms import without_needless_graphs

_LETS_GO = "has gradients of torch.func keep no graph that nothing differentiates"
_INTERRUPTED = 130  # what a shell shows for a program that Ctrl-C ended: 128 + SIGINT
_OF_COMPILED = (
    ". If torch.compile was given the function that calls the model, give it the model: memwall plans what calls it"
)
_OF_CHILDREN = (
    ". Training in processes that the script starts itself, as by multiprocessing.Process, is not seen: call what they "
    "run in the script's own process, and for several take RANK and WORLD_SIZE from the environment and start it by "
    "memwall run --nproc N --budget SIZE {name}"
)


class ScriptEnded(BaseException):
    """Ends a script early from inside, once enough steps were recorded.

    Not an `Exception`, so that a script which handles those does not go on.
    """


def execute(
    name: str,
    args: Sequence[str],
    *,
    is_module: bool,
    explained: Callable[[BaseException], MemwallError | None] = lambda _: None,
    has_budget: bool = False,
) -> int:
    """Runs a script as `python name args` would; returns the status it asks for, 1 if it raised.

    Args:
        explained: what a failure means to memwall; None where it is the script's own.
        has_budget: its gradients by `torch.func` are to keep no graph that nothing differentiates.

    Raises:
        MemwallError: one that the script, or a thread of it, let pass.
        ScriptEnded: likewise.
    """
    threads = ThreadFailures(explained)
    with Patches("ends a script when a thread of it has failed") as patches, Patches(_LETS_GO) as of_gradients:
        threads.listen(patches)
        if has_budget:
            without_needless_graphs(of_gradients)
        try:
            status = _executed(name, args, is_module=is_module, explained=explained, threads=threads)
        finally:
            threads.end()
    if threads.failure is not None:
        raise threads.failure
    return status


def _executed(
    name: str,
    args: Sequence[str],
    *,
    is_module: bool,
    explained: Callable[[BaseException], MemwallError | None],
    threads: ThreadFailures,
) -> int:
    with _as_main(name, args, is_module=is_module):
        try:
            if is_module:
                runpy.run_module(name, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(name, run_name="__main__")
        except SystemExit as end:
            if end.code is None or isinstance(end.code, int):
                return end.code or 0
            sys.stderr.write(f"{end.code}\n")
            return 1
        except (MemwallError, ScriptEnded):
            raise
        except (Exception, KeyboardInterrupt) as error:
            if threads.failure is not None:
                return 1  # what it failed by follows from that
            # As Python would show it, from the script's own first line on.
            frames = error.__traceback__
            while frames is not None and frames.tb_frame.f_code.co_filename in (__file__, "<frozen runpy>"):
                frames = frames.tb_next
            traceback.print_exception(type(error), error, frames)
            found = explained(error)
            if found is not None:
                raise found from error
            return _INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1
    return 0


@contextmanager
def _as_main(name: str, args: Sequence[str], *, is_module: bool) -> Iterator[None]:
    """Sets the argument list and import path that a script finds when Python runs it."""
    argv, path = list(sys.argv), list(sys.path)

    def undo() -> None:
        """Puts both back even where the script has changed them: they were its own."""
        sys.argv, sys.path[:] = argv, path

    with Patches("runs a script as Python would") as patches:
        patches.add("attribute", "sys.argv and sys.path", undo)
        sys.argv = [name, *args]
        sys.path.insert(0, os.getcwd() if is_module else str(Path(name).resolve().parent))
        yield


class BeforeScript(NamedTuple):
    """Holds what the process had done before a script ran in it."""

    num_compiled: int
    """Functions that the compiler was given."""
    child_seconds: float
    """CPU time of processes that it had started, in seconds."""

    @classmethod
    def now(cls) -> Self:
        """Returns what the process has done so far."""
        times = os.times()
        return cls(num_compiled(), times.children_user + times.children_system)


def without_step(name: str, status: int, before: BeforeScript) -> str:
    """Says that a script has ended, why there is nothing to plan, and what may have trained unseen.

    Args:
        before: what the process had done before it.
    """
    ending = f"ended with status {status}" if status else "finished"
    after = BeforeScript.now()
    unseen = _OF_COMPILED if after.num_compiled > before.num_compiled else ""
    if after.child_seconds > before.child_seconds:
        unseen += _OF_CHILDREN.format(name=name)
    return (
        f"{name} {ending} without a whole training step (forward of a module with gradients on, backward, step of a "
        f"torch optimizer); there is nothing to plan{unseen}"
    )
