"""An evaluation on fake tensors: the live one's peak, beside the optimizer's state, with no gradient in it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracle import profiler_peak_bytes
from scratch_workspaces import ScratchWorkspaces
from torch import nn
from zoo import MODELS, optimizers

from memwall.errors import TraceError
from memwall.predict.curve import live_peak_bytes
from memwall.trace.fake import record_fake_run
from memwall.trace.records import Step, Trace
from memwall.trace.trace_builder import TraceBuilder, run_evaluated, run_recorded
from memwall.trace.workload import Workload

# Two of four experts take each token: a quarter of the choices goes to each.
EXPERT_SHARE = 0.25
# The allocator's own count, which also hears of what operators allocate for themselves.
TOLERANCE = 0.01

pytestmark = pytest.mark.usefixtures("one_thread")


def workload_of_case(model_name: str) -> Workload:
    case = MODELS[model_name]
    return Workload(
        model=lambda: case("tiny").model,
        batch=lambda: case("tiny").batch,
        loss=case("tiny").loss,
        optimizer=optimizers()["adamw_foreach"],
    )


@pytest.mark.slow
@pytest.mark.parametrize("model_name", sorted(set(MODELS) - {"moe"}))  # a live router is not perfectly balanced
def test_a_fake_evaluation_has_the_peak_that_the_allocator_counts(
    model_name: str, names_of: Callable[[Trace, Step], list[str]]
) -> None:
    workload = workload_of_case(model_name)
    model, batch = workload.make_model(), workload.make_batch()
    optimizer = workload.make_optimizer(model)
    builder = TraceBuilder([model])
    run_recorded(builder, workload, model, optimizer, batch, num_steps=2)
    live = run_evaluated(builder, workload, model, optimizer, batch)
    state = [value for values in optimizer.state.values() for value in values.values()]

    def evaluate() -> None:
        with torch.no_grad():
            workload.loss(model, batch)

    existing = (*model.parameters(), *model.buffers(), *state, *batch.values())
    counted_bytes = profiler_peak_bytes(evaluate, existing)
    fake = record_fake_run(workload, workload.make_batch, workspaces=ScratchWorkspaces()).evaluation
    assert fake is not None
    assert names_of(fake, fake.steps[0]) == names_of(live, live.steps[0])
    assert live_peak_bytes(fake.steps[0], "cpu") == pytest.approx(counted_bytes, rel=TOLERANCE)


@pytest.mark.slow
def test_an_evaluation_holds_weights_and_state_and_saves_nothing() -> None:
    run = record_fake_run(workload_of_case("gpt"), workload_of_case("gpt").make_batch)
    assert run.evaluation is not None
    (step,) = run.evaluation.steps
    assert {op.phase for op in step.ops} <= {"eval", "other"}
    assert step.saved == ()
    assert not [storage for storage in step.storages if storage.category == "gradient"]
    standing = {storage.category for storage in step.storages if storage.birth < 0}
    assert {"parameter", "optimizer_state", "input"} <= standing
    assert live_peak_bytes(step, "cpu") < live_peak_bytes(run.training.steps[1], "cpu")
    assert len(run.training.steps) == 2


@pytest.mark.slow
def test_a_router_needs_the_share_in_evaluation_too() -> None:
    workload = workload_of_case("moe")
    run = record_fake_run(workload, workload.make_batch, mask_share=EXPERT_SHARE)
    assert (run.evaluation is not None, run.failure) == (True, "")


def test_the_batch_evaluated_may_be_another_one(workload_of: Callable[..., Workload]) -> None:
    workload = workload_of(lambda model, batch: model(batch).sum())
    run = record_fake_run(workload, lambda: torch.ones(64, 8))
    assert run.evaluation is not None
    found = [
        [storage.nbytes for storage in trace.steps[-1].storages if storage.category == "input"]
        for trace in (run.training, run.evaluation)
    ]
    assert found == [[4 * 8 * 4], [64 * 8 * 4]]
    assert run.training.micro_batch == 4


def test_micro_batches_accumulate_gradients(workload_of: Callable[..., Workload]) -> None:
    """Of many micro-batches two are recorded: the second finds gradients, and so do those after it."""
    workload = workload_of(lambda model, batch: model(batch).sum())
    run = record_fake_run(workload, workload.make_batch, num_micro_batches=8)
    assert run.training.num_micro_batches == 2
    for step in run.training.steps:
        assert [name for name, _ in step.marks].count("backward") == 2
        assert [name for name, _ in step.marks].count("optimizer") == 1


class FailsInEvaluation(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            raise ValueError("no labels, no loss")
        return super().forward(x)


def test_a_model_that_cannot_be_evaluated_is_recorded_training(workload_of: Callable[..., Workload]) -> None:
    trained: Any = workload_of(lambda model, batch: model(batch).sum())
    workload = Workload(
        model=lambda: FailsInEvaluation(8, 8), batch=trained.batch, loss=trained.loss, optimizer=trained.optimizer
    )
    run = record_fake_run(workload, workload.make_batch)
    assert run.evaluation is None
    assert run.failure.startswith("ValueError: no labels, no loss (")
    assert len(run.training.steps) == 2


def test_a_loss_without_the_model_is_no_evaluation(sgd: Callable[[Any], torch.optim.Optimizer]) -> None:
    model = nn.Linear(8, 8)
    workload = Workload(model=model, batch=torch.ones(2, 8), loss=lambda model, batch: batch.sum(), optimizer=sgd)
    builder = TraceBuilder([model])
    with pytest.raises(TraceError, match=r"no eval phase: the model was not called .*; record one whole evaluation$"):
        run_evaluated(builder, workload, model, sgd(model.parameters()), workload.make_batch())
    assert not builder.is_recording


def test_steps_are_the_same_where_none_is_asked_for() -> None:
    workload = workload_of_case("gpt")
    run = record_fake_run(workload, None)
    assert (run.evaluation, run.failure) == (None, "")
    assert run.training == record_fake_run(workload, workload.make_batch).training
