"""How the system schedules the store's threads beside the computation."""

import os
from contextlib import suppress


def schedule_as_batch() -> None:
    """Has the calling thread wait for its turn when it wakes up, where it would interrupt another thread.

    A transfer that is done wakes its worker on the core that the disk interrupts, though another one may be idle, and
    there it took the core from the thread that trains: most of what offloaded tensors cost a step that hides them
    (benchmarks/activation_offload.py). A thread of SCHED_BATCH does not preempt others as it wakes up, and otherwise
    has its share (sched(7)). Nothing changes where the system has no such thing, does not let a process ask, as some
    sandboxes, or runs this process otherwise. Never raises: whoever waits for the thread would wait in vain.
    """
    # macOS and Windows have none of these names, FreeBSD all but SCHED_BATCH.
    with suppress(AttributeError, OSError):
        if os.sched_getscheduler(0) == os.SCHED_OTHER:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
