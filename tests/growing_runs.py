"""Runs that hold more with each step, as `GrowthWatch` sees them."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import nn

from memwall.session.watch.growth import GrowthWatch

BUDGET_BYTES = 1 << 40


def watched(
    values: Sequence[int],
    *,
    model: nn.Module | None = None,
    step: Callable[[int], object] = lambda _: None,
    disk: str | None = None,
    budget_bytes: int = BUDGET_BYTES,
    in_use: Sequence[int] | None = None,
) -> int:
    """Runs steps that begin with so many bytes; returns how many.

    Args:
        in_use: what of that is in use; None for all.
    """
    followed = nn.Module() if model is None else model
    watch = GrowthWatch(budget_bytes=lambda: budget_bytes, model=lambda: followed, disk=lambda: disk)
    for i, standing_bytes in enumerate(values):
        with pytest.MonkeyPatch.context() as patch:
            now_bytes = standing_bytes if in_use is None else in_use[i]
            for module in ("heap_rise", "growth"):
                patch.setattr(f"memwall.session.watch.{module}.heap_bytes", lambda said=now_bytes: said)
            watch.begin_step(standing_bytes, torch.device("cpu"))
        step(i)
        watch.end_step()
    watch.close()
    return len(values)
