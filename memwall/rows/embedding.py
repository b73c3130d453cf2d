"""Embedding tables larger than memory: in place of `torch.nn.Embedding` and `EmbeddingBag` with `sparse=True`.

    table = memwall.RowEmbedding(20_000_000, 64, cache="1GiB")
    optimizer = torch.optim.SparseAdam(table.parameters())

Rows exist from their first update on: until then they take neither memory nor disk. Those in use are in memory, up to
`cache`; the others are on disk. The optimizer's state of a row lies with the row. Updates are bit-equal to those of the
same optimizer on `torch.nn.Embedding(sparse=True)` with the same weights.

Where torch.distributed is initialised with several ranks, row `id` lives on rank `id % ranks`. Then all ranks make the
module, call it, save and load it together, and step its optimizer together; `DistributedDataParallel` can wrap it.
"""

import os
from typing import Any, Literal, TypedDict, Unpack

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from memwall.errors import ApplyError, UsageError
from memwall.machine.disk_location import default_directory
from memwall.rows.exchange import RowExchange
from memwall.rows.files import load_table, save_table
from memwall.rows.initial import InitialRows
from memwall.rows.optimizer import install_hooks
from memwall.rows.store import RowLayout, RowStore
from memwall.rows.table import RowTable, TableWeight
from memwall.units import parse_size

_IMPORT_ROWS = 1 << 14


class TableOptions(TypedDict, total=False):
    """Says how a table keeps its rows."""

    dtype: torch.dtype | None
    """Weights and optimizer state have this dtype; torch's default if None."""
    cache: str | int
    """Rows, with their state, take no more memory; 256 MiB if not given."""
    disk: str | os.PathLike[str] | None
    """Cold rows go to this directory; the system's temporary one if None."""
    disk_limit: str | int | None
    """They take no more there; all that is free if None."""
    seed: int
    """Initial rows are a function of this and of their id; 0 if not given."""
    initial: Literal["normal", "uniform"]
    """They are normal with standard deviation `scale`, or uniform in [-scale, scale)."""
    scale: float
    """It is what `initial` says; 1 if not given."""
    process_group: dist.ProcessGroup | None
    """These ranks share the rows, over gloo; all ranks if None."""
    gradients: Literal["mean", "sum"]
    """Ranks take the mean (as DistributedDataParallel does, and if not given) or the sum."""


