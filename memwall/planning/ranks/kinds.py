"""The kinds of sharding that are weighed against each other, in the order in which equal ones are preferred."""

from memwall.planning.ranks.forecast import AnySharding
from memwall.predict.sharding.ddp import Ddp
from memwall.predict.sharding.fsdp2 import Fsdp2
from memwall.predict.sharding.zero import DeepSpeedZero

KINDS: tuple[AnySharding, ...] = (
    Ddp(),
    Ddp(are_views=True),
    Ddp(are_views=True, divides_state=True),
    Ddp(are_views=True, is_compressed=True),
    Fsdp2(reshard="no"),
    Fsdp2(),
    Fsdp2(reshard="node"),
    Fsdp2(is_hybrid=True, reshard="no"),
    Fsdp2(is_hybrid=True),
    DeepSpeedZero(stage=1),
    DeepSpeedZero(stage=2),
    DeepSpeedZero(stage=3),
    Fsdp2(is_offloaded=True),
    DeepSpeedZero(stage=2, offloads_state=True),
    DeepSpeedZero(stage=3, offloads_state=True),
    DeepSpeedZero(stage=3, offloads_state=True, offloads_parameters=True),
)
