"""A step that left blocks out, made whole, holds what one holds that runs all of them."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memwall.planning.blocks import find_blocks
from memwall.predict.call_rules import Treatment
from memwall.predict.curve import live_peak_bytes
from memwall.predict.treatment import StepModel
from memwall.trace.file import load_trace, save_trace
from memwall.trace.left_out import whole_step as whole_step_module
from memwall.trace.left_out.copied_run import Lacks
from memwall.trace.left_out.whole_step import Choices, whole_step
from memwall.trace.records import Step, Trace
from memwall.trace.trace_builder import TraceBuilder, run_recorded
from memwall.trace.workload import Workload

WIDTH = 96
EVERY = frozenset(range(5))


class Block(nn.Module):
    """Returns early where it is not to run."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.runs = True

    def forward(self, x: Tensor) -> Tensor:
        if torch.rand(()) > 2 or not self.runs:
            return x
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Calls the blocks that are to run, of some that are alike."""

    def __init__(self, runs: frozenset[int], *, calls_all: bool) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 4)
        self.blocks = nn.ModuleList(Block() for _ in EVERY)
        for number, block in enumerate(self.blocks):
            block.runs = number in runs
        self.calls_all = calls_all

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            if torch.rand(()) < 2 and (self.calls_all or block.runs):
                x = block(x)
        return self.head(x).square()


def recorded(
    runs: frozenset[int],
    *,
    calls_all: bool = False,
    make: Callable[[], nn.Module] | None = None,
    num_micro_batches: int = 1,
) -> Trace:
    """Returns the trace of a first step in which these blocks run, or of the model that is made."""
    torch.manual_seed(0)
    workload = Workload(
        model=make or (lambda: Net(runs, calls_all=calls_all)),
        batch=lambda: torch.randn(64, 32, 8),
        loss=lambda model, batch: model(batch).sum(),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    )
    model, batch = workload.make_model(), workload.make_batch()
    optimizer, builder = workload.make_optimizer(model), TraceBuilder([model])
    return run_recorded(builder, workload, model, optimizer, batch, num_steps=1, num_micro_batches=num_micro_batches)


def made_whole(trace: Trace, *, draws_in_python: bool = False) -> Step:
    """Returns its step with the blocks that it left out, of which nothing but parameters exists."""
    step = trace.steps[0]
    gradients = tuple(4 * size for size in (WIDTH, WIDTH, 4 * WIDTH * WIDTH, 4 * WIDTH, 4 * WIDTH * WIDTH, WIDTH))
    lacks = Lacks(gradients, tuple(each for size in gradients for each in (4, size, size)))
    choices = Choices(step, trace.names, trace.modules, draws_in_python=draws_in_python)
    return whole_step(step, trace.modules, may_run=choices.may_run, is_routed=choices.is_routed, lacks=lambda *_: lacks)


def saved_bytes(trace: Trace, step: Step) -> list[tuple[str, int, int]]:
    """Returns each block with its calls, and the bytes that it saves."""
    return [
        (
            block.path,
            len([c for c in block.calls if c.backward_start >= 0]),
            sum(step.saved[n].nbytes for each in block.saved for n in each),
        )
        for block in find_blocks(trace, step)
    ]


@pytest.mark.parametrize("calls_all", [False, True], ids=["left out", "returns early"])
@pytest.mark.parametrize("runs", [{0, 2, 4}, {3}, {0}, {4}, {1, 2}], ids=str)
def test_it_is_the_step_that_runs_every_block(runs: set[int], calls_all: bool) -> None:
    trace, real = recorded(frozenset(runs), calls_all=calls_all), recorded(EVERY, calls_all=calls_all)
    whole, expected = made_whole(trace), real.steps[0]
    assert saved_bytes(trace, whole) == saved_bytes(real, expected)
    assert live_peak_bytes(whole, "cpu") == live_peak_bytes(expected, "cpu")
    assert live_peak_bytes(trace.steps[0], "cpu") < live_peak_bytes(expected, "cpu")
    for treatment in (Treatment(recompute=True), Treatment(offload=True, min_bytes=1)):
        peaks = []
        for step, names in ((whole, trace), (expected, real)):
            model = StepModel(step, names.names, find_blocks(names, step))
            peaks.append(live_peak_bytes(model.treated({f"blocks.{n}": treatment for n in (1, 2, 3)}), "cpu"))
        assert peaks[0] == pytest.approx(peaks[1], rel=0.01)


def test_each_forward_of_an_accumulated_step_runs_every_block() -> None:
    trace, real = recorded(frozenset({1, 4}), num_micro_batches=2), recorded(EVERY, num_micro_batches=2)
    whole = made_whole(trace)
    assert saved_bytes(trace, whole) == saved_bytes(real, real.steps[0])
    assert live_peak_bytes(whole, "cpu") == pytest.approx(live_peak_bytes(real.steps[0], "cpu"), rel=0.01)


def test_copies_that_would_take_too_long_are_left_out_in_words(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    trace = recorded(frozenset({0, 2}))
    monkeypatch.setattr(whole_step_module, "_MOST_COPIED_OPS", 3 * len(trace.steps[0].ops))
    made_whole(trace)
    (said,) = caplog.messages
    assert said.startswith("the first step left out more blocks than are planned for, among them blocks.")


def test_a_trace_of_it_is_valid(tmp_path: Path) -> None:
    trace = recorded(frozenset({2}))
    whole = msgspec.structs.replace(trace, steps=(made_whole(trace),))
    save_trace(whole, tmp_path / "trace.json")
    assert load_trace(tmp_path / "trace.json") == whole


class Short(nn.Module):
    """Has blocks that it never calls; whether it looks at a number says whether another step may."""

    def __init__(self, *, looks: bool = False) -> None:
        super().__init__()
        self.stem, self.looks = nn.Linear(8, WIDTH), looks
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in EVERY)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        if self.looks:
            assert x.sum().item() < 1e9
        return self.blocks[1](self.blocks[0](x))  # type: ignore[no-any-return]


def test_a_model_that_chooses_nothing_has_blocks_that_never_run() -> None:
    trace = recorded(EVERY, make=Short)
    assert made_whole(trace) is trace.steps[0]
    assert len(made_whole(trace, draws_in_python=True).calls) == len(trace.steps[0].calls) + 3
    looking = recorded(EVERY, make=lambda: Short(looks=True))
    assert len(made_whole(looking).calls) == len(looking.steps[0].calls) + 3


class Parts(nn.Module):
    """Runs some of its own parts."""

    def __init__(self, runs: str) -> None:
        super().__init__()
        self.first, self.second, self.runs = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH), runs
        self.third = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if torch.rand(()) < 2 and "1" in self.runs:
            x = x + self.first(x).tanh()
        return x + self.third(F.gelu(self.second(x))) if "2" in self.runs else x


def test_of_a_block_that_left_out_some_of_it_only_that_is_added() -> None:
    def made(*runs: str) -> Trace:
        return recorded(EVERY, make=lambda: nn.Sequential(nn.Linear(8, WIDTH), nn.Sequential(*map(Parts, runs))))

    trace, real = made("12", "1", "2", ""), made("12", "12", "12", "12")
    whole = made_whole(trace)
    got, expected = (
        [size for _, _, size in saved_bytes(each, step)] for each, step in ((trace, whole), (real, real.steps[0]))
    )
    assert sum(got) == pytest.approx(sum(expected), rel=0.15)
    assert live_peak_bytes(whole, "cpu") == pytest.approx(live_peak_bytes(real.steps[0], "cpu"), rel=0.15)


class Experts(nn.Module):
    """Hands out rows to experts, all of them to the first ones."""

    def __init__(self, num_used: int) -> None:
        super().__init__()
        self.stem, self.num_used = nn.Linear(8, WIDTH), num_used
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).flatten(0, 1)
        chosen, out = torch.arange(len(x)) % self.num_used, torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().flatten()
            if len(rows):
                out = out.index_add(0, rows, expert(x[rows]).tanh())
        return out


def test_experts_without_a_token_have_gradients_and_state_and_no_rows_of_others() -> None:
    """GIVEN rows that are handed out THEN a step that uses all experts saves as much as one that uses two."""
    trace, real = (recorded(EVERY, make=lambda n=n: Experts(n)) for n in (2, 8))  # type: ignore[misc]
    step = trace.steps[0]
    sizes = (4 * WIDTH * WIDTH, 4 * WIDTH)
    lacks = Lacks(sizes, tuple(each for size in sizes for each in (4, size, size)))
    choices = Choices(step, trace.names, trace.modules, draws_in_python=False)
    whole = whole_step(
        step, trace.modules, may_run=choices.may_run, is_routed=choices.is_routed, lacks=lambda *_: lacks
    )
    for category in ("gradient", "optimizer_state"):
        held = [sum(s.nbytes for s in each.storages if s.category == category) for each in (whole, real.steps[0])]
        assert held[0] == held[1]
    assert live_peak_bytes(whole, "cpu") == pytest.approx(live_peak_bytes(real.steps[0], "cpu"), rel=0.03)
    assert len(whole.ops) == len(step.ops)
