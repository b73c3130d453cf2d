"""The rows behind an embedding: read for a batch, stepped by the user's own optimizer, written back.

A forward copies the rows of its ids out of the store. A backward leaves their gradient here, as ids and values, in the
order in which torch would accumulate them. When an optimizer steps the table's weight, the weight is for that moment a
small tensor with just the rows that have a gradient, and the optimizer's state for it likewise; then they go back.
"""

import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from memwall.errors import ApplyError, UsageError
from memwall.rows.exchange import Passes, RowExchange
from memwall.rows.initial import InitialRows
from memwall.rows.store import RowColumns, RowLayout, RowStore
from memwall.torch_internals.autograd import current_backward
from memwall.torch_internals.storages import sparse_indices, sparse_nnz, sparse_values

StoreMaker = Callable[[RowLayout, InitialRows], RowStore]


class TableWeight(nn.Parameter):
    """Stands for all rows of a table where a parameter is expected: in an optimizer, in `clip_grad_norm_`.

    Between steps it has no elements. Its gradient is that of the rows that have one, each once, [rows, dim].
    """

    table: "RowTable"

    @property
    def grad(self) -> Tensor | None:
        """Returns the gradient so far, or None."""
        return self.table.gradient() if hasattr(self, "table") else None

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        self.table.replace_gradient(value)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ApplyError(
            "a table of rows cannot be copied or pickled: its rows are partly on disk and belong to this process; "
            "use save(folder), and load(folder) on a second table, or state_dict() for the rest of the model"
        )

    def __deepcopy__(self, memo: Any) -> Any:
        return self.__reduce_ex__(4)


class _Lookup(torch.autograd.Function):
    """Puts rows into the graph; their gradient goes to the table, the weight's own has no elements."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, rows: Tensor, table: "RowTable", ids: Tensor) -> Tensor:
        ctx.table, ctx.ids = table, ids
        return rows.view_as(rows)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        table: RowTable = ctx.table
        if gradient.is_sparse:
            table.receive(ctx.ids[sparse_indices(gradient)[0].cpu()], sparse_values(gradient).cpu())
        else:
            table.receive(ctx.ids, gradient.cpu())
        return torch.zeros_like(table.weight), None, None, None


@dataclass(frozen=True, slots=True)
class RowUpdate:
    """Says how an optimizer updates a row."""

    columns: tuple[RowColumns, ...]
    """It keeps this state for a row."""
    first_count: Any
    """Its count of steps is this before the first, None if it has none."""
    is_linear: bool
    """True if it applies one gradient of a row after another, without adding them up first."""


@dataclass(slots=True)
class _Stepping:
    """Holds a step under way."""

    optimizer: torch.optim.Optimizer
    rows: Tensor
    gradient: Tensor
    count_before: Any
    """The optimizer's count of steps becomes this if it fails."""


