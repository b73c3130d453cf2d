"""Ranks that train unlike models, or other parameters of one: a plan for each kind, and one file with all of them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from plans import a_plan
from rank_runs import found_by_ranks
from rank_threads import on_ranks
from torch import nn

from memwall.errors import InfeasibleError, PlanError, RankError
from memwall.planning.planfile import Plan
from memwall.planning.settings import Settings
from memwall.planning.technique import techniques
from memwall.planning.techniques.recompute import Recompute
from memwall.predict.first_step import FirstStep
from memwall.session.ranks.agreement import Ranks
from memwall.session.ranks.shared_plan import check_equal, planned_together, save_together
from memwall.trace.records import Trace
from memwall.trace.trace_builder import record
from memwall.trace.workload import Workload

TRAINED = ((True, True), (True, True), (False, True))
"""Which of two parameters each of three ranks trains."""


@pytest.fixture(scope="module")
def trace() -> Trace:
    techniques()  # are loaded once in a process, and threads that stand for processes would all do it
    return record(
        Workload(
            model=lambda: nn.Linear(4, 4),
            batch=lambda: torch.ones(2, 4),
            loss=lambda model, batch: model(batch).sum(),
            optimizer=lambda parameters: torch.optim.SGD(parameters),
        )
    )


def of_rank(rank: int) -> Plan:
    return a_plan(micro_batch=rank + 1)


def planned_by(trace: Trace, trained: Sequence[tuple[bool, ...]]) -> list[int]:
    """Returns by its number the rank that made each one's plan."""

    def do(ranks: Ranks) -> int:
        def solve(trace: Trace, _: Settings) -> tuple[Trace, Plan]:
            return trace, of_rank(ranks.rank)

        settings = Settings(budget_bytes=1 << 40)
        return planned_together(ranks, trace, settings, solve, trained=trained[ranks.rank])[1].micro_batch - 1

    return on_ranks(len(trained), do)


def test_ranks_that_train_other_parameters_have_a_plan_of_their_own(trace: Trace) -> None:
    assert planned_by(trace, TRAINED) == [0, 0, 2]


def test_ranks_that_wait_for_each_other_in_forward_have_one_plan(trace: Trace) -> None:
    """GIVEN a collective, which recomputation on some ranks alone would leave without its partners THEN one for all."""
    names = (*trace.names, "c10d.allreduce_.default")
    steps = []
    for step in trace.steps:
        collective = msgspec.structs.replace(step.ops[0], name=len(trace.names), phase="forward")
        steps.append(msgspec.structs.replace(step, ops=(collective, *step.ops[1:])))
    assert planned_by(msgspec.structs.replace(trace, names=names, steps=tuple(steps)), TRAINED) == [0, 0, 0]


def test_what_any_rank_held_before_its_first_step_is_planned_for(trace: Trace) -> None:
    """GIVEN alike ranks, one of which drew samples first THEN the number told has room for that, and for blocks left
    out."""

    def do(ranks: Ranks) -> None:
        def solve(trace: Trace, settings: Settings) -> tuple[Trace, Plan]:
            first = settings.first_step
            assert first is not None
            raise InfeasibleError(
                "known", budget_bytes=9, smallest_feasible_bytes=first.before_bytes + first.left_out_bytes
            )

        held = FirstStep(
            needed_bytes=5,
            in_memory_bytes=0,
            stays_from_bytes=0,
            before_bytes=700 * (ranks.rank == 1),
            left_out_bytes=30 * (ranks.rank == 2),
        )
        planned_together(ranks, trace, Settings(budget_bytes=9, first_step=held), solve, trained=(True, True))

    errors = on_ranks(3, do)
    assert {error.smallest_feasible_bytes for error in errors} == {730}


@pytest.mark.parametrize("lacking", [{2: 700}, {0: 900, 2: 700}, {0: 700, 2: 900}], ids=str)
def test_where_one_kind_has_no_plan_none_goes_on(trace: Trace, lacking: dict[int, int]) -> None:
    """GIVEN ranks of which not all have a plan THEN all hear so, and of a budget that is enough for all of these."""

    def do(ranks: Ranks) -> None:
        def solve(trace: Trace, _: Settings) -> tuple[Trace, Plan]:
            if ranks.rank in lacking:
                needed = lacking[ranks.rank]
                raise InfeasibleError(f"{needed} needed\nin detail", budget_bytes=9, smallest_feasible_bytes=needed)
            return trace, of_rank(ranks.rank)

        planned_together(ranks, trace, Settings(budget_bytes=9), solve, trained=TRAINED[ranks.rank])

    errors = on_ranks(3, do)
    assert all(isinstance(error, InfeasibleError) for error in errors)
    assert {error.smallest_feasible_bytes for error in errors} == {max(lacking.values())}
    first, _, last = (str(error).splitlines()[0] for error in errors)
    assert first == (f"{lacking[0]} needed" if 0 in lacking else "rank 2, of another kind: 700 needed")
    assert last == f"{lacking[2]} needed"


