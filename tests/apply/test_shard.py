"""`memwall.shard` and what frontends are told: a model divided by the plan, or why not."""

from types import SimpleNamespace

import pytest
import torch
from plans import a_plan
from sharded_runs import Model, network_for, ranked_plan
from trainer_runs import with_actions

from memwall.apply.shard import shard
from memwall.errors import IntegrationError, UsageError
from memwall.integrations.accelerate import _check
from memwall.planning.ranks.frontends import accelerate_sharding, trainer_sharding
from memwall.planning.techniques.accumulate import Accumulate
from memwall.predict.sharding.ddp import Ddp
from memwall.predict.sharding.fsdp2 import Fsdp2
from memwall.predict.sharding.zero import DeepSpeedZero


def test_a_plan_for_one_process_divides_nothing() -> None:
    with pytest.raises(UsageError, match=r"for one process; make one for ranks: memwall plan SPEC"):
        shard(Model(), a_plan())


def test_ranks_are_those_of_the_plan() -> None:
    with pytest.raises(UsageError, match=r"the plan is for 8 ranks, and there are 1"):
        shard(Model(), ranked_plan(Ddp(), network_for(8)))


def test_modules_are_those_of_the_plan() -> None:
    with pytest.raises(UsageError, match=r"modules that Model does not have: layers\.0; make the plan for this model"):
        shard(Model(), ranked_plan(Fsdp2(), network_for(1), units=("layers.0",)))


def test_deepspeed_divides_by_a_configuration_of_the_plan() -> None:
    chosen = DeepSpeedZero(stage=3, offloads_state=True, offloads_parameters=True)
    plan = ranked_plan(chosen, network_for(16))
    with pytest.raises(UsageError, match=r"chose ZeRO-3, state and parameters on the CPU: hand plan\.deepspeed_config"):
        shard(Model(), ranked_plan(chosen, network_for(1)))
    config = plan.deepspeed_config()
    assert config["train_batch_size"] == 16 * 8
    zero = config["zero_optimization"]
    assert (zero["stage"], zero["offload_optimizer"]["device"], zero["offload_param"]["device"]) == (3, "cpu", "cpu")
    with pytest.raises(UsageError, match=r"for_hugging_face=True\) makes the configuration that the Trainer takes"):
        plan.training_arguments(None)


def test_nothing_of_a_plan_is_dropped_by_frontends_that_have_no_word_for_it() -> None:
    divided = ranked_plan(Ddp(are_views=True, divides_state=True), network_for(8)).forecast.ranks
    views = ranked_plan(Ddp(are_views=True), network_for(8)).forecast.ranks
    with pytest.raises(UsageError, match=r"Accelerate has no word for DDP, bucket views, divided state; divide the"):
        accelerate_sharding(divided)
    for ranks in (divided, views):
        with pytest.raises(UsageError, match=r"the Trainer has no word for DDP, bucket views.*shard\(model, plan\)"):
            trainer_sharding(ranks)
    assert trainer_sharding(ranked_plan(Ddp(), network_for(8)).forecast.ranks) == {}


@pytest.mark.skipif(torch.version.cuda is not None, reason="torch for CUDA does it")
def test_a_torch_without_cuda_averages_no_gradients_in_bfloat16(one_rank: None) -> None:
    with pytest.raises(UsageError, match=r"torch does not do: .*; make one without --allow gradient-compression"):
        shard(Model(), ranked_plan(Ddp(are_views=True, is_compressed=True), network_for(1)))


