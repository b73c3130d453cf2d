"""Whether weights are in half precision, told from a trace, which keeps no dtypes."""

import pytest
import torch
from fake_steps import record_fake
from torch import nn

from memwall.planning.techniques.autocast import can_autocast
from memwall.predict.half_precision import computes_in_half
from memwall.trace.records import Trace
from memwall.trace.workload import Workload


def traced(model: nn.Module, batch: torch.Tensor) -> Trace:
    return record_fake(
        Workload(
            model=lambda: model,
            batch=lambda: batch,
            loss=lambda model, batch: model(batch).float().sum(),
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        )
    )


class LastToken(nn.Module):
    """Its second product reads a part of a larger storage."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(64, 256), nn.Linear(256, 8, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(tokens)[:, -1])


@pytest.mark.parametrize(("dtype", "expected"), [("float32", False), ("bfloat16", True), ("float16", True)])
@pytest.mark.parametrize("has_bias", [True, False])
def test_it_is_told_by_the_sizes_of_a_product(dtype: str, expected: bool, has_bias: bool) -> None:
    kind = getattr(torch, dtype)
    trace = traced(nn.Linear(96, 33, bias=has_bias).to(kind), torch.ones(5, 7, 96, dtype=kind))
    assert computes_in_half(trace) is expected


@pytest.mark.parametrize(("dtype", "expected"), [("float32", False), ("bfloat16", True)])
def test_a_part_of_a_larger_storage_does_not_hide_it(dtype: str, expected: bool) -> None:
    kind = getattr(torch, dtype)
    assert computes_in_half(traced(LastToken().to(kind), torch.ones(4, 50, 64, dtype=kind))) is expected


def test_without_products_nothing_is_claimed() -> None:
    assert not computes_in_half(traced(nn.Conv2d(3, 8, 3), torch.ones(2, 3, 16, 16)))


def test_autocast_is_not_offered_for_weights_in_half_precision() -> None:
    kind = torch.bfloat16
    whole, half = traced(nn.Linear(8, 8), torch.ones(4, 8)), traced(nn.Linear(8, 8).to(kind), torch.ones(4, 8).to(kind))
    assert can_autocast(whole, ("precision",)) is None
    assert can_autocast(half, ("precision",)) == "the weights are in half precision already"
