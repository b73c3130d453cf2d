"""`memwall estimate` and `memwall plan --device`: the forecast for a device that is not here, as a user meets it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from memwall.cli.app import main
from memwall.plan.planfile import Plan
from memwall.predict.hardware import hardware_named
from memwall.trace.file import save_trace
from memwall.trace.record import record
from memwall.trace.spec import load_workload

SCHEMA = json.loads((Path(__file__).parents[1] / "contract" / "forecast.schema.json").read_text())
MIB = 1 << 20

# Activations outweigh the weights, and layers are alike, so that a plan has something to do.
LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 512,
    "max_position_embeddings": 2048,
}
FACTORY = """
import torch
from memwall.trace.workload import Workload

def small():
    return Workload(
        model=lambda: torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(4))),
        batch=lambda: torch.ones(64, 256),
        loss=lambda model, batch: model(batch).sum(),
        optimizer=lambda parameters: torch.optim.AdamW(parameters),
    )
"""

Run = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    return str(path)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command with --json; returns its status and the one object it prints."""

    def of(*arguments: str) -> tuple[int, dict[str, Any]]:
        status = main([*arguments, "--json"])
        return status, json.loads(capsys.readouterr().out)

    return of


OPTIONS = ("--batch", "4", "--seq", "1024", "--dtype", "bfloat16")


def estimated(run: Run, config: str, *more: str) -> tuple[int, dict[str, Any]]:
    return run("estimate", config, "--device", "h100-80gb", *OPTIONS, *more)


# -- estimate ----------------------------------------------------------------------------------------------------------


@pytest.mark.requires("transformers")
def test_the_object_keeps_the_contract_and_says_what_it_rests_on(run: Run, config: str) -> None:
    status, found = estimated(run, config)
    jsonschema.validate(found, SCHEMA)
    hardware = hardware_named("h100-80gb")
    peak = found["peak"]
    assert status == 0
    assert (found["device"], found["source"], found["tag"], found["fits"]) == ("h100-80gb", "fake", "predicted", True)
    assert found["budget_bytes"] == hardware.usable_bytes
    assert peak["process_bytes"] == hardware.context_bytes[0] + peak["reserved_bytes"]
    assert peak["reserved_bytes"] >= peak["allocated_bytes"] > 0
    assert set(found["phases"]) == {"build", "first_step", "steady_step", "eval", "save", "resume"}
    assert found["attention_kernels"] == {"cudnn": LLAMA["num_hidden_layers"]}
    assert found["step_seconds"] > 0
    assert "not yet measured on a GPU" in found["margin_basis"]
    assert any("nothing was measured on this device" in line for line in found["not_modelled"])


@pytest.mark.requires("transformers")
def test_the_same_question_twice_gives_the_same_bytes(capsys: pytest.CaptureFixture[str], config: str) -> None:
    shown = []
    for _ in range(2):
        main(["estimate", config, "--device", "l4", "--seq", "64", "--json"])
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1]


