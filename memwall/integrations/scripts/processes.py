"""Says of a process that a script starts by `multiprocessing.Process` that it trains, which memwall is no part of.

It goes on: the script may wait for what it returns, and would for ever. Those that prepare data, say, are let alone.
"""

import sys
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

from torch.optim.optimizer import register_optimizer_step_pre_hook

from memwall.patches import Patches

_OTHERS = ("torch", "multiprocessing", "concurrent")
"""Packages whose processes run what is no loop of the script's: workers of data loaders and of pools, managers."""


class _Watched(NamedTuple):
    """Runs in a process that a script has started, and says when it begins to train."""

    run: Callable[..., Any]
    text: str

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        said = False

        def tell(*_: Any) -> None:
            nonlocal said
            if not said:
                said = True
                sys.stderr.write(self.text)
                sys.stderr.flush()

        with Patches("says that a process which a script has started trains") as patches:
            patches.hook(register_optimizer_step_pre_hook, tell)
            return self.run(*args, **kwargs)


def watch_processes(name: str, patches: Patches) -> None:
    """Has one of the processes that a script starts with the same function say that it trains.

    Args:
        name: the script's.
    """
    known: set[tuple[str, str]] = set()
    """Holds names: what processes run may have no hash, and may hold much."""

    def started(original: Callable[..., Any], process: Any) -> Any:
        target = getattr(process, "_target", None)
        module = getattr(target, "__module__", None) or ""
        function = module, getattr(target, "__qualname__", type(target).__qualname__)
        if target is not None and module.split(".")[0] not in _OTHERS and function not in known:
            known.add(function)
            process._target = _Watched(
                target,
                f"memwall: {name} trains in a process of its own, started by multiprocessing.Process: memwall is not "
                "in it, and its memory is not planned; call what it runs in the script itself, and for several take "
                f"RANK and WORLD_SIZE from the environment and start them by memwall run --nproc N --budget SIZE "
                f"{name}\n",
            )
        return original(process)

    patches.wrap(BaseProcess, "start", started)
