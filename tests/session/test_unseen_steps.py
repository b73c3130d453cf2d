"""A run by torch.func, whose steps no plan makes smaller, is refused before its second step where the first was too
large, with a budget that has room for the next ones."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad

from memwall.apply.memory.allocator import AllocatorHandler
from memwall.cli.app import main
from memwall.errors import InfeasibleError
from memwall.session.measurements import Measurements
from memwall.session.unseen_steps import UnseenSteps

MIB = 1 << 20


@dataclass
class Held:
    """Stands for the process's meter."""

    peak: int = 0
    device: str = "cpu"

    def peak_bytes(self) -> int:
        return self.peak


class Untouched(AllocatorHandler):
    """Leaves the process's memory as it is."""

    def apply_tight(self, limit_bytes: int = 0, outside_bytes: int = 0) -> None:
        assert limit_bytes > 0


class Run:
    """Trains a network by torch.func, each of whose steps holds what it is told."""

    def __init__(self, budget_bytes: int, *, is_ended_by_optimizer: bool = False) -> None:
        self.num_optimizer_steps = 0
        self.held, self.model = Held(), nn.Linear(1024, 1024)
        measured = Measurements(meter=self.held)  # type: ignore[arg-type]
        self.unseen = UnseenSteps(measured, lambda: budget_bytes, Untouched())
        self.model.register_forward_pre_hook(self._before_forward)
        self._is_ended_by_optimizer = is_ended_by_optimizer
        self.weights = {name: value.detach() for name, value in self.model.named_parameters()}

    def _before_forward(self, model: nn.Module, _: object) -> None:
        self.unseen.forward_begins(model, self.num_optimizer_steps if self._is_ended_by_optimizer else None)

    def step(self, peak_bytes: int, *, num_forwards: int = 1) -> None:
        def loss_of(weights: dict[str, Tensor]) -> Tensor:
            losses = []
            for _ in range(num_forwards):
                losses.append(functional_call(self.model, weights, torch.ones(1, 1024)).sum())
                self.held.peak = max(self.held.peak, peak_bytes)
            return torch.stack(losses).sum()

        gradients = grad(loss_of)(self.weights)
        self.weights = {name: value - 0.1 * gradients[name] for name, value in self.weights.items()}


def test_the_step_after_one_that_has_passed_the_budget_is_refused() -> None:
    run = Run(budget_bytes=100 * MIB)
    run.step(4096 * MIB)
    with pytest.raises(InfeasibleError, match=r"torch\.func, which allows no hooks on saved tensors") as refused:
        run.step(4096 * MIB)
    # The parameters have 4 MiB.
    assert refused.value.smallest_feasible_bytes >= (4096 + 2 * 4 + 16) * MIB
    assert str(refused.value).startswith("the budget of 100.0 MiB cannot be met: the smallest feasible one is 4.")


def test_a_step_is_judged_when_it_is_over() -> None:
    run = Run(budget_bytes=100 * MIB)
    run.step(4096 * MIB, num_forwards=3)
    assert run.held.peak == 4096 * MIB


def test_a_run_within_its_budget_goes_on() -> None:
    run = Run(budget_bytes=100 * MIB)
    for _ in range(5):
        run.step(90 * MIB)
    run.step(110 * MIB)  # it has trained for a while: what it held is said at its end
    run.step(110 * MIB)
    assert run.held.peak == 110 * MIB


def test_what_is_no_transform_is_not_judged() -> None:
    run = Run(budget_bytes=100 * MIB)
    run.held.peak = 4096 * MIB
    for _ in range(3):
        run.model(torch.ones(1, 1024)).sum().backward()
    with torch.no_grad():
        functional_call(run.model, run.weights, torch.ones(1, 1024))


def test_a_step_that_an_optimizer_ends_is_judged_as_a_whole() -> None:
    """GIVEN a step of several inner gradients WHEN the first of them passes the budget THEN its end is awaited."""
    run = Run(budget_bytes=100 * MIB, is_ended_by_optimizer=True)
    run.step(200 * MIB)
    run.step(4096 * MIB)
    run.num_optimizer_steps += 1
    with pytest.raises(InfeasibleError) as refused:
        run.step(0)
    assert refused.value.smallest_feasible_bytes >= 4096 * MIB


