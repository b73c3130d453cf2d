"""How an optimizer steps a table of rows: which ones may, what state they keep for a row, and the hooks.

A row is stepped when it has a gradient, and only then. That is what torch's optimizers do with a sparse gradient where
nothing else moves a row: neither momentum nor weight decay. They are named here, with the state they keep; whoever adds
one has read its step on sparse gradients. Others are refused.

The hooks are installed for all optimizers with the first table, so that a script needs no line more than for
`torch.nn.Embedding(sparse=True)`. An optimizer without a table in it is left alone.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from memwall.apply.optimizer_state.partial_step import with_closure_called
from memwall.errors import ApplyError
from memwall.patches import note_permanent
from memwall.rows.store import RowColumns
from memwall.rows.table import RowUpdate, TableWeight


def _sparse_adam(group: dict[str, Any], dim: int) -> RowUpdate:
    moments = (RowColumns(name="exp_avg", width=dim), RowColumns(name="exp_avg_sq", width=dim))
    return RowUpdate(columns=moments, first_count=0, is_linear=False)


def _sgd(group: dict[str, Any], dim: int) -> RowUpdate:
    return RowUpdate(columns=(), first_count=None, is_linear=True)


def _adagrad(group: dict[str, Any], dim: int) -> RowUpdate:
    sums = RowColumns(name="sum", width=dim, initial=float(group["initial_accumulator_value"]))
    count = torch.tensor(0.0, dtype=torch.promote_types(torch.get_default_dtype(), torch.float32), device="cpu")
    return RowUpdate(columns=(sums,), first_count=count, is_linear=False)


_KINDS: tuple[tuple[type[torch.optim.Optimizer], Callable[[dict[str, Any], int], RowUpdate], tuple[str, ...]], ...] = (
    (torch.optim.SparseAdam, _sparse_adam, ()),
    (torch.optim.SGD, _sgd, ("momentum", "weight_decay")),
    (torch.optim.Adagrad, _adagrad, ("weight_decay",)),
)
"""Each is a class, how it updates a row, and the settings that must be 0."""
_is_installed = False


def install_hooks() -> None:
    """Has every optimizer's step look for tables, from now on."""
    global _is_installed
    if not _is_installed:
        _is_installed = True
        for register, hook in (
            (register_optimizer_step_pre_hook, _before_step),
            (register_optimizer_step_post_hook, _after_step),
        ):
            register(hook)  # type: ignore[arg-type]
            note_permanent(
                "hook",
                f"torch.optim.optimizer.{register.__name__}",
                why="steps tables of rows",
                reason="a table ends when it is collected, which may be while an optimizer goes through its hooks",
            )


def _before_step(
    optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    found = [(p, group) for group in optimizer.param_groups for p in group["params"] if isinstance(p, TableWeight)]
    if not found:
        return None
    updates = [(p.table, _update_of(optimizer, group, p.table.dim)) for p, group in found]
    args, kwargs = with_closure_called(args, kwargs)  # its backward is what there is to step
    try:
        for table, update in updates:
            table.begin_step(optimizer, update)
    except BaseException:
        for table, _ in updates:
            table.withdraw()
        raise
    return args, kwargs


def _after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if isinstance(parameter, TableWeight):
                parameter.table.end_step(optimizer)


def _update_of(optimizer: torch.optim.Optimizer, group: dict[str, Any], dim: int) -> RowUpdate:
    """Says how an optimizer updates a row of a table."""
    step = inspect.unwrap(type(optimizer).step)
    for kind, update, must_be_zero in _KINDS:
        if isinstance(optimizer, kind) and step is inspect.unwrap(kind.step):
            wrong = [f"{name}={group[name]}" for name in must_be_zero if group[name]]
            if wrong:
                raise ApplyError(_refusal(optimizer, f" with {' and '.join(wrong)}"))
            return update(group, dim)
    raise ApplyError(_refusal(optimizer, ""))


def _refusal(optimizer: torch.optim.Optimizer, setting: str) -> str:
    known: Sequence[str] = [kind.__name__ for kind, *_ in _KINDS]
    return (
        f"{type(optimizer).__name__}{setting} cannot step a table of rows: it would have to move every row at every "
        "step, or is not known not to; give the table's weight to an optimizer of its own, one of "
        f"{', '.join(known)}, without momentum and weight decay"
    )
