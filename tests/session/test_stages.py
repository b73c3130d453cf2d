"""A loop that freezes and unfreezes parameters has few steps recorded, however often it does."""

import itertools
import weakref
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import memwall
from memwall.session.live_plan import LivePlan, Revision
from memwall.session.loop.stages import Stage, Stages

BYTES = {"a": 3, "b": 5, "c": 4, "d": 2, "e": 6}
NAMES = "abcde"


def revision_of(stage: Stage, budget_bytes: int = 8) -> Revision:
    needed = BYTES.get("".join(NAMES[place] for place, is_trained in enumerate(stage) if is_trained), 1)
    plan: Any = SimpleNamespace(forecast=SimpleNamespace(plain_peak=SimpleNamespace(process_bytes=needed)))
    return Revision(cast(Any, stage), plan, budget_bytes)


def stage_of(name: str) -> Stage:
    return tuple(each == name for each in NAMES)


def planned(names: str) -> str:
    """Returns by which stage's plan each step ran; R for one that is recorded."""
    stages, ran = Stages(), ""
    present = revision_of(())
    for number, stage in enumerate(map(stage_of, names)):
        if number and ran[-1] == "R":
            present = revision_of(stages.planned)
        if number and stage == stages.planned:
            stages.goes_on()
        else:
            found = stages.change(stage, present) if number else None
            if found is None:
                stages.begin(stage)
                ran += "R"
                continue
            present = found
        ran += NAMES[present.trace.index(True)]  # type: ignore[arg-type]
    return ran


@pytest.mark.parametrize(
    ("names", "ran"),
    [
        ("aaaaaaa", "Raaaaaa"),
        ("abababab", "RRabbbbb"),  # the larger one's plan is kept once it has run in its own stage
        ("bababa", "RRbbbb"),
        ("abcabcabc", "RRRabbbbb"),
        ("aaaaaaaaabbbbbbbbbbaaa", "RaaaaaaaaRbbbbbbbbbRaa"),  # stages that last are recorded
        ("aabbccddeeeeeeeeee", "RaRbRcRdbbbbbbbRee"),  # a fifth stage runs under the largest plan, until it lasts
        ("bbbbabbbaaaaaaaaaa", "RbbbRbbbbbbbbbbaaa"),  # one that is known has its own plan where it lasts
        ("bbbabbaabaaaaaaaba", "RbbRbbbbbbbbbbbbbb"),  # short ones do not add up
    ],
)
def test_stages_in_turns_are_recorded_once_each(names: str, ran: str) -> None:
    assert planned(names) == ran


def test_stages_that_never_come_again_are_recorded_a_few_times() -> None:
    stages, present, num_recorded = Stages(), revision_of(()), 0
    for stage in itertools.product((False, True), repeat=6):
        if stages.change(stage, present) is None:
            stages.begin(stage)
            num_recorded += 1
    assert num_recorded == 3  # and the one before


def test_a_plan_for_more_than_turned_out_to_be_there_is_forgotten() -> None:
    stages = Stages()
    stages.begin(stage_of("a"))
    assert stages.change(stage_of("b"), revision_of(stage_of("a"), budget_bytes=8)) is None
    stages.begin(stage_of("b"))
    assert stages.change(stage_of("a"), revision_of(stage_of("b"), budget_bytes=7)) is None


@pytest.mark.slow
def test_a_loop_that_trains_two_halves_in_turns_has_two_steps_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    recordings: list[int] = []
    begin = LivePlan.begin

    def counted(live: LivePlan) -> None:
        recordings.append(1)
        begin(live)

    monkeypatch.setattr(LivePlan, "begin", counted)

    def trained(budget: int | None) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)) for _ in range(2)))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

        def train() -> None:
            for number in range(10):
                for place, half in enumerate(model):
                    half.requires_grad_(place == number % 2)
                model(torch.randn(4, 8)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()

        if budget is None:
            train()
        else:
            with memwall.fit(model, optimizer, budget=budget):
                train()
        return [parameter.detach() for parameter in model.parameters()]

    plain, found = trained(None), trained(8 << 30)
    assert len(recordings) == 2
    assert all(torch.equal(one, other) for one, other in zip(found, plain, strict=True))


def test_the_optimizer_of_a_stage_that_is_over_is_let_go_with_its_state() -> None:
    """GIVEN a loop that makes another optimizer when it unfreezes a part THEN the plan is of that one alone."""
    body, head = nn.Linear(4, 4), nn.Linear(4, 2)
    model = nn.Sequential(body.requires_grad_(False), head)
    optimizer = torch.optim.AdamW(head.parameters())

    def train() -> None:
        for _ in range(2):
            model(torch.ones(3, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    with memwall.fit(model, optimizer, budget="64GiB") as session:
        train()
        before = weakref.ref(optimizer)
        body.requires_grad_(True)
        optimizer = torch.optim.AdamW(model.parameters())
        session.add_optimizer(optimizer)
        train()
        assert before() is None
        assert session.trace is not None
        assert session.trace.optimizer == "AdamW"
