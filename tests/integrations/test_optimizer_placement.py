"""Optimizer state on disk under the Trainer, Accelerate and the launcher: the same bits, saved and resumed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from combinations import exhaustive
from plans import plan_of
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader

from memwall.apply.optimizer_state import state_keeper
from memwall.integrations.launcher import run_script
from memwall.planning.planfile import Plan
from memwall.planning.techniques.optimizer_state import OptimizerPlacement
from memwall.planning.techniques.parameters import ParameterPlacement
from memwall.session.session import Session

KIB = 1 << 10
SCRIPT = Path(__file__).parents[1] / "scripts" / "train_plain.py"
pytestmark = [pytest.mark.requires("transformers", "accelerate"), pytest.mark.timeout(120), pytest.mark.slow]


def all_on_disk(model: nn.Module) -> Plan:
    action = OptimizerPlacement(tier="disk", resident_bytes=0, bucket_bytes=200 * KIB, min_bytes=4 * KIB)
    return plan_of(model, action, micro_batch=16)


def parameters_on_disk(model: nn.Module) -> Plan:
    away = ParameterPlacement(tier="disk", blocks=(), window_bytes=16 * KIB, min_bytes=4 * KIB, written_bytes=0)
    state = OptimizerPlacement(tier="disk", resident_bytes=0, bucket_bytes=200 * KIB, min_bytes=4 * KIB)
    return plan_of(model, away, state, micro_batch=16)


def state_in_memory(optimizer: torch.optim.Optimizer) -> int:
    tensors = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    return sum(t.nbytes for t in tensors if not t.is_meta and t.nbytes >= 4 * KIB)


def test_a_trainer_saves_and_resumes_state_that_is_on_disk(
    make_model: Any, samples: Any, digest: Callable[[nn.Module], str], tmp_path: Path
) -> None:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from memwall.integrations.trainer import MemwallCallback

    seen: list[int] = []

    class Watch(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
            seen.append(state_in_memory(optimizer.optimizer))

    def trained(folder: str, callback: Any = None, resume: str | None = None) -> nn.Module:
        args = TrainingArguments(
            output_dir=str(tmp_path / folder),
            per_device_train_batch_size=16,
            num_train_epochs=1,
            save_strategy="steps",
            save_steps=2,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        )
        callbacks = [] if callback is None else [callback, Watch()]
        trainer = Trainer(model=make_model(), args=args, train_dataset=samples, callbacks=callbacks)
        trainer.train(resume_from_checkpoint=resume)
        return trainer.model

    plan = all_on_disk(make_model())
    plain = digest(trained("plain"))
    assert digest(trained("disk", MemwallCallback(plan=plan, disk=str(tmp_path)))) == plain
    assert seen == [0, 0, 0]
    # Each one's checkpoint is the other's.
    assert digest(trained("plain", resume=str(tmp_path / "disk" / "checkpoint-2"))) == plain
    resumed = trained("disk", MemwallCallback(plan=plan, disk=str(tmp_path)), str(tmp_path / "plain" / "checkpoint-2"))
    assert digest(resumed) == plain
    assert seen == [0, 0, 0, 0]


def test_a_trainer_trains_and_saves_parameters_that_are_on_disk(
    make_model: Any, samples: Any, digest: Callable[[nn.Module], str], tmp_path: Path
) -> None:
    from transformers import Trainer, TrainingArguments

    from memwall.integrations.trainer import MemwallCallback

    def trained(folder: str, callback: Any = None) -> nn.Module:
        args = TrainingArguments(
            output_dir=str(tmp_path / folder),
            per_device_train_batch_size=16,
            num_train_epochs=1,
            save_strategy="steps",
            save_steps=2,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        )
        model = make_model()
        trainer = Trainer(
            model=model, args=args, train_dataset=samples, callbacks=[] if callback is None else [callback]
        )
        trainer.train()
        return model

    plain = trained("plain")
    callback = MemwallCallback(plan=parameters_on_disk(make_model()), disk=str(tmp_path))
    assert digest(trained("disk", callback)) == digest(plain)
    saved = [load_file(tmp_path / folder / "checkpoint-2" / "model.safetensors") for folder in ("plain", "disk")]
    assert {name: t.tolist() for name, t in saved[0].items()} == {name: t.tolist() for name, t in saved[1].items()}


def test_accelerates_optimizer_keeps_its_state_on_disk(
    make_model: Any, samples: Any, digest: Callable[[nn.Module], str], tmp_path: Path
) -> None:
    from accelerate import Accelerator

    from memwall.integrations.accelerate import MemwallPlugin

    digests = []
    for plan in (None, all_on_disk(make_model())):
        accelerator, model = Accelerator(cpu=True), make_model()
        parts = (model, torch.optim.AdamW(model.parameters(), lr=1e-3), DataLoader(samples, batch_size=16))
        plugin = MemwallPlugin(plan=plan, disk=str(tmp_path)) if plan is not None else None
        prepared = accelerator.prepare(*parts) if plugin is None else plugin.prepare(accelerator, *parts)
        model, optimizer, loader = prepared
        for batch in loader:
            accelerator.backward(model(**batch).loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            assert (state_in_memory(optimizer) == 0) == (plugin is not None)
        if plugin is not None:
            plugin.close()
        digests.append(digest(accelerator.unwrap_model(model)))
    assert digests[0] == digests[1]


@pytest.fixture
def plain_weights(tmp_path: Path) -> dict[str, Tensor]:
    """What the script trains by itself."""
    import runpy
    import sys

    argv, sys.argv = sys.argv, [str(SCRIPT), "--out", str(tmp_path / "plain.safetensors")]
    try:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    finally:
        sys.argv = argv
    found: dict[str, Tensor] = load_file(tmp_path / "plain.safetensors")
    return found


def test_the_launcher_follows_a_plan_file_with_a_placement(
    plain_weights: dict[str, Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The optimizer shows itself in its first step, which is recorded, and finds no room for its state.
    monkeypatch.setattr(state_keeper, "lacks_room", lambda *_: True)
    monkeypatch.setattr("memwall.session.recorded_step.MIN_STATE_BYTES", 4 * KIB)
    monkeypatch.setattr(state_keeper, "MIN_STATE_BYTES", 4 * KIB)
    out = tmp_path / "out.safetensors"
    first = Session(budget_bytes=1 << 40, disk=str(tmp_path))
    assert run_script(str(SCRIPT), ["--out", str(out)], first) == 0
    assert first.measured.first_step_bytes_to_tier > 0
    assert first.plan is not None
    assert first.plan.actions == ()
    assert {name: t.tolist() for name, t in load_file(out).items()} == {n: t.tolist() for n, t in plain_weights.items()}

    path = tmp_path / "plan.json"
    msgspec.structs.replace(all_on_disk(nn.Module()), model_fingerprint=first.plan.model_fingerprint).save(path)
    second = Session(plan=Plan.load(path), disk=str(tmp_path))
    assert run_script(str(SCRIPT), ["--out", str(out)], second) == 0
    assert second.measured.bytes_from_tier > 0
    assert {name: t.tolist() for name, t in load_file(out).items()} == {n: t.tolist() for n, t in plain_weights.items()}


@pytest.mark.parametrize("is_last", [exhaustive(False), True])
def test_what_is_on_disk_when_the_process_ends_is_not_brought_back(
    is_last: bool, plain_weights: dict[str, Tensor], tmp_path: Path
) -> None:
    out = tmp_path / "out.safetensors"
    first = Session(budget_bytes=1 << 40, disk=str(tmp_path))
    assert run_script(str(SCRIPT), ["--out", str(out)], first) == 0
    assert first.plan is not None
    plan = msgspec.structs.replace(parameters_on_disk(nn.Module()), model_fingerprint=first.plan.model_fingerprint)
    session = Session(plan=plan, disk=str(tmp_path))
    assert run_script(str(SCRIPT), ["--out", str(out)], session, is_last=is_last) == 0
    assert (session._live.in_effect.keeper.away_bytes > 0) == is_last
    assert (session._live.in_effect.parameters.away_bytes > 0) == is_last
    assert session.measured.bytes_from_tier > 0
    assert {name: t.tolist() for name, t in load_file(out).items()} == {n: t.tolist() for n, t in plain_weights.items()}
    session._live.in_effect.parameters.bring_back()
    session._live.in_effect.keeper.bring_back()
