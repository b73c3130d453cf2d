"""Every measured figure of the front page and docs/ is that of its result file; `prediction` has a test of its own.

A figure that is measured again must be written again, and nobody can write one that was not measured.
"""

import json
from pathlib import Path
from statistics import median
from typing import Any

import compiled_graphs
import faults
import faults_instants
import knob_report
import pytest
import ranks
import ranks_bytes
import ranks_bytes_phantom
import ranks_faults
import ranks_peers
import ranks_planning
import ranks_redo
import scenario_table
import start_up

ROOT = Path(__file__).parents[1]
# One line for all of them: which page a figure is on is the reader's matter.
PAGE = " ".join(" ".join(page.read_text() for page in (ROOT / "README.md", *ROOT.glob("docs/*.md"))).split())
WORKLOADS = {
    "gpt": "GPT, 12 layers",
    "vit": "ViT, 12 layers",
    "resnet": "ResNet, 16 blocks",
    "llama": "Llama, 10 layers",
}


SHORT_BATCHES = ("uniform_sorted", "uniform_unsorted", "skewed_sorted", "skewed_unsorted")


def result(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / "benchmarks" / "results" / "cpu" / f"{name}.json").read_text())
    assert "cpu-measured" in (found.get("tag"), found.get("kind"))
    return found


@pytest.fixture(scope="module")
def knobs() -> dict[str, Any]:
    return result("knobs")


def frontier_rows() -> list[dict[str, Any]]:
    """The largest cap takes as long as the others together, and has a file of its own."""
    return [row for name in ("frontier", "frontier_4gib") for row in result(name)["rows"]]


def cells_of(workload: dict[str, Any]) -> list[dict[str, Any]]:
    return [cell for race in workload["races"] for cell in race["cells"]]


def test_the_table_of_ranks_is_the_measured_one() -> None:
    simulated = json.loads((ROOT / "benchmarks" / "results" / "simulated" / "ranks.json").read_text())
    for name, cell in simulated["cells"].items():
        assert ranks.row(name, cell) in PAGE
    for name, cell in result("ranks")["cells"].items():
        assert ranks.row(name, cell) in PAGE
        if "predicted_bytes" in cell:
            assert cell["steady_bytes"] <= cell["budget_bytes"]
            assert abs(cell["predicted_bytes"] / cell["steady_bytes"] - 1) <= 0.05


def test_what_a_step_that_ranks_can_do_again_costs_is_what_was_measured() -> None:
    for line in ranks_redo.table(result("ranks_redo")["rows"]).splitlines():
        assert line in PAGE


def test_the_tables_of_bytes_of_ranks_are_what_was_counted() -> None:
    """Tensors are foreseen to 2 %, processes under a plan to 5 %."""
    about = result("ranks_bytes")
    simulated = json.loads((ROOT / "benchmarks" / "results" / "simulated" / "ranks_bytes.json").read_text())
    for line in (*ranks_bytes.table(about["cells"]).splitlines(), *ranks_bytes_phantom.table(simulated).splitlines()):
        assert line in PAGE
    counted = [(cell["predicted_bytes"], cell["measured_bytes"]) for cell in about["cells"].values()]
    counted += [(cell["predicted_bytes"], cell["counted_bytes"]) for cell in simulated["cells"].values()]
    assert all(abs(predicted / found - 1) < 0.02 for predicted, found in counted)
    for name, cell in about["cells"].items():
        by, form, num_ranks = name.split(", ")
        if form != "plain":
            plain = about["cells"][f"{by}, plain, {num_ranks}"]
            predicted = ranks_bytes.foreseen_process_bytes(form, cell, plain)
            assert abs(predicted / cell["process_bytes"] - 1) < 0.05


def test_the_table_of_the_peers_tests_is_the_measured_one() -> None:
    about = result("ranks_peers")
    for line in ranks_peers.table(about).splitlines():
        assert line in PAGE
    trained = [row for row in about["scripts"].values() if row.get("report_is_reported")]
    assert [row["verdict"] for row in trained] == ["as without", "as without"]


def test_how_long_a_plan_for_many_ranks_takes_is_what_was_measured() -> None:
    about = result("ranks_planning")
    for line in ranks_planning.table(about).splitlines():
        assert line in PAGE
    assert all(row["peak_bytes"] < 2e9 for row in about["plans"].values())


def test_the_table_of_faults_is_the_measured_one() -> None:
    for row in ranks_faults.table(result("ranks_faults")["parts"]):
        assert row in PAGE
    for row in faults_instants.table(result("faults"), faults.PARTS):
        assert row in PAGE


