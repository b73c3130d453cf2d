"""Starts this very command again with what the C library reads only at its start.

glibc takes its malloc tunables from the environment before Python's first instruction. The best malloc policy for
tensors needs one, so `memwall run` replaces itself once, keeping its process id, its files and its arguments.
"""

import logging
import os
import sys

__all__ = ["restart_for_malloc"]

_log = logging.getLogger(__name__)


def restart_for_malloc() -> None:
    """Returns if the process has what it needs, or cannot have it; else does not return."""
    from memwall.predict.malloc import missing_environment, policy_named, unavailable_reason

    if unavailable_reason():
        return
    missing = missing_environment(policy_named("compact"))
    if not missing or os.environ.get("MEMWALL_RESTARTED") == "1":
        return
    _log.debug("starting again with %s", missing)
    sys.stdout.flush()
    sys.stderr.flush()
    # sys.orig_argv is the command line as the system got it, `python -m memwall` or the console script alike.
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ | missing | {"MEMWALL_RESTARTED": "1"})
