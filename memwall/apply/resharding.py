"""Has the units that `fully_shard` made of a model keep or free after forward what they gathered, as a plan says.

A unit that stays gathered saves its second gather; what it computes is the same to the bit either way.
"""

import logging
from collections.abc import Callable, Mapping
from functools import partial

from torch import nn

from memwall.errors import ApplyError
from memwall.patches import undo_all
from memwall.planning.planfile import Plan
from memwall.predict.sharding.fsdp2 import Fsdp2
from memwall.torch_internals.sharding import is_sharding_unit, resharding_of, set_resharding

_log = logging.getLogger(__name__)


def with_resharding(model: nn.Module, frees: Mapping[str, bool]) -> Callable[[], None]:
    """Sets which units free after forward what they have gathered, all of them or none.

    It is to be called between two steps, on all ranks.

    Args:
        frees: whether a unit does, by its path.

    Returns:
        A function that sets units back as the script has them.

    Raises:
        ApplyError: a module is no unit.
    """
    modules = dict(model.named_modules())
    absent = [path for path in frees if path not in modules or not is_sharding_unit(modules[path])]
    if absent:
        raise ApplyError(
            f"the plan says what {len(frees)} units of FSDP2 do after forward, and {len(absent)} of them are no units "
            f"here, '{absent[0]}' first; make a plan for the model as it is divided here"
        )
    undos: list[Callable[[], None]] = []
    try:
        for path, is_freed in frees.items():
            unit = modules[path]
            undos.append(partial(set_resharding, unit, resharding_of(unit)))
            unit.set_reshard_after_forward(is_freed, recurse=False)
    except BaseException:
        undo_all(undos)
        raise
    return partial(undo_all, undos)


def with_resharding_of_ranks(model: nn.Module, plan: Plan) -> Callable[[], None]:
    """Sets what units free for those of a plan for ranks that the model has; the root stays as the script has it.

    Of a plan that has units stay in the node only those that are kept whole are set: torch has the groups of ranks
    for the others made where the model is divided.
    """
    ranks = plan.forecast.ranks
    if ranks is None or not isinstance(ranks.chosen, Fsdp2) or not is_sharding_unit(model):
        return lambda: None
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
