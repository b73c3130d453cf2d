"""Tells what ranks say of their recorded steps, which of them are alike, and the most that any of these needs."""

import hashlib
from collections.abc import Sequence

import msgspec
import torch
from msgspec import Struct

from memwall.machine.tiers import Machine, Tier
from memwall.planning.settings import Settings
from memwall.predict.first_step import FirstStep
from memwall.predict.live_device import live_process
from memwall.trace.records import Trace
from memwall.trace.steps import steady_step

_COLLECTIVES = ("c10d.", "_c10d_functional.", "c10d_functional.")


class RankFigures(Struct, frozen=True, kw_only=True):
    """Holds what a rank says of its recorded step."""

    kind: str
    """Names what it trains and how: equal for ranks that are alike."""
    needed_bytes: int
    """The plain step's process bytes."""
    base_bytes: int
    workspace_bytes: int
    budget_bytes: int
    tier_capacity_bytes: int | None
    allow: tuple[str, ...]
    allow_accumulation: bool
    can_move_state: bool
    is_built_on_disk: bool
    parameters_stay: str
    lost: tuple[tuple[str, str], ...]
    machine: Machine
    first_step: FirstStep | None


def encoded_figures(trace: Trace, settings: Settings, trained: Sequence[bool]) -> bytes:
    """Returns what this rank says of its recorded step, as `RankFigures` in JSON."""
    process = live_process(trace)
    figures = RankFigures(
        kind=_kind(trace, trained),
        needed_bytes=process.bare(steady_step(trace)).process_bytes,
        base_bytes=trace.base_bytes,
        workspace_bytes=trace.workspace_bytes,
        budget_bytes=settings.budget_bytes,
        tier_capacity_bytes=settings.tier_capacity_bytes,
        allow=settings.allow,
        allow_accumulation=settings.allow_accumulation,
        can_move_state=settings.can_move_state,
        is_built_on_disk=settings.is_built_on_disk,
        parameters_stay=settings.parameters_stay,
        lost=settings.lost,
        machine=trace.machine,
        first_step=settings.first_step,
    )
    return msgspec.json.encode(figures)


def _kind(trace: Trace, trained: Sequence[bool]) -> str:
    facts = (trace.model_fingerprint, trace.optimizer, trace.device.partition(":")[0], trace.num_micro_batches)
    # A collective that runs again on one rank, and not on another that has a plan of its own, waits for ever.
    told_apart = () if _has_collective(trace) else tuple(trained)
    return hashlib.sha256(repr((*facts, trace.autocast, torch.__version__, told_apart)).encode()).hexdigest()


def _has_collective(trace: Trace) -> bool:
    """Tells whether ranks wait for each other in forward."""
    collectives = {number for number, name in enumerate(trace.names) if name.startswith(_COLLECTIVES)}
    return any(op.name in collectives for step in trace.steps for op in step.ops if op.phase == "forward")


def of_worst(alike: Sequence[RankFigures], trace: Trace, settings: Settings) -> tuple[Trace, Settings]:
    """Returns a trace and settings with the most that any rank holds, and the least that any has and allows."""
    capacities = [f.tier_capacity_bytes for f in alike if f.tier_capacity_bytes is not None]
    first_steps = [f.first_step for f in alike if f.first_step is not None]
    trace = msgspec.structs.replace(
        trace,
        base_bytes=max(f.base_bytes for f in alike),
        workspace_bytes=max(f.workspace_bytes for f in alike),
        machine=_slowest([f.machine for f in alike]),
    )
    settings = msgspec.structs.replace(
        settings,
        budget_bytes=min(f.budget_bytes for f in alike),
        tier_capacity_bytes=min(capacities, default=None),
        allow=tuple(name for name in settings.allow if all(name in f.allow for f in alike)),
        allow_accumulation=all(f.allow_accumulation for f in alike),
        can_move_state=all(f.can_move_state for f in alike),
        is_built_on_disk=all(f.is_built_on_disk for f in alike),
        parameters_stay=next((f.parameters_stay for f in alike if f.parameters_stay), ""),
        lost=tuple(sorted({each for f in alike for each in f.lost})),
        first_step=_largest(first_steps) if first_steps else None,
    )
    return trace, settings


def _slowest(machines: Sequence[Machine]) -> Machine:
    """Returns a machine that is as slow as the slowest of these in everything, with the tiers that all of them have."""
    num_tiers = min(len(machine.tiers) for machine in machines)
    tiers = [[machine.tiers[index] for machine in machines] for index in range(num_tiers)]
    return Machine(
        tiers=tuple(_smallest(each) for each in tiers),
        cpu_step_bytes_per_second=min(machine.cpu_step_bytes_per_second for machine in machines),
        cpu_step_bfloat16_bytes_per_second=min(machine.cpu_step_bfloat16_bytes_per_second for machine in machines),
        copy_seconds_per_byte=max(machine.copy_seconds_per_byte for machine in machines),
        fault_seconds_per_byte=max(machine.fault_seconds_per_byte for machine in machines),
        huge_fault_seconds_per_byte=max(machine.huge_fault_seconds_per_byte for machine in machines),
        pack_seconds_per_element=max(machine.pack_seconds_per_element for machine in machines),
    )


def _smallest(tiers: Sequence[Tier]) -> Tier:
    return msgspec.structs.replace(
        tiers[0],
        write_bytes_per_second=min(tier.write_bytes_per_second for tier in tiers),
        read_bytes_per_second=min(tier.read_bytes_per_second for tier in tiers),
        free_bytes=min(tier.free_bytes for tier in tiers),
        total_bytes=min(tier.total_bytes for tier in tiers),
    )


def _largest(steps: Sequence[FirstStep]) -> FirstStep:
    return FirstStep(
        needed_bytes=max(step.needed_bytes for step in steps),
        before_bytes=max(step.before_bytes for step in steps),
        left_out_bytes=max(step.left_out_bytes for step in steps),
        in_memory_bytes=max(step.in_memory_bytes for step in steps),
        stays_from_bytes=max(step.stays_from_bytes for step in steps),
        evaluation_batch=max(step.evaluation_batch for step in steps),
        has_average=any(step.has_average for step in steps),
    )
