"""A process ends at its deadline whatever it does, unless that is lifted."""

import pytest
from warm_python import warm_python

PROGRAMS = {
    "sleeps": ("Deadline(0.2, 143); time.sleep(60)", 143),
    "holds Python's lock": ("Deadline(0.2, 143); ctypes.PyDLL(None).sleep(60)", 143),
    "takes itself apart": ("Deadline(0.2, 143); atexit.register(ctypes.PyDLL(None).sleep, 60)", 143),
    "has its deadline lifted": ("late = Deadline(0.2, 143); late.lift(); late.lift(); time.sleep(0.5)", 0),
    "ends a run before the thread that attends to signals knows": (
        "ending._MOST_SECONDS = 1.5; own = ending.Ending(); atexit.register(ctypes.PyDLL(None).sleep, 60); "
        "own._hear(signal.SIGTERM, None); own.end()",
        143,
    ),
    "ends by itself after SIGTERM": (
        "own, changed = ending.Ending(), Patches('a test'); own.listen(changed); ending._MOST_SECONDS = 0.3; "
        "os.kill(os.getpid(), signal.SIGTERM); time.sleep(0.1); changed.undo(); time.sleep(0.5)",
        0,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(("source", "status"), PROGRAMS.values(), ids=PROGRAMS)
def test_the_status_is_that_of_what_ends_the_process(source: str, status: int) -> None:
    head = (
        "import atexit, ctypes, os, signal, time; import memwall.checkpoint.ending as ending; "
        "from memwall.checkpoint.deadline import Deadline; from memwall.patches import Patches; "
    )
    program = warm_python().start("-c", head + source)
    assert program.wait(timeout_s=30) == status, program.said
