"""How the system schedules the store's threads beside the computation."""

import os
from contextlib import suppress

__all__ = ["schedule_as_batch"]


def schedule_as_batch() -> None:
    """Has the calling thread wait for its turn when it wakes up, where it would interrupt another thread.

    A transfer that is done wakes its worker on the core that the disk interrupts, though another one may be idle, and
    there it took the core from the thread that trains: most of what offloaded tensors cost a step that hides them
    (benchmarks/activation_offload.py). A thread of SCHED_BATCH does not preempt others as it wakes up, and otherwise
    has its share (sched(7)). Nothing changes where the system has no such thing, or runs this process otherwise.
    """
    if hasattr(os, "sched_setscheduler") and os.sched_getscheduler(0) == os.SCHED_OTHER:
        with suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