META = """
import torch
from torch.func import functional_call, grad
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.Adam(model.parameters())
def loss_of(params):
    return functional_call(model, params, (torch.ones(3, 4),)).sum().square()
for step in range(3):
    params = dict(model.named_parameters())
    for _ in range(2):
        gradients = grad(loss_of)(params)
        params = {name: value - 0.1 * gradients[name] for name, value in params.items()}
    optimizer.zero_grad()
    loss_of(params).backward()
    optimizer.step()
    open("steps.txt", "a").write(f"{step} ")
"""


COPIES = """
import torch
from torch.func import functional_call
model = torch.nn.Linear(4, 1)
copies = {name: value.detach().clone().requires_grad_() for name, value in model.named_parameters()}
optimizer = torch.optim.Adam(copies.values())
for step in range(3):
    optimizer.zero_grad()
    functional_call(model, copies, (torch.ones(3, 4),)).sum().square().backward()
    optimizer.step()
    open("steps.txt", "a").write(f"{step} ")
"""


BY_FUNC = """
import torch
from torch.func import functional_call, grad
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
def loss_of(weights):
    out = functional_call(model, weights, (torch.ones(3, 4),))
HOOK
    return out.square().sum()
for step in range(3):
    gradients = grad(loss_of)(weights)
    weights = {name: value - 0.1 * gradients[name] for name, value in weights.items()}
"""


@pytest.mark.parametrize(("budget", "status", "steps"), [("8GiB", 0, "0 1 2 "), ("32MiB", 3, "0 ")])
@pytest.mark.parametrize(
    ("script", "advice", "is_told_early"),
    [(META, "use loss.backward()", True), (COPIES, "train the model's own parameters", False)],
    ids=["torch.func", "copies"],
)
def test_a_script_whose_steps_no_plan_makes_smaller_is_told_so_and_refused_after_one(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
    script: str,
    advice: str,
    is_told_early: bool,
    budget: str,
    status: int,
    steps: str,
) -> None:
    """A model called by torch.func is told of in any case, copies that are trained where they pass the budget."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(script)
    assert main(["run", "--budget", budget, "train.py"]) == status
    assert Path("steps.txt").read_text() == steps
    said = caplog.text + capsys.readouterr().err
    assert said.count(f"no plan makes such steps smaller; {advice}") == (is_told_early or status == 3)
    assert ("the smallest feasible one is" in said) == (status == 3)


@pytest.mark.parametrize(
    ("command", "status"), [(["run", "--budget", "8GiB", "--checkpoint", "kept"], 0), (["profile"], 2)]
)
def test_such_a_script_trains_as_it_is_where_steps_would_be_committed_or_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[str], status: int
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("meta.py").write_text(META)
    assert main([*command, "meta.py"]) == status
    assert Path("steps.txt").read_text() == "0 1 2 "


def test_gradients_by_torch_func_of_copies_that_an_optimizer_trains_are_judged_at_its_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    by_func = """
    loss_of = lambda given: functional_call(model, given, (torch.ones(3, 4),)).sum()
    for name, gradient in torch.func.grad(loss_of)(copies).items():
        copies[name].grad = gradient
"""
    begin, _, end = COPIES.replace(".requires_grad_()", "").partition("    functional_call(")
    Path("by_func.py").write_text(begin + by_func + end.partition("backward()\n")[2])
    assert main(["run", "--budget", "32MiB", "by_func.py"]) == 3
    assert Path("steps.txt").read_text() == "0 "
    assert "gradients are computed by torch.func" in capsys.readouterr().err


@pytest.mark.parametrize(("hook", "recorded"), [("", False), ("    out.register_hook(lambda given: given)\n", True)])
def test_a_script_by_torch_func_keeps_no_graph_that_nothing_differentiates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hook: str, recorded: bool
) -> None:
    """GIVEN a budget WHEN a script's gradients come from torch.func THEN the first ones are not recorded already."""
    monkeypatch.chdir(tmp_path)
    found, original = list[bool](), torch.autograd.grad

    def computed(*args: Any, create_graph: bool = False, **kwargs: Any) -> Any:
        found.append(create_graph)
        return original(*args, create_graph=create_graph, **kwargs)

    monkeypatch.setattr(torch.autograd, "grad", computed)
    Path("train.py").write_text(BY_FUNC.replace("HOOK\n", hook))
    assert main(["run", "--budget", "8GiB", "train.py"]) == 0
    assert found == [recorded] * 3