@pytest.mark.slow
@pytest.mark.requires("accelerate", "transformers")
def test_accelerate_and_the_trainer_take_fsdp2_from_the_plan() -> None:
    from accelerate import FullyShardedDataParallelPlugin
    from transformers import TrainingArguments

    plan = ranked_plan(Fsdp2(reshard="no"), network_for(8))
    plugin = plan.accelerate_kwargs()["fsdp_plugin"]
    assert isinstance(plugin, FullyShardedDataParallelPlugin)
    assert (plugin.fsdp_version, plugin.reshard_after_forward) == (2, False)
    arguments = plan.training_arguments(TrainingArguments(output_dir="unused", use_cpu=True))
    assert arguments.fsdp is True
    assert arguments.fsdp_plugin_args["reshard_after_forward"] is False
    for each in (plugin, FullyShardedDataParallelPlugin(**arguments.fsdp_plugin_args)):
        each.set_mixed_precision("bf16")  # as Accelerator(mixed_precision="bf16") does
        assert each.mixed_precision_policy.param_dtype is None
    hybrid = ranked_plan(Fsdp2(is_hybrid=True), network_for(16)).accelerate_kwargs()["parallelism_config"]
    assert (hybrid.dp_replicate_size, hybrid.dp_shard_size) == (2, 8)
    views = ranked_plan(Ddp(are_views=True), network_for(8)).accelerate_kwargs()["kwargs_handlers"]
    assert views[0].gradient_as_bucket_view
    compressed = ranked_plan(Ddp(are_views=True, is_compressed=True), network_for(8)).accelerate_kwargs()
    assert compressed["kwargs_handlers"][0].comm_hook.value == "bf16"
    with pytest.raises(UsageError, match=r"Accelerate has no word for FSDP2, kept in the node"):
        ranked_plan(Fsdp2(reshard="node"), network_for(16)).accelerate_kwargs()
    with pytest.raises(UsageError, match=r"the Trainer has no word for FSDP2, last 3 units kept gathered; divide the"):
        trainer_sharding(ranked_plan(Fsdp2(num_kept=3), network_for(8)).forecast.ranks)
    with pytest.raises(UsageError, match=r"the Trainer has no word for FSDP2, gathered 2 ahead; divide the model by"):
        trainer_sharding(ranked_plan(Fsdp2(num_ahead=2), network_for(8)).forecast.ranks)


@pytest.mark.slow
@pytest.mark.requires("accelerate", "transformers")
def test_frontends_reduce_each_micro_batch_under_fsdp2() -> None:
    """GIVEN a plan with micro-batches THEN no gradient waits whole for the last one, which is Accelerate's default."""
    from transformers import TrainingArguments

    plan = with_actions(ranked_plan(Fsdp2(), network_for(8)), (Accumulate(micro_batch=2, num_micro_batches=4),))
    kwargs = plan.accelerate_kwargs()
    assert "gradient_accumulation_steps" not in kwargs
    plugin = kwargs["gradient_accumulation_plugin"]
    assert (plugin.num_steps, plugin.sync_each_batch) == (4, True)
    asked = TrainingArguments(output_dir="unused", use_cpu=True, accelerator_config={"even_batches": False})
    arguments = plan.training_arguments(asked)
    assert arguments.gradient_accumulation_steps == 4
    assert arguments.accelerator_config.gradient_accumulation_kwargs == {"sync_each_batch": True}
    assert not arguments.accelerator_config.even_batches
    replicated = with_actions(ranked_plan(Ddp(), network_for(8)), (Accumulate(micro_batch=2, num_micro_batches=4),))
    assert replicated.accelerate_kwargs() == {"gradient_accumulation_steps": 4}
    bare = SimpleNamespace(gradient_accumulation_steps=4, gradient_state=SimpleNamespace(plugin_kwargs={}))
    with pytest.raises(IntegrationError, match="GradientAccumulationPlugin with sync_each_batch=True"):
        _check(plan, bare, [])
    bare.gradient_state.plugin_kwargs = plugin.to_kwargs()
    _check(plan, bare, [])
    accumulating = TrainingArguments(output_dir="unused", use_cpu=True, gradient_accumulation_steps=3)
    arguments = ranked_plan(Fsdp2(), network_for(8)).training_arguments(accumulating)
    assert arguments.accelerator_config.gradient_accumulation_kwargs == {"sync_each_batch": True}
