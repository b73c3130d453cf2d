"""What memwall refuses to do with DeepSpeed, each with its reason and the way out; DeepSpeed need not be installed."""

import importlib.util
from collections.abc import Callable, Sized
from pathlib import Path
from typing import Any

import pytest
import torch
from plans import a_plan
from torch import nn

from memwall.errors import ApplyError, IntegrationError
from memwall.integrations.deepspeed import apply_rest, check_resume, load_checkpoint, require_deepspeed
from memwall.planning.techniques.offload import Offload
from memwall.planning.techniques.recompute import Recompute

ON_NVME = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}}
PARAMETERS_ON_NVME = {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}


class Engine:
    """As much of DeepSpeed's engine as memwall looks at."""

    class _Config:
        def __init__(self, config: dict[str, Any]) -> None:
            self._param_dict = config

    def __init__(self, config: dict[str, Any], num_ranks: int = 1) -> None:
        self._config = self._Config(config)
        self.dp_world_size, self.micro_steps, self.loaded = num_ranks, 0, False
        self.module = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), nn.Linear(8, 8))

    def zero_optimization_stage(self) -> int:
        return int(self._config._param_dict["zero_optimization"]["stage"])

    def gradient_accumulation_steps(self) -> int:
        return 1

    def load_checkpoint(self, load_dir: str, tag: str | None) -> str:
        self.loaded = True
        return load_dir


@pytest.fixture
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())


def test_without_deepspeed_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(IntegrationError) as error:
        require_deepspeed()
    assert str(error.value) == (
        "DeepSpeed is not installed; install it with `pip install 'torch-memwall[deepspeed]'`. It compiles its "
        "operators when they are first used: that takes a C++ compiler, and for NVMe the headers of libaio "
        "(Debian and Ubuntu: g++ and libaio-dev)"
    )


def test_deepspeeds_own_resume_of_an_optimizer_on_nvme_is_refused_with_the_ways_out() -> None:
    with pytest.raises(IntegrationError) as error:
        check_resume(ON_NVME)
    assert str(error.value) == (
        "DeepSpeed's own load_checkpoint loses an optimizer on NVMe: it copies the moments back beside the run and "
        "never reads them, so that Adam starts again from zero, and parameter groups below 1 MiB get back the values "
        "they were initialized with; nothing says so. Load with memwall.integrations.load_checkpoint, which "
        'puts both back, or train and resume with offload_optimizer.device "cpu" and parameters not on NVMe'
    )


@pytest.mark.usefixtures("_installed")
def test_another_deepspeed_than_known_is_refused_and_nothing_is_loaded(tmp_path: Path) -> None:
    engine = Engine(ON_NVME)
    (tmp_path / "latest").write_text("global_step3\n")
    with pytest.raises(IntegrationError, match="DeepSpeed's Engine has no '_get_zero_ckpt_name' in this version"):
        load_checkpoint(engine, str(tmp_path))
    assert not engine.loaded


@pytest.mark.usefixtures("_installed")
def test_a_folder_that_holds_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(IntegrationError, match=r"cannot read .*latest: No such file or directory; give the folder"):
        load_checkpoint(Engine(ON_NVME), str(tmp_path))


@pytest.mark.usefixtures("_installed")
def test_half_a_checkpoint_is_not_loaded_from_nvme(tmp_path: Path) -> None:
    with pytest.raises(IntegrationError, match="load_module_only is given, and with the optimizer on NVMe"):
        load_checkpoint(Engine(ON_NVME), str(tmp_path), load_module_only=True)


@pytest.mark.usefixtures("_installed")
def test_resuming_without_nvme_goes_to_deepspeed() -> None:
    engine = Engine({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}})
    assert load_checkpoint(engine, "checkpoints") == "checkpoints"
    assert engine.loaded


def test_resuming_with_parameters_on_nvme_is_refused() -> None:
    with pytest.raises(IntegrationError, match="cannot resume with parameters on NVMe and the optimizer elsewhere"):
        check_resume(PARAMETERS_ON_NVME)
    check_resume({"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}})
    check_resume({})


@pytest.mark.usefixtures("_installed")
def test_what_is_no_engine_is_refused() -> None:
    with pytest.raises(IntegrationError, match=r"expected the engine that deepspeed\.initialize returns first, found"):
        load_checkpoint(nn.Linear(1, 1), "checkpoints")


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