class _RowModule(nn.Module):
    """Is what both modules are: a table with ids of any shape in front."""

    weight: TableWeight

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        padding_idx: int | None,
        refused: dict[str, bool],
        dtype: torch.dtype | None = None,
        cache: str | int = "256MiB",
        disk: str | os.PathLike[str] | None = None,
        disk_limit: str | int | None = None,
        seed: int = 0,
        initial: Literal["normal", "uniform"] = "normal",
        scale: float = 1.0,
        process_group: dist.ProcessGroup | None = None,
        gradients: Literal["mean", "sum"] = "mean",
    ) -> None:
        super().__init__()
        for name, is_set in refused.items():
            if is_set:
                raise ApplyError(
                    f"{type(self).__name__} has no {name}: it would change rows that have no gradient, or need all of "
                    f"them; use torch.nn.{type(self).__name__.removeprefix('Row')} for a table that fits into memory"
                )
        if num_embeddings <= 0 or embedding_dim <= 0:
            raise UsageError(f"a table of {num_embeddings} x {embedding_dim} has no elements; both must be positive")
        if padding_idx is not None:
            if not -num_embeddings <= padding_idx < num_embeddings:
                raise UsageError(f"padding_idx={padding_idx} lies outside the table of {num_embeddings} rows")
            padding_idx %= num_embeddings
        self.num_embeddings, self.embedding_dim, self.padding_idx = num_embeddings, embedding_dim, padding_idx
        directory = default_directory() if disk is None else disk
        cache_bytes = parse_size(cache)
        capacity_bytes = None if disk_limit is None else parse_size(disk_limit)

        def make_store(layout: RowLayout, begin: InitialRows) -> RowStore:
            return RowStore(layout, begin, directory=directory, cache_bytes=cache_bytes, capacity_bytes=capacity_bytes)

        self._table = RowTable(
            num_embeddings,
            embedding_dim,
            torch.get_default_dtype() if dtype is None else dtype,
            initial=InitialRows(kind=initial, scale=scale, seed=seed, zero_id=padding_idx),
            make_store=make_store,
            exchange=_exchange(process_group, has_mean=gradients == "mean"),
        )
        self._agree()
        self.weight = self._table.weight
        install_hooks()

    # -- for users ---------------------------------------------------------------------------------------------------

    @property
    def num_rows(self) -> int:
        """Returns how many rows exist on this rank: those that were updated, loaded or imported."""
        return self._table.store.num_rows

    @property
    def memory_bytes(self) -> int:
        """Returns the memory that this rank's rows and their index take now."""
        return self._table.store.memory_bytes

    @property
    def store(self) -> RowStore:
        """Returns this rank's rows."""
        return self._table.store

    def prefetch(self, ids: Tensor) -> None:
        """Begins to read the rows of a coming batch while other work goes on. Between ranks, all call it."""
        self._table.prefetch(self._distinct(ids)[0])

    def rows(self, ids: Tensor) -> Tensor:
        """Returns the weights of rows, [*ids.shape, embedding_dim], without a gradient."""
        distinct, places = self._distinct(ids)
        return self._table.lookup(distinct, has_graph=False)[places]

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes all rows that exist, with their optimizer state, to a new folder; one file per rank."""
        save_table(self._table, folder)

    def load(self, folder: str | os.PathLike[str], *, with_state: bool = True) -> None:
        """Replaces all rows by those that were saved, on however many ranks that was.

        Args:
            folder: that `save` wrote.
            with_state: False to drop the optimizer's state.
        """
        load_table(self._table, folder, with_state=with_state)

    def close(self) -> None:
        """Gives back memory, threads and disk space; the rows are gone."""
        self._table.store.close()

    def extra_repr(self) -> str:
        """Returns what `torch.nn.Module` shows in brackets."""
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"{self.num_embeddings}, {self.embedding_dim}{padding}, rows={self.num_rows}"

    # -- what a module does ------------------------------------------------------------------------------------------

    def _look_up(self, ids: Tensor) -> tuple[Tensor, Tensor, int | None]:
        """Returns the rows of distinct ids, where each id is among them, and where the padding is."""
        distinct, places = self._distinct(ids)
        rows = self._table.lookup(distinct, has_graph=torch.is_grad_enabled())
        if self.padding_idx is None:
            return rows, places, None
        found = (distinct == self.padding_idx).nonzero()
        return rows, places, int(found[0]) if found.numel() else None

    def _distinct(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        if ids.dtype not in (torch.int32, torch.int64):
            raise UsageError(f"ids are int32 or int64, and these are {str(ids.dtype).removeprefix('torch.')}")
        distinct, places = torch.unique(ids.long(), return_inverse=True)
        if distinct.numel() and not 0 <= int(distinct[0]) <= int(distinct[-1]) < self.num_embeddings:
            raise UsageError(
                f"ids from {int(distinct[0])} to {int(distinct[-1])} were looked up in a table of "
                f"{self.num_embeddings} rows, whose ids are 0 to {self.num_embeddings - 1}"
            )
        return distinct, places

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Leaves rows in host memory and on disk when a model moves; what they give follows the ids."""
        dtype = fn(torch.empty(0, dtype=self._table.dtype, device="cpu")).dtype
        if dtype != self._table.dtype:
            raise ApplyError(
                f"a table of rows of {self._table.dtype} cannot become one of {dtype}; make it with dtype={dtype}, or "
                "convert the rest of the model only"
            )
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Says which the rows are, so that others are not taken for them; a state dict has none."""
        table = self._table
        destination[prefix + "rows"] = torch.tensor(
            [table.num_rows, table.dim, table.lineage, table.num_updates], dtype=torch.int64, device="cpu"
        )

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        weight, rows = state_dict.get(prefix + "weight"), state_dict.get(prefix + "rows")
        if weight is not None:
            self._import(weight)
        elif rows is None:
            missing_keys.append(prefix + "rows")
        else:
            table = self._table
            found = (table.num_rows, table.dim, table.lineage, table.num_updates)
            if tuple(rows.tolist()) != found:
                raise ApplyError(
                    f"this state dict was taken beside other rows for {prefix.rstrip('.') or 'the table'} (after "
                    f"{int(rows[3])} updates) than the module has now (after {table.num_updates} updates); load those "
                    "rows first, with load(folder) from where save(folder) put them at the same step"
                )

    @torch.no_grad()
    def _import(self, weight: Tensor) -> None:
        """Takes the rows of a dense table, as of `torch.nn.Embedding`."""
        table = self._table
        if weight.shape != (table.num_rows, table.dim):
            raise UsageError(
                f"a weight of shape {tuple(weight.shape)} was loaded into a table of {table.num_rows} x {table.dim}"
            )
        store = table.make_store(RowLayout(num_weights=table.dim, dtype=table.store.layout.dtype), table.initial)
        rank, num_ranks = (0, 1) if table.exchange is None else (table.exchange.rank, table.exchange.num_ranks)
        for first in range(rank, table.num_rows, _IMPORT_ROWS * num_ranks):
            ids = torch.arange(first, min(table.num_rows, first + _IMPORT_ROWS * num_ranks), num_ranks, device="cpu")
            store.write(ids, weight[ids.to(weight.device)].to("cpu", table.dtype))
        table.replace_store(store)

    def _agree(self) -> None:
        """Gives the table one name; ranks have one, so they must have made the same."""
        table = self._table
        if table.exchange is None:
            return
        mine = (table.num_rows, table.dim, str(table.dtype), repr(table.initial))
        found: Any = table.exchange.gather((mine, table.lineage))
        for rank, (theirs, _) in enumerate(found):
            if theirs != found[0][0]:
                raise ApplyError(
                    f"rank {rank} makes a table of {theirs}, and rank 0 one of {found[0][0]}; give all ranks the same "
                    "arguments"
                )
        table.lineage = found[0][1]


class RowEmbedding(_RowModule):
    """Is a `torch.nn.Embedding(sparse=True)` whose rows are lazily made, cached in memory, and otherwise on disk.

    Args:
        num_embeddings: rows in the table; ids are 0 to num_embeddings - 1.
        embedding_dim: elements in a row.
        padding_idx: a row that begins with zeros and gets no gradient.
        max_norm: not supported.
        norm_type: not supported.
        scale_grad_by_freq: not supported.
        sparse: always True.
        **options: see `TableOptions`.

    Raises:
        ApplyError: an argument asks for what such a table cannot do.
        StoreError: the directory is unsuitable.
        UsageError: a size is none.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = True,
        **options: Unpack[TableOptions],
    ) -> None:
        super().__init__(
            num_embeddings,
            embedding_dim,
            padding_idx=padding_idx,
            refused=_refused(max_norm, scale_grad_by_freq, sparse),
            **options,
        )

    def forward(self, ids: Tensor) -> Tensor:
        """Returns the rows of ids, [*ids.shape, embedding_dim]."""
        rows, places, padding = self._look_up(ids)
        return F.embedding(places, rows, padding_idx=padding, sparse=True)


