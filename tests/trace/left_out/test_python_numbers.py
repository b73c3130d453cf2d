"""Random numbers that Python code takes are noticed, and those of tensors alone are not."""

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from memwall.trace.left_out.python_numbers import python_numbers
from memwall.trace.step_recorder import StepRecorder


@pytest.mark.parametrize(
    ("take", "is_noticed"),
    [(random.random, True), (np.random.rand, True), (lambda: torch.rand(2), False), (lambda: None, False)],
    ids=["python", "numpy", "torch", "none"],
)
def test_numbers_that_were_taken_are_noticed(take: Callable[[], object], is_noticed: bool) -> None:
    before = python_numbers()
    take()
    assert (python_numbers() != before) is is_noticed


@pytest.mark.parametrize("is_inside", [True, False])
def test_of_a_step_only_those_count_that_a_forward_took(is_inside: bool) -> None:
    """A loop that shuffles its data takes numbers, too: between forwards."""

    class Net(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * (random.random() if is_inside else 1.0)

    model = Net(4, 4)
    recorder = StepRecorder([model])
    recorder.start()
    random.random()
    model(torch.ones(2, 4)).sum().backward()
    recorder.stop()
    assert recorder.draws_in_python is is_inside