def test_what_becomes_of_the_corpus_is_what_was_counted() -> None:
    counted = result("scenarios")
    assert f"the {counted['num_scripts']} training scripts" in PAGE
    assert " ".join(scenario_table.table(counted)) in PAGE
    for counts in counted["outcomes"].values():
        assert sum(counts.values()) == counted["num_run"]
        assert set(counts) <= {"num_equal", "num_equal_dropped_with_a_reason", "num_one_clear_error"}


def test_what_verification_costs_is_what_was_measured() -> None:
    proofs = result("proofs")
    gpt, conv = (proofs[name]["share_of_step_ratio"] for name in ("gpt", "conv"))
    assert f"take {gpt:.2%} of a step".replace("%", " %") in PAGE
    assert f"small GPT and {conv:.2%} of one".replace("%", " %") in PAGE


def test_what_a_start_costs_is_what_was_measured() -> None:
    measured = result("start_up")
    for row in start_up.table(measured):
        assert row in PAGE
    assert f"adds {measured['steady']['added_to_plain_ratio']:.2%} to a step".replace("%", " %") in PAGE
    quartiles = "{:.1%} and {:.1%}".format(*measured["steady"]["added_to_plain_ratio_quartiles"])
    assert f"pairs, whose quartiles are {quartiles}".replace("%", " %") in PAGE
    assert measured["steady"]["added_to_plain_ratio"] < 0.01
    seconds = [measured["commands"][f"{name}_cpu_seconds"] for name in ("version", "help", "help_of_run")]
    assert "take {:.2f}, {:.2f} and {:.2f} s of a processor".format(*seconds) in PAGE
    doctor = measured["commands"]["doctor_cpu_seconds"] - measured["commands"]["import_torch_cpu_seconds"]
    assert f"`memwall doctor` {doctor:.2f} s more than `import torch`" in PAGE


def test_how_soon_a_run_is_gone_after_sigterm_is_what_was_measured() -> None:
    measured = result("ending_time")
    alone, beside = measured["alone"], measured["beside_others"]
    assert f"gone after {alone['most_seconds']:.1f} s at most, and after {beside['most_seconds']:.1f} s beside" in PAGE
    assert f"beside {beside['num_beside']} busy processes" in PAGE
    assert alone["num_runs"] == beside["num_runs"] == 3
    assert "in three runs each" in PAGE
    assert f"beside them a step took {beside['step_seconds']:.1f} s, and each that was done was committed" in PAGE
    assert alone["num_steps_lost"] == beside["num_steps_lost"] == 0
    assert beside["most_seconds"] < 10


def test_the_table_of_knobs_is_the_measured_one(knobs: dict[str, Any]) -> None:
    for workload in knobs["workloads"]:
        peaks = f"{workload['keep_all_bytes'] / 2**20:,.0f}, {workload['floor_bytes'] / 2**20:,.0f} MiB"
        cells = []
        for cell in cells_of(workload):
            ratio = "no knob" if cell["time_ratio"] is None else f"{cell['time_ratio']:.2f}"
            cells.append(f"{ratio} ({cell['time_ratio_to_heap_knob']:.2f})")
        assert f"| {WORKLOADS[workload['workload']]} | {peaks} | {' | '.join(cells)} |" in PAGE
    assert len(WORKLOADS) == len(knobs["workloads"])


def test_what_is_said_about_all_cells_holds_for_all(knobs: dict[str, Any]) -> None:
    cells = [cell for workload in knobs["workloads"] for cell in cells_of(workload)]
    errors = [cell["prediction_error"] for cell in cells]
    assert all(cell["failures"] == [] for cell in cells)
    assert f"No budget was exceeded in any of the {len(cells)} cells" in PAGE
    assert f"was {100 * min(errors):+.1f} to {100 * max(errors):+.1f} % off the measured one" in PAGE
    slowest = max(cell["time_ratio_to_plain"] for cell in cells if cell["share_percent"] == 10)
    assert f"At 10 % a step takes {slowest:.2f} times plain" in PAGE
    noise: dict[bool, float] = {True: 0.0, False: 0.0}
    for workload in knobs["workloads"]:
        is_resnet = workload["workload"] == "resnet"
        noise[is_resnet] = max(noise[is_resnet], *(abs(race["noise_ratio"] - 1) for race in workload["races"]))
    assert f"differed by up to {100 * noise[False]:.1f} %, on the ResNet by up to {100 * noise[True]:.0f} %" in PAGE


