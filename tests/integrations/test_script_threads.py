"""A refusal in a thread of a script ends the script, whatever that and its other threads wait for."""

import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from combinations import every_value
from torch import nn
from warm_python import warm_python

from memwall.errors import UsageError
from memwall.integrations.launcher import run_script
from memwall.integrations.scripts.ample_room import AmpleRoom
from memwall.integrations.scripts.script_watch import ScriptWatch
from memwall.integrations.scripts.threads import ThreadFailures
from memwall.patches import Patches
from memwall.session.session import Session

TRAINS = """
import queue
import threading
import torch
from torch import nn

barrier, done = threading.Barrier({num_waiting}), queue.Queue()


def train():
    model = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        loss = model(torch.randn(8, 64)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        barrier.wait()
    done.put(loss.item())


threads = [threading.Thread(target=train) for _ in range({num_training})]
for thread in threads:
    thread.start()
for _ in threads:
    print("loss", done.get())
for thread in threads:
    thread.join()
"""


RUNS = """
import runpy, signal, sys
signal.signal(signal.SIGINT, signal.{handler})  # as Python finds it where a shell started it
sys.argv = ["memwall", "run", "--budget", "64MiB", "train.py"]
runpy.run_module("memwall", run_name="__main__", alter_sys=True)
"""
REFUSALS = {
    "two threads": (
        2,
        2,
        "train.py trains in several threads: Linear was called with gradients on while another",
    ),
    "one thread": (1, 3, "the budget of 64.0 MiB cannot be met: the smallest feasible one is"),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("refusal", "handler"),
    every_value(REFUSALS, {"in the foreground": "default_int_handler", "in the background": "SIG_IGN"}),
)
def test_a_run_that_is_refused_in_a_thread_ends(refusal: tuple[int, int, str], handler: str, tmp_path: Path) -> None:
    """GIVEN a main thread that waits WHEN another is refused THEN the run ends, also where SIGINT is ignored."""
    num_threads, status, said = refusal
    (tmp_path / "train.py").write_text(TRAINS.format(num_training=num_threads, num_waiting=num_threads))
    run = warm_python().run("-c", RUNS.format(handler=handler), folder=tmp_path, timeout_s=100)
    assert run.returncode == status, run.stderr
    assert said in run.stderr
    assert "Traceback" not in run.stderr


@pytest.mark.slow
def test_a_thread_that_trains_alone_is_planned_for(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAINS.format(num_training=1, num_waiting=1))
    session = Session(budget_bytes=8 << 30)
    assert run_script(str(script), [], session) == 0
    assert session.plan is not None
    assert session.measured.num_steps == 3


def test_a_thread_may_train_after_another_and_ask_beside_it() -> None:
    begun: list[nn.Module] = []
    model, asked = nn.Linear(2, 2), nn.Linear(2, 2)
    watch = ScriptWatch("train.py", lambda whole, called, has_optimizer: begun.append(called))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    failures: list[BaseException] = []

    def call(*modules: nn.Module) -> None:
        try:
            for module in modules:
                module(torch.ones(2))
        except UsageError as error:
            failures.append(error)

    def in_thread(*modules: nn.Module) -> None:
        thread = threading.Thread(target=call, args=modules)
        thread.start()
        thread.join()

    with Patches("test") as patches:
        watch.listen(patches)
        in_thread(model)
        call(model)  # the thread that has trained is gone
        in_thread(asked)  # which no optimizer trains
        with torch.no_grad():
            call(asked)
        assert (begun, failures, watch.failure) == ([model], [], None)
        in_thread(model)
    assert isinstance(watch.failure, UsageError)
    assert len(failures) == 1
    assert optimizer is not None


def test_two_threads_that_fail_at_once_interrupt_once(monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted: list[int] = []
    monkeypatch.setattr(signal, "pthread_kill", lambda thread, number: interrupted.append(number))
    failures = ThreadFailures(lambda error: None)

    def fail(error: Exception) -> None:
        raise error

    with Patches("test") as patches:
        failures.listen(patches)
        threads = [threading.Thread(target=fail, args=(UsageError(str(number)),)) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert interrupted == [signal.SIGINT]
    assert isinstance(failures.failure, UsageError)


def test_a_thread_that_fails_after_the_script_interrupts_nothing() -> None:
    failures = ThreadFailures(lambda error: None)
    with Patches("test") as patches:
        failures.listen(patches)
        failures.end()
        threading.excepthook(threading.ExceptHookArgs((UsageError, UsageError("late"), None, None)))
    assert failures.failure is None


def test_a_run_is_handed_over_once(tmp_path: Path) -> None:
    taken_over: list[nn.Module | None] = []

    def take_over(module: nn.Module | None) -> None:
        time.sleep(0.2)
        taken_over.append(module)

    room = AmpleRoom("train.py", 1 << 30, take_over=take_over, disk=str(tmp_path))
    room.start()
    threads = [threading.Thread(target=torch.compile, args=(abs,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert taken_over == [None]