@pytest.mark.requires("transformers")
def test_the_status_says_whether_it_fits(run: Run, config: str) -> None:
    """0 with room for the margin, 4 without, 3 where even the forecast is more than the budget."""
    _, found = estimated(run, config)
    process, margin = found["peak"]["process_bytes"], found["margin_bytes"]
    for budget, expected, fits in (
        (process + margin, 0, True),
        (process + margin - 1, 4, False),
        (process, 4, False),
        (process // 2, 3, False),
    ):
        status, found = estimated(run, config, "--budget", str(budget))
        assert (status, found["fits"], found["budget_bytes"]) == (expected, fits, budget)
    assert any("memwall plan" in line for line in found["relaxations"])


@pytest.mark.requires("transformers")
def test_the_table_starts_with_the_verdict_and_ends_with_what_is_left_out(
    capsys: pytest.CaptureFixture[str], config: str
) -> None:
    assert main(["estimate", config, "--device", "h100-80gb", *OPTIONS, "--budget", "300MiB"]) == 3
    shown = capsys.readouterr().out
    words = " ".join(shown.split())
    assert shown.startswith("✗ does not fit: ")
    assert "h100-80gb (NVIDIA H100 SXM5 80GB)" in words
    assert "cudnn (6 calls)" in words
    assert "optimizer state" in words
    assert "What would make it fit:" in shown
    assert "Predicted, not measured. Not modelled: nothing was measured on this device" in words


def test_a_factory_is_estimated_as_well(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "training.py"
    path.write_text(FACTORY)
    status, found = run("estimate", f"{path}:small", "--device", "a100-40gb")
    jsonschema.validate(found, SCHEMA)
    assert status == 0
    assert found["micro_batch"] == 64


@pytest.mark.requires("transformers")
@pytest.mark.parametrize(
    ("change", "arguments", "message"),
    [
        ({}, ("--device", "h100"), "'h100' is no device that memwall has figures for; closest are h100-80gb, h100-p"),
        ({"model_type": "lama"}, ("--device", "l4"), "model_type 'lama' is not known to the installed transformers"),
        ({"auto_map": {"x": "y"}}, ("--device", "l4"), "'auto_map' asks for code that the model brings along"),
        ({"vocab_size": None}, ("--device", "l4"), "config.json: "),
        ({"num_hidden_layers": 10**9}, ("--device", "l4"), "'num_hidden_layers' is 1000000000; expected 1 to 2000"),
        ({}, ("--device", "l4", "--dtype", "int8"), "dtype 'int8' is not known; expected one of float32, bfloat16"),
        ({}, ("--device", "l4", "--seq", "99999"), "sequence 99999 is more than the 2048 positions"),
        ({}, ("--device", "l4", "--budget", "much"), "--budget: 'much' is not a size"),
    ],
)
def test_bad_input_is_one_clear_error(
    change: dict[str, Any],
    arguments: tuple[str, ...],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**LLAMA, **change}))
    assert main(["estimate", str(path), *arguments]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("memwall: ")
    assert message in shown.err


# -- the worst batch, all phases ---------------------------------------------------------------------------------------

OUTLIER = 1_500


@pytest.fixture
def data(tmp_path: Path) -> str:
    """Samples of 100 to 163 tokens for a hundred batches of four, and a long one in the 50th."""
    lengths = [100 + number % 64 for number in range(400)]
    lengths[4 * 49 + 2] = OUTLIER
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps({"length": length}) + "\n" for length in lengths))
    return str(path)


@pytest.mark.requires("transformers")
def test_an_outlier_of_the_data_decides_the_forecast(run: Run, config: str, data: str) -> None:
    """The forecast is that of its length, and says which sample it is and when it comes."""
    common = ("estimate", config, "--device", "h100-80gb", "--batch", "4", "--dtype", "bfloat16")
    _, found = run(*common, "--worst-batch", "dataset", "--data", data)
    jsonschema.validate(found, SCHEMA)
    choice = found["worst_batch"]
    assert (choice["rule"], choice["num_samples"], choice["padded_length"]) == ("dataset", 4, OUTLIER)
    assert (choice["longest_sample"], choice["longest_step"]) == (199, 50)
    _, same = run(*common, "--seq", str(OUTLIER))
    # Padded to it, the other samples need a mask, and with it another attention kernel and more memory.
    assert found["peak"]["allocated_bytes"] > same["peak"]["allocated_bytes"]
    assert same["worst_batch"] is None
    _, usual = run(*common, "--worst-batch", "p99", "--data", data)
    assert (usual["worst_batch"]["padded_length"], usual["worst_batch"]["num_longer_batches"]) == (163, 1)
    assert usual["peak"]["process_bytes"] < found["peak"]["process_bytes"]
    assert any(line.startswith("1 of 100 batches, which are longer") for line in usual["not_modelled"])
    _, longest = run(*common, "--worst-batch", "max-length")
    assert longest["worst_batch"]["padded_length"] == LLAMA["max_position_embeddings"]


@pytest.mark.requires("transformers")
def test_the_table_names_the_worst_batch(capsys: pytest.CaptureFixture[str], config: str, data: str) -> None:
    common = ("estimate", config, "--device", "h100-80gb", "--batch", "4")
    for options, expected in (
        (("dataset", "--data", data), "4 x 1500 tokens: the longest of 100 batches"),
        (("p99", "--data", data), "1.0% are longer, the longest by sample 199, 1500 tokens, in step 50 as read"),
        (("dataset", "--data", data, "--seq", "200"), "in step 50 as read; 1 longer sample taken as cut"),
        (("max-length",), "4 x 2048 tokens: every sample as long as allowed"),
    ):
        main([*common, "--worst-batch", *options])
        shown = capsys.readouterr().out
        # The path of the data is folded wherever the column ends.
        assert "".join(expected.split()) in "".join(shown.split())