def test_the_benchmarks_page_shows_the_published_knobs(knobs: dict[str, Any]) -> None:
    page = (ROOT / "benchmarks" / "README.md").read_text()
    for text in (knob_report.summary(knobs), knob_report.cell_table(knobs)):
        assert text in page


def test_a_script_that_the_cap_kills_finishes_under_memwall() -> None:
    found = result("cap")
    shares = [row["share_percent"] for row in found["rows"]]
    assert f"killed at {shares[0]} % and at {shares[1]} % of its plain peak" in PAGE
    assert f"with the same weights after {found['num_steps']} steps" in PAGE
    for row in found["rows"]:
        assert row["plain"]["is_oom_killed"]
        assert row["memwall"]["status"] == 0
        assert row["memwall"]["has_same_weights"]
        assert row["memwall"]["num_steps"] == found["num_steps"]


def test_a_model_of_weights_that_the_cap_kills_finishes_with_its_parameters_on_disk() -> None:
    rows = result("cap_weights")["rows"]
    page = (ROOT / "benchmarks" / "README.md").read_text()
    for row in rows:
        planned = row["memwall"]
        assert row["plain"]["is_oom_killed"]
        assert row["plain"]["num_steps"] == 0
        assert planned["status"] == 0
        assert planned["has_same_weights"]
        assert "parameter-placement" in planned["actions"]
        assert planned["measured_peak_bytes"] < row["cap_bytes"]
        names = ("predicted_steady_peak_bytes", "measured_steady_peak_bytes", "measured_peak_bytes")
        predicted, steady, whole = (round(planned[name] / 2**20) for name in names)
        cap, group = (round(num_bytes / 2**20) for num_bytes in (row["cap_bytes"], planned["group_peak_bytes"]))
        share = row["share_percent"]
        line = f"| {share} % = {cap} MiB | killed | {group} MiB | {predicted}, {steady} MiB | {whole} MiB | yes |"
        assert line in page
    least = min(row["share_percent"] for row in rows)
    assert f"is killed at {least} % of its plain peak before its first step" in PAGE


def test_state_on_disk_costs_what_was_measured() -> None:
    cell = result("optimizer_state")["cells"][0]
    assert cell["optimizer"] == "AdamW"
    assert cell["has_same_weights"]
    peak = cell["memwall"]["peak_bytes"] / cell["plain"]["peak_bytes"]
    seconds = median(cell["memwall"]["step_seconds"]) / median(cell["plain"]["step_seconds"])
    assert f"at {peak:.2f} of plain PyTorch's peak and {seconds:.1f} times its step" in PAGE
    assert "ParameterPlacement" in cell["memwall"]["actions"]
    # The budget is the smallest, and what makes it so is the model's construction.
    built = cell["budget_bytes"] / cell["plain"]["peak_bytes"]
    assert f"building the model first took {built:.2f} of that peak" in PAGE


def test_a_table_larger_than_memory_costs_what_was_measured() -> None:
    found = result("embedding_table")
    assert f"under a cap of {found['cap_bytes'] / 2**30:.1f} GiB" in PAGE
    assert f"at {found['time_ratio_large_to_small']:.2f} times the step of a table of 1M rows" in PAGE
    assert found["torch_large"]["is_oom_killed"]
    steps = {
        name: median(run["step_seconds_quartiles"][1] for run in runs) for name, runs in found["runs"].items() if runs
    }
    assert f"takes {steps['memwall, small'] / steps['torch, small']:.1f} times torch's" in PAGE


def test_so_many_times_the_parameters_train_under_one_cap() -> None:
    words = {8: "eight"}
    rows = frontier_rows()
    times = int(min(row["num_times_plain"] for row in rows))
    assert all(row["has_same_losses"] for row in rows)
    assert f"trains {words[times]} times the parameters of plain PyTorch under the same cap" in PAGE
    shares = sorted(f"{row['bound']['num_times_bound']:.2f}" for row in rows)
    low, high = shares[0], shares[-1]
    assert f"at {low} to {high} times the least that a step's bytes and arithmetic can take" in PAGE


def test_the_largest_models_under_a_cap_are_what_was_measured() -> None:
    page = (ROOT / "benchmarks" / "README.md").read_text()
    for row in frontier_rows():
        largest = {arm: found["largest"] for arm, found in row["arms"].items()}
        sizes = [largest[arm]["num_parameters"] / 1e6 for arm in ("plain", "checkpoint", "deepspeed", "memwall")]
        columns = [f"{row['cap_bytes'] >> 30} GiB", *(f"{size:.1f} M" for size in sizes)]
        columns.append(f"{largest['memwall']['peak_bytes'] / 2**20:.0f} MiB")
        columns += [f"{row['bound']['step_seconds']:.1f} s", f"{row['bound']['num_times_bound']:.2f}"]
        assert f"| {' | '.join(columns)} |" in page
        assert row["bound"]["is_plausible"]
        assert all(row["holds"].values())


