"""Which effect to look for, for each action of a plan that was just applied."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from memwall.apply.effect.blocks import OffloadEffect, RebuildEffect, RecomputeEffect, Watched, own_weight
from memwall.apply.effect.effect import Effect, Effects
from memwall.apply.effect.kernels import KernelsEffect
from memwall.apply.effect.memory import AllocatorEffect, LowBitEffect, PlacementEffect
from memwall.apply.effect.numerics import AccumulationEffect, AutocastEffect
from memwall.apply.effect.parameters import ParameterEffect
from memwall.planning.action import Action
from memwall.planning.techniques.accumulate import Accumulate
from memwall.planning.techniques.allocator import AllocatorReuse
from memwall.planning.techniques.autocast import Autocast
from memwall.planning.techniques.cpu_step import StepOnCpu
from memwall.planning.techniques.kernels import FusedKernels
from memwall.planning.techniques.low_bit_state import LowBitState
from memwall.planning.techniques.offload import Offload
from memwall.planning.techniques.optimizer_state import OptimizerPlacement
from memwall.planning.techniques.parameters import ParameterPlacement
from memwall.planning.techniques.rebuild import Rebuild
from memwall.planning.techniques.recompute import Recompute

if TYPE_CHECKING:
    from memwall.apply.applied import AppliedPlan

__all__ = ["EFFECTS", "effects_of"]


def effects_of(applied: "AppliedPlan") -> Effects:
    """What to watch in the first steps; the actions that the training loop carries out itself are among it."""
    made = (EFFECTS[type(action)](applied, action) for action in applied.plan.actions)
    return Effects([effect for effect in made if effect is not None])


def _recompute(applied: "AppliedPlan", action: Action) -> Effect | None:
    assert isinstance(action, Recompute)
    outer = [a.block for a in applied.plan.actions if isinstance(a, Recompute) and a.block != action.block]
    is_nested = any(action.block.startswith(f"{block}.") for block in outer)
    watched = _watched(applied, action.block)
    return None if watched is None else RecomputeEffect(action, watched, is_nested=is_nested)


def _rebuild(applied: "AppliedPlan", action: Action) -> Effect | None:
    assert isinstance(action, Rebuild)
    watched = _watched(applied, action.block)
    return None if watched is None else RebuildEffect(action, watched)


def _offload(applied: "AppliedPlan", action: Action) -> Effect | None:
    assert isinstance(action, Offload)
    watched = _watched(applied, action.block)
    return None if watched is None else OffloadEffect(action, watched)


def _watched(applied: "AppliedPlan", path: str) -> Watched | None:
    """A wrapped block. The model as one block is wrapped while it is being called: that call says nothing."""
    assert applied.executor is not None
    module, counts = applied.executor.wrapped(path)
    if module is applied.model:
        return None
    return Watched(module, counts, own_weight(applied.model, module))


def _accumulate(applied: "AppliedPlan", action: Action) -> Effect:
    assert isinstance(action, Accumulate)
    return AccumulationEffect(action, applied.model, None if Accumulate in applied.set_by_loop else applied.micro)


def _autocast(applied: "AppliedPlan", action: Action) -> Effect:
    assert isinstance(action, Autocast)
    return AutocastEffect(action, applied.model)


def _kernels(applied: "AppliedPlan", action: Action) -> Effect:
    assert isinstance(action, FusedKernels)
    assert applied.kernels is not None
    return KernelsEffect(action, applied.kernels)


def _allocator(applied: "AppliedPlan", action: Action) -> Effect:
    assert isinstance(action, AllocatorReuse)
    return AllocatorEffect(action, applied.allocator)


def _placement(applied: "AppliedPlan", action: Action) -> Effect:
    assert isinstance(action, OptimizerPlacement | StepOnCpu)
    return PlacementEffect(action, applied.model, applied.keeper, lambda: next(iter(applied.optimizers), None))


def _low_bit(applied: "AppliedPlan", action: Action) -> Effect:
    assert isinstance(action, LowBitState)
    return LowBitEffect(action, applied.keeper, lambda: next(iter(applied.optimizers), None))


def _parameters(applied: "AppliedPlan", action: Action) -> Effect:
    assert isinstance(action, ParameterPlacement)
    return ParameterEffect(action, applied.parameters)


EFFECTS: dict[type, Callable[["AppliedPlan", Action], Effect | None]] = {
    Recompute: _recompute,
    Rebuild: _rebuild,
    Offload: _offload,
    Accumulate: _accumulate,
    Autocast: _autocast,
    FusedKernels: _kernels,
    AllocatorReuse: _allocator,
    OptimizerPlacement: _placement,
    StepOnCpu: _placement,
    LowBitState: _low_bit,
    ParameterPlacement: _parameters,
}
