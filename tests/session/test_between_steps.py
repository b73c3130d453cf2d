"""What runs between two steps under a plan keeps to the budget: it finds the free memory of the last step returned."""

import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from plans import plan_of
from torch import nn

import memwall
from memwall.machine.meter import process_bytes, reset_process_peak, return_free_memory
from memwall.observe.measure import run_report
from memwall.planning.techniques.allocator import AllocatorReuse
from memwall.predict.malloc.tensor_heap import heap_unavailable_reason
from memwall.session.session import Session

pytestmark = pytest.mark.skipif(bool(heap_unavailable_reason()), reason=heap_unavailable_reason())

MIB = 1 << 20
ROOM_BYTES = 200 * MIB
"""What a step may use beyond the weights. It uses 160 MiB of it, and frees them; what follows it takes 96 or more."""


class Wide(nn.Module):
    """32 MiB of weights, and a forward with gradients that needs 160 MiB for a moment."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(32 << 18))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled():
            torch.ones(160 << 18).sum()
        return (self.weight[:8] * batch).sum()


class Unwritten(Wide):
    """The same beside a tensor of 64 MiB that is never written, as a buffer is that is larger than its contents."""

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled():
            used, unused = torch.ones(160 << 18), torch.empty(64 << 18)
            assert used.sum() == used.numel()
            assert unused.data_ptr() > used.data_ptr()
        return (self.weight[:8] * batch).sum()


def evaluate(model: nn.Module) -> None:
    """Collects 120 MiB that are no tensors, as metrics do."""
    with torch.no_grad():
        model(torch.ones(8))
        bytearray(b"1") * (120 * MIB)


def save(model: nn.Module) -> None:
    """Writes the weights into memory, three times over, as a run does that keeps its best weights."""
    file = io.BytesIO()
    for _ in range(3):
        torch.save(model.state_dict(), file)


def save_optimizer(_: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Collects 120 MiB beside the optimizer's state."""
    found = optimizer.state_dict()
    assert found["param_groups"]
    bytearray(b"1") * (120 * MIB)


def copy_weights(model: nn.Module) -> None:
    """Makes bytes of the weights, and joins them, as a script does that prints their digest: nothing of it is seen."""
    parts = [parameter.detach().numpy().tobytes() for parameter in model.parameters()]
    assert len(b"".join([*parts, b"."])) > 32 * MIB


