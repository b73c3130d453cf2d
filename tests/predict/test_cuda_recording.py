"""What torch decides by the device of a tensor, while a step is recorded for one that is not here."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memwall.predict.hardware import hardware_named
from memwall.predict.translate import not_modelled, recording_for
from memwall.trace.records import Trace
from memwall.trace.workload import Workload

pytestmark = pytest.mark.usefixtures("one_thread")


def test_torch_has_its_own_functions_back_afterwards() -> None:
    before = (F.scaled_dot_product_attention, F.dropout, torch.autocast.__init__)
    choices = recording_for(hardware_named("l4")).choices()
    with pytest.raises(ZeroDivisionError), choices:
        F.dropout(torch.ones(4), 0.5) if F.dropout is before[1] else 1 / 0
    assert (F.scaled_dot_product_attention, F.dropout, torch.autocast.__init__) == before


def test_dropout_saves_a_mask_of_bools(workload_of: Callable[..., Workload], recorded: Callable[..., Trace]) -> None:
    def saved(*without: str) -> set[int]:
        workload = workload_of(lambda: nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.1)), lambda: torch.ones(4, 32))
        trace = recorded(workload, "a100-80gb", *without)
        step = trace.steps[-1]
        return {save.nbytes for save in step.saved if step.storages[save.storage].category == "activation"}

    assert 4 * 32 in saved()
    assert 4 * 32 not in saved("dropout-mask")


def test_autocast_to_cuda_is_not_silently_off(
    workload_of: Callable[..., Workload], recorded: Callable[..., Trace]
) -> None:
    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return model(batch).float().sum()

    workload = workload_of(lambda: nn.Linear(64, 64), lambda: torch.ones(8, 64), loss=loss)
    trace = recorded(workload, "a100-80gb")
    weight_copy = 2 * 64 * 64
    assert trace.autocast == "bfloat16"
    assert any(s.nbytes == weight_copy for s in trace.steps[-1].storages)
    assert any("gradient scaling" in line for line in not_modelled(trace, hardware_named("a100-80gb")))
