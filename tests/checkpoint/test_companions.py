"""A run goes on with what training depends on beside the model; what cannot be committed is named, or refused."""

import copy
import json
import logging
import random
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from checkpoint_runs import NUM_STEPS, Interrupted, Script, failure_of, run
from combinations import exhaustive
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, RandomSampler

import memwall
from memwall.checkpoint.companions import Companions
from memwall.checkpoint.reachable import reachable
from memwall.checkpoint.resumption import set_checkpoint
from memwall.checkpoint.step_checkpoint import StepCheckpoint

SCRIPT = Path(__file__).parent.parent / "scripts" / "train_companions.py"


class Counter:
    """Has a state, as a schedule of one's own."""

    def __init__(self) -> None:
        self.num_steps = 0

    def state_dict(self) -> dict[str, Any]:
        return {"num_steps": self.num_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.num_steps = state["num_steps"]


class Kept(Script):
    """Has one thing beside its model: `made` makes it, `used` is called before the model in each step."""

    def __init__(
        self,
        made: Callable[["Kept"], Any],
        used: Callable[["Kept"], Tensor | float] = lambda script: 0.0,
        updated: Callable[["Kept"], object] = lambda script: None,
        stop_in: int | None = None,
        numbers: Callable[[], Iterator[int]] = lambda: memwall.steps(NUM_STEPS),
    ) -> None:
        super().__init__(stop_in=stop_in, numbers=numbers)
        self.beside, self.used, self.updated = made(self), used, updated

    def train(self) -> None:
        for step in self.numbers():
            factor = self.used(self)
            (self.model(torch.randn(6, 8)).square().mean() * (1 + factor)).backward()
            if step == self.stop_in:
                raise Interrupted
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.updated(self)


def _average(script: Kept) -> None:
    script.beside.update_parameters(script.model)


def _distilled(script: Kept) -> Tensor:
    with torch.no_grad():
        out: Tensor = script.beside(torch.ones(6, 8)).square().mean()
    return out


def _lerped(script: Kept) -> None:
    for name, value in script.model.named_parameters():
        script.beside[name].lerp_(value.detach(), 0.1)


def _rebound(script: Kept) -> None:
    script.beside = {name: value.detach() * 0.5 for name, value in script.model.named_parameters()}


def _best(script: Kept) -> float:
    return float(script.beside["first.weight"].square().mean())


def _counted(script: Kept) -> None:
    script.beside.num_steps += 1


BESIDE: dict[str, tuple[Any, ...]] = {
    "AveragedModel": (lambda script: AveragedModel(script.model), _distilled, _average),
    "a teacher": (lambda script: copy.deepcopy(script.model).eval(), _distilled),
    "an average by name": (
        lambda script: {name: value.detach().clone() for name, value in script.model.named_parameters()},
        _best,
        _lerped,
    ),
    "an average made anew": (
        lambda script: {name: value.detach().clone() for name, value in script.model.named_parameters()},
        _best,
        _rebound,
    ),
    "torch.Generator": (
        lambda script: torch.Generator().manual_seed(1),
        lambda script: torch.rand((), generator=script.beside),
    ),
    "random.Random": (lambda script: random.Random(1), lambda script: script.beside.random()),
    "numpy's Generator": (lambda script: np.random.default_rng(1), lambda script: float(script.beside.uniform())),
    "numpy's RandomState": (lambda script: np.random.RandomState(1), lambda script: float(script.beside.rand())),
    "a sampler": (
        lambda script: RandomSampler(range(9), generator=torch.Generator().manual_seed(1)),
        lambda script: next(iter(script.beside)) / 9,
    ),
    "a state of one's own": (lambda script: Counter(), lambda script: script.beside.num_steps, _counted),
    "within a list": (lambda script: [{"of": Counter()}], lambda script: script.beside[0]["of"].num_steps),
}


class Holder:
    """Holds one of several things beside a model, as a script does that has only this."""

    def __init__(self, script: Kept, name: str) -> None:
        self.model = script.model
        self.beside = BESIDE[name][0](script)


def _all_used(script: Kept) -> Tensor | float:
    total: Tensor | float = 0.0
    for name, holder in script.beside.items():
        total = total + (BESIDE[name][1](holder) if len(BESIDE[name]) > 1 else 0.0)
    return total / len(BESIDE)


def _all_updated(script: Kept) -> None:
    for name, holder in script.beside.items():
        if len(BESIDE[name]) > 2:
            BESIDE[name][2](holder)


CASES = {
    "all of it": (lambda script: {name: Holder(script, name) for name in BESIDE}, _all_used, _all_updated),
    **BESIDE,
}


def interrupted_and_resumed(script: Callable[..., Kept], directory: Path) -> Kept:
    run(lambda: script(stop_in=3), StepCheckpoint(directory))
    return run(script, StepCheckpoint(directory, is_resuming=True))


def assert_same(script: Kept, plain: Kept) -> None:
    pairs = zip(script.model.state_dict().values(), plain.model.state_dict().values(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


@pytest.mark.parametrize("name", ["all of it", *map(exhaustive, BESIDE)])
def test_what_goes_with_the_model_goes_on_with_the_run(name: str, tmp_path: Path) -> None:
    def script(**options: Any) -> Kept:
        return Kept(*CASES[name], **options)

    plain = run(script)
    assert isinstance(plain, Kept)
    assert_same(interrupted_and_resumed(script, tmp_path), plain)


def test_a_source_of_noise_without_a_state_ends_no_run(tmp_path: Path) -> None:
    """GIVEN a script that draws from the system's noise THEN its run is committed and goes on, as without it."""

    def script(**options: Any) -> Kept:
        return Kept(lambda script: random.SystemRandom(), **options)

    assert_same(interrupted_and_resumed(script, tmp_path), run(script))


def test_a_run_that_lacks_something_of_it_is_refused(tmp_path: Path) -> None:
    run(lambda: Kept(lambda script: torch.Generator(), stop_in=3), StepCheckpoint(tmp_path))
    error = failure_of(lambda: Kept(lambda script: None), StepCheckpoint(tmp_path, is_resuming=True))
    assert "holds the state of '_run.made.beside', which this script has not made" in str(error)


def test_a_run_that_has_something_more_is_refused(tmp_path: Path) -> None:
    run(lambda: Kept(lambda script: None, stop_in=3), StepCheckpoint(tmp_path))
    error = failure_of(lambda: Kept(lambda script: Counter()), StepCheckpoint(tmp_path, is_resuming=True))
    assert "was made without '_run.made.beside', which this script has" in str(error)


def test_what_cannot_be_committed_is_named_at_the_first_commit_and_when_the_run_continues(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Locked(Counter):
        def state_dict(self) -> dict[str, Any]:
            return {"lock": self}

    def made(script: Kept) -> Any:
        return [iter(DataLoader(range(99))), Locked()]

    with caplog.at_level(logging.WARNING):
        run(lambda: Kept(made, stop_in=3), StepCheckpoint(tmp_path))
        (first,) = [record.message for record in caplog.records]
        assert "does not commit the position in '_run.made.beside[0]' (_SingleProcessDataLoaderIter)" in first
        assert "'_run.made.beside[1]' (Locked): the state of" in first
        caplog.clear()
        run(lambda: Kept(made), StepCheckpoint(tmp_path, is_resuming=True))
        assert "continues, but begins anew with what was not committed: the position in" in caplog.records[0].message


def _made_later(script: Kept) -> None:
    state = {name: value.detach().clone() for name, value in script.model.state_dict().items()}
    script.beside |= {"best": state, "model": copy.deepcopy(script.model), "schedule": Counter()}


def test_what_a_run_makes_after_its_first_update_does_not_keep_it_from_being_resumed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """GIVEN a best state and a best model that improvements make WHEN the run is resumed THEN it goes on, and says."""

    def script(**options: Any) -> Kept:
        return Kept(lambda script: {"best": script.model.state_dict()}, updated=_made_later, **options)

    with caplog.at_level(logging.WARNING):
        resumed = interrupted_and_resumed(script, tmp_path)
    names = ("['best']", "['model']", "['schedule']")
    late = "; ".join(f"'_run.made.beside{name}', which was made after the first update" for name in names)
    assert f"does not commit {late}; a resumed run begins anew with it" in caplog.text
    assert caplog.text.count("does not commit") == 2  # once in each process
    assert f"continues, but begins anew with what was not committed: {late}" in caplog.text
    plain = run(script)
    assert isinstance(plain, Kept)
    assert_same(resumed, plain)


def test_what_a_function_no_longer_holds_is_not_kept_alive() -> None:
    def forgets() -> "weakref.ref[Tensor]":
        large = torch.ones(3)
        found = dict(reachable())
        assert any(value is holder for value in found.values())
        reference = weakref.ref(large)
        del large, found
        return reference if reference() is None else weakref.ref(holder[0])

    holder = [torch.ones(2)]
    assert forgets()() is None


def test_the_variables_of_what_runs_a_script_are_no_companions_of_its_model() -> None:
    """GIVEN a function that keeps an earlier run's state WHEN another one runs a script THEN it is not found."""

    def run_one() -> dict[str, Any]:
        own = Counter()
        set_checkpoint(checkpoint)
        try:
            found = dict(reachable())
        finally:
            set_checkpoint(None)
        assert any(value is own for value in found.values())
        return found

    earlier = Counter()
    checkpoint = cast(StepCheckpoint, SimpleNamespace(space=None))
    assert not any(value is earlier for value in run_one().values())
    assert any(value is earlier for _, value in reachable())


class Adversary:
    """Another model, stepped by an optimizer of its own before the first one is called."""

    def __init__(self, script: Kept) -> None:
        self.model = nn.Linear(4, 4)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)

    def step(self, script: Kept) -> Tensor:
        out: Tensor = self.model(torch.randn(3, 4)).square().mean()
        out.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return out.detach()


def test_another_model_that_is_stepped_first_goes_on_from_the_same_step(tmp_path: Path) -> None:
    def script(**options: Any) -> Kept:
        return Kept(Adversary, lambda script: script.beside.step(script), **options)

    plain = run(script)
    assert isinstance(plain, Kept)
    resumed = interrupted_and_resumed(script, tmp_path)
    assert_same(resumed, plain)
    pairs = zip(resumed.beside.model.parameters(), plain.beside.model.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def test_where_nothing_says_where_a_step_begins_another_model_that_is_stepped_first_is_refused(tmp_path: Path) -> None:
    error = failure_of(
        lambda: Kept(Adversary, lambda script: script.beside.step(script), numbers=lambda: iter(range(NUM_STEPS))),
        StepCheckpoint(tmp_path),
    )
    assert "a Adam of another model steps before the model that is committed is called again" in str(error)


@pytest.mark.exhaustive
@pytest.mark.timeout(300)
def test_a_script_that_is_killed_goes_on_with_all_of_it(tmp_path: Path) -> None:
    """GIVEN averages, a teacher, generators and a schedule WHEN it is killed THEN the end is the same."""
    plain, kept = tmp_path / "plain.json", tmp_path / "kept.json"
    memwall_run = [*("-m", "memwall", "run", "--budget", "1GiB", "--checkpoint", str(tmp_path / "run"))]
    for command, status in (
        ([str(SCRIPT), "--out", str(plain)], 0),
        ([*memwall_run, str(SCRIPT), "--out", str(kept), "--stop-in", "5"], 9),
        ([*memwall_run, "--resume", str(SCRIPT), "--out", str(kept)], 0),
    ):
        done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=100)
        assert done.returncode == status, done.stderr
    assert json.loads(kept.read_text()) == json.loads(plain.read_text())


@pytest.mark.usefixtures("one_rank")
def test_a_copy_that_is_divided_among_ranks_is_named() -> None:
    """GIVEN a moving average of DTensors, of which only a part is here THEN it is not committed, and said so."""
    mesh = init_device_mesh("cpu", (1,))
    model = nn.Linear(2, 2)
    average = {name: distribute_tensor(each, mesh, [Shard(0)]) for name, each in model.state_dict().items()}
    companions = Companions()
    companions.look(model, (), ())
    (named,) = companions.uncommitted
    assert named.endswith(".average', whose tensors are divided among ranks")
    assert len(average) == 2
