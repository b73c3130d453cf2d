"""A model that several optimizers step, as Muon its matrices and AdamW the rest, and how it is trained."""

from collections.abc import Sequence

import torch
from optimizer_runs import Net
from torch import nn

__all__ = ["Optimizers", "everything", "made", "one_each", "train"]

Optimizers = Sequence[torch.optim.Optimizer]


def made(*, adamw_first: bool = False) -> tuple[Net, Optimizers]:
    """A model and its two optimizers, in the order in which they step."""
    torch.manual_seed(0)
    model = Net()
    muon = torch.optim.Muon([p for p in model.parameters() if p.ndim == 2], lr=1e-2)
    adamw = torch.optim.AdamW([p for p in model.parameters() if p.ndim != 2], lr=1e-2)
    return model, (adamw, muon) if adamw_first else (muon, adamw)


def train(model: nn.Module, optimizers: Optimizers, *, num_steps: int = 4, every: int = 1) -> None:
    """Micro-batches, clipping over all, a schedule for each; the second optimizer steps in every so many steps."""
    schedules = [torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)) for o in optimizers]
    for step in range(num_steps):
        for micro in range(2):
            x = torch.randn(5, 32, generator=torch.Generator().manual_seed(100 * step + micro))
            (model(x, step).square().mean() / 2).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        due = optimizers if step % every == every - 1 else optimizers[:1]
        for optimizer in due:
            optimizer.step()
        for optimizer, schedule in zip(due, schedules, strict=False):
            optimizer.zero_grad()
            schedule.step()


def everything(model: nn.Module, optimizers: Optimizers) -> object:
    return [model.state_dict(), *(optimizer.state_dict() for optimizer in optimizers)]


def one_each(model: nn.Module) -> dict[nn.Parameter, torch.optim.Optimizer]:
    return {parameter: torch.optim.AdamW([parameter], lr=1e-2) for parameter in model.parameters()}
