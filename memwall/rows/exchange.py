"""Rows shared by ranks: row `id` belongs to rank `id % world size`. Ids go out, rows come back; gradients go out.

All ranks take part in every exchange, in the same order. A row's gradients are added up as one rank would add them that
has the ranks' batches one after another: where there is one lookup a step, to the same bits. Of several lookups they
are added up in the order of the lookups, where one rank's autograd merges them in another: sums of three and more may
differ in their last bit.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from memwall.errors import ApplyError

Passes = list[tuple[Tensor, Tensor]]
"""One lookup's gradients after another's: ids [n], and values [n, dim]."""


_NO_IDS = torch.empty(0, dtype=torch.int64, device="cpu")


class RowExchange:
    """Moves rows and gradients between the ranks of one table.

    Args:
        group: over CPU tensors (gloo).
        has_mean: gradients are averaged over ranks, as DistributedDataParallel does it, instead of summed.

    Raises:
        ApplyError: the group cannot exchange CPU tensors.
    """

    def __init__(self, group: dist.ProcessGroup, *, has_mean: bool) -> None:
        if dist.get_backend(group) != "gloo":
            raise ApplyError(
                f"a table of rows is exchanged between CPUs, and the process group's backend is "
                f"{dist.get_backend(group)}; pass process_group=torch.distributed.new_group(backend='gloo')"
            )
        self._group, self._has_mean = group, has_mean
        self.num_ranks, self.rank = dist.get_world_size(group), dist.get_rank(group)

    def rows(self, ids: Tensor, read: Callable[[Tensor], Tensor], num_columns: int, dtype: torch.dtype) -> Tensor:
        """Returns the rows of ids, [n, num_columns], from their owners.

        Args:
            ids: int64 [n], each once.
            read: the rows of owned ids.
            num_columns: elements in a row.
            dtype: of a row.
        """
        order = self._by_owner(ids)
        sent = self._counts(ids)
        received = self._swapped_counts(sent)
        asked = self._swap(ids[order], sent, received)
        distinct, inverse = torch.unique(asked, return_inverse=True)  # several ranks ask for the same rows
        answered = self._swap(read(distinct)[inverse], received, sent)
        rows = torch.empty(ids.numel(), num_columns, dtype=dtype, device="cpu")
        rows[order] = answered
        return rows

    def owned(self, ids: Tensor) -> Tensor:
        """Returns those of all ranks' ids that this rank owns, each once."""
        sent = self._counts(ids)
        asked = self._swap(ids[self._by_owner(ids)], sent, self._swapped_counts(sent))
        distinct: Tensor = torch.unique(asked)
        return distinct

    def gradients(self, passes: Passes, num_columns: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor] | None:
        """Collects all ranks' gradients of the rows that this rank owns.

        Returns:
            Ids [n] and values [n, num_columns] in the order (pass, rank, place in the batch), and the order [n] in
            which one rank with the whole batch would add them up; None if no rank has any.
        """
        num_passes = torch.tensor([len(passes)], device="cpu")
        dist.all_reduce(num_passes, op=dist.ReduceOp.MAX, group=self._group)
        if not int(num_passes):
            return None
        everyones = [self._gathered(passes[n][0] if n < len(passes) else _NO_IDS) for n in range(int(num_passes))]
        ids = torch.cat([ids for ids, _ in passes]) if passes else _NO_IDS
        values = torch.cat([v for _, v in passes]) if passes else torch.empty(0, num_columns, dtype=dtype, device="cpu")
        order = self._by_owner(ids)
        received = torch.tensor(
            [sum(self._num_owned(one[rank]) for one in everyones) for rank in range(self.num_ranks)], device="cpu"
        )
        values = self._swap(values[order], self._counts(ids), received)
        # They come by rank, then pass.
        number = [
            torch.full((self._num_owned(one[rank]),), n, device="cpu")
            for rank in range(self.num_ranks)
            for n, one in enumerate(everyones)
        ]
        values = values[torch.argsort(torch.cat(number), stable=True)]
        whole = torch.cat([ids for one in everyones for ids in one])
        is_owned = whole % self.num_ranks == self.rank
        # `coalesce` sorts the same way: which of several equal ids comes first depends on all others.
        adding = whole.sort(0)[1]
        place = torch.cumsum(is_owned, 0) - 1
        return whole[is_owned], values / self.num_ranks if self._has_mean else values, place[adding[is_owned[adding]]]

    def gather(self, value: object) -> list[object]:
        """Returns every rank's value, in their order."""
        found: list[object] = [None] * self.num_ranks
        dist.all_gather_object(found, value, group=self._group)
        return found

    def _gathered(self, ids: Tensor) -> list[Tensor]:
        """Returns every rank's ids, in the order of ranks."""
        counts = [torch.zeros(1, dtype=torch.int64, device="cpu") for _ in range(self.num_ranks)]
        dist.all_gather(counts, torch.tensor([ids.numel()], device="cpu"), group=self._group)
        size = max(int(count) for count in counts)
        found = [torch.empty(size, dtype=torch.int64, device="cpu") for _ in counts]
        dist.all_gather(found, torch.nn.functional.pad(ids, (0, size - ids.numel())), group=self._group)
        return [padded[: int(count)] for padded, count in zip(found, counts, strict=True)]

    def _num_owned(self, ids: Tensor) -> int:
        return int((ids % self.num_ranks == self.rank).sum())

    def _by_owner(self, ids: Tensor) -> Tensor:
        order: Tensor = torch.argsort(ids % self.num_ranks, stable=True)
        return order

    def _counts(self, ids: Tensor) -> Tensor:
        return torch.bincount(ids % self.num_ranks, minlength=self.num_ranks)

    def _swapped_counts(self, sent: Tensor) -> Tensor:
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self._group)
        return received

    def _swap(self, values: Tensor, sent: Tensor, received: Tensor) -> Tensor:
        found = values.new_empty((int(received.sum()), *values.shape[1:]))
        dist.all_to_all_single(found, values.contiguous(), received.tolist(), sent.tolist(), group=self._group)
        return found
