"""Techniques are found by whichever thread asks first, and by all of them alike."""

import pytest
from warm_python import warm_python

# The registry of a process is filled once, so each try has one of its own.
ASKED_AT_ONCE = """
import sys, threading
from concurrent.futures import ThreadPoolExecutor
from memwall.planning.technique import techniques

sys.setswitchinterval(1e-6)
barrier = threading.Barrier(8)

def ask(_):
    barrier.wait()
    return tuple(technique.tag for technique in techniques())

with ThreadPoolExecutor(8) as threads:
    found = set(threads.map(ask, range(8)))
assert found == {tuple(technique.tag for technique in techniques())}, found
assert len(techniques()) > 5
"""


@pytest.mark.slow
def test_threads_that_ask_at_once_find_the_same_techniques() -> None:
    for _ in range(3):
        ended = warm_python().run("-c", ASKED_AT_ONCE, timeout_s=60)
        assert ended.returncode == 0, ended.stderr
