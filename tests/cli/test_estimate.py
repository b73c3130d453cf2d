"""`memwall estimate`: the forecast for a device that is not here, as a user meets it."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
import torch
from figures import sizes_not_in, untagged, without_unit
from forecasts import FACTORY, LLAMA, OPTIONS, SCHEMA, Run, estimated

import memwall
from memwall.cli.app import main
from memwall.machine.hardware import hardware_named
from memwall.units import format_bytes

pytestmark = pytest.mark.slow


@pytest.mark.requires("transformers")
def test_the_object_keeps_the_contract_and_says_what_it_rests_on(run: Run, config: str) -> None:
    status, found = estimated(run, config)
    jsonschema.validate(found, SCHEMA)
    assert (without_unit(found), untagged(found)) == ([], [])
    hardware = hardware_named("h100-80gb")
    peak = found["peak"]
    assert status == 0
    assert (found["device"], found["source"], found["tag"], found["fits"]) == ("h100-80gb", "fake", "simulated", True)
    assert found["budget_bytes"] == hardware.usable_bytes
    assert peak["process_bytes"] == hardware.context_bytes[0] + peak["reserved_bytes"]
    assert peak["reserved_bytes"] >= peak["allocated_bytes"] > 0
    assert set(found["phases"]) == {"build", "first_step", "steady_step", "eval", "save", "resume"}
    assert found["attention_kernels"] == {"cudnn": LLAMA["num_hidden_layers"]}
    assert found["attention_calls"] == [
        {"module": f"model.layers.{layer}.self_attn", "kernel": "cudnn", "num_calls": 1}
        for layer in range(LLAMA["num_hidden_layers"])
    ]
    assert found["step_seconds"] > 0
    assert "not yet measured on a GPU" in found["margin_basis"]
    assert any("nothing was measured on this device" in line for line in found["not_modelled"])


@pytest.mark.requires("transformers")
def test_the_same_question_twice_gives_the_same_bytes(
    capsys: pytest.CaptureFixture[str], config: str, recordings: dict[str, Any]
) -> None:
    shown = []
    for _ in range(2):
        recordings.clear()
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
    assert main(["estimate", config, "--device", "h100-80gb", *OPTIONS, "--budget", "300MiB", "-v"]) == 3
    shown = capsys.readouterr().out
    words = " ".join(shown.split())
    assert shown.startswith("✗ does not fit: ")
    assert "h100-80gb (NVIDIA H100 SXM5 80GB)" in words
    assert "cudnn (3 calls)" in words
    assert "optimizer state" in words
    assert "What would make it fit:" in shown
    assert "Predicted, not measured. Not modelled: nothing was measured on this device" in words


@pytest.mark.requires("transformers")
def test_twelve_lines_say_what_matters(
    run: Run, config: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """GIVEN a forecast that fits WHEN nothing else is asked for THEN it is short, and says what it leaves out."""
    monkeypatch.setenv("COLUMNS", "160")
    asked = ["estimate", config, "--device", "h100-80gb", *OPTIONS]
    _, found = run(*asked)
    assert main(asked) == 0
    shown = capsys.readouterr().out
    lines = [" ".join(line.split()) for line in shown.splitlines() if line.strip()]
    assert len(lines) <= 12
    assert lines[0].startswith("✓ fits: ")
    assert lines[1] == "device h100-80gb"
    peak = next(line for line in lines if line.startswith("peak "))
    assert peak.startswith(f"peak {format_bytes(found['peak']['process_bytes'], rounding='up')}, first in ")
    assert lines[2].startswith(f"workload weights in {found['workload']['dtype']}")
    assert "route translate, simulated; --route phantom has workspaces of cuDNN and temporaries of CUB as well" in lines
    assert lines[-1].endswith(f"and {len(found['not_modelled'])} things that are not modelled.")


@pytest.mark.requires("transformers")
def test_what_was_assumed_is_always_shown(run: Run, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """GIVEN a configuration in bfloat16 WHEN nothing is asked for THEN dtype, optimizer, batch and length are said."""
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**LLAMA, "torch_dtype": "bfloat16"}))
    _, found = run("estimate", str(config), "--device", "h100-80gb")
    assert found["workload"] == {
        "dtype": "bfloat16",
        "autocast": "none",
        "optimizer": "AdamW",
        "micro_batch": 1,
        "num_micro_batches": 1,
        "input_shape": [1, 2048],
        "tokens_per_sample": 2048,
    }
    assert main(["estimate", str(config), "--device", "h100-80gb"]) == 0
    assert "weights in bfloat16; AdamW; batch 1 x 2,048 tokens" in " ".join(capsys.readouterr().out.split())


@pytest.mark.requires("transformers")
def test_an_explicit_dtype_wins_over_that_of_the_configuration(run: Run, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**LLAMA, "torch_dtype": "bfloat16"}))
    more = ("--device", "h100-80gb", "--dtype", "fp32", "--autocast", "bf16", "--seq", "64", "--accumulate", "4")
    _, found = run("estimate", str(config), *more)
    assumed = found["workload"]
    assert (assumed["dtype"], assumed["autocast"], assumed["num_micro_batches"]) == ("float32", "bfloat16", 4)


def test_a_factory_is_estimated_as_well(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "training.py"
    path.write_text(FACTORY)
    status, found = run("estimate", f"{path}:small", "--device", "a100-40gb")
    jsonschema.validate(found, SCHEMA)
    assert status == 0
    assert found["micro_batch"] == 64
    assumed = found["workload"]
    assert (assumed["dtype"], assumed["optimizer"]) == ("float32", "AdamW")
    assert (assumed["input_shape"], assumed["tokens_per_sample"]) == ([64, 256], None)


@pytest.mark.requires("transformers")
def test_python_gives_the_same_forecast_as_the_command(run: Run, config: str) -> None:
    _, found = estimated(run, config, "--budget", "50%")
    asked = memwall.estimate(config, "h100-80gb", batch=4, sequence=1024, dtype="bf16", budget="50%")
    assert json.loads(msgspec.json.encode(asked)) == found


def test_a_workload_is_estimated_without_a_file() -> None:
    workload = memwall.Workload(
        model=lambda: torch.nn.Linear(256, 256),
        batch=lambda: torch.ones(64, 256),
        loss=lambda model, batch: model(batch).sum(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
    found = memwall.estimate(workload, "l4")
    assert (found.fits, found.micro_batch) == (True, 64)
    for options, message in (
        ({"batch": 2}, r"^--batch: the workload is a factory, which decides that itself"),
        ({"accumulate": 0}, r"^accumulate is 0, eval_batch None; expected at least 1 of each$"),
        ({"budget": "much"}, r"^'much' is not a size"),
    ):
        with pytest.raises(memwall.UsageError, match=message):
            memwall.estimate(workload, "l4", **options)
    with pytest.raises(memwall.UsageError, match="'l5' is no device that memwall has figures for"):
        memwall.estimate(workload, "l5")


@pytest.mark.requires("transformers")
@pytest.mark.parametrize(
    ("change", "arguments", "message"),
    [
        ({}, ("--device", "h100"), "'h100' is no device that memwall has figures for; closest are h100-80gb, h100-p"),
        ({"model_type": "lama"}, ("--device", "l4"), "model_type 'lama' is not known to the installed transformers"),
        ({"auto_map": {"x": "y"}}, ("--device", "l4"), "'auto_map' asks for code that the model brings along"),
        ({"vocab_size": None}, ("--device", "l4"), "config.json: "),
        ({"num_hidden_layers": 10**9}, ("--device", "l4"), "'num_hidden_layers' is 1000000000; expected 1 to 2000"),
        ({}, ("--device", "l4", "--dtype", "int8"), "--dtype: 'int8' is not known; expected one of float32, bfloat16"),
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


@pytest.mark.requires("transformers")
def test_a_trainers_options_can_be_asked_for(run: Run, config: str) -> None:
    """WHEN forward runs under autocast and layers are recomputed THEN each takes less than without."""
    common = ("estimate", config, "--device", "h100-80gb", "--batch", "4", "--seq", "1024", "--optimizer", "sgd")
    peaks = [
        run(*common, *more)[1]["phases"]["steady_step"]["allocated_bytes"]
        for more in ((), ("--autocast", "bfloat16"), ("--autocast", "float16", "--checkpointing"))
    ]
    assert peaks[0] > 1.3 * peaks[1] > 1.3 * 1.3 * peaks[2]


@pytest.mark.requires("transformers")
def test_the_object_has_every_figure_of_the_table(
    run: Run, deep_config: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The holders at the peak are in both; phases stand in the order in which they happen, the largest marked."""
    monkeypatch.setenv("COLUMNS", "160")
    _, found = estimated(run, deep_config)
    main(["estimate", deep_config, "--device", "h100-80gb", *OPTIONS, "-v"])
    shown = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    for kind, at_peak in (("by_category", "In the peak, by category"), ("by_module", "In the peak, by module")):
        shares = found["in_peak"][kind]
        assert sum(share["num_bytes"] for share in shares) == found["in_peak"]["live_bytes"]
        first = shown[shown.index(at_peak) + 3]
        assert first.startswith(f"{shares[0]['name'].replace('_', ' ')} {format_bytes(shares[0]['num_bytes'])} ")
    assert sizes_not_in(found, "\n".join(line for line in shown if " others " not in line)) == []
    start = shown.index("Predicted peaks") + 3
    rows = shown[start : start + 6]
    order = ("build", "first step", "steady step", "eval", "save", "resume")
    assert [row.startswith(name) for row, name in zip(rows, order, strict=True)] == [True] * 6
    assert [row.endswith("◄ peak") for row in rows] == [name.replace(" ", "_") == found["peak_phase"] for name in order]


