"""What memwall refuses to do with DeepSpeed, each with its reason and the way out; DeepSpeed need not be installed."""

from collections.abc import Callable, Sized
from typing import Any

import pytest
import torch
from plans import a_plan
from torch import nn

from memwall.errors import ApplyError, IntegrationError
from memwall.integrations.deepspeed import apply_rest
from memwall.planning.techniques.offload import Offload
from memwall.planning.techniques.recompute import Recompute

PARAMETERS_ON_NVME = {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}


class Engine:
    """As much of DeepSpeed's engine as memwall looks at."""

    class _Config:
        def __init__(self, config: dict[str, Any]) -> None:
            self._param_dict = config

    def __init__(self, config: dict[str, Any], num_ranks: int = 1) -> None:
        self._config = self._Config(config)
        self.dp_world_size, self.micro_steps = num_ranks, 0
        self.module = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), nn.Linear(8, 8))

    def zero_optimization_stage(self) -> int:
        return int(self._config._param_dict["zero_optimization"]["stage"])

    def gradient_accumulation_steps(self) -> int:
        return 1


def test_what_is_no_engine_is_refused() -> None:
    with pytest.raises(IntegrationError, match=r"expected the engine that deepspeed\.initialize returns first, found"):
        apply_rest(nn.Linear(1, 1), a_plan())


def test_saved_tensors_do_not_leave_memory_where_weights_come_and_go_in_them() -> None:
    away = Offload(block="0", scope="saved", tier="disk", min_bytes=1, window_bytes=1 << 20)
    with pytest.raises(IntegrationError, match="the plan moves what '0' saves to the disk, and under ZeRO stage 3"):
        apply_rest(Engine({"zero_optimization": {"stage": 3}}), a_plan(away))


def test_recomputation_is_refused_where_its_weights_would_be_overwritten() -> None:
    with pytest.raises(IntegrationError, match="the plan recomputes '0', and on one rank ZeRO stage 3 lends weights"):
        apply_rest(Engine(PARAMETERS_ON_NVME), a_plan(Recompute(block="0")))
    apply_rest(Engine(PARAMETERS_ON_NVME, num_ranks=2), a_plan(Recompute(block="0"))).undo()


def test_a_block_that_the_model_does_not_have_is_refused() -> None:
    with pytest.raises(ApplyError, match=r"the plan treats the module 'h\.0', which this model does not have"):
        apply_rest(Engine({"zero_optimization": {"stage": 2}}), a_plan(Recompute(block="h.0")))


def test_the_rest_is_applied_to_the_model_in_the_engine_and_taken_back(count_calls: Callable[..., Sized]) -> None:
    """GIVEN a block of three modules WHEN it is recomputed THEN it runs twice a step and once to be proven."""
    engine = Engine({"zero_optimization": {"stage": 2}})
    block = engine.module[0]
    assert isinstance(block, nn.Sequential)
    calls = count_calls(block[0])
    rest = apply_rest(engine, a_plan(Recompute(block="0")))
    engine.module(torch.ones(2, 8)).sum().backward()
    assert len(calls) == 3, "the first call is proven by a second run"
    rest.undo()
    engine.module(torch.ones(2, 8)).sum().backward()
    assert len(calls) == 4
    assert not engine.module._forward_pre_hooks
