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
    assert set(found["phases"]) == {"first_step", "steady_step"}
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
