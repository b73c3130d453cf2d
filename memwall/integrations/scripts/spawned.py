"""Lets a script start processes for other work than training, which memwall would not be in: preparing data, say.

Each of them refuses the first step of an optimizer, in words that the script's own process then ends with.
"""

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch.multiprocessing
from torch.multiprocessing.spawn import ProcessRaisedException
from torch.optim.optimizer import register_optimizer_step_pre_hook

from memwall.errors import UsageError
from memwall.integrations.scripts.script_watch import ScriptWatch
from memwall.patches import Patches


class _Untrained(NamedTuple):
    """Runs in a process that a script has started, and ends it when it begins to train."""

    run: Callable[..., Any]
    refusal: str

    def __call__(self, *args: Any) -> Any:
        with Patches("refuses to train in a process that a script has started") as patches:
            patches.hook(register_optimizer_step_pre_hook, self._refuse)
            return self.run(*args)

    def _refuse(self, *_: Any) -> None:
        raise UsageError(self.refusal)


def watch_spawning(watch: ScriptWatch, patches: Patches) -> None:
    """Has processes that the script starts by `torch.multiprocessing` refuse to train."""

    def started(
        original: Callable[..., Any], fn: Any, args: Any = (), nprocs: int = 1, *rest: Any, **kwargs: Any
    ) -> Any:
        refusal = _refusal(watch.script, nprocs)
        with watch.guarded():
            try:
                return original(_Untrained(fn, refusal), args, nprocs, *rest, **kwargs)
            except ProcessRaisedException as error:
                if refusal in str(error):
                    raise UsageError(refusal) from None
                raise

    # What the public function calls, and notebook launchers too.
    patches.wrap(sys.modules["torch.multiprocessing.spawn"], "start_processes", started)
    patches.wrap(torch.multiprocessing, "start_processes", started)


def _refusal(name: str, num_processes: int) -> str:
    return (
        f"{name} starts {num_processes} processes by torch.multiprocessing that train, and memwall is not in them; "
        "call what they run in the script itself, with RANK and WORLD_SIZE from the environment, and start it by "
        f"memwall run --nproc {num_processes} --budget SIZE {name}"
    )
