"""A plan as a DeepSpeed configuration: every number follows from plan, model and ranks, or it is refused."""

import uuid
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from plans import a_plan
from torch import nn

from memwall.errors import IntegrationError, StoreError
from memwall.planning.action import Action
from memwall.planning.deepspeed import not_expressed, remarks
from memwall.planning.planfile import Plan
from memwall.planning.techniques.accumulate import Accumulate
from memwall.planning.techniques.allocator import AllocatorReuse
from memwall.planning.techniques.autocast import Autocast
from memwall.planning.techniques.low_bit_state import LowBitState
from memwall.planning.techniques.offload import Offload
from memwall.planning.techniques.optimizer_state import OptimizerPlacement
from memwall.planning.techniques.recompute import Recompute

ON_DISK = OptimizerPlacement(tier="disk", resident_bytes=0, bucket_bytes=32 << 20, min_bytes=1 << 20)
RECOMPUTED = Recompute(block="0")
AWAY = Offload(block="1", scope="saved", tier="disk", min_bytes=1 << 20, window_bytes=32 << 20)
HEAP = AllocatorReuse(policy="tensor-heap", limit_bytes=9)
BF16 = Autocast(dtype="bfloat16")


def a_model(*widths: int) -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(*(nn.Linear(width, width) for width in widths))


def keys_of(value: Any) -> set[str]:
    return {f"{name}.{inner}" for name, part in value.items() if isinstance(part, dict) for inner in part} | set(value)


# -- the batch ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("plan", "ranks", "expected"),
    [
        (a_plan(), 1, (8, 8, 1)),
        (a_plan(num_micro_batches=3), 4, (96, 8, 3)),
        (a_plan(Accumulate(micro_batch=2, num_micro_batches=4)), 2, (16, 2, 4)),
    ],
)
def test_the_global_batch_is_micro_batch_by_accumulation_by_ranks(
    plan: Plan, ranks: int, expected: tuple[int, int, int]
) -> None:
    config = plan.deepspeed_config(world_size=ranks)
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    assert tuple(config[name] for name in names) == expected


def test_the_number_of_ranks_is_torchruns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert a_plan().deepspeed_config()["train_batch_size"] == 24
    monkeypatch.delenv("WORLD_SIZE")
    assert a_plan().deepspeed_config()["train_batch_size"] == 8


def test_a_plan_that_does_not_know_its_batch_is_refused_where_numbers_are_needed() -> None:
    with pytest.raises(IntegrationError, match="the plan does not know its batch") as error:
        a_plan(micro_batch=0).deepspeed_config()
    assert "set train_micro_batch_size_per_gpu" in str(error.value)
    assert a_plan(micro_batch=0).deepspeed_config(for_hugging_face=True)["train_batch_size"] == "auto"


def test_no_ranks_is_refused() -> None:
    with pytest.raises(IntegrationError, match="world_size is 0; expected the number of ranks that train, 1 or more"):
        a_plan().deepspeed_config(world_size=0)


# -- the stage ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("actions", "settings", "stage"),
    [
        ((), {"world_size": 1}, 0),
        ((), {"world_size": 2}, 2),
        ((BF16,), {"world_size": 1}, 1),
        ((ON_DISK,), {"world_size": 1}, 3),
        ((), {"world_size": 1, "offload_parameters": "cpu"}, 3),
        ((), {"world_size": 1, "stage": 2}, 2),
        ((), {"world_size": 2, "stage": 3}, 3),
    ],
)
def test_the_stage_is_the_lowest_that_does_it(
    actions: tuple[Action, ...], settings: dict[str, Any], stage: int, tmp_path: Path
) -> None:
    config = a_plan(*actions).deepspeed_config(disk=str(tmp_path), **settings)
    assert config["zero_optimization"]["stage"] == stage


