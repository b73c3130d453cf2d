"""`memwall.fit`: one line around a training loop, and the session that other loops open likewise."""

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from memwall.errors import UsageError
from memwall.logs import tell
from memwall.machine.limits import budget_bytes
from memwall.planning.explain import plan_line
from memwall.planning.planfile import Plan
from memwall.session.refusals import check_parallel
from memwall.session.session import Session
from memwall.trace.optimizers import Optimizers, optimizers_of, trains


def fit(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer],
    *,
    budget: str | int | None = None,
    plan: Plan | None = None,
    disk: str | None = None,
    no_disk: bool = False,
    allow: Sequence[str] = (),
) -> Session:
    """Opens a session that makes training `model` with `optimizer` fit a budget, or follow a plan made before.

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
        optimizer: what steps the model: one, or a list of several, as torch.optim.Muon for matrices and AdamW for the
            rest. Of several the state stays in memory, and so do parameters.
        budget: what the process may use: a size, or a percentage of the model's device. Either this or `plan`. Ranks
            that a launcher started on one host have equal parts of a CPU's memory limit.
        plan: a plan made for this model.
        disk: directory for bytes that leave memory; the system's temporary directory by default.
        no_disk: whether no plan may write there; the first step alone, which is recorded, moves tensors there once.
        allow: what may be done that is not bit-exact: words of --allow, or one of its modes, "exact",
            "balanced" or "smallest"; `memwall plan --allow help` lists all.

    Raises:
        UsageError: neither or both of budget and plan; a budget that is no size; no optimizer of this model; a
            relaxation that is for a model on CUDA alone.
        StoreError: the disk directory cannot be used.
    """
    optimizers = _checked(model, optimizer)
    return open_session(model, optimizers, budget=budget, plan=plan, disk=disk, no_disk=no_disk, allow=tuple(allow))


def open_session(
    model: nn.Module,
    optimizers: Optimizers,
    *,
    budget: str | int | None,
    plan: Plan | None,
    disk: str | None,
    no_disk: bool,
    allow: tuple[str, ...],
    set_by_loop: tuple[str, ...] = (),
) -> Session:
    """Returns a session on a model, attached; a percentage is of what this process has of the model's device.

    Args:
        set_by_loop: tags of actions of a given plan that the loop carries out itself.

    Raises:
        UsageError: neither or both of budget and plan; a budget that is no size; `no_disk` for a plan that is given.
        PlanError: the plan was made for another model.
    """
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    if no_disk and plan is not None:
        raise UsageError("no_disk is for a plan that is made in the run, and this one is given")
    session = Session(
        budget_bytes=None if budget is None else budget_bytes(budget, str(device)),
        plan=plan,
        disk=disk,
        no_disk=no_disk,
        allow=allow,
        set_by_loop=set_by_loop,
    )
    session.on_plan = _tell
    try:
        session.attach(model, optimizers)
    except BaseException:
        session.close(completed=False)  # what it has changed in the process would stay
        raise
    return session


def _tell(session: Session) -> None:
    """Says in one line what the plan does: a loop that opens a session has no other place where it is shown."""
    if session.plan is not None:
        tell(plan_line(session.plan))


def _checked(model: nn.Module, given: Optimizers) -> tuple[torch.optim.Optimizer, ...]:
    optimizers = optimizers_of(given)
    check_parallel(model, optimizers)
    if not optimizers:
        raise UsageError("fit was given no optimizer; expected the one that trains the model, or a list of all that do")
    for optimizer in optimizers:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise UsageError(f"fit was given a {type(optimizer).__name__}; expected a torch.optim.Optimizer")
        if not trains(optimizer, model):
            raise UsageError(
                f"fit was given a {type(optimizer).__name__} that trains no parameter of {type(model).__name__}; give "
                "each model a session of its own, with its own optimizers"
            )
    return optimizers
