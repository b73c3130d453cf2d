"""The processes that tests begin with torch imported."""

import signal

import pytest
from warm_python import warm_python


@pytest.mark.slow
def test_a_program_that_takes_too_long_is_killed_once() -> None:
    program = warm_python().start("-c", "import time; time.sleep(100)")
    with pytest.raises(TimeoutError, match=r"has not ended within 0 s"):
        program.wait(timeout_s=0.1)
    program.kill()  # there is nothing left that a signal could be sent to
    assert program.wait() == -signal.SIGKILL