@pytest.mark.requires("transformers")
def test_evaluation_saving_and_resuming_have_peaks_of_their_own(run: Run, config: str) -> None:
    _, found = estimated(run, config)
    phases, host = found["phases"], found["host"]
    held = {name: phases[name]["allocated_bytes"] for name in phases}
    assert held["build"] < held["resume"] <= held["save"] < held["eval"] < held["steady_step"]
    assert found["peak"]["allocated_bytes"] == max(held.values())
    assert phases["save"]["host_bytes"] - phases["steady_step"]["host_bytes"] == host["weights_bytes"]
    assert phases["resume"]["host_bytes"] == host["process_bytes"][0] + host["state_bytes"]
    assert found["peak"]["host_bytes"] == max(phase["host_bytes"] for phase in phases.values())
    assert phases["save"]["disk_bytes"] == host["weights_bytes"] + host["state_bytes"]
    order = ("build", "first_step", "steady_step", "eval", "save", "resume")
    reached = [name for name in order if phases[name]["reserved_bytes"] == found["peak"]["reserved_bytes"]]
    assert found["peak_phase"] == reached[0]
    assert not any("evaluation, saving and resuming" in line for line in found["not_modelled"])


@pytest.mark.requires("transformers")
def test_a_large_batch_in_evaluation_can_be_what_does_not_fit(run: Run, config: str) -> None:
    _, plain = estimated(run, config)
    budget = str(plain["peak"]["process_bytes"])
    assert estimated(run, config, "--budget", budget)[0] == 4
    status, found = estimated(run, config, "--budget", budget, "--eval-batch", "64")
    assert (status, found["peak_phase"]) == (3, "eval")
    assert found["phases"]["steady_step"] == plain["phases"]["steady_step"]
    assert found["relaxations"][0] == "a smaller batch in evaluation: --eval-batch N"


@pytest.mark.requires("transformers")
def test_accumulation_keeps_gradients_and_the_batches_of_all_micro_batches(run: Run, config: str) -> None:
    (_, one), (_, two), (_, eight) = (estimated(run, config, "--accumulate", str(n)) for n in (1, 2, 8))
    inputs = 3 * 4 * 1024 * 8  # tokens, mask and labels
    assert [found["waiting_batch_bytes"] for found in (one, two, eight)] == [0, inputs, 7 * inputs]
    steady = [found["phases"]["steady_step"]["allocated_bytes"] for found in (one, two, eight)]
    assert steady[1] > steady[0]
    assert steady[2] - steady[1] == 6 * inputs
    assert eight["num_micro_batches"] == 8
    assert eight["attention_kernels"] == {"cudnn": 8 * LLAMA["num_hidden_layers"]}
    # The optimizer runs once, everything else eight times.
    assert 4 * two["step_seconds"] > eight["step_seconds"] > 3 * two["step_seconds"]
    assert one["step_seconds"] < two["step_seconds"] < 2 * one["step_seconds"]


