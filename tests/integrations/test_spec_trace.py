"""Any SPEC: a configuration or a factory, and what neither is; the batch of a data set that a forecast is for."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_steps import record_fake
from torch.nn.utils.rnn import pad_sequence

from memwall.errors import TraceError, UsageError
from memwall.integrations.spec_trace import batch_of_spec, device_run_of_spec, workload_of_spec
from memwall.machine.hardware import hardware_named
from memwall.predict.curve import live_peak_bytes
from memwall.trace.trace_builder import TraceBuilder, run_recorded

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
T5_CHANGE = {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "max_position_embeddings": None}
VIT_CHANGE = {"model_type": "vit", "architectures": ["ViTForImageClassification"], "image_size": 32, "patch_size": 8}
BATCH, OUTLIER_STEP, OUTLIER_LENGTH = 2, 50, 96


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Samples of 8 to 15 tokens for 60 steps of two, and one long one in step 50."""
    lengths = [8 + number % 8 for number in range(60 * BATCH)]
    lengths[BATCH * (OUTLIER_STEP - 1) + 1] = OUTLIER_LENGTH
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps({"input_ids": [1] * length}) + "\n" for length in lengths))
    return path


@pytest.mark.slow
@pytest.mark.requires("transformers")
def test_the_peak_of_a_run_whose_longest_sample_comes_late_is_foreseen(data: Path, written: Any) -> None:
    """GIVEN an outlier in step 50 WHEN the batches are trained on THEN step 50 has the peak that was foreseen."""
    spec = written(TINY)
    choice = batch_of_spec(spec, "dataset", data=data, batch=BATCH)
    assert (choice.longest_step, choice.longest_sample) == (OUTLIER_STEP, BATCH * OUTLIER_STEP)
    shape = {"batch": choice.num_samples, "sequence": choice.padded_length}
    workload = workload_of_spec(spec, **shape, optimizer="adamw-foreach", is_padded=choice.is_padded)
    foreseen = live_peak_bytes(record_fake(workload, has_cpu_workspaces=True).steps[1], "cpu")
    rows = [json.loads(line)["input_ids"] for line in data.read_text().splitlines()]
    model = workload.make_model()
    optimizer = workload.make_optimizer(model)
    builder = TraceBuilder([model])
    peaks = {}
    for step in (1, OUTLIER_STEP - 1, OUTLIER_STEP):
        texts = rows[BATCH * (step - 1) : BATCH * step]
        tokens = pad_sequence([torch.tensor(text) for text in texts], batch_first=True)
        batch = {"input_ids": tokens, "attention_mask": (tokens > 0).long(), "labels": tokens.clone()}
        trace = run_recorded(builder, workload, model, optimizer, batch, num_steps=1)
        peaks[step] = live_peak_bytes(trace.steps[-1], "cpu")
    assert max(peaks, key=lambda step: peaks[step]) == OUTLIER_STEP
    assert peaks[OUTLIER_STEP] > 1.5 * peaks[OUTLIER_STEP - 1]
    assert foreseen == pytest.approx(peaks[OUTLIER_STEP], rel=0.02)


@pytest.mark.requires("transformers")
def test_a_percentile_leaves_the_outlier_out(data: Path, written: Any) -> None:
    """Sixty batches: the one that is longer is more than a hundredth of them, so it is the percentile itself."""
    spec = written(TINY)
    assert batch_of_spec(spec, "p99", data=data, batch=BATCH).padded_length == OUTLIER_LENGTH
    long = data.with_name("long.txt")
    long.write_text("96\n" + "12\n" * 299)
    choice = batch_of_spec(spec, "p99", data=long, batch=BATCH)
    assert (choice.padded_length, choice.num_longer_batches, choice.num_batches) == (12, 1, 150)


@pytest.mark.requires("transformers")
def test_without_data_samples_are_as_long_as_the_model_allows(written: Any) -> None:
    spec = written(TINY)
    assert batch_of_spec(spec, "max-length", batch=3).padded_length == 128
    assert batch_of_spec(spec, "max-length", batch=3, sequence=40).padded_length == 40
    assert batch_of_spec(spec, "max-length").num_samples == 1


@pytest.mark.requires("transformers")
@pytest.mark.parametrize(
    ("change", "rule", "sequence", "message"),
    [
        ({"max_position_embeddings": 64}, "dataset", None, r"sample 100 has 96 tokens, but .* has 64 positions; .*64$"),
        (T5_CHANGE, "max-length", None, r"max-length: nothing limits the positions of .*; give --seq N$"),
        (VIT_CHANGE, "max-length", None, r"batches for image classification are not padded to a number of tokens; "),
    ],
)
def test_a_batch_that_the_model_cannot_take_is_refused(
    change: dict[str, Any], rule: Any, sequence: int | None, message: str, data: Path, written: Any
) -> None:
    config = {name: value for name, value in {**TINY, **change}.items() if value is not None}
    with pytest.raises(UsageError, match=message):
        batch_of_spec(written(config), rule, data=data, batch=BATCH, sequence=sequence)


@pytest.mark.requires("transformers")
def test_samples_that_are_cut_fit_the_models_positions(data: Path, written: Any) -> None:
    spec = written({**TINY, "max_position_embeddings": 64})
    choice = batch_of_spec(spec, "dataset", data=data, batch=BATCH, sequence=64)
    assert (choice.padded_length, choice.num_cut_samples) == (64, 1)


def test_a_factory_decides_its_batches_itself(tmp_path: Path) -> None:
    path = tmp_path / "training.py"
    path.write_text(FACTORY)
    with pytest.raises(UsageError, match=r"^--worst-batch max-length: only with a Hugging Face config"):
        batch_of_spec(f"{path}:small", "max-length")
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
