"""What an operation has to do, as the function that turns it into seconds sees it."""

from collections.abc import Callable

import pytest
from fake_steps import record_fake

from memwall.trace.op_work import OpWork
from memwall.trace.workload import Workload

pytestmark = pytest.mark.usefixtures("one_thread")


def test_times_come_from_the_given_function_and_are_zero_without_one(workload_of: Callable[..., Workload]) -> None:
    seen: list[OpWork] = []

    def seconds_of(work: OpWork) -> float:
        seen.append(work)
        return work.flops / 1e9 + (work.read_bytes + work.written_bytes) / 1e6

    workload = workload_of(lambda model, batch: model(batch).sum())
    assert {op.seconds for step in record_fake(workload).steps for op in step.ops} == {0.0}
    trace = record_fake(workload, seconds_of=seconds_of)
    product = next(work for work in seen if work.name == "aten.addmm.default")
    # [4, 8] x [8, 8] + [8]: two floating-point operations per multiplication.
    assert product == OpWork(
        name="aten.addmm.default",
        dtype="float32",
        flops=2 * 4 * 8 * 8,
        read_bytes=(4 * 8 + 8 * 8 + 8) * 4,
        written_bytes=4 * 8 * 4,
    )
    view = next(work for work in seen if work.name == "aten.t.default")
    assert (view.read_bytes, view.written_bytes) == (0, 0)
    assert [op.seconds for op in trace.steps[0].ops if trace.names[op.name] == "aten.addmm.default"] == [
        pytest.approx(512 / 1e9 + 544 / 1e6)
    ]