def test_a_model_that_cannot_be_evaluated_is_estimated_without(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "training.py"
    path.write_text(
        FACTORY.replace("model(batch).sum()", "model(batch).sum() if model.training else model(batch.missing)")
    )
    _, found = run("estimate", f"{path}:small", "--device", "l4")
    assert "eval" not in found["phases"]
    assert any("has no attribute 'missing'" in line for line in found["not_modelled"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("longest",), "--worst-batch: 'longest' is not known; expected one of max-length, dataset, p99"),
        (("dataset",), "--worst-batch dataset needs --data FILE: a .jsonl file whose objects have 'input_ids'"),
        (("max-length", "--data", "d"), "--data d: say which batch of it to forecast: --worst-batch dataset, or p99"),
        (("p99", "--data", "missing"), "cannot read missing: No such file or directory; expected a .jsonl"),
    ],
)
def test_a_batch_that_cannot_be_found_is_one_clear_error(
    options: tuple[str, ...], message: str, config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in (("estimate",), ("plan", "--budget", "50%")):
        assert main([*command, config, "--device", "l4", "--worst-batch", *options]) == 2
        assert message in capsys.readouterr().err


# -- plan --device -----------------------------------------------------------------------------------------------------


@pytest.mark.requires("transformers")
def test_a_plan_for_a_device_fits_what_its_allocator_would_reserve(run: Run, config: str, tmp_path: Path) -> None:
    """GIVEN a budget below what the step needs THEN blocks are recomputed until the simulated process fits."""
    _, plain = estimated(run, config)
    budget = plain["peak"]["process_bytes"] + plain["margin_bytes"] - 150 * MIB
    output = tmp_path / "plan.json"
    command = ("plan", config, "--device", "h100-80gb", *OPTIONS, "--budget", str(budget), "-o", str(output))
    status, found = run(*command)
    jsonschema.validate(found, SCHEMA)
    assert status == 0
    assert found["fits"]
    assert {action["kind"] for action in found["actions"]} == {"recompute"}
    assert found["peak"]["process_bytes"] + found["margin_bytes"] <= budget
    assert found["peak"]["reserved_bytes"] >= found["peak"]["allocated_bytes"]
    assert found["plain_peak"]["process_bytes"] > found["peak"]["process_bytes"]
    assert found["step_seconds"] > found["plain_step_seconds"]
    assert Plan.load(output).actions


@pytest.mark.requires("transformers")
def test_host_memory_is_the_next_tier_of_a_device(run: Run, config: str) -> None:
    """WHEN nothing fits THEN host memory is named as a way out, unless it was given already."""
    command = ("plan", config, "--device", "h100-80gb", *OPTIONS, "--budget", "400MiB")
    for options, is_offered in (((), True), (("--host", "64GiB"), False)):
        status, found = run(*command, *options)
        assert (status, found["fits"]) == (3, False)
        assert any("--host SIZE" in line for line in found["relaxations"]) == is_offered


def test_a_trace_recorded_on_a_cpu_is_planned_for_a_device(run: Run, tmp_path: Path) -> None:
    (tmp_path / "training.py").write_text(FACTORY)
    path = tmp_path / "t.trace"
    save_trace(record(load_workload(f"{tmp_path / 'training.py'}:small")), path)
    status, found = run("plan", str(path), "--device", "l4", "--budget", "50%")
    jsonschema.validate(found, SCHEMA)
    assert status == 0
    assert found["budget_bytes"] == hardware_named("l4").usable_bytes // 2
    assert found["peak"]["process_bytes"] >= hardware_named("l4").context_bytes[0]
    assert any("machine that recorded the trace" in line for line in found["not_modelled"])


def test_options_of_a_configuration_need_a_device(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "t.trace", "--budget", "1GiB", "--batch", "2"]) == 2
    assert "--batch: only for a config.json together with --device NAME" in capsys.readouterr().err


@pytest.mark.requires("transformers")
def test_a_plan_is_made_for_the_worst_batch(
    run: Run, config: str, data: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The plan fits the outlier's batch, says so, and keeps it in its file."""
    output = tmp_path / "plan.json"
    command = ("plan", config, "--device", "h100-80gb", "--batch", "4", "--dtype", "bfloat16", "--budget", "5GiB")
    status, found = run(*command, "--worst-batch", "dataset", "--data", data, "-o", str(output))
    jsonschema.validate(found, SCHEMA)
    assert status == 0
    assert found["worst_batch"]["longest_step"] == 50
    forecast = Plan.load(output).forecast
    assert forecast.worst_batch is not None
    assert forecast.worst_batch.padded_length == OUTLIER
    _, same = run(*command, "--seq", str(OUTLIER))
    assert found["plain_peak"]["allocated_bytes"] > same["plain_peak"]["allocated_bytes"]
    assert main([*command, "--worst-batch", "max-length"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "Worst batch: 4 x 2048 tokens: every sample as long as allowed." in shown
    status, found = run(*command[:-1], "310MiB", "--worst-batch", "dataset", "--data", data)
    assert (status, found["fits"], found["worst_batch"]["padded_length"]) == (3, False, OUTLIER)
    assert main(["plan", "t.trace", "--budget", "1GiB", "--worst-batch", "max-length"]) == 2
    assert "--worst-batch: only for a config.json together with --device NAME" in capsys.readouterr().err