def test_memwall_beside_deepspeed_where_both_fit_is_what_was_measured() -> None:
    page, found = (ROOT / "benchmarks" / "README.md").read_text(), result("against_deepspeed")
    names = {
        "plain": "plain PyTorch",
        "deepspeed": "DeepSpeed, tuned",
        "memwall": "memwall, half of DeepSpeed's peak",
        "memwall-smallest": "memwall, its smallest budget",
    }
    for arm, of_arm in found["arms"].items():
        low, middle, high = of_arm["step_seconds_quartiles"]
        moved = ", ".join(f"{sum(of_arm[kind]) / 2**20:,.0f}" for kind in ("read_bytes", "written_bytes"))
        columns = [names[arm], f"{middle:.2f} s ({low:.2f}-{high:.2f})", f"{of_arm['peak_bytes'] / 2**20:,.0f} MiB"]
        verdict = found["verdicts"].get(arm)
        shares = (f"{verdict['times_faster']:.2f}", f"{verdict['peak_share']:.2f}") if verdict else ("", "")
        line = " | ".join([*columns, f"{moved} MiB", *shares]).rstrip(" |")
        assert f"| {line} |" in page
        assert not arm.startswith("memwall") or found["has_same_losses"][arm]
    times, share = (found["verdicts"]["memwall"][name] for name in ("times_faster", "peak_share"))
    assert f"memwall is {times:.2f} times faster at {share:.2f} of the memory" in " ".join(page.split())
    claim = "times faster than under DeepSpeed's ZeRO-3 with NVMe at its best settings"
    assert f"{times:.2f} {claim}, in {share:.2f} of its memory" in PAGE


def test_what_kernels_leave_room_for_is_what_was_measured() -> None:
    plain, _, _, without, kernels = result("fused_kernels")["rows"]
    assert [row["arm"] for row in (plain, without, kernels)] == ["plain", "memwall", "kernels"]
    assert without["budget_bytes"] == kernels["budget_bytes"] >= kernels["peak_bytes"]
    peak, step = f"{kernels['peak_bytes'] / 2**20:,.0f} MiB", f"{median(kernels['step_seconds']):.3f} s"
    assert f"in {peak} at {step} a step" in PAGE
    peak, step = f"{plain['peak_bytes'] / 2**20:,.0f} MiB", f"{median(plain['step_seconds']):.3f} s"
    assert f"plain PyTorch needs {peak} and {step}" in PAGE
    assert f"no plan without kernels fits below {without['smallest_feasible_bytes'] / 2**20:,.0f} MiB" in PAGE


def test_saved_tensors_on_disk_cost_what_was_measured() -> None:
    page = (ROOT / "benchmarks" / "README.md").read_text()
    for cell in result("activation_offload")["cells"]:
        plain, offloaded, disk = (median(cell[f"{name}_seconds"]) for name in ("plain", "offloaded", "disk"))
        low, middle, high = (
            round(100 * value) for value in cell["share_hidden" if cell["multiplies"] else "share_of_disk_speed"]
        )
        assert cell["has_same_gradients"]
        (row,) = (line for line in page.splitlines() if line.startswith(f"| {cell['name']} | {plain:.3f}"))
        assert f"| {plain:.3f} s | {offloaded:.3f} s | {disk:.3f} s |" in row
        assert f"| {middle} % ({low}-{high} %) |" in row


def test_what_moments_in_8_bits_cost_is_what_was_measured() -> None:
    page, found = (ROOT / "benchmarks" / "README.md").read_text(), result("low_bit_state")
    text = " ".join(page.split())
    plain, costs = found["plain"], found["costs"]
    one, two = (f"{costs['seconds_per_element'][number] * 1e9:.0f}" for number in ("1", "2"))
    assert f"takes {plain['step_seconds']:.2f} s and {plain['peak_bytes'] / 2**20:,.0f} MiB" in text
    assert f"the budget is {found['budget_bytes'] / 2**20:,.0f} MiB" in text
    assert f"took {costs['import_bytes'] / 2**20:.0f} MiB, and opening and closing a moment {one} ns" in text
    assert f"with one thread, {two} with two" in text
    for row in found["rows"]:
        assert row["peak_bytes"] <= found["budget_bytes"]
        speed, moments = row["disk_bytes_per_second"], "8 bits" if row["is_low_bit"] else "float32"
        disk = f"{speed / 2**20:.0f} MiB/s" if speed else "as it is"
        seconds = f"{median(row['step_seconds']):.2f} s | {row['predicted_step_seconds']:.2f} s"
        peaks = " | ".join(f"{row[f'{name}_peak_bytes'] / 2**20:,.0f} MiB" for name in ("steady", "predicted"))
        moved = f"{row['moved_bytes'] / 2**20:,.0f} MiB"
        assert f"| {disk} | {row['arm']} | {moments} | {moved} | {seconds} | {peaks} |" in page
        assert row["is_plain_loss"] != row["is_low_bit"]