class RowTable:
    """Holds the rows of one embedding, this rank's share of them in a store.

    Args:
        num_rows: ids are 0 to num_rows - 1.
        dim: weights in a row.
        dtype: of weights and state.
        initial: how rows begin.
        make_store: opens an empty store.
        exchange: how ranks share the rows; None if there is one.
    """

    def __init__(
        self,
        num_rows: int,
        dim: int,
        dtype: torch.dtype,
        *,
        initial: InitialRows,
        make_store: StoreMaker,
        exchange: RowExchange | None,
    ) -> None:
        self.num_rows, self.dim, self.dtype, self.initial = num_rows, dim, dtype, initial
        self.exchange = exchange
        self.make_store = make_store
        self.store = make_store(RowLayout(num_weights=dim, dtype=str(dtype).removeprefix("torch.")), initial)
        self.lineage = uuid.uuid4().int >> 65
        """Tells this table's rows from all others'; kept by saving and loading."""
        self.num_updates = 0
        self.step_count: float | None = None
        """It is the optimizer's own count of steps, where it keeps one."""
        self.weight = TableWeight(torch.empty(0, dim, dtype=dtype, device="cpu"))
        self.weight.table = self
        self.weight.register_post_accumulate_grad_hook(self._end_backward)  # type: ignore[no-untyped-call]
        self._arriving: dict[int, Passes] = {}
        self._to_exchange: Passes = []
        self._is_gathered = exchange is None
        self._sum: Tensor | None = None
        self._shown: tuple[Tensor, Tensor, Tensor | None] | None = None
        self._stepping: _Stepping | None = None

    # -- forward -----------------------------------------------------------------------------------------------------

    def lookup(self, ids: Tensor, *, has_graph: bool = True) -> Tensor:
        """Returns the rows of these ids, [n, dim], on their device, with a gradient that comes back here.

        Args:
            ids: int64 [n], sorted, each once.
            has_graph: False to have no gradient.
        """
        self.withdraw()
        on_cpu = ids.cpu()
        with torch.inference_mode(mode=False), torch.no_grad():
            if self.exchange is None:
                rows = self.store.weights(on_cpu)
            else:
                rows = self.exchange.rows(on_cpu, self.store.weights, self.dim, self.dtype)
            rows = rows.to(ids.device)
        if not has_graph:
            return rows
        looked_up: Tensor = _Lookup.apply(self.weight, rows, self, on_cpu)  # type: ignore[no-untyped-call]
        return looked_up

    def prefetch(self, ids: Tensor) -> None:
        """Begins to read what of these rows is on disk only."""
        on_cpu = ids.cpu()
        with torch.inference_mode(mode=False), torch.no_grad():
            self.store.prefetch(on_cpu if self.exchange is None else self.exchange.owned(on_cpu))

    # -- backward ----------------------------------------------------------------------------------------------------

    def receive(self, ids: Tensor, values: Tensor) -> None:
        """Takes the gradient of one lookup: `values[i]` for row `ids[i]`, also repeated."""
        self.withdraw()
        # One backward may run inside another, and one that breaks off leaves what nobody will ask for.
        self._arriving.setdefault(current_backward(), []).append((ids, values))

    def _end_backward(self, _: Tensor) -> None:
        arrived = self._arriving.pop(current_backward(), [])
        if self.exchange is not None:
            self._to_exchange += reversed(arrived)  # nodes run from the last use to the first
            self._is_gathered = False
            return
        # As torch's engine adds up what comes from several uses, so that sums have the same order.
        whole: Tensor | None = None
        for ids, values in arrived:
            new = self._sparse(ids, values)
            whole = new if whole is None else new + whole
        if whole is not None:
            self._add(whole)

    def _add(self, new: Tensor) -> None:
        """Accumulates, as torch does it in a parameter's gradient."""
        before = self._sum_so_far()
        self._sum, self._shown = new if before is None else before + new, None

    def _sum_so_far(self) -> Tensor | None:
        """Returns the gradient, sparse; what was shown and then changed, by clipping or so, replaces what came."""
        if self._shown is None:
            return self._sum
        ids, values, before = self._shown
        if before is not None and torch.equal(values, before):  # `.grad.data` changes without a trace
            return self._sum
        if not bool(values.any()):  # zero_grad(set_to_none=False): a sparse gradient has no rows then
            ids, values = ids[:0], values[:0]
        return self._sparse(ids, values)

    def _sparse(self, ids: Tensor, values: Tensor) -> Tensor:
        size = (self.num_rows, self.dim)
        return torch.sparse_coo_tensor(ids[None], values, size, check_invariants=False, device="cpu")

    def gradient(self) -> Tensor | None:
        """Returns what the weight shows as its gradient: [rows, dim], in the order of their ids.

        Between ranks it is shown within the optimizer's step alone.
        """
        if self._stepping is not None:
            return self._stepping.gradient
        if self._sum is None or not self._is_gathered:
            return None
        return self._coalesced()[1]

    def _coalesced(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Returns ids with a gradient, it, and a copy from before anybody saw it; None for one that was set."""
        if self._shown is None:
            assert self._sum is not None
            whole = self._sum.coalesce()
            self._shown = sparse_indices(whole)[0], sparse_values(whole), sparse_values(whole).clone()
        return self._shown

    def replace_gradient(self, value: Tensor | None) -> None:
        """Does what setting the weight's gradient means.

        Raises:
            UsageError: it is neither None nor as large as the gradient at hand.
        """
        if value is None:
            self._sum, self._shown, self._to_exchange = None, None, []
            return
        shown = self.gradient()
        if shown is None or value.shape != shown.shape:
            found = "no gradient" if shown is None else f"one of shape {tuple(shown.shape)}"
            raise UsageError(
                f"a gradient of shape {tuple(value.shape)} was set on a table of rows that has {found}; change the "
                "gradient in place, or set it to None"
            )
        self._shown = self._coalesced()[0], value, None

    # -- the optimizer's step ----------------------------------------------------------------------------------------

    @torch.no_grad()
    def begin_step(self, optimizer: torch.optim.Optimizer, update: RowUpdate) -> None:
        """Makes the weight, its gradient and its state those of the rows that have a gradient.

        Args:
            optimizer: about to step the weight.
            update: how it does that.

        Raises:
            ApplyError: the rows hold another optimizer's state.
            StoreError: rows cannot be read.
        """
        self.withdraw()
        if current_backward() == -1:
            self._arriving.clear()
        self._gather_gradient()
        whole = self._sum_so_far()
        if whole is None:
            return
        if update.is_linear:
            rows, places = torch.unique(sparse_indices(whole)[0], return_inverse=True)
        else:
            # Between ranks it has been added up already: a part of a batch might be in another order than the whole.
            whole = self._sparse(*self._coalesced()[:2]) if whole is self._sum else whole
            rows, places = sparse_indices(whole)[0], torch.arange(sparse_nnz(whole), device="cpu")
        self._adopt(update.columns)
        records = self.store.records(rows)
        state = optimizer.state[self.weight]
        self._check_state(optimizer, update)
        start = self.dim
        for column in update.columns:
            state[column.name] = records[:, start : start + column.width].contiguous()
            start += column.width
        self.weight.data = records[:, : self.dim].contiguous()
        gradient = torch.sparse_coo_tensor(
            places[None],
            sparse_values(whole),
            self.weight.shape,
            check_invariants=False,
            is_coalesced=not update.is_linear,
            device="cpu",
        )
        count = state["step"].clone() if isinstance(state.get("step"), Tensor) else state.get("step")
        self._stepping = _Stepping(optimizer, rows, gradient, count)

    @torch.no_grad()
    def end_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Writes the stepped rows back.

        Raises:
            StoreError: there is no room for them on disk; the table cannot be used any more then.
        """
        stepping = self._stepping
        if stepping is None or stepping.optimizer is not optimizer:
            return
        state = optimizer.state[self.weight]
        parts = [self.weight.data, *(state[columns.name] for columns in self.store.layout.state)]
        self.store.write(stepping.rows, torch.cat(parts, dim=1))
        stepping.count_before = state.get("step")
        self.withdraw()
        self.num_updates += 1
        if "step" in state:
            self.step_count = float(state["step"])

    def _gather_gradient(self) -> None:
        """Brings every rank's gradient to the rows' owners."""
        if self.exchange is None:
            return
        gathered = self.exchange.gradients(self._to_exchange, self.dim, self.dtype)
        if gathered is not None:
            ids, values, adding = gathered
            is_first = self._sum is None
            self._add(self._sparse(ids, values))
            if is_first:
                rows, inverse = torch.unique(ids, return_inverse=True)
                added = values.new_zeros(rows.numel(), self.dim).index_add_(0, inverse[adding], values[adding])
                self._shown = rows, added, added.clone()
        self._to_exchange, self._is_gathered = [], True

    def replace_store(self, store: RowStore, *, step_count: float | None = None) -> None:
        """Takes other rows in place of these, and forgets the gradient."""
        self.withdraw()
        self.store.close()
        self.store, self.step_count = store, step_count
        self.num_updates += 1
        self.replace_gradient(None)

    def withdraw(self) -> None:
        """Takes away what `begin_step` put up, of a step that is done, or that failed."""
        if self._stepping is None:
            return
        stepping, self._stepping = self._stepping, None
        self.weight.data = torch.empty(0, self.dim, dtype=self.dtype, device="cpu")
        state = stepping.optimizer.state[self.weight]
        if stepping.count_before is not None:
            state["step"] = stepping.count_before
        for columns in self.store.layout.state:
            state[columns.name] = torch.empty(0, columns.width, dtype=self.dtype, device="cpu")

    def _adopt(self, columns: tuple[RowColumns, ...]) -> None:
        """Makes the store keep this state beside the weights."""
        layout = self.store.layout
        if layout.state == columns:
            return
        if layout.state and self.store.num_rows:
            raise ApplyError(
                f"the rows of this table hold {_named(layout.state)}, and the optimizer that steps it now keeps "
                f"{_named(columns)}; go on with the optimizer they were trained with, or load them into a new table "
                "with load(folder, with_state=False)"
            )
        layout = RowLayout(num_weights=self.dim, dtype=layout.dtype, state=columns)
        made = self.make_store(layout, self.initial)
        for ids, weights in self.store.every_record():
            made.write(ids, torch.cat([weights[:, : self.dim], layout.initial_state(ids.numel())], dim=1))
        self.store.close()
        self.store = made

    def _check_state(self, optimizer: torch.optim.Optimizer, update: RowUpdate) -> None:
        state = optimizer.state[self.weight]
        for column in update.columns:
            held = state.get(column.name)
            if isinstance(held, Tensor) and held.numel():
                raise ApplyError(
                    f"the {type(optimizer).__name__} was given a state '{column.name}' of shape {tuple(held.shape)} "
                    "for a table of rows, whose state lies with its rows; load the table with load(folder)"
                )
        if update.first_count is None:
            return
        count, held_count = state.setdefault("step", update.first_count), self.step_count or 0.0
        if float(count) not in (0.0, held_count):
            raise ApplyError(
                f"the {type(optimizer).__name__} has made {float(count):.0f} steps and the table's rows "
                f"{held_count:.0f}: they were not saved together; load both of the same step, or make a new optimizer"
            )
        state["step"] = torch.full_like(count, held_count) if isinstance(count, Tensor) else int(held_count)


def _named(state: tuple[RowColumns, ...]) -> str:
    return ", ".join(f"{columns.name} ({columns.width})" for columns in state) or "no state"
