"""What torch decides by the device of a tensor, while a step is recorded for one that is not here."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memwall.machine.hardware import hardware_named
from memwall.predict.cuda.translate import not_modelled, recording_for
from memwall.torch_internals.operators import has_kernel
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
    def saved() -> set[int]:
        workload = workload_of(lambda: nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.1)), lambda: torch.ones(4, 32))
        trace = recorded(workload, "a100-80gb")
        step = trace.steps[-1]
        return {save.nbytes for save in step.saved if step.storages[save.storage].category == "activation"}

    assert 4 * 32 in saved()


@pytest.mark.parametrize(
    ("dtype", "is_cast"), [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)]
)
def test_an_rms_norm_saves_its_input_and_a_number_per_row(
    dtype: torch.dtype, is_cast: bool, workload_of: Callable[..., Workload], recorded: Callable[..., Trace]
) -> None:
    """GIVEN 8 rows of 64 WHEN they are normalised on CUDA THEN no copy of them is saved but those autocast makes."""

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=is_cast):
            return model(batch).float().sum()

    def saved() -> list[int]:
        workload = workload_of(
            lambda: nn.Sequential(nn.Linear(64, 64), nn.RMSNorm(64)),
            lambda: torch.ones(8, 64),
            torch.float32 if is_cast else dtype,
            loss=loss,
        )
        step = recorded(workload, "a100-80gb").steps[-1]
        numbers = {save.storage for save in step.saved if step.storages[save.storage].category == "activation"}
        return sorted(step.storages[number].nbytes for number in numbers)

    rows, wide_rows = dtype.itemsize * 8 * 64, 4 * 8 * 64
    input_copy = [rows] if is_cast else []  # of the linear layer
    # In torch 2.11 autocast leaves the rows as they are, of another dtype than the weight, which has no fused operator.
    is_in_pieces = is_cast and not has_kernel("aten::rms_norm", "AutocastCUDA")
    piece = [wide_rows] if is_in_pieces else []
    assert saved() == sorted([4 * 8, *input_copy, wide_rows if is_cast else rows, *piece])


def test_a_weight_of_another_dtype_has_an_rms_norm_taken_to_pieces(
    workload_of: Callable[..., Workload], recorded: Callable[..., Trace]
) -> None:
    """As on CUDA: layer_norm.cpp has no fused operator for it."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(64, dtype=torch.float32))

        def forward(self, x: Tensor) -> Tensor:
            return F.rms_norm(x, (64,), self.weight)

    trace = recorded(workload_of(Mixed, lambda: torch.ones(8, 64), torch.bfloat16), "a100-80gb")
    assert "aten._fused_rms_norm.default" not in trace.names
    assert "aten.rsqrt.default" in trace.names


@pytest.mark.parametrize(
    ("weight_format", "batch_format", "is_copied"),
    [
        (torch.contiguous_format, torch.contiguous_format, False),
        (torch.channels_last, torch.channels_last, False),
        (torch.contiguous_format, torch.channels_last, True),
    ],
)
def test_a_gradient_lies_as_its_parameter_does(
    weight_format: torch.memory_format,
    batch_format: torch.memory_format,
    is_copied: bool,
    workload_of: Callable[..., Workload],
    recorded: Callable[..., Trace],
) -> None:
    """The result of backward becomes the gradient, or where it lies otherwise a copy: both are there for a moment."""
    workload = workload_of(
        lambda: nn.Conv2d(8, 16, 3, bias=False).to(memory_format=weight_format),
        lambda: torch.ones(2, 8, 9, 9).to(memory_format=batch_format),
    )
    trace = recorded(workload, "a100-80gb")
    step = trace.steps[-1]
    (gradient,) = (storage for storage in step.storages if storage.category == "gradient")
    made_by = "new_empty_strided" if is_copied else "convolution_backward"
    assert trace.names[step.ops[gradient.birth].name] == f"aten.{made_by}.default"
    at_once = [s for s in step.storages if s.nbytes == gradient.nbytes and s.birth <= gradient.birth < s.death]
    assert len(at_once) == 2 + is_copied  # the weight, too


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
