"""Under the Trainer callback a step that runs out of memory is done again, and other phases are named."""

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from trainer_runs import NUM_STEPS, Recorded, arguments

from memwall.errors import OutOfMemoryError

pytestmark = [pytest.mark.requires("transformers", "accelerate"), pytest.mark.slow]


class TestOutOfMemory:
    @pytest.fixture
    def failing(self, make_model: Any) -> Any:
        """A model whose layer fails once, in the call with the number that it is told, or in all calls from there."""

        def make(number: int, *, always: bool = False) -> Any:
            model = make_model()
            seen = SimpleNamespace(num_calls=0)  # a number or list would be put back for the second run

            def before(*_: Any) -> None:
                seen.num_calls += 1
                if seen.num_calls == number or (always and seen.num_calls > number):
                    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB. GPU 0 has")

            model.model.layers[-1].register_forward_pre_hook(before)
            return model

        return make

    def test_a_step_is_done_again_to_the_same_bits(self, train: Any, digest: Any, recorded: Recorded, failing: Any):
        from memwall.integrations.trainer import MemwallCallback

        callback = MemwallCallback(budget="1TiB")
        trainer = train(callback, model=failing(2))
        assert digest(trainer.model) == recorded.digest
        report = callback.report()
        assert (report.measured.oom_recoveries, report.measured.steps) == (1, NUM_STEPS)
        assert callback.session.plan.actions != ()

    def test_nobody_else_needs_to_hold_the_trainer(self, make_model: Any, samples: Any, failing: Any):
        from transformers import Trainer, TrainingArguments

        from memwall.integrations.trainer import MemwallCallback

        callback = MemwallCallback(budget="1TiB")
        args = arguments(TrainingArguments, per_device_train_batch_size=16)
        Trainer(model=failing(2), args=args, train_dataset=samples, callbacks=[callback]).train()
        assert callback.report().measured.oom_recoveries == 1

    def test_a_trainer_goes_with_its_last_holder(self, train: Any):
        from memwall.integrations.trainer import MemwallCallback

        trainer = train(MemwallCallback(budget="1TiB"))
        assert type(trainer).__name__ == "Trainer"
        gone = weakref.ref(trainer)
        gc.disable()
        try:
            del trainer
            assert gone() is None
        finally:
            gc.enable()

    @pytest.mark.exhaustive
    def test_accumulation_is_done_again_as_a_whole(self, train: Any, digest: Any, failing: Any):
        from memwall.integrations.trainer import MemwallCallback

        settings = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "max_steps": 2}
        callback = MemwallCallback(budget="1TiB")
        trainer = train(callback, model=failing(4), **settings)
        assert callback.report().measured.oom_recoveries == 1
        assert digest(trainer.model) == digest(train(**settings).model)

    def test_in_evaluation_it_is_named_and_the_model_is_given_back(self, train: Any, failing: Any):
        from memwall.integrations.trainer import MemwallCallback

        callback = MemwallCallback(budget="1TiB")
        with pytest.raises(OutOfMemoryError, match=r"^out of memory in evaluation, after step 1: 2\.0 MiB"):
            train(callback, model=failing(2, always=True), eval_strategy="steps", eval_steps=1)
        assert callback.session.state == "closed"
        assert callback.session.measured.oom_recoveries == 0
        assert callback.session.plan.actions == ()
