"""Rebuild: what fused kernels return in a block is made again from what they keep anyway, instead of being kept."""

from collections.abc import Iterator, Sequence

from memwall.planning.action import Action
from memwall.planning.menu import Costs, Menu
from memwall.planning.paths import block_ranges
from memwall.planning.technique import Technique
from memwall.predict.call_rules import BlockCalls, Treatment
from memwall.predict.treatment import StepModel
from memwall.trace.records import ModuleCall, Trace

__all__ = ["TECHNIQUE", "Rebuild", "can_rebuild"]

# Measured on two cores with torch 2.13 (benchmarks/executor_cost.py, 2026-11-22).
_HANDLE_SECONDS = 4e-6  # one saved tensor that passes through the hooks of recompute handles, there and back
_REBUILD_SECONDS = 47e-6  # one result that becomes a recipe and is rebuilt, besides the operation itself


class Rebuild(Action, frozen=True, kw_only=True, tag="rebuild"):
    """Rebuilds for backward what fused kernels return in a block, from what they keep anyway, instead of keeping it."""

    block: str
    """Path of the module; its kernels are those that a plan puts into it, or the model's own."""


class _Rebuild(Technique[Rebuild]):
    record = Rebuild
    order = 41
    block_levers = {"rebuild": "rebuild results of fused kernels"}  # noqa: RUF012

    def block_options(
        self, trace: Trace, model: StepModel, block: BlockCalls, costs: Costs, offered: Sequence[str]
    ) -> Iterator[tuple[str, Treatment, str]]:
        if can_rebuild(model, block) is None:
            yield "rebuild", Treatment(rebuild=True, min_bytes=costs.min_bytes), ""

    def host_seconds(
        self, model: StepModel, call: ModuleCall, saved: Sequence[int], treatment: Treatment, num_repeated_ops: int
    ) -> float:
        return _HANDLE_SECONDS * len(saved) + _REBUILD_SECONDS * num_repeated_ops if treatment.rebuild else 0.0

    def block_action(self, menu: Menu, number: int, device: str) -> Rebuild | None:
        treatment = menu.treatments[number]
        if treatment is None or not treatment.rebuild:
            return None
        return Rebuild(
            block=menu.block.path,
            saved_bytes=menu.freed_bytes[number],
            cost_seconds=menu.options[number].extra_seconds,
        )

    def treatment(self, action: Rebuild, other: Treatment) -> Treatment:
        return other.but(rebuild=True)

    def what(self, action: Rebuild) -> str:
        return "rebuild results of fused kernels"

    def where(self, actions: Sequence[Rebuild]) -> str:
        return block_ranges([action.block for action in actions])

    def row_key(self, action: Rebuild) -> tuple[object, ...]:
        return (action.exactness,)


TECHNIQUE = _Rebuild()


def can_rebuild(model: StepModel, block: BlockCalls) -> str | None:
    """Returns None if the block keeps results of fused kernels that can be rebuilt for backward, else why not."""
    if not any(model.rebuilt_results(call, saved) for call, saved in zip(block.calls, block.saved, strict=True)):
        return f"'{block.path}' keeps no result of a fused kernel that can be rebuilt"
    return None
