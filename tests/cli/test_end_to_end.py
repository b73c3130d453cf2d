"""profile, plan, run, verify, explain: the whole loop on an unmodified script, and the JSON that each step leaves."""

import contextlib
import io
import json
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import referencing
from figures import untagged, without_unit
from warm_python import warm_python

from memwall.cli.app import main

pytestmark = pytest.mark.slow

TESTS = Path(__file__).parents[1]
SCRIPT = (str(TESTS / "scripts" / "train_plain.py"), "--batch", "32", "--sequence", "128", "--steps", "3")


def memwall(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """A command in a process of its own, whose memory is not this one's."""
    return warm_python().run("-m", "memwall", *arguments, folder=folder, timeout_s=100)


def run_plainly(folder: Path, *script: str) -> None:
    done = warm_python().run(*script, folder=folder, timeout_s=100)
    assert done.returncode == 0, done.stderr


def planned(folder: Path, *arguments: str) -> tuple[int, str, str]:
    """Returns what `memwall plan` makes of the trace: status, and what is printed, in this process."""
    out, said = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2))
    with contextlib.chdir(folder), contextlib.redirect_stdout(out), contextlib.redirect_stderr(said):
        status = main(["plan", "t.trace", *arguments])
    for stream in (out, said):
        stream.seek(0)
    return status, out.read(), said.read()


