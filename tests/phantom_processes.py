"""Tests on the phantom device: each in a process of its own, forked before CUDA is touched, with settings of its own.

Under `phantom/run`, every test marked `gpu` or `phantom` runs so; tensors have values there, and what is queued on a
stream is done as late as possible, unless the test says otherwise:

    @pytest.mark.phantom(card="l4", devices=2, order="random", seed=3, numbers=False, memory_bytes=1 << 30)

`phantom` alone is for what only a phantom device can show; elsewhere such a test is skipped. With numbers, kernels of
Triton's are computed by its interpreter; without, they are compiled for the card and launched, and write nothing.
"""

import ctypes
import os
import pickle
import signal
import sys
import traceback
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

__all__ = ["is_phantom", "pytest_runtest_protocol", "run_forked"]

DEFAULTS = {"order": "lazy", "numbers": True}


def is_phantom() -> bool:
    """Returns whether this process runs under `phantom/run`."""
    return "PHANTOM_LIBRARY" in os.environ


def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Runs a test of CUDA's in a fork of this process, and reports what came of it there."""
    marks = list(item.iter_markers("phantom"))
    if not is_phantom() or not (marks or item.get_closest_marker("gpu")):
        return None
    settings = dict(DEFAULTS)
    for mark in reversed(marks):
        settings.update(mark.kwargs)
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in run_forked(lambda: runtestprotocol(item, nextitem=None, log=False), settings, item):
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def run_forked(work: Any, settings: dict[str, Any], item: pytest.Item) -> list[pytest.TestReport]:
    """Returns the reports of a test that ran in a fork; a report of the crash where the process ended without any."""
    reading, writing = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.close(reading)
            # Its watchdog is a thread that this process lacks: told to end, as after a failure, it is waited for.
            item.config.pluginmanager.unregister(name="faulthandler")
            _settle(settings)
            reports = work()
            _no_value_was_missing(reports)
            hook = item.config.hook
            data = [hook.pytest_report_to_serializable(config=item.config, report=report) for report in reports]
            with os.fdopen(writing, "wb") as pipe:
                pickle.dump(data, pipe)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    os.close(writing)
    try:
        with os.fdopen(reading, "rb") as pipe:
            said = pipe.read()
    except pytest.fail.Exception as ended:  # by the time-out, which would end the whole run here
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return [_failed(item, str(ended))]
    _, status = os.waitpid(child, 0)
    if said:
        hook = item.config.hook
        return [hook.pytest_report_from_serializable(config=item.config, data=each) for each in pickle.loads(said)]
    return [_failed(item, f"the process ended with status {status}")]


def _failed(item: pytest.Item, why: str) -> pytest.TestReport:
    return pytest.TestReport.from_item_and_call(item, pytest.CallInfo.from_call(lambda: pytest.fail(why), "call"))


def _no_value_was_missing(reports: list[pytest.TestReport]) -> None:
    """Fails a test in which an operation was not computed: what it returned was whatever lay there."""
    queued = sys.modules.get("phantom.queued")
    for report in reports:
        if report.when == "call" and report.passed and queued is not None and queued.failures:
            report.outcome = "failed"
            report.longrepr = f"operations without values: {queued.failures}"


def _settle(settings: dict[str, Any]) -> None:
    """Makes the settings of a test those of its device, which nobody has touched yet."""
    for name, value in settings.items():
        os.environ[f"PHANTOM_{name.upper()}"] = str(int(value) if isinstance(value, bool) else value)
    device = ctypes.CDLL(os.environ["PHANTOM_LIBRARY"])
    if not device.phantom_read_settings_again():
        raise RuntimeError("the device was in use before the test began; allocate nothing while tests are collected")
    if settings.get("time") == "roofline":
        from phantom import roofline

        roofline.install()
    if settings["numbers"]:
        # Triton decides when it is imported whether its functions are compiled; collecting tests may have done that.
        os.environ["TRITON_INTERPRET"] = "1"
        for name in [name for name in sys.modules if name == "triton" or name.startswith("triton.")]:
            if not name.startswith("triton._C"):
                del sys.modules[name]
        import torch  # noqa: F401 - which the device prepares as it is imported: numerics comes after that

        from phantom import numerics

        numerics.install()
