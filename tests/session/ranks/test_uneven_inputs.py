"""Ranks with unlike numbers of batches, in the context that DistributedDataParallel has for them."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rank_runs import found_by_ranks

from memwall.session import recovery
from memwall.session.recovery import Recovery

pytestmark = pytest.mark.slow(seconds=20)

SCRIPT = """
import memwall
from torch.nn.parallel import DistributedDataParallel

def trained(context, how, num_batches):
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(*(nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 64))
                                                   for _ in range(3))))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    further = torch.optim.SGD(model.module[0].parameters(), lr=1e-3)
    with context(model, optimizer, further) as session:
        for epoch in range(2):
            try:
                with model.join(throw_on_early_termination=num_batches is None):
                    for step in range(num_batches or 2 + rank):
                        torch.manual_seed(10 * epoch + step + 100 * rank)
                        batch = torch.randn(256, 64)
                        optimizer.zero_grad()
                        if how == "handed over" and session is not None:
                            session.compute_gradients(batch, lambda batch: model(batch).square().mean())
                        else:
                            model(batch).square().mean().backward()
                        optimizer.step()
                        if how == "another optimizer" and (epoch or step >= 2):
                            further.step()
            except RuntimeError as error:
                assert "exhausted all inputs" in str(error) or "Detected at least one rank" in str(error), error
    return [float(p.detach().double().sum()) for p in model.parameters()]

from contextlib import nullcontext
sessions = []
def plain(model, *optimizers):
    return nullcontext()
def fitted(model, *optimizers):
    sessions.append(memwall.fit(model, optimizers, budget="8GiB"))
    return sessions[-1]
counts = {"more": 1 + 3 * rank, "one each": 1, "even": 3, "thrown": None, "handed over": 1 + 3 * rank,
          "another optimizer": 2 + 4 * rank}
found(
    plain={name: trained(plain, name, count) for name, count in counts.items()},
    planned={name: trained(fitted, name, count) for name, count in counts.items()},
    steps=[session.measured.num_steps for session in sessions],
)
"""


def test_ranks_with_fewer_batches_are_not_waited_for(tmp_path: Path) -> None:
    """GIVEN a rank whose first batch is its last of an epoch THEN all of them train on, to the bits of plain torch."""
    found = found_by_ranks(2, SCRIPT, tmp_path)
    for rank, one in enumerate(found):
        assert one["planned"] == one["plain"]
        assert one["steps"][:3] == [2 * (1 + 3 * rank), 2, 6]
        assert one["steps"][4:] == [2 * (1 + 3 * rank), 2 * (2 + 4 * rank)]


FAILS_AT_ITS_LAST = """
import time
import memwall
from memwall.errors import MemwallError, TraceError
from memwall.session.live_plan import LivePlan
from torch.nn.parallel import DistributedDataParallel

def fail(live):
    raise TraceError("no step of this rank")

if rank == 0:
    LivePlan.end_recording = fail
model = DistributedDataParallel(nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
message = ""
with memwall.fit(model, optimizer, budget="8GiB"):
    try:
        with model.join():
            for _ in range(1 + rank):
                model(torch.ones(2, 4)).sum().backward()
                optimizer.step()
    except MemwallError as error:
        message = str(error)
    while rank == 0 and not os.path.exists(os.path.join(os.environ["FOUND_IN"], "1.json")):
        time.sleep(0.1)
    found(message=message)
"""


def test_a_rank_that_fails_at_its_last_batch_is_not_waited_for(tmp_path: Path) -> None:
    """GIVEN a rank that catches its error and stays WHEN others wait for it to plan THEN they end at once."""
    failed, other = found_by_ranks(2, FAILS_AT_ITS_LAST, tmp_path)
    assert "no step of this rank" in failed["message"]
    assert "no rank can train on alone" in other["message"]


LEAVES_WITHIN_A_STEP = """
import time
from contextlib import nullcontext
import memwall
from memwall.errors import MemwallError
from torch.nn.parallel import DistributedDataParallel

def trained(counts):
    model = DistributedDataParallel(nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    number = 0
    with memwall.fit(model, optimizer, budget="8GiB") as session:
        for count in counts:
            with model.join():
                for _ in range(count):
                    number += 1
                    with model.no_sync() if number % 2 else nullcontext():
                        model(torch.ones(8, 64)).sum().backward()
                    if number % 2 == 0:
                        optimizer.step()
                        optimizer.zero_grad()
    return session.measured.num_steps

steps = trained([1, 1, 4])
message, begin = "", time.monotonic()
try:
    trained([1 if rank else 6])
except (RuntimeError, MemwallError) as error:
    message = f"{type(error).__name__}: {error}"
found(steps=steps, message=message, seconds=time.monotonic() - begin)
"""


def test_a_rank_that_leaves_within_the_first_step_is_not_waited_for(tmp_path: Path) -> None:
    """GIVEN ranks that all leave in the midst of an accumulated first step THEN they go on with it together.

    GIVEN one of them alone THEN those that end that step hear of it as they begin to plan, it hears of it as well, and
    nobody waits.
    """
    other, left = found_by_ranks(2, LEAVES_WITHIN_A_STEP, tmp_path)
    assert other["steps"] == left["steps"] == 3
    assert other["message"].startswith("RankError: another one of 2 ranks has no more batches in the midst of a step")
    assert left["message"].startswith("RankError: this one of 2 ranks has no more batches in the midst of a step")
    assert max(other["seconds"], left["seconds"]) < 30


def test_what_a_step_took_too_much_is_planned_for_once_ranks_go_on_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN a step far over its forecast, and a rank that has no more batches THEN it is made up for after the join."""
    charged: list[int] = []
    ranks = SimpleNamespace(have_inputs=False, num_ranks=2, largest=tuple)
    device_budget = SimpleNamespace(is_kept=False)
    live: Any = SimpleNamespace(
        ranks=ranks,
        plan=object(),
        trace=object(),
        in_effect=SimpleNamespace(device_budget=device_budget),
        note_lost=bool,
        revised=lambda charged_bytes: charged.append(charged_bytes),
        change_to=lambda _: None,
    )
    measured: Any = SimpleNamespace(count_replan=lambda: None, num_replans=1)
    watched = Recovery(live, None, measured)  # type: ignore[arg-type]
    monkeypatch.setattr(recovery, "excess_bytes", lambda _, peak_bytes: max(0, peak_bytes - 100))
    for peak_bytes in (150, 90, 120):
        watched.end_step(peak_bytes)
        watched.plan_again()
    assert charged == []
    ranks.have_inputs = True
    watched.plan_again()
    watched.plan_again()
    assert charged == [50]