def test_where_planning_fails_all_hear_so(trace: Trace) -> None:
    def do(ranks: Ranks) -> None:
        def solve(trace: Trace, _: Settings) -> tuple[Trace, Plan]:
            if ranks.rank == 2:
                raise PlanError("no solver")
            return trace, of_rank(ranks.rank)

        planned_together(ranks, trace, Settings(budget_bytes=9), solve, trained=TRAINED[ranks.rank])

    first, second, third = map(str, on_ranks(3, do))
    assert first == second == "rank 2 of 3, which plans for all of its kind, failed: no solver"
    assert third == "no solver"


def test_plans_that_are_given_may_differ_where_ranks_train_other_parameters() -> None:
    def do(ranks: Ranks, *, trained: Sequence[tuple[bool, ...]]) -> None:
        plan = a_plan() if ranks.rank < 2 else a_plan(Recompute(block="0"))
        check_equal(ranks, plan, trained=trained[ranks.rank])

    assert on_ranks(3, lambda ranks: do(ranks, trained=TRAINED)) == [None] * 3
    refused = on_ranks(3, lambda ranks: do(ranks, trained=TRAINED[:1] * 3))
    assert all(isinstance(error, RankError) for error in refused)


def test_one_file_has_the_plan_of_each_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plan.json"
    on_ranks(3, lambda ranks: save_together(ranks, of_rank(0 if ranks.rank < 2 else 7), path))
    found = json.loads(path.read_text())
    assert (found["plan_of_rank"], len(found["plans"])) == ([0, 0, 1], 2)
    assert Plan.load(path) == of_rank(0)  # where nothing has launched this process
    for rank, expected in enumerate((of_rank(0), of_rank(0), of_rank(7))):
        monkeypatch.setenv("WORLD_SIZE", "3")
        monkeypatch.setenv("RANK", str(rank))
        assert Plan.load(path).plan_hash == expected.plan_hash
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(PlanError, match="holds plans for 3 ranks, and there are 2"):
        Plan.load(path)


def test_like_ranks_have_a_plan_file_as_one_process_has(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    on_ranks(2, lambda ranks: save_together(ranks, of_rank(0), path))
    assert path.read_bytes() == of_rank(0).encode()


@pytest.mark.parametrize("changed", [{"plan_of_rank": [5]}, {"plans": [3]}, {"plan_of_rank": ["a"]}, {"more": 1}])
def test_a_damaged_file_is_refused(changed: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    whole = {"schema": "memwall.plan/2", "plan_of_rank": [0], "plans": [json.loads(of_rank(0).encode())]}
    path.write_text(json.dumps(whole | changed))
    with pytest.raises(PlanError, match="not a valid plan"):
        Plan.load(path)


SCRIPT = """
import memwall
from memwall.machine.meter import return_free_memory
from torch.nn.parallel import DistributedDataParallel

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(64, 1024), nn.Linear(1024, 64)

    def forward(self, x):
        return x + self.outer(torch.tanh(self.inner(x)))

groups = [distributed.new_group([0, 1]), distributed.new_group([2])]
is_student = rank == 2

def made():
    "Ranks 0 and 1 train all of a model together, rank 2 half of the same modules alone."
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(4)))
    model[:2].requires_grad_(not is_student)
    model = DistributedDataParallel(model, process_group=groups[is_student])
    return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)

def trained(model, optimizer, session=None):
    losses = []
    for step in range(3):
        torch.manual_seed(10 * step + rank)
        loss = model(torch.randn(4096, 64)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if session is not None:
        session.save_plan("plan.json")
    return losses

plain = trained(*made())
model, optimizer = made()
with memwall.fit(model, optimizer, budget="8GiB") as session:
    trained(model, optimizer)
budget = session.plan.forecast.smallest_feasible_budget_bytes + (6 << 20)
del model, optimizer, session
return_free_memory()  # what is left of them would be in the next forecast, more on one rank than on another
model, optimizer = made()
with memwall.fit(model, optimizer, budget=budget) as session:
    losses = trained(model, optimizer, session)
distributed.barrier()
loaded = memwall.Plan.load("plan.json")
model, optimizer = made()
with memwall.fit(model, optimizer, plan=loaded) as given:
    again = trained(model, optimizer)
found(plain=plain, losses=losses, again=again, plan=session.plan.plan_hash, loaded=loaded.plan_hash,
      recomputed=sorted(a.block for a in session.plan.actions if type(a).__name__ == "Recompute"))
"""


@pytest.mark.slow(seconds=20)
def test_a_rank_with_frozen_blocks_has_its_own_plan_and_trains_on_by_the_common_file(tmp_path: Path) -> None:
    """GIVEN three ranks of which one trains half of the same modules THEN each kind keeps to a plan of its own
    AND one file has both, by which each rank gets its own again, to the same losses.
    """
    ranks = found_by_ranks(3, SCRIPT, tmp_path)
    for ran in ranks:
        assert ran["losses"] == ran["again"] == ran["plain"]
        assert ran["loaded"] == ran["plan"]
    assert ranks[0]["plan"] == ranks[1]["plan"] != ranks[2]["plan"]
    assert ranks[0]["recomputed"]
    assert json.loads((tmp_path / "plan.json").read_text())["plan_of_rank"] == [0, 0, 1]
