"""A run that was interrupted and resumed ends with the bits of one that was not; what cannot be resumed says why."""

import gc
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoint_runs import NUM_STEPS, Counting, Interrupted, Schedule, Script, adamw, failure_of, run
from combinations import exhaustive
from optimizer_runs import OPTIMIZERS, are_equal, same
from torch import Tensor

import memwall
from memwall.checkpoint.step_checkpoint import StepCheckpoint
from memwall.checkpoint.writer import CommitTimes
from memwall.errors import StoreError, UsageError

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.slow]

CONTINUED = ["adamw for-loop", "sgd fused", "Adafactor", "lion foreach"]
CONTINUED += map(exhaustive, ["adamw fused", "adam amsgrad", "RAdam", "Lion"])


@pytest.mark.parametrize("name", CONTINUED)
def test_interrupted_and_resumed_is_equal_to_uninterrupted(tmp_path: Path, name: str) -> None:
    stop_in = 3
    make = OPTIMIZERS[name]
    plain = run(lambda: Script(make))
    run(lambda: Script(make, stop_in=stop_in), StepCheckpoint(tmp_path))
    checkpoint = StepCheckpoint(tmp_path, is_resuming=True)
    assert checkpoint.resumed_steps == stop_in
    resumed = run(lambda: Script(make), checkpoint)
    assert checkpoint.steps_done == NUM_STEPS
    assert are_equal(plain.result, resumed.result)
    assert same(dict(plain.model.named_buffers()), dict(resumed.model.named_buffers()))
    assert plain.schedule.state_dict() == resumed.schedule.state_dict()


def test_every_step_can_be_the_last_of_a_process(tmp_path: Path) -> None:
    plain = run(Script)
    for step in range(1, NUM_STEPS + 1):
        resumed = run(lambda step=step: Script(stop_in=step), StepCheckpoint(tmp_path, is_resuming=True))
    assert are_equal(plain.result, resumed.result)


def test_what_commits_and_recovery_take_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN a disk that takes a while to sync: that is what recording takes, and not what writing does."""
    clock = SimpleNamespace(seconds=0.0, perf_counter=lambda: clock.seconds)
    for module in ("memwall.store.journal", "memwall.checkpoint.writer"):
        monkeypatch.setattr(f"{module}.time", clock)

    class Slow(Counting):
        def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
            clock.seconds += 0.001
            return super().pwrite(fd, data, offset)

        def pread(self, fd: int, data: memoryview, offset: int) -> int:
            clock.seconds += 0.001
            return super().pread(fd, data, offset)

        def sync(self, fd: int) -> None:
            clock.seconds += 1.0
            super().sync(fd)

    disk = Slow()
    checkpoint = StepCheckpoint(tmp_path, backend=disk)
    run(Script, checkpoint)
    times = checkpoint.times
    assert times.num_commits == NUM_STEPS
    assert 0 < times.written_bytes < disk.num_bytes
    assert times.record_seconds > NUM_STEPS * 2 * 1.0 > times.transfer_seconds > 0
    again = StepCheckpoint(tmp_path, is_resuming=True, backend=Slow())
    assert NUM_STEPS * again.recovered_bytes >= times.written_bytes > again.recovered_bytes  # what is as it was stays
    assert again.recovery_seconds > 0
    assert again.times == CommitTimes()
    again.close(completed=False)


def test_a_longer_run_goes_on_from_the_end_of_a_shorter_one(tmp_path: Path) -> None:
    plain = run(lambda: Script(numbers=lambda: memwall.steps(9)))
    run(Script, StepCheckpoint(tmp_path))
    resumed = run(lambda: Script(numbers=lambda: memwall.steps(9)), StepCheckpoint(tmp_path, is_resuming=True))
    assert are_equal(plain.result, resumed.result)


def test_a_loop_that_begins_at_the_resumed_step_is_exact_where_data_depend_on_the_step_alone(tmp_path: Path) -> None:
    def numbers() -> Iterator[int]:
        yield from range(memwall.resumed_steps(), NUM_STEPS)

    class ByStep(Script):
        def train(self) -> None:
            for step in self.numbers():
                x = torch.randn(6, 8, generator=torch.Generator().manual_seed(step))
                self.model(x).square().mean().backward()
                if step == self.stop_in:
                    raise Interrupted
                self.optimizer.step()
                self.schedule.step()
                self.optimizer.zero_grad()

    plain = run(lambda: ByStep(numbers=numbers))
    run(lambda: ByStep(numbers=numbers, stop_in=3), StepCheckpoint(tmp_path))
    resumed = run(lambda: ByStep(numbers=numbers), StepCheckpoint(tmp_path, is_resuming=True))
    assert are_equal(plain.result, resumed.result)


class Loader:
    """Batches in an order of its own, which it can take up again."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(7)

    def __iter__(self) -> Iterator[Tensor]:
        while True:
            yield torch.randn(6, 8, generator=self.generator)

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generator.set_state(state["generator"])


class WithLoader(Script):
    loader_name = "loader"

    def train(self) -> None:
        loader = Loader()
        named = {self.loader_name: loader}
        for step, x in zip(memwall.steps(NUM_STEPS, **named), loader, strict=False):
            self.model(x).square().mean().backward()
            if step == self.stop_in:
                raise Interrupted
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()


def test_what_the_loop_names_goes_on_where_it_was(tmp_path: Path) -> None:
    plain = run(WithLoader)
    run(lambda: WithLoader(stop_in=3), StepCheckpoint(tmp_path))
    resumed = run(WithLoader, StepCheckpoint(tmp_path, is_resuming=True))
    assert are_equal(plain.result, resumed.result)


