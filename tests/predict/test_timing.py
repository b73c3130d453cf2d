"""Seconds of operations: what page faults can have cost in a recorded step."""

import msgspec
import pytest
import torch
from torch import Tensor, nn

from memwall.predict.timing import first_touch_seconds
from memwall.trace.records import COMPILED_CODE
from memwall.trace.steps import steady_step
from memwall.trace.trace_builder import record
from memwall.trace.workload import Workload

pytestmark = pytest.mark.usefixtures("one_thread")


def test_pages_cost_no_more_than_their_rate_nor_than_the_operations_that_touched_them() -> None:
    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        out: Tensor = model(batch)
        return out.square().mean()

    workload = Workload(
        model=lambda: nn.Linear(64, 64),
        batch=lambda: torch.ones(8, 64),
        loss=loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
    trace = record(workload)
    step, names = steady_step(trace), trace.names
    step = msgspec.structs.replace(step, ops=tuple(msgspec.structs.replace(op, seconds=1e-3) for op in step.ops))
    born = [s for s in step.storages if s.birth >= 0]
    assert first_touch_seconds(step, names, 1e-12) == pytest.approx(1e-12 * sum(s.nbytes for s in born))
    assert first_touch_seconds(step, names, 1.0) == pytest.approx(1e-3 * len({s.birth for s in born}))
    assert first_touch_seconds(step, names, 0.0) == 0.0
    assert first_touch_seconds(step, [COMPILED_CODE] * len(names), 1.0) == 0.0, "it is recorded without them"
