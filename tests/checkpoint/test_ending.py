"""A run that is told to end ends with the step that runs committed, or at once where that would take too long."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from combinations import every_value
from warm_python import Program, warm_python

from memwall.cli.app import main

pytestmark = pytest.mark.slow(seconds=3)

Committed = Callable[[Path], int]

SCRIPT = """
import atexit, ctypes, hashlib, os, signal, sys, time
import torch
import memwall

how, seconds = sys.argv[1], float(sys.argv[2])
torch.manual_seed(0)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.AdamW(model.parameters())
large = torch.ones(5000, 5000) if how == "long" else None
if how == "own handler":
    signal.signal(signal.SIGTERM, lambda *_: print("heard"))
if how == "clean-up":
    atexit.register(lambda: (time.sleep(0.4), print("cleaned up at exit")))
try:
    for step in memwall.steps(6):
        x = torch.randn(4)
        loss = model(x).square().sum()
        if how == "fork" and step == 3 and (child := os.fork()) == 0:
            defaults = (signal.SIG_DFL, signal.default_int_handler, -1)
            found = (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT), signal.set_wakeup_fd(-1))
            os._exit(7 if found == defaults else 8)
        if how == "fork" and step == 3:
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        elif how != "plain" and step == 3:
            os.kill(os.getpid(), signal.SIGINT if how == "INT" else signal.SIGTERM)
        if how == "long" and step == 3:
            large @ large  # seconds of one thread's, in which Python hears nothing
        time.sleep(seconds)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(step)
finally:
    if how == "clean-up":
        time.sleep(0.4)
        print("cleaned up")
print(hashlib.sha256(model.weight.detach().numpy().tobytes()).hexdigest())
"""


def started(
    folder: Path,
    how: str,
    *options: str,
    step_seconds: float = 0.0,
    patience_seconds: float = 8.0,
    most_seconds: float = 7.7,
    before: str = "",
    after: str = "sys.exit(main())",
) -> Program:
    script = folder / "train.py"
    script.write_text(SCRIPT)
    words = ("run", "--budget", "8GiB", "--checkpoint", str(folder / "kept"), *options, str(script), how)
    source = (
        # A shell that starts the tests in the background has them ignore Ctrl-C.
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "import atexit, ctypes, sys, memwall.checkpoint.ending as ending; from memwall.cli.app import main; "
        f"ending._PATIENCE_SECONDS, ending._LAST_SECONDS = {patience_seconds}, 0.2; "
        f"ending._MOST_SECONDS, ending._LEAST_SECONDS = {most_seconds}, 0.05; "
        f"sys.argv = {['memwall', *words, str(step_seconds)]}; {before}{after}"
    )
    return warm_python().start("-c", source)


@pytest.fixture
def committed_step(capsys: pytest.CaptureFixture[str]) -> Committed:
    """Tells the step that a run has committed in a folder."""

    def of(folder: Path) -> int:
        assert main(["checkpoint", str(folder / "kept"), "--json"]) == 0
        return int(json.loads(capsys.readouterr().out)["step"])

    return of


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Returns what a run prints that nobody ends."""
    program = started(tmp_path_factory.mktemp("plain"), "plain")
    assert program.wait() == 0, program.said
    return program.printed.splitlines()


@pytest.mark.parametrize(("how", "every"), every_value(["TERM", "INT"], ["1", "5"]))
def test_the_step_that_runs_is_committed(
    tmp_path: Path, how: str, every: str, plain: list[str], committed_step: Committed
) -> None:
    told = started(tmp_path, how, "--checkpoint-every", every)
    assert told.wait() == {"TERM": 143, "INT": 130}[how], told.said
    assert "ends when the step that runs is committed" in told.said
    assert committed_step(tmp_path) == 4
    resumed = started(tmp_path, "plain", "--resume")
    assert resumed.wait() == 0, resumed.said
    assert resumed.printed.splitlines() == ["4", "5", plain[-1]]


def test_a_step_that_takes_too_long_is_not_waited_for(tmp_path: Path, committed_step: Committed) -> None:
    told = started(tmp_path, "TERM", step_seconds=0.6, patience_seconds=0.3)
    assert told.wait() == 143, told.said
    assert "s more; the run ends at the last committed step" in told.said
    assert committed_step(tmp_path) == 3


def test_an_operation_that_takes_too_long_is_not_waited_for(tmp_path: Path, committed_step: Committed) -> None:
    told = started(tmp_path, "long", patience_seconds=0.3)
    assert told.wait() == 143, told.said
    assert "one operation has run all the time" in told.said
    assert committed_step(tmp_path) == 3


PYTHON_ENDS_SLOWLY = "atexit.register(ctypes.PyDLL(None).sleep, 100); "
"""Is what Python does after all of the script: no other thread of Python's runs meanwhile."""


def test_an_end_of_python_that_takes_too_long_is_not_waited_for(tmp_path: Path, committed_step: Committed) -> None:
    """GIVEN a step that is committed in time WHEN what follows takes minutes THEN the process ends in time as well."""
    told = started(tmp_path, "TERM", most_seconds=1.5, before=PYTHON_ENDS_SLOWLY)
    assert told.wait(timeout_s=30) == 143, told.said
    assert "Python's own end is cut short after" in told.said
    assert committed_step(tmp_path) == 4


def test_what_a_script_does_in_the_end_is_waited_for(tmp_path: Path, committed_step: Committed) -> None:
    """GIVEN a clean-up that takes longer than Python has THEN it is done after SIGTERM, and the run reported."""
    told = started(
        tmp_path, "clean-up", "--report", str(tmp_path / "run.json"), most_seconds=0.2, before=PYTHON_ENDS_SLOWLY
    )
    assert told.wait(timeout_s=30) == 143, told.said
    assert told.printed.splitlines()[-2:] == ["cleaned up", "cleaned up at exit"]
    assert json.loads((tmp_path / "run.json").read_text())
    assert committed_step(tmp_path) == 4


def test_a_caller_that_goes_on_after_the_run_is_not_cut_off(tmp_path: Path) -> None:
    after = "print(main(sys.argv[1:])); atexit.register(ctypes.PyDLL(None).sleep, 1)"
    told = started(tmp_path, "TERM", most_seconds=0.2, after=after)
    assert told.wait() == 0, told.said
    assert told.printed.splitlines()[-1] == "143"


def test_a_handler_of_the_script_stays(tmp_path: Path) -> None:
    told = started(tmp_path, "own handler")
    assert told.wait() == 0, told.said
    assert told.printed.splitlines()[:5] == ["0", "1", "2", "heard", "3"]


def test_forked_processes_hear_what_they_would_without_memwall(tmp_path: Path) -> None:
    told = started(tmp_path, "fork")
    assert told.wait() == 0, told.said
    assert "7" in told.printed.splitlines()
