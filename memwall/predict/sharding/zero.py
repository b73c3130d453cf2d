"""ZeRO 1-3 of DeepSpeed, as `plan.deepspeed_config()` writes it: what each stage divides, and the buffers it holds.

Stages and their communication: Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter
Models, SC 2020, sections 5 and 7. Buffers: DeepSpeed 0.19, runtime/zero, in stage_1_and_2.py a reduction bucket, or two
with `overlap_comm`, from the first gradient to the end of backward, and master weights in float32 whatever the
parameters' dtype; in stage3.py `grad_partitions_flat_buffer` and the bucket for the whole run; and parameters that
persist, are fetched ahead (partitioned_param_coordinator.py), or are used again within `stage3_max_reuse_distance`.
"""

from collections.abc import Collection
from typing import ClassVar, Literal

from memwall.predict.sharding.host_step import host_step_seconds
from memwall.predict.sharding.kind import RankCost, Sharding
from memwall.predict.sharding.network import Network
from memwall.predict.sharding.passes import Passes
from memwall.predict.sharding.rank_step import RankStep
from memwall.predict.sharding.units import ShardUnit
from memwall.trace.records import Step, Trace
from memwall.trace.workload_facts import workload_facts

_MASTER_BYTES = 4
# As memwall.planning.deepspeed has them.
_MIN_BUCKET_ELEMENTS = 500_000
_PERSISTENT_ELEMENTS = 100_000
_REUSE_ELEMENTS = 1_000_000_000


