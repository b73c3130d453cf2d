"""Offload: a block's saved tensors go to the next tier between forward and backward, as they are or in fewer digits."""

from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec

from memwall.machine.tiers import Machine, Tier
from memwall.planning.action import Action
from memwall.planning.location import can_offload
from memwall.planning.menu import Costs, Menu
from memwall.planning.paths import block_ranges
from memwall.planning.technique import Recording, Technique
from memwall.predict.call_rules import BlockCalls, Treatment
from memwall.predict.treatment import StepModel
from memwall.trace.records import Trace

_ROOM_ENOUGH_BYTES = 1 << 50

LeavingForm = Literal["exact", "int8"]
"""How saved tensors leave: as they are, or floating-point ones in a byte an element (`triton_kernels.pack`)."""


class Offload(Action, frozen=True, kw_only=True, tag="offload"):
    """Moves a block's saved tensors to the next tier between forward and backward."""

    block: str
    """Path of the module."""
    scope: Literal["saved", "inputs"]
    """saved: everything autograd saves in the block; inputs: what a recomputed block was called with."""
    tier: Literal["disk", "host"]
    min_bytes: int
    """Smaller tensors stay on the device."""
    window_bytes: int
    """Memory for bytes on their way."""
    form: LeavingForm = "exact"

    def __post_init__(self) -> None:
        expected = "bit-exact" if self.form == "exact" else "changes-numerics"
        if self.exactness != expected:
            raise ValueError(f"what leaves in the form '{self.form}' comes back {expected}, not {self.exactness}")
        if self.form != "exact" and self.scope == "inputs":
            raise ValueError(
                f"inputs leave as they are, not as {self.form}: run again from them, a block must do the same"
            )


class _Offload(Technique[Offload]):
    record = Offload
    order = 42
    allow = "low-bit-offload"
    allow_means = "saved tensors may leave memory in int8, which changes numerics"
    uses_tier = True
    advice_rank = 1
    way_out_rank = 3
    block_levers = {  # noqa: RUF012
        "offload": "offload saved tensors",
        "offload as int8": "offload saved tensors as int8, lossy",
        "full+offload": "recompute, offload inputs",
    }

    def why_not(self, trace: Trace, allow: tuple[str, ...]) -> str | None:
        if self.allow not in allow:
            return "saved tensors that leave in int8 change numerics; allow it with --allow low-bit-offload"
        reason = can_offload(trace)
        if reason is None and not trace.machine.pack_seconds_per_element:
            if trace.device != "cpu":
                return "no data sheet says what packing costs on the card; plan with --device NAME"
            return "what packing costs on its machine is not in the trace; record it again, or give another --disk DIR"
        return reason

    def advice(self, trace: Trace, allow: tuple[str, ...], *, can_split: bool) -> str | None:
        if can_offload(trace) is None:
            return None
        tier, option = ("a disk", "--disk DIR") if trace.device == "cpu" else ("host memory", "--host SIZE")
        return f"give {tier} for saved tensors: {option}"

    def way_out(self, found: Recording) -> tuple[str, Recording] | None:
        hardware = found.settings.hardware
        if hardware is None or can_offload(found.trace) is None:
            return None
        changed = found.changed(lambda trace: _with_host_memory(trace, hardware.host_link_bytes_per_second))
        return "host memory for saved tensors and optimizer state: --host SIZE", changed

    def block_options(
        self, trace: Trace, model: StepModel, block: BlockCalls, costs: Costs, offered: Sequence[str]
    ) -> Iterator[tuple[str, Treatment, str]]:
        if costs.link is None:
            return
        moving = [("offload", Treatment(offload=True, min_bytes=costs.min_bytes))]
        if "full" in offered:
            moving.append(("full+offload", Treatment(recompute=True, offload=True, min_bytes=costs.min_bytes)))
        for name, treatment in moving:
            yield name, treatment, ""
            # Run again from inputs that lost digits, a block may take another path, as routing to experts does.
            if costs.pack_seconds_per_element is not None and not treatment.recompute:
                yield f"{name} as int8", treatment.but(is_packed=True), name

    def block_action(self, menu: Menu, number: int, device: str) -> Offload | None:
        treatment, option = menu.treatments[number], menu.options[number]
        if treatment is None or not treatment.offload:
            return None
        return Offload(
            block=menu.block.path,
            scope="inputs" if treatment.recompute else "saved",
            tier="disk" if device == "cpu" else "host",
            min_bytes=treatment.min_bytes,
            window_bytes=menu.window_bytes,
            # At as many bytes int8 loses less of what values of one size are (tests/kernels/test_pack.py).
            form="int8" if treatment.is_packed else "exact",
            exactness="changes-numerics" if treatment.is_packed else "bit-exact",
            saved_bytes=option.moved_bytes if treatment.recompute else menu.freed_bytes[number],
            cost_seconds=0.0 if treatment.recompute else option.extra_seconds,
        )

    def treatment(self, action: Offload, other: Treatment) -> Treatment:
        window_bytes = action.window_bytes if action.tier == "host" else 0
        is_packed = action.form != "exact"
        return other.but(offload=True, is_packed=is_packed, min_bytes=action.min_bytes, window_bytes=window_bytes)

    def what(self, action: Offload) -> str:
        thing = "saved tensors" if action.scope == "saved" else "block inputs"
        form = "" if action.form == "exact" else f" as {action.form}, lossy"
        return f"offload {thing} to {action.tier}{form}"

    def where(self, actions: Sequence[Offload]) -> str:
        return block_ranges([action.block for action in actions])

    def row_key(self, action: Offload) -> tuple[object, ...]:
        return action.scope, action.tier, action.form, action.exactness

    def binding(self, trace: Trace, actions: Sequence[Offload]) -> Iterator[str]:
        num_packed = sum(action.form != "exact" for action in actions)
        if num_packed:
            yield (
                f"what leaves {num_packed} of the blocks does so in a byte an element, since that is faster; what "
                "comes back is off by up to 1/254 of the largest of its 128 neighbours in memory, and gradients with it"
            )


TECHNIQUE = _Offload()


def _with_host_memory(trace: Trace, bytes_per_second: float) -> Trace:
    """Returns the trace of a device whose host has room for everything."""
    host = Tier(
        name="host",
        write_bytes_per_second=bytes_per_second,
        read_bytes_per_second=bytes_per_second,
        free_bytes=_ROOM_ENOUGH_BYTES,
    )
    return msgspec.structs.replace(trace, machine=Machine(tiers=(host,)))