def test_another_loop_is_refused(tmp_path: Path) -> None:
    run(lambda: WithLoader(stop_in=3), StepCheckpoint(tmp_path))
    error = failure_of(Script, StepCheckpoint(tmp_path, is_resuming=True))
    assert str(error) == (
        f"the checkpoint in {tmp_path} was made with ['loader'], and this loop goes on with nothing; resume with the "
        "script that made it"
    )


def test_a_script_that_would_begin_with_its_first_batch_again_is_refused(tmp_path: Path) -> None:
    run(lambda: Script(stop_in=4), StepCheckpoint(tmp_path))
    error = failure_of(lambda: Script(numbers=lambda: iter(range(9))), StepCheckpoint(tmp_path, is_resuming=True))
    assert isinstance(error, UsageError)
    assert str(error) == (
        f"the run in {tmp_path} has done 4 steps, but this script does not ask for that and would begin with its first "
        "batch again; loop over `for step in memwall.steps(NUM_STEPS)`, or begin at `memwall.resumed_steps()` and pass "
        "over the data of the steps before"
    )


def test_a_run_is_not_written_over(tmp_path: Path) -> None:
    run(lambda: Script(stop_in=4), StepCheckpoint(tmp_path))
    with pytest.raises(UsageError) as caught:
        StepCheckpoint(tmp_path)
    assert str(caught.value) == (
        f"--checkpoint {tmp_path} holds step 4 of a run; continue it with --resume, or give this run a directory of "
        "its own"
    )


@pytest.mark.parametrize("is_frozen", [True, False])
def test_another_model_is_refused_with_its_differences(
    tmp_path: Path, is_frozen: bool, request: pytest.FixtureRequest
) -> None:
    """GIVEN the committed model as garbage WHEN the run is resumed with another one THEN the garbage is left alone."""
    if is_frozen:
        request.getfixturevalue("freezes")
        gc.collect()
        gc.freeze()
    gc.disable()
    try:
        run(lambda: Script(stop_in=2), StepCheckpoint(tmp_path))
        error = failure_of(lambda: Script(width=32), StepCheckpoint(tmp_path, is_resuming=True))
    finally:
        gc.enable()
    assert isinstance(error, StoreError)
    assert str(error) == (
        f"the checkpoint in {tmp_path} is of another model: buffer norm.running_mean is float32 [24] in the checkpoint "
        "and float32 [32] here; buffer norm.running_var is float32 [24] in the checkpoint and float32 [32] here; "
        "parameter first.bias is float32 [24] in the checkpoint and float32 [32] here; and 6 more; resume with the "
        "script that made it, or give this one a directory of its own"
    )


def test_another_optimizer_is_refused(tmp_path: Path) -> None:
    run(lambda: Script(stop_in=2), StepCheckpoint(tmp_path))
    error = failure_of(lambda: Script(OPTIMIZERS["sgd fused"]), StepCheckpoint(tmp_path, is_resuming=True))
    assert str(error) == (
        "the checkpoint is of a AdamW with 2 groups of 2, 3, and this script has a SGD with 2 groups of 2, 3; resume "
        "with the script that made it"
    )


def test_another_schedule_is_refused(tmp_path: Path) -> None:
    def linear(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.LinearLR(optimizer)

    run(lambda: Script(stop_in=2), StepCheckpoint(tmp_path))
    error = failure_of(lambda: Script(adamw, linear), StepCheckpoint(tmp_path, is_resuming=True))
    assert str(error) == (
        f"the checkpoint in {tmp_path} holds the state of a CosineAnnealingLR, which this script has not made before "
        "its first update; resume with the script that made it"
    )


@pytest.mark.parametrize(
    "schedule",
    [
        lambda optimizer: torch.optim.lr_scheduler.SequentialLR(
            optimizer,
            [torch.optim.lr_scheduler.LinearLR(optimizer), torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)],
            [3],
        ),
        lambda optimizer: torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4]),
        lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20),
    ],
    ids=["sequential", "multi-step", "one-cycle"],
)
def test_schedules_go_on_where_they_were(tmp_path: Path, schedule: Schedule) -> None:
    plain = run(lambda: Script(adamw, schedule))
    run(lambda: Script(adamw, schedule, stop_in=4), StepCheckpoint(tmp_path))
    resumed = run(lambda: Script(adamw, schedule), StepCheckpoint(tmp_path, is_resuming=True))
    assert are_equal(plain.result, resumed.result)


class Scaled(Script):
    """With a gradient scaler, which doubles its scale after two steps."""

    def train(self) -> None:
        scaler = torch.amp.GradScaler("cpu", growth_interval=2)
        for step in self.numbers():
            scaler.scale(self.model(torch.randn(6, 8)).square().mean()).backward()
            if step == self.stop_in:
                raise Interrupted
            scaler.step(self.optimizer)
            scaler.update()
            self.schedule.step()
            self.optimizer.zero_grad()
        self.scale = scaler.get_scale()


def test_a_gradient_scaler_goes_on_where_it_was(tmp_path: Path) -> None:
    gc.collect()
    plain = run(Scaled)
    gc.collect()  # a scaler of another process would not be there
    run(lambda: Scaled(stop_in=5), StepCheckpoint(tmp_path))
    gc.collect()
    resumed = run(Scaled, StepCheckpoint(tmp_path, is_resuming=True))
    assert are_equal(plain.result, resumed.result)
    assert resumed.scale == plain.scale == 2.0**19
