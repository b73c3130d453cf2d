"""Has the units that `fully_shard` made of a model stay gathered after forward or not, as a plan says.

A unit that stays gathered saves its second gather; what it computes is the same to the bit either way.
"""

import logging
from collections.abc import Callable, Mapping
from functools import partial

import msgspec
from torch import nn

from memwall.errors import ApplyError
from memwall.patches import undo_all
from memwall.planning.planfile import Plan
from memwall.predict.sharding.fsdp2 import Fsdp2
from memwall.predict.sharding.gathering import Gathering
from memwall.torch_internals.sharding import gathers_ahead, is_sharding_unit, resharding_of, set_resharding
from memwall.trace.records import Trace

_log = logging.getLogger(__name__)


def with_resharding(model: nn.Module, frees: Mapping[str, bool]) -> Callable[[], None]:
    """Sets which units free after forward what they have gathered; between two steps, on all ranks or on none.

    Args:
        frees: whether a unit does, by its path.

    Returns:
        What leaves units as the script has set them.

    Raises:
        ApplyError: a module is no unit.
    """
    modules = dict(model.named_modules())
    absent = [path for path in frees if path not in modules or not is_sharding_unit(modules[path])]
    if absent:
        raise ApplyError(
            f"the plan says what {len(frees)} units of FSDP2 do after forward, and {len(absent)} of these modules are "
            f"none, {absent[0]} first; make a plan for the model as it is divided here"
        )
    undos: list[Callable[[], None]] = []
    for path, is_freed in frees.items():
        unit = modules[path]
        undos.append(partial(set_resharding, unit, resharding_of(unit)))
        unit.set_reshard_after_forward(is_freed, recurse=False)
    return partial(undo_all, undos)


class FreedUnits:
    """Has units free after forward what they gather while a step is recorded, that the script keeps gathered."""

    def __init__(self) -> None:
        self._undo: Callable[[], None] = _nothing
        self._paths: tuple[str, ...] = ()

    def begin(self, model: nn.Module) -> None:
        """Frees those that are within another one, if the script leaves it to torch which are gathered ahead."""
        self.end()
        units = {path: module for path, module in model.named_modules() if is_sharding_unit(module)}
        if any(map(gathers_ahead, units.values())):
            return
        inner = [
            path for path in units if any(path.startswith(outer and f"{outer}.") for outer in units if outer != path)
        ]
        self._paths = tuple(path for path in inner if not any(resharding_of(units[path])))
        self._undo = with_resharding(model, dict.fromkeys(self._paths, True))

    def as_scripted(self, model: nn.Module, trace: Trace) -> Trace:
        """Returns the recorded step as it would be with these units kept gathered, as they are again from now on.

        Those of which that cannot be said, as they are called twice before a backward, are freed until `end`.
        """
        paths, self._paths = self._paths, ()
        if not paths:
            return trace
        self.end()
        known = {unit.path for step in trace.steps for unit in Gathering(trace, step).freed}
        left = [path for path in paths if path not in known]
        if left:
            _log.info(
                "%d units stay freed after forward, %s first: how they are gathered is not known", len(left), left[0]
            )
            self._undo = with_resharding(model, dict.fromkeys(left, True))
        steps = tuple(Gathering(trace, step).with_kept(paths) for step in trace.steps)
        return msgspec.structs.replace(trace, steps=steps)

    def end(self) -> None:
        """Leaves units as the script has them. Safe to call twice."""
        undo, self._undo = self._undo, _nothing
        undo()


def _nothing() -> None:
    pass


def with_resharding_of_ranks(model: nn.Module, plan: Plan) -> Callable[[], None]:
    """Sets it for the units of a plan for ranks that are units of the model; the root stays as the script has it.

    Of a plan that has units stay in the node only those that are kept whole are set: torch has the groups of ranks
    for the others made where the model is divided.
    """
    ranks = plan.forecast.ranks
    if ranks is None or not isinstance(ranks.chosen, Fsdp2) or not is_sharding_unit(model):
        return _nothing
    chosen, modules = ranks.chosen, dict(model.named_modules())
    absent = {path for path in ranks.units if path not in modules or not is_sharding_unit(modules[path])}
    if absent:
        _log.warning(
            "the plan divides %d units that the script does not, %s first: its forecast is of another step; divide "
            "the model by memwall.shard(model, plan)",
            len(absent),
            next(path for path in ranks.units if path in absent),
        )
    kept = chosen.kept_of(ranks.units)
    here = [path for path in ranks.units if path not in absent and (path in kept or chosen.reshard == "yes")]
    return with_resharding(model, {path: path not in kept for path in here})