@pytest.mark.requires("transformers")
def test_another_release_of_torch_has_another_allocator(
    run: Run, config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _, found = estimated(run, config, "--torch", "2.11")
    assert found["torch_version"].startswith("2.11")
    assert main(["estimate", config, "--device", "l4", "--torch", "newest"]) == 2
    assert "'newest' is not a torch version" in capsys.readouterr().err


@pytest.mark.requires("transformers")
def test_devices_are_compared_and_the_largest_batch_is_found(
    run: Run, config: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """GIVEN two cards WHEN the largest batch is asked for THEN each has its own; forecasts vary one real one."""
    _, one = estimated(run, config)
    real = msgspec.convert(one, memwall.planning.estimate.Estimate)

    def forecast(spec: str, device: str, *, batch: int, **_: Any) -> Any:
        budget = hardware_named(device).usable_bytes
        peak = msgspec.structs.replace(real.peak, process_bytes=batch * 2**30)
        fits = batch * 2**30 + real.margin_bytes <= budget
        return msgspec.structs.replace(
            real, device=device, micro_batch=batch, peak=peak, budget_bytes=budget, fits=fits
        )

    monkeypatch.setattr("memwall.cli.estimate_search.estimate", forecast)
    status, found = run("estimate", config, "--device", "l4, h100-80gb", "--batch", "max")
    assert (status, found["schema"], found["tag"]) == (0, "memwall.estimates/1", "simulated")
    assert (without_unit(found), untagged(found)) == ([], [])
    for device, each in zip(("l4", "h100-80gb"), found["estimates"], strict=True):
        assert each["device"] == device
        assert each["micro_batch"] == (hardware_named(device).usable_bytes - real.margin_bytes) // 2**30
    capsys.readouterr()
    assert main(["estimate", config, "--device", "l4", "--batch", "max"]) == 0
    assert "is the largest batch that fits" in capsys.readouterr().out
    assert main(["estimate", config, "--device", "l4", "--batch", "max", "--seq", "max"]) == 2


@pytest.mark.parametrize("size", ["0", "many"])
def test_a_batch_that_is_no_number_is_refused(size: str, config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", config, "--device", "l4", "--batch", size]) == 2
    assert f"--batch {size}: expected a whole number from 1 on, or max" in " ".join(capsys.readouterr().err.split())
