"""Tensors that leave memory in a recorded forward do so in a smaller one too, though they are below the plan's size."""

from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
import torch
from plans import plan_of
from torch import Tensor, nn

import memwall
from memwall.planning.planfile import Plan
from memwall.planning.techniques.accumulate import Accumulate
from memwall.planning.techniques.offload import Offload
from memwall.session.loop.longer_batch import Shape
from memwall.session.loop.smaller_forwards import SmallerForwards, least_share
from memwall.trace.workload_facts import WorkloadFacts

KIB = 1 << 10
WIDTH = 256


@pytest.mark.parametrize(
    ("shape", "recorded", "share"),
    [
        ((12, 128), [(12, 128)], 1.0),
        ((12, 64), [(12, 128)], 0.25),  # what attention holds shrinks with the square
        ((6, 128), [(12, 128)], 0.25),  # the length may come first
        ((12, 64), [(12, 128), (12, 80)], 0.64),
        ((12, 100), [(12, 128), (12, 80)], (100 / 128) ** 2),  # of one that was as large at least
        ((12, 256), [(12, 128)], 1.0),
        ((24, 32), [(12, 128)], 2 / 16),
        ((12, 3, 8, 8), [(12, 128)], 1.0),  # not to be compared
        ((), [()], 1.0),
        ((12, 64), [], 1.0),
        ((12, 64), [(12, 0)], 1.0),
    ],
)
def test_the_nearest_forward_that_was_as_large_counts(shape: Shape, recorded: list[Shape], share: float) -> None:
    assert least_share(shape, recorded) == pytest.approx(share)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def offload(number: int, min_bytes: int) -> Offload:
    return Offload(
        block=f"blocks.{number}",
        scope="saved",
        tier="disk",
        min_bytes=min_bytes,
        window_bytes=8 << 20,
        saved_bytes=1,
        cost_seconds=0.0,
    )


def with_workload(plan: Plan, shape: Shape) -> Plan:
    facts = WorkloadFacts(
        dtype="", autocast="none", optimizer="", micro_batch=shape[0], num_micro_batches=1, input_shape=shape
    )
    return msgspec.structs.replace(plan, forecast=msgspec.structs.replace(plan.forecast, workload=facts))


def test_a_slightly_shorter_batch_moves_what_the_planned_one_does() -> None:
    """GIVEN tensors just above what a plan leaves WHEN a shorter batch has them just below THEN they leave too.

    A batch that is longer, or of another kind, is held to the plan's size.
    """
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    least_bytes = 8 * 30 * WIDTH * 4
    plan = with_workload(plan_of(model, *(offload(n, least_bytes) for n in range(3))), (8, 32, WIDTH))
    moved, before = [], 0
    with memwall.fit(model, optimizer, plan=plan) as session:
        for length in (32, 32, 29, 17, 32, 29):
            model(torch.randn(8, length, WIDTH)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            now = session._live.moved_bytes[0]
            moved.append((now - before) / (8 * length * WIDTH * 4))
            before = now
    assert moved[1] > 0
    assert moved[1:] == [moved[1]] * 5


def test_forwards_are_noted_while_a_step_is_recorded_and_compared_under_the_plan_of_their_model() -> None:
    shares: list[float] = []
    model, other = nn.Identity(), nn.Identity()
    engine = SimpleNamespace(move_from=shares.append)
    live = SimpleNamespace(recorded=object(), plan=None, in_effect=SimpleNamespace(applied=None))
    smaller = SmallerForwards(cast(Any, live))
    smaller.begin_forward(model, (torch.empty((8, 64)),), {})
    smaller.begin_forward(model, (torch.empty((8, 32)),), {})
    smaller.begin_forward(other, (torch.empty((8, 16)),), {})
    live.recorded, live.plan = None, plan_of(model, micro_batch=8)
    live.in_effect.applied = SimpleNamespace(engine=engine)
    for one, shape in ((model, (8, 64)), (model, (8, 16)), (other, (8, 16)), (other, (8, 8))):
        smaller.begin_forward(one, (torch.empty(shape),), {})
    assert shares == [1.0, 0.25, 1.0, 0.25]
    shares.clear()
    with torch.no_grad():
        smaller.begin_forward(model, (torch.empty((8, 16)),), {})
    assert not shares
    live.plan = plan_of(model, Accumulate(micro_batch=2, num_micro_batches=4), micro_batch=8)
    smaller.begin_forward(model, (torch.empty((2, 64)),), {})
    smaller.begin_forward(model, (torch.empty((1, 64)),), {})
    assert shares == [1.0, 0.25]
    smaller.recording_begins()
    smaller.begin_forward(model, (torch.empty((2, 16)),), {})
    assert shares[2:] == [1.0]
