"""FSDP2 (`fully_shard`): a rank holds a part; a unit's parameters are gathered before it runs, gradients divided.

What is there when: torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py of torch 2.13 (`unshard`,
`wait_for_unshard`, `post_backward`), _fsdp_collectives.py (`foreach_all_gather`, `foreach_reduce`), _fsdp_state.py (the
root stays gathered). In forward the flat buffer of a gather outlives its unit, until the next one has been gathered; in
backward the next unit is gathered while one computes, and the input of the last reduction is held until the next.

Parameters are gathered in the precision in which they are kept, and autocast casts them then, as in one process:
`MixedPrecisionPolicy(param_dtype=...)` would cast norms as well, which is other training.
"""

from typing import ClassVar, Literal

from memwall.predict.sharding.host_step import host_step_seconds
from memwall.predict.sharding.kind import RankCost, Sharding
from memwall.predict.sharding.network import Group, Network
from memwall.predict.sharding.passes import Passes
from memwall.predict.sharding.rank_step import RankStep
from memwall.predict.sharding.units import ShardUnit
from memwall.trace.records import ModuleCall, Step, Trace

Reshard = Literal["yes", "no", "node"]


class Fsdp2(Sharding, frozen=True, kw_only=True, tag="fsdp2"):
    """Divides parameters, gradients and state among all ranks, or among those of each node."""

    by: ClassVar[str] = "torch"

    reshard: Reshard = "yes"
    """The value of `reshard_after_forward`: True, False, or the ranks of a node."""
    num_kept: int = 0
    """Counts the last units, in order of forward, that stay gathered, whatever the others do."""
    num_ahead: int = 1
    """A unit is gathered while so many before it run; more than one by `set_modules_to_forward_prefetch` and its twin.

    By itself torch gathers the next one, which in forward is begun by the host running ahead.
    """
    is_hybrid: bool = False
    """Whether a node holds all of the model, and nodes average their gradients (HSDP)."""
    is_offloaded: bool = False
    """Whether parts are in host memory, where the optimizer steps (`CPUOffloadPolicy`)."""

    @property
    def num_communicators(self) -> int:
        return 2 if self.is_hybrid or self.reshard == "node" else 1

    @property
    def words(self) -> str:
        name = "HSDP" if self.is_hybrid else "FSDP2"
        how = {"yes": "", "no": ", kept gathered", "node": ", kept in the node"}[self.reshard]
        last = f", last {self.num_kept} units kept gathered" if self.num_kept else ""
        ahead = f", gathered {self.num_ahead} ahead" if self.num_ahead > 1 else ""
        return f"{name}{how}{last}{ahead}{', on the CPU' if self.is_offloaded else ''}"

    @property
    def needs_host(self) -> bool:
        return self.is_offloaded

    def why_not(self, network: Network) -> str | None:
        if network.num_ranks == 1 and not self.is_offloaded:
            return "one rank has nobody to divide the model with"
        if (self.is_hybrid or self.reshard == "node") and network.num_nodes == 1:
            return "all ranks are on one node, so it is FSDP2 as it is"
        if (self.is_hybrid or self.reshard == "node") and network.size("node") == 1:
            return "a node has one rank"
        return None

    def cost(self, trace: Trace, step: Step, units: tuple[ShardUnit, ...], network: Network) -> RankCost:
        rank = RankStep(trace, step, units)
        num = network.size(self._group)
        share_bytes = -(-rank.nbytes(rank.parameters) // num)
        rank.divide("gradient", num)
        if self.is_offloaded:
            host_bytes = 2 * share_bytes + rank.remove("optimizer_state") // num
            rank.remove("parameter")
        else:
            host_bytes = 0
            rank.divide("parameter", num)
            rank.divide("optimizer_state", num)
        passes = Passes(units)
        for position, (unit, call) in enumerate(passes.forward):
            self._forward(rank, unit, call, passes, position, network)
        for position, (unit, call) in enumerate(passes.backward):
            self._backward(rank, unit, call, passes, position, network)
        self._root(rank, units[0], passes, num)
        communication_seconds, exposed_seconds = self._seconds(rank, units[0], passes, network)
        gradients = [index for unit in units for index in unit.gradients]
        host_seconds = 0.0
        if self.is_offloaded:
            host_seconds = host_step_seconds(-(-rank.num_elements(rank.parameters) // num), network.size("node"))
        rank.divide_optimizer(num, is_elsewhere=self.is_offloaded)
        return RankCost(
            step=rank.done(),
            communication_seconds=communication_seconds,
            exposed_seconds=exposed_seconds + host_seconds,
            exposed_per_pass=exposed_seconds,
            waiting_gradient_bytes=rank.nbytes(gradients) * (num - 1) // num,
            reduction_seconds=sum(self._reduce_seconds(rank, unit, network) for unit in units),
            host_bytes=host_bytes,
        )

    def kept_of(self, paths: tuple[str, ...]) -> frozenset[str]:
        """Returns which units stay gathered from forward to backward.

        Args:
            paths: of all units but the root, in order of forward.
        """
        return frozenset(paths if self.reshard == "no" else paths[len(paths) - self.num_kept :])

    def _stays(self, rank: RankStep, unit: ShardUnit) -> bool:
        return unit.path in self.kept_of(tuple(each.path for each in rank.units if not each.is_root))

    @property
    def _group(self) -> Group:
        return "node" if self.is_hybrid else "all"

    def _forward(
        self, rank: RankStep, unit: ShardUnit, call: ModuleCall, passes: Passes, position: int, network: Network
    ) -> None:
        """Adds what a unit gathers in forward, and what of it stays until its backward."""
        whole_bytes, num = rank.nbytes(unit.parameters), network.size(self._group)
        sent_for_at = passes.sent_for_at(position, self.num_ahead)
        rank.add(_padded(whole_bytes, num), sent_for_at, passes.start_after(position))
        stays = self._stays(rank, unit) and call.backward_start >= 0
        rank.add(whole_bytes, call.start, _freed_at(call) if stays else call.end)
        if self.reshard == "node" and not stays and call.backward_start >= 0:
            rank.add(whole_bytes // network.size("node"), call.end, call.backward_start)

    def _backward(
        self, rank: RankStep, unit: ShardUnit, call: ModuleCall, passes: Passes, position: int, network: Network
    ) -> None:
        """Adds what a unit gathers in backward, the gather of it while the one before computes, and its reduction."""
        whole_bytes, num = rank.nbytes(unit.parameters), network.size(self._group)
        if not self._stays(rank, unit):
            rank.add(_padded(whole_bytes, num), passes.prefetched_at(position, self.num_ahead), call.backward_start)
            rank.add(whole_bytes, call.backward_start, _freed_at(call))
        if not passes.is_last_of(unit, position):
            return
        self._reduce(rank, unit, call.backward_end, passes.reduced_after(position), num)

    def _reduce(self, rank: RankStep, unit: ShardUnit, at: int, until: int, num: int) -> None:
        """Ends a unit's gradients with its backward; the input of their reduction is held until the next one's."""
        gradient_bytes = rank.nbytes(unit.gradients)
        if not gradient_bytes:
            return
        until_end = rank.gradients_end(unit)
        rank.end_gradients(unit, at)
        # The last operation stands for the reduction, ahead of which gathered parameters are freed; where there is only
        # one, it is the larger of both.
        is_alone = any(call.backward_start + 1 >= at == call.backward_end for call in unit.calls)
        begin = at if is_alone else at - 1
        if num > 1:
            rank.add(_padded(gradient_bytes, num), begin, until, "temporary")
            if rank.device == "cpu":  # torch._chunk_cat copies once more where it has no kernel of its own
                rank.add(gradient_bytes, begin, begin + 1, "temporary")
        if not self.is_offloaded:
            rank.add(-(-gradient_bytes // num), begin, until_end, "gradient")

    def _root(self, rank: RankStep, root: ShardUnit, passes: Passes, num: int) -> None:
        """Adds what the root gathers: its parameters stay from its forward to the end of its backward."""
        whole_bytes = rank.nbytes(root.parameters)
        for call in root.calls:
            end = call.backward_end if call.backward_end >= 0 else call.end
            first = next((other.start for _, other in passes.forward if other.start >= call.start), call.end)
            rank.add(_padded(whole_bytes, num), call.start, first)
            rank.add(whole_bytes, call.start, end)
        if root.calls:
            end = max(call.backward_end for call in root.calls)
            self._reduce(rank, root, end, end, num)

    def _seconds(self, rank: RankStep, root: ShardUnit, passes: Passes, network: Network) -> tuple[float, float]:
        """Returns the seconds of all collectives, and of those that no computation hides."""
        group: Group = "node" if self.reshard == "node" else self._group
        again = [
            0.0 if self._stays(rank, unit) else self._gather_seconds(rank, unit, network, group)
            for unit, _ in passes.backward
        ]
        return passes.exposed(
            rank,
            at_root=self._gather_seconds(rank, root, network, self._group) + self._reduce_seconds(rank, root, network),
            gathers=[self._gather_seconds(rank, unit, network, self._group) for unit, _ in passes.forward],
            again=again,
            reductions=[self._reduce_seconds(rank, unit, network) for unit, _ in passes.backward],
            num_ahead=self.num_ahead,
        )

    def _gather_seconds(self, rank: RankStep, unit: ShardUnit, network: Network, group: Group) -> float:
        seconds = network.gather_seconds(rank.nbytes(unit.parameters), group)
        if self.is_offloaded:
            seconds += rank.nbytes(unit.parameters) / network.size(self._group) / network.host_bytes_per_second
        return seconds

    def _reduce_seconds(self, rank: RankStep, unit: ShardUnit, network: Network) -> float:
        whole_bytes = rank.nbytes(unit.gradients)
        seconds = network.gather_seconds(whole_bytes, self._group)
        share_bytes = -(-whole_bytes // network.size(self._group))
        if self.is_hybrid:
            seconds += network.all_reduce_seconds(share_bytes, "across")
        return seconds + (share_bytes / network.host_bytes_per_second if self.is_offloaded else 0.0)


def _freed_at(call: ModuleCall) -> int:
    """Returns when a unit's gathered parameters are freed: ahead of its reduction, see `_reduce`."""
    return max(call.backward_start + 1, call.backward_end - 1)


def _padded(nbytes: int, num: int) -> int:
    """Returns the bytes of a flat buffer for all ranks' parts; one rank needs none."""
    return 0 if num == 1 else -(-nbytes // num) * num
