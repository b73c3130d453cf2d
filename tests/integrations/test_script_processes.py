"""A process of a script may run anything that can be called."""

import multiprocessing

from memwall.integrations.scripts.processes import watch_processes
from memwall.patches import Patches


class Equal:
    """Has no hash, since it defines what it is equal to."""

    def __eq__(self, other: object) -> bool:
        return True

    def __call__(self) -> None:
        raise SystemExit(7)


def test_a_process_runs_what_has_no_hash() -> None:
    with Patches("says that a process which a script has started trains") as patches:
        watch_processes("train.py", patches)
        process = multiprocessing.get_context("fork").Process(target=Equal())
        process.start()
        process.join()
    assert process.exitcode == 7
