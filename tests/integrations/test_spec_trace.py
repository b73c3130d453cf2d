"""Any SPEC: a configuration or a factory, and what neither is."""

from pathlib import Path
from typing import Any

import pytest
import torch

from memwall.errors import TraceError, UsageError
from memwall.integrations.spec_trace import device_run_of_spec, workload_of_spec
from memwall.machine.hardware import hardware_named
from memwall.predict.curve import live_peak_bytes

A100 = hardware_named("a100-80gb")
FACTORY = """
import torch
from memwall import Workload

def small():
    return Workload(
        model=lambda: torch.nn.Linear(8, 8),
        batch=lambda: torch.ones(4, 8),
        loss=lambda model, batch: model(batch).sum(),
        optimizer=lambda parameters: torch.optim.AdamW(parameters),
    )

def broken():
    workload = small()
    return Workload(
        model=workload.model, batch=lambda: torch.ones(4, 9), loss=workload.loss, optimizer=workload.optimizer
    )
"""


def test_a_spec_may_be_a_factory_which_leaves_nothing_open(tmp_path: Path) -> None:
    path = tmp_path / "training.py"
    path.write_text(FACTORY)
    assert device_run_of_spec(f"{path}:small", A100).training.source == "fake"
    refused = (
        r"^--batch, --dtype: '.*training\.py:small' is a factory, which decides that itself; leave it out, or give a "
        r"Hugging Face config\.json$"
    )
    with pytest.raises(UsageError, match=refused):
        workload_of_spec(f"{path}:small", batch=2, dtype="bfloat16")
    failed = r"broken': a step on fake tensors failed: RuntimeError: a and b must have same .*training\.py, line \d+\)$"
    with pytest.raises(TraceError, match=failed):
        device_run_of_spec(f"{path}:broken", A100)


@pytest.mark.parametrize("name", ["meta-llama/Llama-3-8B", "gpt2"])
def test_a_name_on_the_hub_is_refused_with_what_to_do(name: str) -> None:
    with pytest.raises(UsageError, match=rf"^'{name}' names no workload; expected package\.module:factory") as error:
        workload_of_spec(name)
    assert f"nothing is downloaded here, so run `hf download {name} config.json --local-dir FOLDER`" in str(error.value)
    assert "gated, log in and accept its licence" in str(error.value)


def test_a_missing_file_is_not_taken_for_a_name_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    for spec in ("models/llama", "run.trace", "../llama", str(tmp_path / "llama")):
        with pytest.raises(UsageError, match=r"names no workload; .* of a Hugging Face model on this disk$"):
            workload_of_spec(spec)


# -- lower precision ---------------------------------------------------------------------------------------------------

UNDER_AUTOCAST = """
import json
import torch
from memwall import Workload
from memwall.integrations.hugging_face.hf_spec import hugging_face_workload

def loss(model, batch):
    with torch.autocast("cuda", dtype=torch.bfloat16):
        out = model(**batch)
    out.logits = out.logits.float()
    return out.loss

def workload():
    given = hugging_face_workload(CONFIG, batch=2, sequence=16)
    return Workload(model=given.model, batch=given.batch, loss=loss, optimizer=given.optimizer)
"""


@pytest.mark.slow
@pytest.mark.requires("transformers")
def test_autocast_is_that_of_the_trainer(tmp_path: Path, written: Any) -> None:
    """WHEN autocast is asked for THEN the step is that of a loop with torch.autocast and results in float32 again."""
    spec = written(TINY)
    path = tmp_path / "training.py"
    path.write_text(UNDER_AUTOCAST.replace("CONFIG", repr(spec)))
    asked = device_run_of_spec(spec, A100, batch=2, sequence=16, autocast="bfloat16").training
    by_hand = device_run_of_spec(f"{path}:workload", A100).training
    assert asked.autocast == by_hand.autocast == "bfloat16"
    assert [live_peak_bytes(step, "cuda") for step in asked.steps] == [
        live_peak_bytes(step, "cuda") for step in by_hand.steps
    ]
    names = [
        [trace.names[op.name] for op in trace.steps[1].ops if "profiler" not in trace.names[op.name]]
        for trace in (asked, by_hand)
    ]
    assert names[0] == names[1]


@pytest.mark.slow
@pytest.mark.requires("transformers")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_autocast_halves_activations_and_keeps_weights(dtype: str, written: Any) -> None:
    plain, lower = (
        device_run_of_spec(written(TINY), A100, batch=8, sequence=64, autocast=autocast) for autocast in (None, dtype)
    )
    assert (plain.training.autocast, lower.training.autocast) == ("none", dtype)

    def held(trace: Any, *categories: str) -> int:
        return sum(storage.nbytes for storage in trace.steps[1].storages if storage.category in categories)

    standing = ("parameter", "gradient", "optimizer_state")
    assert held(lower.training, *standing) == held(plain.training, *standing)
    assert held(lower.training, "activation") < 0.8 * held(plain.training, "activation")
    assert lower.evaluation is not None
    assert lower.evaluation.autocast == dtype


def test_a_factory_may_be_run_under_autocast_and_leaves_no_hook(tmp_path: Path) -> None:
    path = tmp_path / "training.py"
    path.write_text(FACTORY)
    assert device_run_of_spec(f"{path}:small", A100, autocast="float16").training.autocast == "float16"
    workload = workload_of_spec(f"{path}:small", autocast="bfloat16")
    model = workload.make_model()
    assert workload.loss(model, torch.ones(4, 8)).dtype == torch.float32
    with pytest.raises(RuntimeError, match="must have the same dtype"):
        workload.loss(model, torch.ones(4, 9, dtype=torch.float64))
    assert not torch.is_autocast_enabled("cpu")
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    with pytest.raises(UsageError, match=r"^--autocast: 'float8' is not known; expected one of bfloat16, float16$"):
        workload_of_spec(f"{path}:small", autocast="float8")
    with pytest.raises(UsageError, match=r"^--checkpointing: '.*:small' is a factory, which decides that itself"):
        workload_of_spec(f"{path}:small", is_checkpointed=True)


# -- the batch that gives the peak -------------------------------------------------------------------------------------

TINY = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 128,
}


def test_a_factory_decides_its_batches_itself(tmp_path: Path) -> None:
    path = tmp_path / "training.py"
    path.write_text(FACTORY)
    with pytest.raises(UsageError, match=r"^--eval-batch: '.*:small' is a factory, which decides that itself"):
        device_run_of_spec(f"{path}:small", A100, eval_batch=2)
    run = device_run_of_spec(f"{path}:small", A100)
    assert (len(run.training.steps), run.training.device) == (2, "cuda")
    assert run.evaluation is not None
    assert run.evaluation.device == "cuda"


@pytest.mark.slow
@pytest.mark.requires("transformers")
def test_training_is_recorded_the_same_with_and_without_an_evaluation(written: Any) -> None:
    spec = written(TINY)
    run = device_run_of_spec(spec, A100, batch=2, sequence=16, eval_batch=4)
    assert run.training.steps == device_run_of_spec(spec, A100, batch=2, sequence=16).training.steps
    path = Path(spec) / "training.py"
    path.write_text(FACTORY)
    with pytest.raises(TraceError, match=r"broken': a step on fake tensors failed: RuntimeError"):
        device_run_of_spec(f"{path}:broken", A100)
