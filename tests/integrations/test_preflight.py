"""What fails late or costs for nothing is seen before the first step: one test for each item."""

import logging
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import plans
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from memwall.errors import IntegrationError
from memwall.integrations.deepspeed import apply_rest
from memwall.integrations.preflight import check_accelerator, check_arguments, check_config, check_model
from memwall.planning.techniques.recompute import Recompute
from memwall.session.session import Session

pytestmark = pytest.mark.requires("transformers", "accelerate")


def checkpointed(make_model: Any, *, use_reentrant: bool) -> Any:
    model = make_model()
    model.config.use_cache = False
    model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": use_reentrant})
    return model.train()


@pytest.mark.usefixtures("one_rank")
def test_ddp_with_reentrant_checkpointing(make_model: Any, caplog: pytest.LogCaptureFixture) -> None:
    """GIVEN a wrapped model that checkpoints reentrantly THEN it is said what that may do, and what to set."""
    with caplog.at_level(logging.WARNING, "memwall"):
        check_model(DistributedDataParallel(checkpointed(make_model, use_reentrant=False)))
    assert caplog.text == ""
    check_model(DistributedDataParallel(checkpointed(make_model, use_reentrant=True)))
    assert "DistributedDataParallel with reentrant gradient checkpointing fails once" in caplog.text
    assert "checkpoint with gradient_checkpointing_kwargs={'use_reentrant': False}" in caplog.text


@pytest.mark.usefixtures("one_rank")
def test_find_unused_parameters_with_reentrant_checkpointing(make_model: Any) -> None:
    """GIVEN both WHEN it is refused THEN torch would have failed in the first backward indeed."""
    model = DistributedDataParallel(checkpointed(make_model, use_reentrant=True), find_unused_parameters=True)
    with pytest.raises(IntegrationError, match="parameters inside the checkpoints look unused, and backward fails"):
        check_model(model)
    tokens = torch.zeros(2, 8, dtype=torch.int64)
    with pytest.raises(RuntimeError, match="Expected to mark a variable ready only once"):
        model(input_ids=tokens, labels=tokens).loss.backward()


@pytest.mark.slow
@pytest.mark.usefixtures("one_rank")
def test_find_unused_parameters_with_a_plan_that_recomputes(make_model: Any) -> None:
    """GIVEN a parameter that is unused WHEN memwall recomputes blocks under DDP THEN that is no obstacle."""
    model = make_model()
    model.config.use_cache = False
    model.unused = nn.Parameter(torch.zeros(1))
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    check_model(wrapped)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tokens = torch.zeros(2, 8, dtype=torch.int64)
    with Session(plan=plans.plan_of(model, Recompute(block="model.layers.1"))) as session:
        session.attach(model, optimizer)
        for _ in range(2):
            wrapped(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert session.measured.num_steps == 2


def test_the_trainer_s_arguments_are_looked_at_before_it_wraps(caplog: pytest.LogCaptureFixture) -> None:
    args = SimpleNamespace(
        parallel_mode=SimpleNamespace(value="distributed"),
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": True},
        ddp_find_unused_parameters=True,
        use_cache=False,
    )
    with pytest.raises(IntegrationError, match="find_unused_parameters=True and reentrant gradient checkpointing"):
        check_arguments(args)
    args.ddp_find_unused_parameters, args.use_cache = None, True
    check_arguments(args)
    assert "DistributedDataParallel with reentrant gradient checkpointing" in caplog.text
    assert "TrainingArguments(use_cache=True): the keys and values of every layer" in caplog.text


def test_use_cache(make_model: Any, caplog: pytest.LogCaptureFixture) -> None:
    model = make_model()
    model.config.use_cache = True
    check_model(model)
    assert "LlamaForCausalLM has config.use_cache=True" in caplog.text
    assert "set model.config.use_cache = False" in caplog.text


def test_auto_left_in_a_deepspeed_configuration() -> None:
    """GIVEN a file for the Trainer WHEN it is given to DeepSpeed itself THEN each place is named."""
    config = {"train_batch_size": 8, "optimizer": {"params": {"betas": ["auto", 0.9]}}, "bf16": {"enabled": "auto"}}
    with pytest.raises(IntegrationError, match=r'"auto" at optimizer\.params\.betas\[0\], bf16\.enabled; Trainer and'):
        check_config(config)
    engine = SimpleNamespace(_config=SimpleNamespace(_param_dict=config), module=nn.Linear(2, 2))
    with pytest.raises(IntegrationError, match='configuration has "auto" at'):
        apply_rest(engine, plans.plan_of(engine.module))
    check_config({"train_batch_size": 8})


def test_deepspeed_is_refused_before_its_engine_is_built(tmp_path: Path) -> None:
    """GIVEN arguments, or an Accelerator, that use DeepSpeed THEN the message has what memwall does do."""
    from transformers import TrainingArguments

    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    args.deepspeed = "zero.json"
    with pytest.raises(IntegrationError, match=r"memwall does not plan within it; .*memwall export --to trainer"):
        check_arguments(args)
    with pytest.raises(IntegrationError, match="memwall does not plan within it"):
        check_accelerator(SimpleNamespace(distributed_type=SimpleNamespace(value="DEEPSPEED")))


def test_fsdp_of_version_1_is_refused_and_of_version_2_is_not(tmp_path: Path) -> None:
    from transformers import TrainingArguments

    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, fsdp="full_shard", fsdp_config={"version": 1})
    with pytest.raises(IntegrationError, match=r"\(FSDP1\) .*set fsdp_version: 2"):
        check_arguments(args)
    check_arguments(
        TrainingArguments(output_dir=str(tmp_path), use_cpu=True, fsdp="full_shard", fsdp_config={"version": 2})
    )
    for is_fsdp2 in (True, False):
        accelerator = SimpleNamespace(distributed_type=SimpleNamespace(value="FSDP"), is_fsdp2=is_fsdp2)
        with nullcontext() if is_fsdp2 else pytest.raises(IntegrationError, match="fsdp_version: 2"):
            check_accelerator(accelerator)
