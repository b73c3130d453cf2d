"""DistributedDataParallel: every rank has all of the model; buckets of gradients are reduced while backward runs.

Sources: torch/nn/parallel/distributed.py of torch 2.13 (`bucket_cap_mb`, `gradient_as_bucket_view`), reducer.cpp
(buckets beside the gradients, `mark_variable_ready_dense`), torch/distributed/optim/zero_redundancy_optimizer.py,
torch/distributed/algorithms/ddp_comm_hooks/default_hooks.py (`bf16_compress_hook`).
"""

from collections.abc import Iterable
from fractions import Fraction
from typing import ClassVar

from memwall.predict.sharding.kind import RankCost, Sharding
from memwall.predict.sharding.network import Network
from memwall.predict.sharding.rank_step import RankStep
from memwall.predict.sharding.units import ShardUnit
from memwall.trace.records import Step, Trace

BUCKET_BYTES = 25 << 20
_FIRST_BUCKET_BYTES = 1 << 20
_COMPRESSED_BYTES = 2


class Ddp(Sharding, frozen=True, kw_only=True, tag="ddp"):
    """Keeps all of the model on every rank."""

    by: ClassVar[str] = "torch"
    moves_state: ClassVar[bool] = True

    are_views: bool = False
    """Whether gradients are views of the buckets (`gradient_as_bucket_view`)."""
    divides_state: bool = False
    """Whether each rank holds and steps its part of the optimizer's state (`ZeroRedundancyOptimizer`)."""
    is_compressed: bool = False
    """Whether buckets are averaged in bfloat16 (`bf16_compress_hook`)."""

    @property
    def allow(self) -> str:
        return "gradient-compression" if self.is_compressed else ""

    @property
    def allow_means(self) -> str:
        return "gradients are averaged over ranks in bfloat16 by DistributedDataParallel's hook (with --ranks)"

    @property
    def words(self) -> str:
        parts = (
            "DDP",
            *(("bucket views",) if self.are_views else ()),
            *(("divided state",) if self.divides_state else ()),
            *(("averaged in bfloat16",) if self.is_compressed else ()),
        )
        return ", ".join(parts)

    def changes_numerics(self, trace: Trace) -> str:
        return "gradients are rounded to bfloat16 before they are averaged" if self.is_compressed else ""

    def why_not(self, network: Network) -> str | None:
        if self.divides_state and network.num_ranks == 1:
            return "one rank has nobody to divide the optimizer's state with"
        if self.is_compressed and network.num_ranks == 1:
            return "one rank sends no gradients"
        return None

    def cost(self, trace: Trace, step: Step, units: tuple[ShardUnit, ...], network: Network) -> RankCost:
        rank, num = RankStep(trace, step, units), network.num_ranks
        gradient_bytes = rank.nbytes(index for unit in units for index in unit.gradients)
        largest_bytes = max((rank.nbytes([index]) for unit in units for index in unit.gradients), default=0)
        # The reducer keeps its buckets from step to step, also where gradients are views of them and set to None.
        rank.add(gradient_bytes, -1, rank.end, "buffer")
        if self.are_views:  # autograd makes each gradient anew, and it is copied into its bucket
            rank.remove("gradient")
            end = max((call.backward_end for unit in units for call in unit.calls), default=0)
            rank.add(largest_bytes, end - 1, end, "temporary")
        gather_seconds = 0.0
        if self.divides_state:
            sizes = [rank.num_elements([index]) for unit in units for index in unit.gradients]
            num_parts = Fraction(sum(sizes), fullest_part(sizes, num)) if sizes else Fraction(num)
            rank.divide("optimizer_state", num_parts)
            rank.divide_optimizer(num_parts)
            gather_seconds = network.gather_seconds(rank.nbytes(rank.parameters))
        num_buckets = max(1, -(-gradient_bytes // BUCKET_BYTES))
        reduced_bytes, cast_seconds = gradient_bytes, 0.0
        if self.is_compressed:
            reduced_bytes = _compress(rank, units)
            # Each bucket is read and its copy written, then the copy read and the bucket written.
            is_cast = reduced_bytes < gradient_bytes
            cast_seconds = 2 * is_cast * (gradient_bytes + reduced_bytes) / network.device_bytes_per_second
        each_seconds = network.all_reduce_seconds(reduced_bytes // num_buckets)
        reduce_seconds = num_buckets * each_seconds
        backward_seconds = sum(op.seconds for op in step.ops if op.phase == "backward")
        return RankCost(
            step=rank.done(),
            communication_seconds=reduce_seconds + gather_seconds,
            # The last bucket is ready when backward ends; of the others what backward is too short for.
            exposed_seconds=max(each_seconds, reduce_seconds - backward_seconds) + gather_seconds + cast_seconds,
        )


def _compress(rank: RankStep, units: tuple[ShardUnit, ...]) -> int:
    """Adds what buckets are sent as, from when each is full, and returns the bytes of all of it.

    Gradients of 16 bits are sent as they are. How soon a copy is free again depends on the link, so all are held to the
    end of backward: at most half of float32.
    """
    _, end = rank.gradients_made
    bucket_bytes = compressed_bytes = sent_bytes = 0
    full_bytes = _FIRST_BUCKET_BYTES
    for birth, index in sorted((rank.birth(index), index) for unit in units for index in unit.gradients):
        bucket_bytes += rank.nbytes([index])
        sent = _COMPRESSED_BYTES * rank.num_elements([index])
        sent_bytes += sent
        compressed_bytes += sent if sent < rank.nbytes([index]) else 0
        if bucket_bytes >= full_bytes or birth == end - 1:
            rank.add(compressed_bytes, birth, end, "temporary", "bfloat16")
            bucket_bytes, compressed_bytes, full_bytes = 0, 0, BUCKET_BYTES
    return sent_bytes


def fullest_part(sizes: Iterable[int], num_ranks: int) -> int:
    """Returns the elements that the fullest rank steps: whole parameters, the largest first, go to the emptiest rank.

    So `ZeroRedundancyOptimizer._partition_parameters` has it.
    """
    parts = [0] * num_ranks
    for size in sorted(sizes, reverse=True):
        parts[parts.index(min(parts))] += size
    return max(parts)
