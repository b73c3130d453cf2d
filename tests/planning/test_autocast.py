"""Autocast is not offered where the weights that a step computes with are in half precision."""

import pytest
import torch
from fake_steps import record_fake
from torch import nn

from memwall.planning.techniques.autocast import can_autocast
from memwall.trace.records import Trace
from memwall.trace.workload import Workload

IN_HALF = "the weights are in half precision already"


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
    """Its second product reads a part of a larger storage; beside it lie weights that nothing is multiplied by."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(64, 256), nn.Linear(256, 8, bias=False)
        self.scale = nn.Parameter(torch.ones(1 << 16, dtype=torch.float32))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(tokens)[:, -1]) * self.scale[:1].to(tokens.dtype)


@pytest.mark.parametrize(("dtype", "expected"), [("float32", None), ("bfloat16", IN_HALF), ("float16", IN_HALF)])
@pytest.mark.parametrize("has_bias", [True, False])
def test_weights_in_half_precision_are_seen(dtype: str, expected: str | None, has_bias: bool) -> None:
    kind = getattr(torch, dtype)
    trace = traced(nn.Linear(96, 33, bias=has_bias).to(kind), torch.ones(5, 7, 96, dtype=kind))
    assert can_autocast(trace, ("precision",)) == expected


def test_weights_of_convolutions_are_seen() -> None:
    kind = torch.bfloat16
    trace = traced(nn.Conv2d(3, 8, 3).to(kind), torch.ones(2, 3, 16, 16, dtype=kind))
    assert can_autocast(trace, ("precision",)) == IN_HALF


@pytest.mark.parametrize(("dtype", "expected"), [("float32", None), ("bfloat16", IN_HALF)])
def test_what_most_is_computed_with_decides(dtype: str, expected: str | None) -> None:
    kind = getattr(torch, dtype)
    model = LastToken()
    model.body.to(kind)
    model.head.to(kind)
    assert can_autocast(traced(model, torch.ones(4, 50, 64, dtype=kind)), ("precision",)) == expected


def test_without_weights_nothing_is_claimed() -> None:
    assert can_autocast(traced(nn.Embedding(8, 4), torch.zeros(2, 3, dtype=torch.long)), ("precision",)) is None