def test_what_a_compiled_graph_that_saves_less_takes_is_what_was_measured() -> None:
    page, rows = (ROOT / "docs" / "compiled.md").read_text(), result("compiled_graphs")["rows"]
    for row in rows:
        assert compiled_graphs.line(row) in page
        assert row["is_plain_weights"]
        peaks = max(row["first_step_peak_bytes"], row["steady_peak_bytes"])
        assert peaks <= row.get("budget_bytes", peaks)
    foreseen = [f"{row['foreseen_step_seconds']:.2f}" for row in rows if "foreseen_step_seconds" in row]
    assert f"The plans foresaw steps of {' and '.join(foreseen)} s" in " ".join(page.split())


def test_what_short_batches_gain_is_what_was_measured() -> None:
    page, found = (ROOT / "benchmarks" / "README.md").read_text(), result("short_batches")
    budget, plain = (f"{found[f'{name}_bytes'] / 2**20:,.0f}" for name in ("budget", "plain"))
    text = " ".join(page.split())
    assert f"({budget} of {plain} MiB)" in text
    for row in found["rows"]:
        ratios = [row["times_as_long"][f"{law}_ratio"] for law in SHORT_BATCHES]
        ways = "with `--no-disk`" if row["no_disk"] else "as it is"
        assert f"| {ways} | {' | '.join(f'{ratio:.3f}' for ratio in ratios)} |" in page
        assert row["peak_bytes"] <= min(row["foreseen_bytes"] + (2 << 20), found["budget_bytes"])
        assert row["actions"]["num_Recompute"] > 0
    shortest = [f"{row['whole_plan_seconds'][0] / row['seconds'][0]:.2f}" for row in found["rows"]]
    assert f"with 52 tokens the whole one takes {' and '.join(shortest)} times as long" in text
    assert {row["num_tokens"][0] for row in found["rows"]} == {52}
    ratios = [ratio for row in found["rows"] for ratio in row["times_as_long"].values()]
    limits = (ROOT / "docs" / "limits.md").read_text()
    assert f"take a BERT {min(ratios):.2f} to {max(ratios):.2f} times as long" in limits


def test_what_packing_is_worth_on_a_slow_disk_is_what_was_measured() -> None:
    page, found = (ROOT / "benchmarks" / "README.md").read_text(), result("packed_offload")
    assert all(row["is_plain_loss"] for row in found["rows"] if row["arm"] == "exact")
    assert not any(row["is_plain_loss"] for row in found["rows"] if row["num_packed_blocks"])
    assert f"{found['pack_seconds_per_element'] * 1e9:.1f} ns for each number" in page
    plain, budget_bytes = found["plain"], found["budget_bytes"]
    assert f"plain PyTorch takes {plain['step_seconds']:.3f} s, {plain['peak_bytes'] / 2**20:,.0f} MiB" in page
    assert (
        f"and ends at a loss of {plain['mean_of_last_losses']:.4f}; the budget is {budget_bytes / 2**20:,.0f} MiB"
        in page
    )
    for row in found["rows"]:
        speed = row["disk_bytes_per_second"]
        disk = f"{speed / 2**20:.0f} MiB/s" if speed else "as it is"
        low, middle, high = sorted(row["step_seconds"])
        cells = (
            f"| {disk} | {row['arm']} | {middle:.3f} s ({low:.3f}-{high:.3f}) | {row['predicted_step_seconds']:.3f} s ",
            f"| {row['moved_bytes'] / 2**20:,.0f} MiB | {row['num_exact_blocks']}, {row['num_packed_blocks']} ",
            f"| {row['mean_of_last_losses']:.4f} |",
        )
        assert "".join(cells) in page
    seconds = {(row["disk_bytes_per_second"] >> 20, row["arm"]): median(row["step_seconds"]) for row in found["rows"]}
    assert (
        f"disk is held at 200 MiB/s takes {seconds[200, 'packed']:.2f} s in place of {seconds[200, 'exact']:.2f} s"
        in PAGE
    )
