"""What torch.distributed.pipelining keeps to itself is where memwall looks for it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from memwall.patches import Patches
from memwall.torch_internals.pipelines import (
    around_trials,
    computes_gradients,
    let_go,
    modules_of,
    when_schedules_are_known,
)


@pytest.mark.usefixtures("one_rank")
def test_a_schedule_tells_its_modules_and_what_it_computes() -> None:
    """GIVEN a pipeline of one stage THEN its first step tries it out once, and its evaluation is told from training."""
    model, patches, seen = nn.Linear(2, 2), Patches("follows schedules"), []
    stage = PipelineStage(model, 0, 1, torch.device("cpu"))

    def step(original: Callable[..., Any], schedule: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append((modules_of(schedule), computes_gradients(schedule)))
        return original(schedule, *args, **kwargs)

    def tries(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        calls: list[bool] = []
        with model.register_forward_hook(lambda *_: calls.append(True)):
            result = original(*args, **kwargs)
        seen.append(len(calls))
        return result

    with patches:
        when_schedules_are_known(patches, lambda kind: patches.wrap(kind, "step", step))
        around_trials(patches, tries)
        schedule = Schedule1F1B(stage, 2, loss_fn=lambda out, target: (out - target).sum())
        for run in (schedule.step, schedule.step, schedule.eval):
            run(torch.ones(4, 2), target=torch.ones(4, 2))
    training, evaluation = ([model], True), ([model], False)
    assert seen == [training, 1, training, 0, evaluation, 1]
    assert stage.fwd_cache  # of an evaluation nobody runs a backward, and its graphs stay
    let_go(schedule)
    assert not stage.fwd_cache
