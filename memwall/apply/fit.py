"""`memwall.fit`: one line around a training loop."""

from collections.abc import Sequence

import torch
from torch import nn

from memwall.apply.session import Session
from memwall.plan.planfile import Plan
from memwall.predict.limits import device_total_bytes
from memwall.units import parse_size

__all__ = ["fit"]


def fit(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    budget: str | int | None = None,
    plan: Plan | None = None,
    disk: str | None = None,
    allow: Sequence[str] = (),
) -> Session:
    """A session that makes training `model` with `optimizer` fit a budget, or follow a plan made before.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> with fit(model, optimizer, budget="8GiB") as session:
        ...     for _ in range(3):
        ...         loss = model(torch.zeros(3, 4)).sum()
        ...         loss.backward()
        ...         optimizer.step()
        ...         optimizer.zero_grad()
        >>> session.plan.actions
        ()

    Args:
        budget: what the process may use: a size, or a percentage of the device. Either this or `plan`.
        disk: directory for bytes that leave memory; the system's temporary directory by default.
        allow: relaxations: "kernels", "precision".

    Raises:
        UsageError: neither or both of budget and plan; a budget that is no size.
        StoreError: the disk directory cannot be used.
    """
    budget_bytes = None if budget is None else parse_size(budget, whole_bytes=device_total_bytes("cpu"))
    session = Session(budget_bytes=budget_bytes, plan=plan, disk=disk, allow=allow)
    session.attach(model, optimizer)
    return session
