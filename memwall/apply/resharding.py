"""Has the units that `fully_shard` made of a model stay gathered after forward or not, as a plan for ranks says.

A unit that stays gathered saves its second gather; what it computes is the same to the bit either way.
"""

import logging
from collections.abc import Callable
from functools import partial

from torch import nn

from memwall.patches import undo_all
from memwall.planning.planfile import Plan
from memwall.predict.sharding.fsdp2 import Fsdp2
from memwall.torch_internals.sharding import is_sharding_unit, resharding_of, set_resharding

_log = logging.getLogger(__name__)


class Resharding:
    """Sets it, and sets back what the script has set; both between two steps, on all ranks or on none."""

    def __init__(self) -> None:
        self._undos: list[Callable[[], None]] = []

    def apply(self, model: nn.Module, plan: Plan) -> None:
        """Sets it for the units of a plan that are units of the model; the root stays as the script has it.

        Of a plan that has units stay in the node only those that are kept whole are set: torch has the groups of ranks
        for the others made where the model is divided.
        """
        ranks = plan.forecast.ranks
        if ranks is None or not isinstance(ranks.chosen, Fsdp2) or not is_sharding_unit(model):
            return
        chosen, modules = ranks.chosen, dict(model.named_modules())
        absent = [path for path in ranks.units if path not in modules or not is_sharding_unit(modules[path])]
        if absent:
            _log.warning(
                "the plan divides %d units that the script does not, %s first: its forecast is of another step; divide "
                "the model by memwall.shard(model, plan)",
                len(absent),
                absent[0],
            )
        kept = chosen.kept_of(ranks.units)
        for path in ranks.units:
            if path not in absent and (path in kept or chosen.reshard == "yes"):
                unit = modules[path]
                self._undos.append(partial(set_resharding, unit, resharding_of(unit)))
                unit.set_reshard_after_forward(path not in kept, recurse=False)

    def undo(self) -> None:
        """Leaves units as they were before."""
        undos, self._undos = self._undos, []
        undo_all(undos)
