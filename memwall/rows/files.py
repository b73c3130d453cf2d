"""Saving a table of rows and loading it, on any number of ranks: each writes its shard, each reads what it owns.

A folder appears under its name when all its shards are on disk, or not at all. A table is replaced when all shards have
been read and checked, or stays as it is.
"""

import os
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from memwall.errors import MemwallError, StoreError
from memwall.rows.store import RowLayout, RowStore
from memwall.rows.store_file import ShardHeader, read_header, read_rows, shard_path, shard_paths, write_shard
from memwall.rows.table import RowTable
from memwall.versioned_files import sync_directory

_T = TypeVar("_T")


def save_table(table: RowTable, folder: str | os.PathLike[str]) -> None:
    """Writes all rows that exist, with their state, to a new folder. All ranks call it.

    Raises:
        StoreError: the folder exists, or a rank could not write its shard.
    """
    place = Path(folder)
    partial = place.with_name(f"{place.name}.partial")
    rank, num_ranks = _rank_of(table)

    def prepare() -> str:
        if place.exists():
            raise StoreError(f"{place} exists already; save to a new folder")
        if rank == 0:
            partial.mkdir(parents=True, exist_ok=True)
            for left in partial.iterdir():
                left.unlink()
        return uuid.uuid4().hex

    save_id = _together(table, prepare)[0]

    def write() -> None:
        header = ShardHeader(
            save_id=save_id,
            shard=rank,
            num_shards=num_ranks,
            num_ids=table.num_rows,
            layout=table.store.layout,
            initial=table.initial,
            lineage=table.lineage,
            num_updates=table.num_updates,
            step_count=table.step_count,
        )
        write_shard(shard_path(partial, rank, num_ranks), header, table.store.every_record())

    _together(table, write)
    _together(table, lambda: _publish(partial, place) if rank == 0 else None)


def load_table(table: RowTable, folder: str | os.PathLike[str], *, with_state: bool) -> None:
    """Replaces a table's rows by those that were saved, on however many ranks. All ranks call it.

    Args:
        table: of the same number of ids, row size and dtype.
        folder: that `save_table` wrote.
        with_state: also the optimizer's state and its count of steps.

    Raises:
        StoreError: a file is missing, cut short, altered, or of another table. The table is as before then.
    """
    made: list[RowStore] = []

    def read() -> ShardHeader:
        paths = shard_paths(folder)
        headers = [read_header(path) for path in paths]
        _check(table, paths, headers)
        layout = headers[0].layout
        if not with_state:
            layout = RowLayout(num_weights=layout.num_weights, dtype=layout.dtype)
        made.append(table.make_store(layout, headers[0].initial))
        for path in paths:
            for ids, records in read_rows(path):
                ids, records = _owned(table, ids, records)
                if ids.numel():
                    made[0].write(ids, records[:, : layout.num_elements])
        return headers[0]

    try:
        header = _together(table, read)[0]
    except BaseException:
        for store in made:
            store.close()
        raise
    table.replace_store(made[0], step_count=header.step_count if with_state else None)
    table.initial, table.lineage, table.num_updates = header.initial, header.lineage, header.num_updates


def _owned(table: RowTable, ids: Tensor, records: Tensor) -> tuple[Tensor, Tensor]:
    rank, num_ranks = _rank_of(table)
    if num_ranks == 1:
        return ids, records
    is_owned = ids % num_ranks == rank
    return ids[is_owned], records[is_owned]


def _check(table: RowTable, paths: list[Path], headers: list[ShardHeader]) -> None:
    for number, (path, header) in enumerate(zip(paths, headers, strict=True)):
        dtype = str(table.dtype).removeprefix("torch.")
        wanted = (table.num_rows, table.dim, dtype, table.initial.zero_id)
        found = (header.num_ids, header.layout.num_weights, header.layout.dtype, header.initial.zero_id)
        if found != wanted:
            raise StoreError(
                f"{path} is of a table of {found[0]} x {found[1]} {found[2]} with padding_idx={found[3]}, and this one "
                f"is {wanted[0]} x {wanted[1]} {wanted[2]} with padding_idx={wanted[3]}; make the table as it was saved"
            )
        if header.save_id != headers[0].save_id or (header.shard, header.num_shards) != (number, len(paths)):
            raise StoreError(
                f"{path} is not of the same save as {paths[0].name}, or was renamed; give a folder with the shards "
                "of one save, all of them"
            )


def _rank_of(table: RowTable) -> tuple[int, int]:
    return (0, 1) if table.exchange is None else (table.exchange.rank, table.exchange.num_ranks)


def _publish(partial: Path, place: Path) -> None:
    try:
        partial.rename(place)
        sync_directory(place.parent)
    except OSError as error:
        raise StoreError(f"{partial} cannot be renamed to {place}: {os.strerror(error.errno or 0)}") from error


def _together(table: RowTable, act: Callable[[], _T]) -> list[_T]:
    """Returns what each rank's `act` does; fails on all ranks if it fails on one, so that none waits for another."""
    failure: MemwallError | OSError | None = None
    value: _T | None = None
    try:
        with torch.no_grad():
            value = act()
    except (MemwallError, OSError) as error:
        failure = error
    found = [(None if failure is None else str(failure), value)]
    if table.exchange is not None:
        found = table.exchange.gather(found[0])  # type: ignore[assignment]
    if failure is not None:
        raise failure
    for rank, (message, _) in enumerate(found):
        if message is not None:
            raise StoreError(f"rank {rank} failed: {message}")
    return [value for _, value in found]  # type: ignore[misc]
