"""What a commit writes and when, beside which work, and what a disk that fails leaves behind."""

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoint_runs import (
    Counting,
    Net,
    Script,
    failure_of,
    run,
)
from optimizer_runs import are_equal
from torch import Tensor, nn

import memwall
from memwall.checkpoint.step_checkpoint import StepCheckpoint
from memwall.errors import OffloadIOError
from memwall.store.backend import SystemBackend

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.slow
def test_with_every_third_step_the_last_whole_one_is_continued(tmp_path: Path) -> None:
    plain = run(Script)
    run(lambda: Script(stop_in=5), StepCheckpoint(tmp_path, every=3))
    checkpoint = StepCheckpoint(tmp_path, every=3, is_resuming=True)
    assert checkpoint.resumed_steps == 3
    assert are_equal(plain.result, run(Script, checkpoint).result)


def test_what_does_not_change_is_written_once(tmp_path: Path) -> None:
    def large(stop_in: int) -> Script:
        script = Script(stop_in=stop_in)
        script.model.rest = nn.Linear(512, 512).requires_grad_(False)  # 1 MiB
        return script

    once, often = Counting(), Counting()
    run(lambda: large(1), StepCheckpoint(tmp_path / "once", backend=once))
    run(lambda: large(5), StepCheckpoint(tmp_path / "often", backend=often))
    assert once.num_bytes > 1 << 20
    assert often.num_bytes - once.num_bytes < 1 << 19


class Waiting(SystemBackend):
    """From the second commit on, writes wait until the test lets them go."""

    def __init__(self) -> None:
        self.is_armed = False
        self.may_write = threading.Event()
        self.was_let_go = False

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        if self.is_armed:
            self.was_let_go |= self.may_write.wait(timeout=20)
        return super().pwrite(fd, data, offset)


def test_forward_and_backward_run_while_the_step_before_is_written(tmp_path: Path) -> None:
    backend = Waiting()

    class Observed(Script):
        def train(self) -> None:
            for step in self.numbers():
                loss = self.model(torch.randn(6, 8)).square().mean()
                loss.backward()
                backend.may_write.set()  # nothing of this step's commit was written before
                self.optimizer.step()
                self.optimizer.zero_grad()
                backend.may_write.clear()
                backend.is_armed = step >= 1

    checkpoint = StepCheckpoint(tmp_path, backend=backend)
    script = Observed()
    handle = script.model.register_forward_pre_hook(lambda model, _: (handle.remove(), checkpoint.attach(model))[0])
    script.train()
    backend.may_write.set()
    checkpoint.close(completed=True)
    assert checkpoint.failure is None
    assert backend.was_let_go


class Meddling(Net):
    """Its forward writes to a parameter: leaving a trace, or through `.data`, leaving none."""

    is_open = True

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            (self.last.weight if self.is_open else self.last.weight.data).clamp_(-0.05, 0.05)
        return super().forward(x)


@pytest.mark.slow
@pytest.mark.parametrize("is_open", [True, False])
def test_a_forward_that_writes_to_a_parameter_is_noticed(
    tmp_path: Path, is_open: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def script(stop_in: int | None = None) -> Script:
        made = Script(stop_in=stop_in)
        made.model.__class__ = Meddling
        made.model.is_open = is_open
        return made

    plain = run(script)
    run(lambda: script(4), StepCheckpoint(tmp_path))
    assert "changed between a forward and the optimizer's step" in caplog.text
    assert are_equal(plain.result, run(script, StepCheckpoint(tmp_path, is_resuming=True)).result)


class FailingLater(SystemBackend):
    """A disk that fails after some syncs."""

    def __init__(self, num_syncs: int, number: int) -> None:
        self.num_syncs, self.number = num_syncs, number

    def sync(self, fd: int) -> None:
        self.num_syncs -= 1
        if self.num_syncs < 0:
            raise OSError(self.number, os.strerror(self.number))
        super().sync(fd)


@pytest.mark.slow
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_a_disk_that_fails_ends_the_run_with_a_typed_error_and_loses_no_committed_step(
    tmp_path: Path, number: int
) -> None:
    plain = run(Script)
    backend: SystemBackend = FailingLater(5, number)
    error = failure_of(Script, StepCheckpoint(tmp_path, backend=backend))
    assert isinstance(error, OffloadIOError)
    assert error.errno == number
    assert str(tmp_path) in str(error)
    checkpoint = StepCheckpoint(tmp_path, is_resuming=True)
    assert checkpoint.resumed_steps == 2
    assert are_equal(plain.result, run(Script, checkpoint).result)


class Owner:
    """Nothing that a checkpoint would load again."""


def within() -> object:
    class Local:
        """Nothing that pickle can name."""

    return Local()


@pytest.mark.parametrize(
    ("make", "words"), [(Owner, "Owner"), (within, "Local"), (threading.Lock, "lock")], ids=["class", "local", "lock"]
)
def test_state_that_could_not_be_read_back_is_refused_at_the_first_commit(
    tmp_path: Path, make: Callable[[], object], words: str
) -> None:
    class Odd(Script):
        def train(self) -> None:
            self.optimizer.param_groups[0]["owner"] = make()
            super().train()

    error = failure_of(Odd, StepCheckpoint(tmp_path))
    assert "cannot be committed" in str(error)
    assert words in str(error)


def test_outside_a_run_with_a_checkpoint_a_loop_begins_at_its_beginning() -> None:
    assert list(memwall.steps(3)) == [0, 1, 2]
    assert memwall.resumed_steps() == 0
