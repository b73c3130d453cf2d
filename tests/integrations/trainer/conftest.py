import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from trainer_runs import MIB, Recorded, arguments

from memwall.planning.planfile import Plan
from memwall.planning.techniques.recompute import Recompute


@pytest.fixture(autouse=True, scope="module")
def _elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The Trainer makes its output folder where it is run."""
    with contextlib.chdir(tmp_path_factory.mktemp("trainer")):
        yield


@pytest.fixture(scope="session")
def train(make_model: Any, samples: Any) -> Callable[..., Any]:
    """Trains the model for three steps; returns the Trainer."""
    from transformers import Trainer, TrainingArguments

    def run(callback: Any = None, *, args: Any = None, model: Any = None, **settings: Any) -> Any:
        values = {"per_device_train_batch_size": 16, **settings}
        trainer = Trainer(
            model=model if model is not None else make_model(),
            args=args or arguments(TrainingArguments, **values),
            train_dataset=samples,
            eval_dataset=samples[:16],
            callbacks=None if callback is None else [callback],
        )
        trainer.train()
        return trainer

    return run


@pytest.fixture(scope="session")
def recorded(train: Any, digest: Any) -> Recorded:
    from memwall.integrations.trainer import MemwallCallback

    callback = MemwallCallback(budget="1TiB")
    trainer = train(callback)
    return Recorded(digest(trainer.model), callback.session)


@pytest.fixture(scope="session")
def plan(recorded: Recorded) -> Plan:
    """A plan that recomputes layers."""
    found = recorded.plan(below_plain=40 * MIB)
    assert any(isinstance(action, Recompute) for action in found.actions)
    return found


@pytest.fixture
def build(make_model: Any, samples: Any) -> Callable[..., Any]:
    """Builds a Trainer without training."""
    from transformers import Trainer, TrainingArguments

    def make(callback: Any, **settings: Any) -> Any:
        kinds = {key: settings.pop(key) for key in ("model_init",) if key in settings}
        args = settings.pop("args", None) or arguments(TrainingArguments, **settings)
        if not kinds:
            kinds["model"] = make_model()
        return Trainer(args=args, train_dataset=samples, callbacks=[callback] if callback else None, **kinds)

    return make