class RowEmbeddingBag(_RowModule):
    """Is a `torch.nn.EmbeddingBag(sparse=True)` whose rows are lazily made, cached in memory, and otherwise on disk.

    Args:
        mode: "sum", "mean" or "max".
        include_last_offset: as in `torch.nn.EmbeddingBag`.
        **others: as in `RowEmbedding`.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        mode: Literal["sum", "mean", "max"] = "mean",
        sparse: bool = True,
        include_last_offset: bool = False,
        padding_idx: int | None = None,
        **options: Unpack[TableOptions],
    ) -> None:
        super().__init__(
            num_embeddings,
            embedding_dim,
            padding_idx=padding_idx,
            refused=_refused(max_norm, scale_grad_by_freq, sparse),
            **options,
        )
        self.mode, self.include_last_offset = mode, include_last_offset

    def forward(self, ids: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        """Returns the bags of ids, [bags, embedding_dim], as `torch.nn.EmbeddingBag` does."""
        rows, places, padding = self._look_up(ids)
        return F.embedding_bag(
            places,
            rows,
            offsets,
            mode=self.mode,
            sparse=self.mode != "max",  # torch has no sparse gradient of a maximum
            per_sample_weights=per_sample_weights,
            include_last_offset=self.include_last_offset,
            padding_idx=padding,
        )


def _refused(max_norm: float | None, scale_grad_by_freq: bool, sparse: bool) -> dict[str, bool]:
    """Returns the arguments of torch's modules that no table of rows has, and whether they were given."""
    return {
        "max_norm": max_norm is not None,
        "scale_grad_by_freq": scale_grad_by_freq,
        "sparse=False": not sparse,
    }


def _exchange(group: dist.ProcessGroup | None, *, has_mean: bool) -> RowExchange | None:
    if group is None:
        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
            return None
        group = dist.group.WORLD if dist.get_backend() == "gloo" else dist.new_group(backend="gloo")
    if group is None or dist.get_world_size(group) == 1:
        return None
    return RowExchange(group, has_mean=has_mean)
