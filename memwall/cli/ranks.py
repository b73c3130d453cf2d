"""Launchers on the command line: they start `memwall run`, which starts none of them."""

import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from memwall.errors import UsageError
from memwall.machine.launched import launched

_MODULES = {
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "torchrun",
    "accelerate.commands.launch": "accelerate launch",
    "accelerate.commands.accelerate_cli": "accelerate launch",
    "deepspeed.launcher.runner": "deepspeed",
}
_PROGRAMS = {"torchrun": "torchrun", "accelerate": "accelerate launch", "deepspeed": "deepspeed"}
_ORDER = {
    "torchrun": "torchrun --nproc-per-node N -m memwall run --budget SIZE SCRIPT",
    "accelerate launch": "accelerate launch --num_processes N -m memwall run --budget SIZE SCRIPT",
    "deepspeed": "deepspeed --num_gpus N --module memwall run --budget SIZE SCRIPT",
}


def check_no_launcher(command: Sequence[str]) -> None:
    """Refuses to run a launcher: the processes that it starts would train without memwall.

    Args:
        command: what follows memwall's own options.

    Raises:
        UsageError: it is one; the message has the right order.
    """
    is_module = command[0] == "-m" and len(command) > 1
    found = command[1] if is_module else Path(command[0]).name
    name = (_MODULES if is_module else _PROGRAMS).get(found)
    if name is not None:
        raise UsageError(
            f"run: {name} starts processes of its own, in which memwall would not be; the launcher comes first: "
            f"{_ORDER[name]}; or let memwall start it: memwall run --nproc N --budget SIZE SCRIPT"
        )


def run_by_torchrun(num_processes: int, arguments: Sequence[str]) -> int:
    """Runs the same command in so many processes, by torchrun on this host; returns torchrun's status.

    Args:
        arguments: those of memwall, with `--nproc` among them.

    Raises:
        UsageError: a launcher has started this process already.
    """
    here = launched()
    if here.by_launcher:
        raise UsageError(
            f"run: --nproc starts processes, and this is one of {here.num_ranks} that a launcher has started; leave it "
            "out here"
        )
    own = _without_nproc(arguments)
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_processes), "-m", "memwall"]
    sys.stderr.write(f"memwall: {shlex.join(['python', *command, *own])}\n")
    sys.stderr.flush()
    return subprocess.run([sys.executable, *command, *own], env=os.environ, check=False).returncode


def _without_nproc(arguments: Sequence[str]) -> list[str]:
    """Returns the arguments without the first `--nproc N` or `--nproc=N`, which is memwall's own: SCRIPT follows it.

    >>> _without_nproc(["run", "--nproc", "2", "--budget", "1GiB", "train.py", "--nproc", "8"])
    ['run', '--budget', '1GiB', 'train.py', '--nproc', '8']
    """
    at = next(number for number, text in enumerate(arguments) if text.partition("=")[0] == "--nproc")
    return [*arguments[:at], *arguments[at + (1 if "=" in arguments[at] else 2) :]]