def valid(record: Any, name: str) -> Any:
    """The record, if it follows the contract's schema of that name."""
    schemas = {path.name: json.loads(path.read_text()) for path in (TESTS / "contract").iterdir()}
    resources = [(uri, referencing.Resource.from_contents(schema)) for uri, schema in schemas.items()]
    registry = referencing.Registry().with_resources(resources)
    jsonschema.Draft202012Validator(schemas[name], registry=registry).validate(record)
    return record


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trace, forecast, plan and run report of one script, and its weights with and without memwall."""
    folder = tmp_path_factory.mktemp("loop")
    profiled = memwall(folder, "profile", "-o", "t.trace", *SCRIPT)
    assert profiled.returncode == 0
    assert profiled.stderr.endswith("the trace is t.trace; what would fit: memwall plan t.trace --budget SIZE\n")
    status, out, said = planned(folder, "--budget", "8GiB", "--json")
    assert status == 0, said
    (folder / "roomy.json").write_text(out)
    forecast = json.loads(out)
    budget = (forecast["smallest_feasible_budget_bytes"] + 2 * forecast["plain_peak"]["process_bytes"]) // 3
    status, out, said = planned(folder, "--budget", str(budget), "-o", "plan.json", "--json")
    assert status == 0, said
    (folder / "forecast.json").write_text(out)
    run = memwall(folder, "run", "--plan", "plan.json", "--report", "run.json", *SCRIPT, "--out", "planned.bin")
    assert run.returncode == 0, run.stderr
    run_plainly(folder, *SCRIPT, "--out", "plain.bin")
    return folder


def test_plan_prints_the_contract_s_forecast(folder: Path) -> None:
    roomy = valid(json.loads((folder / "roomy.json").read_text()), "forecast.schema.json")
    assert (roomy["fits"], roomy["actions"]) == (True, [])
    tight = valid(json.loads((folder / "forecast.json").read_text()), "forecast.schema.json")
    assert tight["fits"]
    assert {action["kind"] for action in tight["actions"]} & {"recompute", "offload", "allocator"}
    assert tight["peak"]["process_bytes"] + tight["margin_bytes"] <= tight["budget_bytes"]
    assert tight["peak"]["process_bytes"] < roomy["peak"]["process_bytes"]


def test_plan_prints_the_forecast_of_a_budget_that_nothing_fits(folder: Path) -> None:
    status, out, said = planned(folder, "--budget", "20MiB", "--json")
    assert status == 3
    forecast = valid(json.loads(out), "forecast.schema.json")
    assert forecast["fits"] is False
    assert forecast["smallest_feasible_budget_bytes"] > forecast["budget_bytes"] == 20 << 20
    assert forecast["relaxations"][0].startswith("halve the micro-batch")
    assert said.startswith("memwall: the budget of 20.0 MiB cannot be met: ")


def test_run_report_follows_the_contract(folder: Path) -> None:
    report = valid(json.loads((folder / "run.json").read_text()), "run.schema.json")
    assert report["forecast"] == json.loads((folder / "plan.json").read_text())["forecast"]
    assert report["measured"]["steps"] == 3
    assert report["within_budget"] == (report["measured"]["peak"]["process_bytes"] <= report["budget_bytes"])


def test_every_figure_has_a_unit_and_says_how_it_was_obtained(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """GIVEN the files and objects of the whole loop THEN no number is without unit, no record of them without tag."""
    records = [json.loads((folder / name).read_text()) for name in ("forecast.json", "plan.json", "run.json")]
    for command in (
        ("explain", f"{folder}/t.trace"),
        ("explain", f"{folder}/plan.json"),
        ("verify", f"{folder}/plan.json", f"{folder}/run.json"),
        ("diff", f"{folder}/plan.json", f"{folder}/plan.json"),
        ("doctor", "--disk", str(folder)),
    ):
        main([*command, "--json"])
        records.append(json.loads(capsys.readouterr().out))
    for record in records:
        assert (without_unit(record), untagged(record)) == ([], []), record["schema"]
    assert [record.get("tag") for record in records] == [
        "simulated",
        None,
        None,
        "cpu-measured",
        "simulated",
        None,
        None,
        None,
    ]
    plan, run = records[1], records[2]
    assert (plan["forecast"]["tag"], run["measured"]["tag"]) == ("simulated", "cpu-measured")


def test_the_gap_between_forecast_and_measurement_is_a_figure_of_its_own(folder: Path) -> None:
    report = json.loads((folder / "run.json").read_text())
    foreseen = report["forecast"]["phases"]["steady_step"]["process_bytes"]
    assert report["measured"]["not_itemised_bytes"] == report["measured"]["steady_peak_bytes"] - foreseen


def test_a_plan_names_the_phase_of_its_peak_and_what_was_measured(folder: Path) -> None:
    forecast = json.loads((folder / "forecast.json").read_text())
    assert set(forecast["phases"]) == {"steady_step"}
    assert (forecast["peak_phase"], forecast["measured_phases"]) == ("steady_step", [])


def test_the_plan_keeps_the_weights_bit_for_bit(folder: Path) -> None:
    assert (folder / "planned.bin").read_bytes() == (folder / "plain.bin").read_bytes()


def test_a_second_plan_of_the_same_trace_is_the_same_file_in_another_process(folder: Path) -> None:
    budget = json.loads((folder / "plan.json").read_text())["forecast"]["budget_bytes"]
    assert memwall(folder, "plan", "t.trace", "--budget", str(budget), "-o", "again.json").returncode == 0
    assert (folder / "again.json").read_bytes() == (folder / "plan.json").read_bytes()


def test_a_budget_that_only_the_margin_misses_has_status_4(folder: Path) -> None:
    least = json.loads((folder / "plan.json").read_text())["forecast"]["smallest_feasible_budget_bytes"]
    budget = least - (4 << 20)
    status, out, said = planned(folder, "--budget", str(budget), "--json")
    assert status == 4, said
    forecast = valid(json.loads(out), "forecast.schema.json")
    assert forecast["fits"] is False
    assert forecast["peak"]["process_bytes"] <= budget < forecast["peak"]["process_bytes"] + forecast["margin_bytes"]


def test_verify_reads_the_pair(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["verify", f"{folder}/plan.json", f"{folder}/run.json"])
    report = json.loads((folder / "run.json").read_text())
    predicted = report["forecast"]["phases"]["steady_step"]["process_bytes"]
    overall, steady = report["measured"]["peak"]["process_bytes"], report["measured"]["steady_peak_bytes"]
    assert status == (5 if overall > report["budget_bytes"] else 4 if steady > predicted else 0)
    assert "Prediction and measurement" in capsys.readouterr().out


@pytest.mark.parametrize(("place", "status"), [("forecast", 0), ("inside the margin", 4), ("over the budget", 5)])
def test_verify_status(folder: Path, tmp_path: Path, place: str, status: int) -> None:
    report = json.loads((folder / "run.json").read_text())
    predicted = report["forecast"]["phases"]["steady_step"]["process_bytes"]
    measured = {
        "forecast": predicted,
        "inside the margin": predicted + 4096,
        "over the budget": report["budget_bytes"] + 1,
    }
    report["measured"]["peak"]["process_bytes"] = report["measured"]["steady_peak_bytes"] = measured[place]
    report["within_budget"] = place != "over the budget"
    (tmp_path / "run.json").write_text(json.dumps(report))
    assert main(["verify", f"{folder}/plan.json", f"{tmp_path}/run.json", "--json"]) == status


def test_verify_refuses_a_run_under_another_plan(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", f"{folder}/t.trace", "--budget", "8GiB", "-o", f"{folder}/other.json"]) == 0
    capsys.readouterr()
    assert main(["verify", f"{folder}/other.json", f"{folder}/run.json"]) == 2
    assert capsys.readouterr().err.endswith("; give the plan that the run used (memwall run --plan)\n")


@pytest.mark.parametrize(("name", "words"), [("t.trace", "In the peak, by category"), ("plan.json", "what binds")])
def test_explain(folder: Path, name: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", f"{folder}/{name}"]) == 0
    assert words in capsys.readouterr().out


@pytest.mark.exhaustive  # in one process: tests/session/test_several_optimizers.py
def test_a_script_that_steps_muon_and_adamw_fits_with_the_same_weights(folder: Path) -> None:
    """GIVEN two optimizers on one model WHEN the budget needs recomputation THEN weights are the plain run's."""
    script = (*SCRIPT, "--muon")
    assert memwall(folder, "profile", "-o", "muon.trace", *script).returncode == 0
    roomy = json.loads(memwall(folder, "plan", "muon.trace", "--budget", "8GiB", "--json").stdout)
    budget = roomy["plain_peak"]["process_bytes"]  # the margin is on top of what is foreseen
    run = memwall(folder, "run", "--budget", str(budget), "--report", "muon.json", *script, "--out", "muon_planned.bin")
    assert run.returncode == 0, run.stderr
    run_plainly(folder, *script, "--out", "muon_plain.bin")
    assert (folder / "muon_planned.bin").read_bytes() == (folder / "muon_plain.bin").read_bytes()
    report = valid(json.loads((folder / "muon.json").read_text()), "run.schema.json")
    forecast, measured = report["forecast"], report["measured"]
    assert report["within_budget"]
    assert "recompute" in {action["kind"] for action in forecast["actions"]}
    assert measured["steady_peak_bytes"] <= forecast["peak"]["process_bytes"] + forecast["margin_bytes"]


def test_run_with_json_prints_nothing_but_the_object(folder: Path) -> None:
    done = memwall(folder, "run", "--budget", "8GiB", "--json", *SCRIPT)
    assert done.returncode == 0
    report = valid(json.loads(done.stdout), "run.schema.json")
    assert report["forecast"]["actions"] == []
    assert report["measured"]["first_step_peak_bytes"] > 0
    assert "step 2 loss" in done.stderr


def test_profile_with_json_prints_nothing_but_the_object(folder: Path) -> None:
    done = memwall(folder, "profile", "-o", "second.trace", "--steps", "1", "--json", *SCRIPT)
    assert done.returncode == 0
    assert [step["kind"] for step in json.loads(done.stdout)["steps"]] == ["first"]
    assert "step 0 loss" in done.stderr
    assert "step 1 loss" not in done.stderr
