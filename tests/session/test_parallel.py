"""Models that others divide or copy are refused before they are touched, and the message has the way out."""

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

import memwall
from memwall.errors import UsageError


def named(module: str, name: str, *bases: type) -> Any:
    """Returns a class that a library has under this name."""
    return type(name, bases, {"__module__": module})


def under_zero_3() -> nn.Module:
    model = nn.Linear(2, 2)
    model.weight.ds_id = 0  # type: ignore[assignment]
    return model


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: nn.Sequential(nn.DataParallel(nn.Linear(2, 2))),
            "wrapped in DataParallel, which copies it to each device.* start one process for each device with torchrun",
        ),
        (
            lambda: named("deepspeed.runtime.engine", "DeepSpeedEngine", nn.Linear)(2, 2),
            r"in a DeepSpeedEngine, .* plan.deepspeed_config\(\), and apply the rest",
        ),
        (under_zero_3, "divided among ranks by DeepSpeed's ZeRO-3: .*memwall.integrations.apply_rest"),
    ],
)
def test_such_a_model_is_refused(make: Callable[[], nn.Module], message: str) -> None:
    model = make()
    with pytest.raises(UsageError, match=message):
        memwall.fit(model, torch.optim.SGD(model.parameters(), lr=0.1), budget="1GiB")


@pytest.mark.usefixtures("one_rank")
def test_fsdp1_is_refused_for_fsdp2() -> None:
    model = FullyShardedDataParallel(nn.Linear(2, 2), device_id=torch.device("cpu"))
    with pytest.raises(UsageError, match=r"\(FSDP1\).* wrap it with torch.distributed.fsdp.fully_shard"):
        memwall.fit(model, torch.optim.SGD(model.parameters(), lr=0.1), budget="1GiB")


def test_an_optimizer_of_deepspeeds_is_refused_by_its_name() -> None:
    """It is no torch.optim.Optimizer, nor a list of such."""
    optimizer = named("deepspeed.runtime.zero.stage_1_and_2", "DeepSpeedZeroOptimizer")()
    with pytest.raises(UsageError, match="is a DeepSpeedZeroOptimizer of DeepSpeed's, which steps flat partitions"):
        memwall.fit(nn.Linear(2, 2), optimizer, budget="1GiB")


def test_what_is_no_optimizer_is_named() -> None:
    with pytest.raises(UsageError, match=r"fit was given a int; expected a torch.optim.Optimizer"):
        memwall.fit(nn.Linear(2, 2), 3, budget="1GiB")  # type: ignore[arg-type]


@pytest.mark.usefixtures("one_rank")
def test_a_group_stays_as_long_as_the_model_may_be_known_to_a_session() -> None:
    """GIVEN DistributedDataParallel WHEN sessions train it THEN its group is kept, once: a script may close it before
    the model goes, and the reducer must not hold it last.
    """
    parallel = nn.parallel.DistributedDataParallel(nn.Linear(2, 1))
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    before = sys.getrefcount(parallel.process_group)
    for _ in range(2):
        with memwall.fit(parallel, optimizer, budget="8GiB"):
            pass
    after = sys.getrefcount(parallel.process_group)
    assert after == before + 1