def run_steps(
    between: Callable[[nn.Module, torch.optim.Optimizer], None],
    make_model: Callable[[], nn.Module] = Wide,
    num_quiet: int = 0,
) -> dict[str, int]:
    """Runs steps under a limit, the last two with something after each; returns peak, budget and where it began."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return_free_memory()
    reset_process_peak()
    before_bytes = process_bytes()
    limit = before_bytes + ROOM_BYTES
    plan = plan_of(model, AllocatorReuse(policy="tensor-heap", limit_bytes=limit))
    with Session(plan=plan) as session:
        session.attach(model, optimizer)
        for number in range(num_quiet + 2):
            model(torch.ones(8)).backward()
            optimizer.step()
            optimizer.zero_grad()
            if number >= num_quiet:
                between(model, optimizer)
    measured = run_report(session).measured
    assert measured.steps >= 2
    assert measured.steady_peak_bytes > limit - 80 * MIB, "the step alone leaves too little room for the rest"
    return {
        "budget_bytes": limit,
        "peak_bytes": measured.peak.process_bytes,
        "step_peak_bytes": measured.steady_peak_bytes,
        "before_bytes": before_bytes,
    }


CASES: dict[str, tuple[Callable, Callable[[], nn.Module], int]] = {
    "evaluation": (lambda model, _: evaluate(model), Wide, 0),
    "saving": (lambda model, _: save(model), Wide, 0),
    "saving the optimizer": (save_optimizer, Wide, 0),
    "copying the weights": (lambda model, _: copy_weights(model), Wide, 0),
    "copying the weights after steps that took nothing": (lambda model, _: copy_weights(model), Wide, 4),
    "copying beside pages never written": (lambda model, _: copy_weights(model), Unwritten, 0),
}
_RUNS_ALL = """
import json, sys
sys.path[:0] = sys.argv[1:]
from test_between_steps import CASES, run_steps
print(json.dumps({name: run_steps(*case) for name, case in CASES.items()}))
"""


@pytest.fixture(scope="module")
def figures() -> dict[str, dict[str, int]]:
    """Returns what each case used in a process of its own: a limit to the MiB needs one that other tests left alone."""
    folders = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    command = [sys.executable, "-c", _RUNS_ALL, *folders]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found: dict[str, dict[str, int]] = json.loads(done.stdout)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_memory_that_a_step_has_freed_is_there_for_what_follows(case: str, figures: dict[str, dict[str, int]]) -> None:
    """GIVEN a step near the budget WHEN something else follows THEN the process stays within the budget.

    So it does where the step left some of its memory unwritten, which is no room for what follows.
    """
    found = figures[case]
    assert found["peak_bytes"] <= found["budget_bytes"] + 4 * MIB, found


@pytest.mark.slow
def test_an_evaluation_inside_a_step_returns_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN a step that calls its model without gradients WHEN it goes on THEN its free memory is kept for it."""
    calls = []
    monkeypatch.setattr("memwall.apply.memory.allocator.return_free_memory", lambda **_: calls.append(1))

    def nothing(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        calls.clear()
        loss = model(torch.ones(8))
        with torch.no_grad():
            model(torch.ones(8))
        loss.backward()
        assert calls == []
        optimizer.step()

    run_steps(nothing)


@pytest.mark.slow
@pytest.mark.parametrize("between", [evaluate, save])
def test_what_malloc_keeps_of_them_is_returned_before_the_next_step(
    monkeypatch: pytest.MonkeyPatch, between: Callable[[nn.Module], None]
) -> None:
    """GIVEN an evaluation or a save, of whose memory malloc keeps some WHEN a step follows THEN it begins without."""
    calls: list[int] = []
    monkeypatch.setattr("memwall.apply.memory.allocator.return_free_memory", lambda **_: calls.append(1))
    model = Wide()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = plan_of(model, AllocatorReuse(policy="tensor-heap", limit_bytes=process_bytes() + ROOM_BYTES))
    found = []
    with Session(plan=plan) as session:
        session.attach(model, optimizer)
        for is_between in (False, True, False):
            if is_between:
                between(model)
            calls.clear()
            loss = model(torch.ones(8))
            found.append(len(calls))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert found[1:] == [1, 0]


@pytest.mark.slow
def test_a_state_dict_after_each_step_is_no_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN a script that averages its weights WHEN it asks for them after each step THEN free memory stays."""
    calls: list[int] = []
    monkeypatch.setattr("memwall.apply.memory.allocator.return_free_memory", lambda **_: calls.append(step))
    model, step = Wide(), 0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = plan_of(model, AllocatorReuse(policy="tensor-heap", limit_bytes=process_bytes() + ROOM_BYTES))
    with Session(plan=plan) as session:
        session.attach(model, optimizer)
        for step in (1, 2, 3, 4, 5, 6, 7, 8):
            model(torch.ones(8)).backward()
            optimizer.step()
            optimizer.zero_grad()
            if step != 6:
                model.state_dict()
        after = list(calls)
    assert [number for number in (1, 2, 3, 4, 5, 7, 8) if number in after] == [1, 2, 3, 4, 7, 8]


def test_a_stage_that_trains_more_parameters_is_planned_anew() -> None:
    """GIVEN a body that is frozen WHEN it is unfrozen for the same optimizer THEN the next step is recorded again."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plans = []
    model[0].requires_grad_(False)
    with memwall.fit(model, optimizer, budget=1 << 40) as session:
        session.on_plan = lambda session: plans.append(session.trace)
        for step in range(6):
            if step == 3:
                model[0].requires_grad_(True)
            model(torch.ones(4, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert len(plans) == 2
    assert session.measured.num_steps == 6
