"""A step with its optimizer's moments in 8 bits: what of them is in memory when, to the byte."""

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from memwall.predict import low_bit_moments
from memwall.predict.curve import live_curve
from memwall.predict.low_bit_moments import can_be_low_bit, low_bit_bytes, low_bit_elements, with_low_bit_state
from memwall.trace.records import Step
from memwall.trace.steps import steady_step
from memwall.trace.trace_builder import record
from memwall.trace.workload import Workload

pytestmark = pytest.mark.usefixtures("one_thread")
# Two layers of 256 x 256; one of 256 x 16, in whole blocks; one of 16 x 3 and biases, too small.
LARGE, SMALLER = 256 * 256, 256 * 16


def steady(make: Callable[..., torch.optim.Optimizer], dtype: torch.dtype = torch.float32) -> Step:
    def model() -> nn.Module:
        widths = (256, 256, 256, 16, 3)
        return nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(widths))).to(dtype)

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        out: Tensor = model(batch)
        return out.square().mean()

    batch = torch.ones(4, 256, dtype=dtype)
    return steady_step(record(Workload(model=model, batch=lambda: batch, loss=loss, optimizer=make)))


def bytes_of(step: Step) -> list[int]:
    """While each operation runs."""
    return [int(number) for number in live_curve(step.storages, len(step.ops))]


@pytest.mark.parametrize(
    ("num_elements", "is_low"), [(4096, True), (4095, False), (3840, False), (4097, False), (4352, True)]
)
def test_whole_blocks_of_what_is_large_enough_are_in_8_bits(num_elements: int, is_low: bool) -> None:
    assert can_be_low_bit(num_elements) == is_low


def test_between_steps_a_moment_takes_a_byte_an_element_a_scale_a_block_and_a_table() -> None:
    step = steady(torch.optim.AdamW)
    assert sorted(low_bit_elements(step)) == [SMALLER] * 2 + [LARGE] * 4
    assert low_bit_bytes(LARGE) == LARGE + 4 * LARGE // 256 + 1024
    freed_bytes = sum(4 * number - low_bit_bytes(number) for number in low_bit_elements(step))
    assert bytes_of(step)[0] - bytes_of(with_low_bit_state(step))[0] == freed_bytes


def test_in_the_step_one_slice_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    step = steady(torch.optim.AdamW)
    first = next(number for number, op in enumerate(step.ops) if op.phase == "optimizer")
    curves = []
    for slice_elements in (1 << 10, 1 << 12):
        monkeypatch.setattr(low_bit_moments, "SLICE_ELEMENTS", slice_elements)
        curves.append(bytes_of(with_low_bit_state(step)))
    assert curves[0][:first] == curves[1][:first]
    assert max(curves[1][first:]) - max(curves[0][first:]) >= 3 * (1 << 10) * 37
    # No temporary of the recorded update is larger than a slice now.
    changed = with_low_bit_state(step)
    late = [s.nbytes for s in changed.storages[:-1] if s.category == "temporary" and s.birth >= first]
    assert (
        max(late)
        <= 4 * (1 << 12)
        < max(s.nbytes for s in step.storages if s.category == "temporary" and s.birth >= first)
    )


def test_other_state_stays() -> None:
    for step in (steady(lambda p: torch.optim.SGD(p, lr=0.1)), steady(torch.optim.AdamW, torch.bfloat16)):
        assert low_bit_elements(step) == ()
        assert with_low_bit_state(step) is step