class DeepSpeedZero(Sharding, frozen=True, kw_only=True, tag="zero"):
    """Divides optimizer state (1), gradients as well (2), and parameters as well (3) among all ranks."""

    by: ClassVar[str] = "DeepSpeed"

    stage: Literal[1, 2, 3]
    offloads_state: bool = False
    """Whether state and master weights are in host memory, where DeepSpeed's CPU Adam steps."""
    offloads_parameters: bool = False
    """Whether the parts of parameters are in host memory, too."""

    @property
    def words(self) -> str:
        what = "state and parameters on the CPU" if self.offloads_parameters else "state on the CPU"
        return f"ZeRO-{self.stage}{f', {what}' if self.needs_host else ''}"

    @property
    def needs_host(self) -> bool:
        return self.offloads_state or self.offloads_parameters

    def changes_numerics(self, trace: Trace) -> str:
        lower = trace.autocast != "none" or "bfloat16" in workload_facts(trace).dtype
        return "DeepSpeed keeps weights and sums gradients in half precision" if lower else ""

    def why_not(self, network: Network) -> str | None:
        if network.num_ranks == 1 and not self.needs_host:
            return "one rank has nobody to divide the model with"
        return None

    def cost(self, trace: Trace, step: Step, units: tuple[ShardUnit, ...], network: Network) -> RankCost:
        rank, num = RankStep(trace, step, units), network.num_ranks
        num_elements = rank.num_elements(rank.parameters)
        element_bytes = 2 if rank.is_lower else 4
        whole_bytes, share_elements = num_elements * element_bytes, -(-num_elements // num)
        largest = max(max((rank.num_elements([i]) for i in rank.parameters), default=0), _MIN_BUCKET_ELEMENTS)
        if rank.is_lower:
            rank.in_half("parameter")
        rank.without_casts()
        self._gradients(rank, share_elements * element_bytes, is_half=rank.is_lower)
        if self.stage == 3:
            self._parameters(rank, num)
        host_bytes = self._state(rank, num, share_elements)
        overlaps = self.stage < 3 and trace.device != "cpu"  # as memwall.planning.deepspeed has it
        num_buckets = 2 if overlaps else 1
        born, ended = (-1, rank.end) if self.stage == 3 else rank.gradients_made
        rank.add(num_buckets * largest * element_bytes, born, ended, "buffer")
        communication_seconds, per_pass = self._seconds(rank, element_bytes, network)
        exposed_seconds = per_pass
        if self.stage < 3:  # the parameters that others stepped come after the step, when nothing else runs
            gather_seconds = network.gather_seconds(whole_bytes)
            communication_seconds += gather_seconds
            exposed_seconds += gather_seconds
        if self.needs_host:
            link_seconds = share_elements * element_bytes / network.host_bytes_per_second
            num_copies = 4 if self.offloads_parameters else 2  # gradients down, parameters up; up for each gather
            exposed_seconds += host_step_seconds(share_elements, network.size("node")) + num_copies * link_seconds
        rank.divide_optimizer(num, is_elsewhere=self.needs_host)
        return RankCost(
            step=rank.done(),
            communication_seconds=communication_seconds,
            exposed_seconds=exposed_seconds,
            exposed_per_pass=per_pass,
            host_bytes=host_bytes,
        )

    def _seconds(self, rank: RankStep, element_bytes: int, network: Network) -> tuple[float, float]:
        """Returns the seconds of collectives in forward and backward, and of those that no computation hides."""
        passes = Passes(rank.units)

        def seconds(unit: ShardUnit) -> float:
            return network.gather_seconds(rank.num_elements(unit.parameters) * element_bytes)

        is_gathered = self.stage == 3
        root = rank.units[0]
        return passes.exposed(
            rank,
            at_root=seconds(root) * (2 if is_gathered else 1),
            gathers=[seconds(unit) if is_gathered else 0.0 for unit, _ in passes.forward],
            again=[seconds(unit) if is_gathered else 0.0 for unit, _ in passes.backward],
            reductions=[seconds(unit) for unit, _ in passes.backward],
        )

    def _gradients(self, rank: RankStep, share_bytes: int, *, is_half: bool) -> None:
        """Ends whole gradients where the stage divides them; a part stays, in stage 3 for the whole run.

        In stage 2 that is what backward makes first, on the rank that holds most: it has the last part.
        """
        if self.stage == 1:
            if is_half:
                rank.in_half("gradient")
            return
        rank.divide("gradient", 1 << 62)
        until = max(rank.gradients_end(unit) for unit in rank.units)
        ends = [(max((call.backward_end for call in unit.calls), default=rank.end), unit) for unit in rank.units]
        left_bytes = share_bytes
        for at, unit in sorted(ends, key=lambda found: found[0]):
            rank.end_gradients(unit, at, is_half=is_half)
            stays_bytes = min(left_bytes, rank.nbytes(unit.gradients) // (2 if is_half else 1))
            if self.stage == 2 and not self.offloads_state:
                rank.add(stays_bytes, at, until, "gradient")
                left_bytes -= stays_bytes
        if self.stage == 3 and not self.offloads_state:
            rank.add(share_bytes, -1, rank.end, "gradient")

    def _parameters(self, rank: RankStep, num: int) -> None:
        """Divides parameters; what a unit needs is live while it runs, and the next one's is fetched meanwhile.

        Small ones are whole all the time, and others between uses of which few elements are used.
        """
        if self.offloads_parameters:
            rank.remove("parameter")
        else:
            rank.divide("parameter", num)
        small = {i for i in rank.parameters if rank.num_elements([i]) <= _PERSISTENT_ELEMENTS}
        rank.add(self._whole_bytes(rank, small), -1, rank.end)
        passes = [
            (start, end, unit)
            for unit in rank.units
            for call in unit.calls
            for start, end in ((call.start, call.end), (call.backward_start, call.backward_end))
        ]
        used = sorted((each for each in passes if each[0] >= 0), key=lambda each: each[0])
        num_elements = {unit.path: rank.num_elements(unit.parameters) for unit in rank.units}
        for number, (start, end, unit) in enumerate(used):
            whole_bytes = self._whole_bytes(rank, [i for i in unit.parameters if i not in small])
            between, again = 0, number + 1
            while again < len(used) and used[again][2] is not unit and between < _REUSE_ELEMENTS:
                between += num_elements[used[again][2].path]
                again += 1
            if again < len(used) and used[again][2] is unit and between < _REUSE_ELEMENTS:
                rank.add(whole_bytes, start, used[again][0])
            else:
                rank.add(whole_bytes * (1 if unit.is_root else 2), start, end)

    def _whole_bytes(self, rank: RankStep, parameters: Collection[int]) -> int:
        """Returns the bytes of parameters that are gathered."""
        return rank.num_elements(parameters) * 2 if rank.is_lower else rank.nbytes(parameters)

    def _state(self, rank: RankStep, num: int, share_elements: int) -> int:
        """Divides state, adds master weights, and returns the bytes that are in host memory instead."""
        rank.widen_state()
        master_bytes = share_elements * _MASTER_BYTES
        if not self.offloads_state:
            rank.divide("optimizer_state", num)
            rank.add(master_bytes, -1, rank.end, "optimizer_state")
            return 0
        state_bytes = rank.remove("optimizer_state") // num
        gradient_bytes = share_elements * _MASTER_BYTES
        parameter_bytes = share_elements * (2 if rank.is_lower else 4) if self.offloads_parameters else 0
        return state_bytes + master_bytes + gradient_bytes + parameter_bytes
