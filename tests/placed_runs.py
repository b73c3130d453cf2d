"""Runs of the small language model under plans that have its parameters on disk, and plainly."""

from collections.abc import Callable
from typing import Any

import torch
from plans import plan_of
from streamed_models import GPT, KIB, loss_of
from torch import Tensor, nn

from memwall.planning.planfile import Plan
from memwall.planning.techniques.optimizer_state import OptimizerPlacement
from memwall.planning.techniques.parameters import ParameterPlacement
from memwall.planning.techniques.recompute import Recompute

__all__ = ["BLOCKS", "PARAMETERS", "STATE", "differing", "made", "plan_for", "train"]

BLOCKS = tuple(f"layers.{number}" for number in range(4))
PARAMETERS = ParameterPlacement(
    tier="disk", blocks=BLOCKS, window_bytes=16 * KIB, min_bytes=4 * KIB, written_bytes=0, saved_bytes=1
)
STATE = OptimizerPlacement(tier="disk", resident_bytes=0, bucket_bytes=40 * KIB, min_bytes=4 * KIB)


def plan_for(model: nn.Module) -> Plan:
    return plan_of(model, PARAMETERS, STATE, Recompute(block="layers.1"), Recompute(block="layers.2"))


def made() -> tuple[GPT, torch.optim.Optimizer, Any]:
    torch.manual_seed(0)
    model = GPT()
    matrices, rest = [p for p in model.parameters() if p.dim() > 1], [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW([{"params": matrices}, {"params": rest, "weight_decay": 0.0}], lr=1e-2)
    return model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: Any,
    *,
    first: int = 0,
    num_steps: int = 4,
    after: Callable[[], None] = lambda: None,
    set_to_none: bool = True,
) -> list[float]:
    """Accumulates, clips by norm, steps, schedules, evaluates; every number that the loop sees."""
    numbers: list[float] = []
    for step in range(first, first + num_steps):
        for micro in range(2):
            loss = loss_of(model, 10 * step + micro)
            (loss / 2).backward()
            numbers.append(loss.item())
        numbers.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad(set_to_none=set_to_none)
        after()
        with torch.no_grad():
            numbers.append(loss_of(model, 99).item())
    return numbers


def differing(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    assert one.keys() == other.keys()
    return [name for name, value in one.items() if not torch.equal(other[name], value)]