@pytest.mark.parametrize(
    ("actions", "settings", "message"),
    [
        ((ON_DISK,), {"stage": 2}, "ZeRO stage 2 cannot have the optimizer's state on NVMe, .* give 3 or higher"),
        ((), {"stage": 1, "offload_parameters": "cpu"}, "ZeRO stage 1 cannot have parameters on cpu"),
        ((BF16,), {"stage": 0}, "ZeRO stage 0 cannot have lower precision with master weights, .* give 1 or higher"),
        ((), {"stage": 4}, "ZeRO has no stage 4; expected 0, 1, 2 or 3"),
    ],
)
def test_a_stage_that_cannot_do_it_is_refused(
    actions: tuple[Action, ...], settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(IntegrationError, match=message):
        a_plan(*actions).deepspeed_config(disk=str(tmp_path), **settings)


# -- offload -----------------------------------------------------------------------------------------------------------


def test_state_in_host_memory_becomes_cpu_from_stage_2_on() -> None:
    zero = a_plan(msgspec.structs.replace(ON_DISK, tier="host")).deepspeed_config()["zero_optimization"]
    assert zero["stage"] == 2
    assert zero["offload_optimizer"] == {"device": "cpu", "pin_memory": False, "ratio": 1.0}


def test_state_on_disk_becomes_nvme_with_a_folder_of_its_own(tmp_path: Path) -> None:
    first, second = (a_plan(ON_DISK).deepspeed_config(disk=str(tmp_path)) for _ in range(2))
    section = first["zero_optimization"]["offload_optimizer"]
    folder = Path(section.pop("nvme_path"))
    assert section == {
        "device": "nvme",
        "pin_memory": False,
        "ratio": 1.0,
        "buffer_count": 4,
        "fast_init": False,
        "pipeline_read": False,
        "pipeline_write": False,
    }
    assert folder.parent == tmp_path
    assert folder != Path(second["zero_optimization"]["offload_optimizer"]["nvme_path"])
    assert first["aio"] == {
        "block_size": 1 << 20,
        "queue_depth": 8,
        "intra_op_parallelism": 1,
        "single_submit": False,
        "overlap_events": True,
        "use_gds": False,
    }


def test_a_tile_of_the_step_is_the_plans_bucket(tmp_path: Path) -> None:
    """32 MiB of two float32 moments are the state of 4 Mi parameters."""
    assert a_plan(ON_DISK).deepspeed_config(disk=str(tmp_path))["zero_optimization"]["sub_group_size"] == 4 << 20


def test_a_third_tensor_of_state_gets_a_buffer(tmp_path: Path) -> None:
    optimizer = torch.optim.AdamW(a_model(4).parameters(), amsgrad=True)
    config = a_plan(ON_DISK).deepspeed_config(disk=str(tmp_path), optimizer=optimizer)
    assert config["zero_optimization"]["offload_optimizer"]["buffer_count"] == 5


@pytest.mark.parametrize(("ranks", "buffer_elements"), [(1, 1_048_576), (3, 350_208)])
def test_a_buffer_holds_the_largest_parameters_share_and_all_of_a_module_have_one(
    ranks: int, buffer_elements: int, tmp_path: Path
) -> None:
    """A third of 1,048,576 elements, rounded up to 1,024; and no parameter stays so long that buffers run out."""
    config = a_plan(ON_DISK).deepspeed_config(
        model=a_model(512, 1024), world_size=ranks, disk=str(tmp_path), offload_parameters="nvme"
    )
    zero = config["zero_optimization"]
    assert zero["offload_param"] == {
        "device": "nvme",
        "pin_memory": False,
        "nvme_path": zero["offload_optimizer"]["nvme_path"],
        "buffer_count": 5,
        "buffer_size": buffer_elements,
        "max_in_cpu": 0,
    }
    assert zero["stage3_max_live_parameters"] == 5 * buffer_elements
    assert zero["stage3_max_reuse_distance"] == 0
    assert zero["stage3_prefetch_bucket_size"] == zero["reduce_bucket_size"] == 1 << 20


def test_a_module_with_many_large_parameters_gets_twice_as_many_buffers(tmp_path: Path) -> None:
    model = nn.Module()
    for number in range(4):
        model.register_parameter(f"p{number}", nn.Parameter(torch.empty(512, 512, device="meta")))
    config = a_plan().deepspeed_config(model=model, disk=str(tmp_path), offload_parameters="nvme", world_size=1)
    assert config["zero_optimization"]["offload_param"]["buffer_count"] == 9


def test_a_module_whose_parameters_is_its_own_method_is_sized_whole() -> None:
    class Learner(nn.Linear):
        def parameters(self) -> list[nn.Parameter]:  # type: ignore[override]
            return [self.bias]

    model = nn.Sequential(Learner(16, 16))
    sizes = [a_plan().deepspeed_config(model=each, world_size=1) for each in (model, model[0], nn.Linear(16, 16))]
    assert sizes[0] == sizes[1] == sizes[2]


def test_parameters_on_nvme_need_the_model(tmp_path: Path) -> None:
    with pytest.raises(IntegrationError, match=r"buffers that hold the largest parameter; give model=\.\.\."):
        a_plan().deepspeed_config(disk=str(tmp_path), offload_parameters="nvme")


def test_a_model_that_is_partitioned_already_is_refused() -> None:
    with pytest.raises(IntegrationError, match=r"before deepspeed\.zero\.Init partitions it"):
        a_plan().deepspeed_config(model=nn.Sequential(nn.Linear(0, 4, bias=False)))


def test_a_disk_without_the_space_is_refused_with_both_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """1,050,112 parameters: 16 bytes of state and 4 of weights each, and a tenth more, are 22.03 MiB, rounded up."""
    from memwall.machine import disk_location as location

    class Full:
        f_bavail, f_frsize = 1, 1 << 20

    monkeypatch.setattr(location.os, "statvfs", lambda path: Full)
    with pytest.raises(StoreError, match=r"22\.1 MiB are needed there, 1\.0 MiB are free"):
        a_plan(ON_DISK).deepspeed_config(model=a_model(1024), disk=str(tmp_path), offload_parameters="nvme")


def test_memory_is_pinned_for_a_device_with_a_link_of_its_own_only(tmp_path: Path) -> None:
    for device, is_cuda in (("cpu", False), ("cuda:0", True)):
        zero = a_plan(ON_DISK, device=device).deepspeed_config(disk=str(tmp_path), offload_parameters="cpu")[
            "zero_optimization"
        ]
        assert zero["offload_optimizer"]["pin_memory"] is zero["offload_param"]["pin_memory"] is is_cuda
        assert zero["overlap_comm"] is is_cuda


# -- optimizer and precision -------------------------------------------------------------------------------------------


def test_moments_in_8_bits_are_refused() -> None:
    with pytest.raises(IntegrationError, match="moments in 8 bits, which DeepSpeed's optimizers do not; make a plan"):
        a_plan(LowBitState()).deepspeed_config()


def test_an_optimizer_that_looks_at_a_parameters_shape_is_refused() -> None:
    optimizer = torch.optim.Adafactor(a_model(4).parameters())
    with pytest.raises(IntegrationError, match="the optimizer is Adafactor, and DeepSpeed steps flat pieces"):
        a_plan().deepspeed_config(optimizer=optimizer)


def test_an_elementwise_optimizer_that_deepspeed_does_not_list_is_allowed() -> None:
    sgd = torch.optim.SGD(a_model(4).parameters(), lr=0.1)
    assert a_plan().deepspeed_config(optimizer=sgd)["zero_allow_untested_optimizer"] is True
    assert a_plan().deepspeed_config()["zero_allow_untested_optimizer"] is False


def test_precision_is_the_plans() -> None:
    plain, half, brain = (
        a_plan(*actions).deepspeed_config() for actions in ((), (Autocast(dtype="float16"),), (BF16,))
    )
    assert (plain["bf16"], plain["fp16"]) == ({"enabled": False}, {"enabled": False})
    assert (brain["bf16"], brain["fp16"]) == ({"enabled": True}, {"enabled": False})
    assert half["bf16"] == {"enabled": False}
    assert half["fp16"] == {
        "enabled": True,
        "loss_scale": 0,
        "initial_scale_power": 16,
        "loss_scale_window": 1000,
        "min_loss_scale": 1,
    }


# -- for Hugging Face --------------------------------------------------------------------------------------------------


def test_hugging_face_fills_in_what_it_owns_and_nothing_else(tmp_path: Path) -> None:
    config = a_plan(ON_DISK, BF16).deepspeed_config(
        for_hugging_face=True, disk=str(tmp_path), offload_parameters="nvme", model=a_model(512)
    )
    flat = {
        f"{name}.{key}": inner for name, part in config.items() if isinstance(part, dict) for key, inner in part.items()
    }
    autos = {name for name, value in (config | flat).items() if value == "auto"}
    assert autos == {
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "gradient_clipping",
        "bf16.enabled",
        "fp16.enabled",
        "zero_optimization.reduce_bucket_size",
        "zero_optimization.stage3_prefetch_bucket_size",
        "zero_optimization.stage3_param_persistence_threshold",
    }


def test_raw_deepspeed_gets_no_auto_which_it_would_drop(tmp_path: Path) -> None:
    config = a_plan(ON_DISK, BF16).deepspeed_config(
        disk=str(tmp_path), offload_parameters="nvme", model=a_model(512), gradient_clipping=1.0
    )
    assert b"auto" not in msgspec.json.encode(config)
    assert config["gradient_clipping"] == 1.0
    assert "activation_checkpointing" not in keys_of(config)


# -- what stays memwall's ----------------------------------------------------------------------------------------------


def test_what_deepspeed_has_nothing_for_is_named() -> None:
    accumulate = Accumulate(micro_batch=2, num_micro_batches=4)
    plan = a_plan(ON_DISK, BF16, accumulate, RECOMPUTED, AWAY, HEAP)
    assert not_expressed(plan) == (RECOMPUTED, AWAY, HEAP)
    assert not_expressed(a_plan(ON_DISK, BF16, accumulate)) == ()


def test_remarks_say_where_deepspeed_does_it_otherwise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uuid, "uuid4", lambda: uuid.UUID(int=0))
    state = msgspec.structs.replace(ON_DISK, resident_bytes=64 << 20)
    plan = a_plan(state, BF16)
    config = plan.deepspeed_config(disk=str(tmp_path), offload_parameters="nvme", model=a_model(1024), world_size=1)
    assert remarks(plan, config) == (
        "of the optimizer's state the plan keeps 64.0 MiB in memory; DeepSpeed moves all of it",
        "the plan runs forward under bfloat16 autocast; DeepSpeed keeps bfloat16 weights and float32 master copies of "
        "them, which is other rounding and another number of bytes",
        "DeepSpeed holds 10.0 MiB of buffers for parameters, locked in memory",
        "DeepSpeed's load_checkpoint loses the moments of an optimizer on NVMe and says nothing: a run that is to be "
        'resumed has offload_optimizer.device "cpu"',
        "the forecast of 4.00 GiB is for one process without DeepSpeed; ZeRO 3 differs",
    )
    assert remarks(a_plan(), a_plan().deepspeed_config(world_size=1)) == ()
