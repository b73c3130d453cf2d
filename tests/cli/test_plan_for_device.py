"""`memwall plan --device`: a plan for a device that is not here, as a user meets it."""

import json
import re
from pathlib import Path

import jsonschema
import msgspec
import pytest
import torch
from figures import untagged, without_unit
from forecasts import FACTORY, LLAMA, MIB, OPTIONS, SCHEMA, Run, estimated

from memwall.apply.techniques import cpu_step
from memwall.cli.app import main
from memwall.cli.plans.plan_source import Source, with_measured
from memwall.machine.hardware import hardware_named
from memwall.machine.tiers import Machine, Tier
from memwall.planning.planfile import Plan
from memwall.planning.recordings import Recordings
from memwall.trace.file import save_trace
from memwall.trace.spec import load_workload
from memwall.trace.trace_builder import record
from memwall.trace.workload import Workload


@pytest.mark.slow
@pytest.mark.requires("transformers")
def test_a_plan_for_a_device_fits_what_its_allocator_would_reserve(run: Run, deep_config: str, tmp_path: Path) -> None:
    """GIVEN a budget below what the step needs THEN blocks are recomputed until the simulated process fits."""
    _, plain = estimated(run, deep_config)
    budget = plain["peak"]["process_bytes"] + plain["margin_bytes"] - 300 * MIB
    output = tmp_path / "plan.json"
    command = ("plan", deep_config, "--device", "h100-80gb", *OPTIONS, "--budget", str(budget), "-o", str(output))
    status, found = run(*command)
    jsonschema.validate(found, SCHEMA)
    assert (without_unit(found), untagged(found)) == ([], [])
    assert status == 0
    assert found["fits"]
    assert {action["kind"] for action in found["actions"]} == {"recompute"}
    assert found["peak"]["process_bytes"] + found["margin_bytes"] <= budget
    assert found["peak"]["reserved_bytes"] >= found["peak"]["allocated_bytes"]
    assert found["plain_peak"]["process_bytes"] > found["peak"]["process_bytes"]
    assert found["step_seconds"] > found["plain_step_seconds"]
    assert Plan.load(output).actions
    assert (found["workload"]["dtype"], found["workload"]["input_shape"]) == ("bfloat16", [4, 1024])


@pytest.mark.slow
@pytest.mark.requires("transformers")
def test_host_memory_is_the_next_tier_of_a_device(run: Run, tmp_path: Path) -> None:
    """GIVEN host memory THEN a smaller budget is feasible, and host memory is no way out any more."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**LLAMA, "num_hidden_layers": 2, "max_position_embeddings": 4096}))
    command = ("plan", str(path), "--device", "h100-80gb", "--seq", "4096", "--budget", "400MiB")
    (status, without), (_, given) = (run(*command, *more) for more in ((), ("--host", "64GiB")))
    assert (status, without["fits"]) == (3, False)
    assert any("nothing was measured on this device" in line for line in without["not_modelled"])
    assert given["smallest_feasible_budget_bytes"] <= without["smallest_feasible_budget_bytes"]
    assert not any("--host SIZE" in line for line in given["relaxations"])


@pytest.mark.slow
@pytest.mark.requires("transformers")
def test_what_a_plan_moves_to_the_host_is_there_beside_the_process(run: Run, deep_config: str) -> None:
    """GIVEN optimizer state in host memory THEN it is there once it is made, and a second time while it is saved."""
    common = ("plan", deep_config, "--device", "h100-80gb", "--seq", "2048", "--optimizer", "adamw", "--host", "64GiB")
    (_, ample), (_, tight) = (run(*common, "--budget", budget) for budget in ("20GiB", "2.8GiB"))
    moved = tight["moved_bytes_per_step"]
    assert ample["moved_bytes_per_step"] == 0 < moved
    for name, phase in tight["phases"].items():
        times = {"build": 0, "save": 2}.get(name, 1)
        assert phase["host_bytes"] == ample["phases"][name]["host_bytes"] + times * moved, name
    assert tight["peak"]["host_bytes"] == max(phase["host_bytes"] for phase in tight["phases"].values())


@pytest.mark.slow
@pytest.mark.requires("transformers")
def test_precision_is_offered_with_its_figure_and_planned_where_it_is_allowed(run: Run, tmp_path: Path) -> None:
    """GIVEN weights in float32 THEN autocast is recorded and replayed, before it is offered or chosen."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**LLAMA, "num_hidden_layers": 1}))
    command = ("plan", str(path), "--device", "h100-80gb", "--seq", "2048", "--optimizer", "sgd", "--budget", "2GiB")
    _, refused = run(*command)
    (line,) = (line for line in refused["relaxations"] if "--allow precision" in line)
    assert re.search(r"bfloat16 autocast, which changes numerics: --allow precision: \S+ GiB, \S+ MiB less", line)
    _, lower = run(*command, "--allow", "precision")
    assert (lower["actions"][0]["kind"], lower["actions"][0]["dtype"]) == ("autocast", "bfloat16")
    assert lower["phases"]["eval"]["allocated_bytes"] < lower["phases"]["steady_step"]["allocated_bytes"]


@pytest.mark.slow
@pytest.mark.requires("transformers")
def test_kernels_are_offered_with_their_figure_and_planned_where_they_are_allowed(run: Run, tmp_path: Path) -> None:
    """GIVEN a vocabulary that outweighs the layers THEN the loss without logits is what makes it fit."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**LLAMA, "num_hidden_layers": 2, "vocab_size": 32_000}))
    command = ("plan", str(path), "--device", "h100-80gb", *OPTIONS)
    _, refused = run(*command, "--budget", "1GiB")
    (line,) = (line for line in refused["relaxations"] if "--allow kernels" in line)
    assert re.search(r"fused kernels, which round at other points: --allow kernels: \S+ \wiB, \S+ \wiB less", line)
    _, least = run(*command, "--budget", "1GiB", "--allow", "kernels")
    budget = least["smallest_feasible_budget_bytes"] + 64 * MIB
    status, found = run(*command, "--budget", str(budget), "--allow", "kernels")
    jsonschema.validate(found, SCHEMA)
    assert (status, found["fits"]) == (0, True)
    kernels = found["actions"][0]
    assert (kernels["kind"], kernels["exactness"], kernels["chunk_rows"]) == ("kernels", "equivalent", 512)
    assert "model.layers.1.mlp" in kernels["modules"]
    assert budget < refused["smallest_feasible_budget_bytes"]
    assert "eval" in found["phases"]
    # Logits in float32, the log of their softmax and its gradient: none of them is whole any more.
    assert kernels["saved_bytes"] > 2 * 4 * 1024 * 32_000 * 4


@pytest.mark.requires("transformers")
def test_kernels_of_a_trace_are_refused(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "training.py").write_text(FACTORY)
    path = tmp_path / "t.trace"
    save_trace(record(load_workload(f"{tmp_path / 'training.py'}:small")), path)
    for more in ((), ("--device", "l4")):
        assert main(["plan", str(path), "--budget", "1GiB", "--allow", "kernels", *more]) == 2
        assert f"--allow kernels: {path} is a trace, and what kernels do" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("allow", [(), ("--allow", "kernels")])
def test_kernels_that_nobody_allowed_are_not_spoken_of(
    allow: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """GIVEN a loss as kernels have, of a model as they have not, WHEN refused THEN only who allowed them is told."""
    loss = "torch.nn.functional.cross_entropy(model(batch), torch.zeros(64, dtype=torch.int64))"
    (tmp_path / "training.py").write_text(FACTORY.replace("model(batch).sum()", loss))
    assert main(["plan", f"{tmp_path / 'training.py'}:small", "--device", "l4", "--budget", "1MiB", *allow]) == 3
    assert ("runs a fused kernel" in capsys.readouterr().err) == bool(allow)


def test_packing_is_refused_where_nothing_can_be_packed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    workload = Workload(
        model=torch.nn.Linear(8, 8),
        batch=torch.randn(4, 8),
        loss=lambda model, batch: model(batch).sum(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
    path = tmp_path / "t.trace"
    save_trace(record(workload), path)
    assert main(["plan", str(path), "--budget", "1GiB", "--allow", "low-bit-offload"]) == 2
    message = " ".join(capsys.readouterr().err.split())
    assert "--allow low-bit-offload: there is no disk to move saved tensors to; pass --disk DIR" in message


def test_moments_in_8_bits_are_refused_for_another_optimizer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    workload = Workload(
        model=torch.nn.Linear(64, 64),
        batch=torch.randn(4, 64),
        loss=lambda model, batch: model(batch).sum(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    )
    path = tmp_path / "t.trace"
    save_trace(record(workload), path)
    assert main(["plan", str(path), "--budget", "1GiB", "--allow", "low-bit-optimizer"]) == 2
    message = " ".join(capsys.readouterr().err.split())
    assert "--allow low-bit-optimizer: only moments of Adam and AdamW are kept in 8 bits; SGD steps" in message


@pytest.mark.slow
@pytest.mark.requires("transformers")
def test_a_plan_for_a_device_has_the_phases_of_its_estimate(run: Run, deep_config: str) -> None:
    """Where nothing is to be done both say the same of each; under a plan the steps need less, and resuming does not.

    The plan takes its first step to be the steady one in which the optimizer's state appears.
    """
    common = (deep_config, "--device", "h100-80gb", "--batch", "4", "--seq", "512")
    _, plain = run("estimate", *common)
    _, ample = run("plan", *common, "--budget", "70GiB")
    names = ("build", "first_step", "steady_step", "eval", "save", "resume")
    assert tuple(sorted(ample["phases"], key=names.index)) == names
    for name in names:
        for figure in ("allocated_bytes", "reserved_bytes", "process_bytes", "host_bytes"):
            expected = plain["phases"][name][figure]
            assert ample["phases"][name][figure] == (
                pytest.approx(expected, rel=0.01) if name == "first_step" else expected
            ), name
    needed = plain["phases"]["steady_step"]["process_bytes"] + ample["margin_bytes"]
    _, tight = run("plan", *common, "--budget", str(int(0.85 * needed)))
    assert any(action["kind"] == "recompute" for action in tight["actions"])
    highest = max(phase["process_bytes"] for phase in tight["phases"].values())
    assert highest == tight["peak"]["process_bytes"] < ample["peak"]["process_bytes"]
    assert tight["phases"][tight["peak_phase"]]["process_bytes"] == highest
    assert tight["measured_phases"] == []
    assert tight["phases"]["resume"] == ample["phases"]["resume"]


@pytest.mark.slow
@pytest.mark.requires("transformers")
def test_an_evaluation_that_needs_more_than_the_budget_is_what_does_not_fit(
    run: Run, config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """GIVEN steps that fit THEN an evaluation of many samples decides, for no action makes it smaller."""
    common = ("plan", config, "--device", "h100-80gb", "--batch", "1", "--seq", "512")
    status, alone = run(*common, "--budget", "70GiB")
    assert status == 0
    _, wide = run(*common, "--budget", "70GiB", "--eval-batch", "256")
    needed, margin = wide["peak"]["process_bytes"], wide["margin_bytes"]
    assert needed == wide["phases"]["eval"]["process_bytes"] > alone["peak"]["process_bytes"] + alone["margin_bytes"]
    assert wide["peak_phase"] == "eval"
    assert wide["smallest_feasible_budget_bytes"] == pytest.approx(needed + margin, rel=0.02)
    for budget, expected, fits in ((needed + margin, 0, True), (needed + margin - 1, 4, False), (needed, 4, False)):
        status, found = run(*common, "--budget", str(budget), "--eval-batch", "256")
        assert (status, found["fits"], found["actions"]) == (expected, fits, [])
    too_little = str(wide["phases"]["eval"]["allocated_bytes"] // 2)
    status, found = run(*common, "--budget", too_little, "--eval-batch", "256")
    jsonschema.validate(found, SCHEMA)
    assert (status, found["fits"]) == (3, False)
    assert found["relaxations"][0] == "a smaller batch in evaluation: --eval-batch N"
    assert main([*common, "--budget", too_little, "--eval-batch", "256", "-v"]) == 3
    shown = " ".join(capsys.readouterr().out.split())
    assert shown.startswith("✗ does not fit: ")
    assert "evaluation with metrics" in shown


@pytest.mark.slow
@pytest.mark.requires("transformers")
def test_an_evaluation_may_have_the_allocator_give_back_what_steps_left_cached(run: Run, deep_config: str) -> None:
    """GIVEN steps that leave pieces too small for it THEN it fits where those are given back, as the plan says."""
    common = ("plan", deep_config, "--device", "h100-80gb", "--batch", "4", "--seq", "512", "--eval-batch", "32")
    _, ample = run(*common, "--budget", "70GiB")
    assert ample["phases"]["eval"]["reserved_bytes"] > 1.5 * ample["phases"]["eval"]["allocated_bytes"]
    assert not any("give back" in line for line in ample["binding"])
    least = ample["smallest_feasible_budget_bytes"]
    assert least < 0.9 * (ample["peak"]["process_bytes"] + ample["margin_bytes"])
    status, found = run(*common, "--budget", str(least))
    assert (status, found["fits"]) == (0, True)
    assert found["peak"]["process_bytes"] + found["margin_bytes"] <= least
    assert re.search(r"cached memory to evaluate within the budget: it would reserve \S+ GiB$", found["binding"][-1])


@pytest.mark.slow
@pytest.mark.requires("transformers")
@pytest.mark.parametrize(
    ("batch", "seq", "eval_batch", "host", "budget"),
    [
        ("4", "512", "24", None, "2.95GiB"),
        pytest.param("4", "512", "24", None, "1GiB", marks=pytest.mark.exhaustive),
        pytest.param("1", "1024", "24", "64GiB", "1GiB", marks=pytest.mark.exhaustive),
        pytest.param("8", "256", "48", "64GiB", "1GiB", marks=pytest.mark.exhaustive),
    ],
)
def test_the_budget_that_a_refusal_tells_is_enough_for_the_evaluation_too(
    run: Run, config: str, batch: str, seq: str, eval_batch: str, host: str | None, budget: str
) -> None:
    """GIVEN a budget that is told WHEN it is given THEN it fits: at once, or where it was the steps' own, the next."""
    options = ("--device", "h100-80gb", "--batch", batch, "--seq", seq, "--eval-batch", eval_batch)
    asked: list[tuple[int, str]] = []
    while len(asked) < 3:
        status, found = run("plan", config, *options, *(("--host", host) if host else ()), "--budget", budget)
        asked.append((status, budget))
        if status == 0:
            break
        budget = str(found["smallest_feasible_budget_bytes"])
    assert asked[-1][0] == 0, asked
    assert all(status == 3 for status, _ in asked[:-2]), asked


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
    assert "eval" not in found["phases"]
    assert any(line.startswith("evaluation; ") for line in found["not_modelled"])


def test_options_of_a_configuration_need_a_device(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "t.trace", "--budget", "1GiB", "--batch", "2"]) == 2
    assert "--batch: only together with --device NAME" in capsys.readouterr().err


def test_a_step_on_the_cpu_is_measured_for_every_way_to_record_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = record(
        Workload(
            model=torch.nn.Linear(8, 8),
            batch=torch.randn(4, 8),
            loss=lambda model, batch: model(batch).sum(),
            optimizer=lambda parameters: torch.optim.AdamW(parameters),
        )
    )
    monkeypatch.setattr(cpu_step, "_NUM_ELEMENTS", 1 << 16)
    trace = msgspec.structs.replace(
        trace,
        machine=Machine(
            tiers=(Tier(name="host", write_bytes_per_second=2e10, read_bytes_per_second=2e10, free_bytes=1 << 30),)
        ),
    )
    source = Source(trace, Recordings(frozenset({"precision", "kernels"}), lambda _: (trace, None)))
    known = with_measured(source, ("cpu-optimizer-step",))
    assert known.recordings is not None
    traces = (known.trace, known.recordings.take("precision")[0], known.recordings.take("kernels")[0])
    found = {one.machine.cpu_step_bytes_per_second for one in traces}
    (speed,) = found
    assert speed > 0
    assert speed == float(f"{speed:.1e}")  # in two digits, so that plans made again are equal


STEPPED = """
import torch
from memwall.trace.workload import Workload


def stepped_by(optimizer):
    return Workload(
        model=lambda: torch.nn.Linear(64, 64),
        batch=lambda: torch.ones(4, 64),
        loss=lambda model, batch: model(batch).sum(),
        optimizer=optimizer,
    )


def adam():
    return stepped_by(lambda parameters: torch.optim.Adam(parameters))


def sgd():
    return stepped_by(lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9))
"""


def test_a_step_on_the_cpu_is_refused_without_host_memory_or_for_another_optimizer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_step, "_NUM_ELEMENTS", 1 << 16)
    (tmp_path / "training.py").write_text(STEPPED)
    refused = []
    for name, more in (("adam", ()), ("sgd", ("--host", "1GiB"))):
        source = f"{tmp_path / 'training.py'}:{name}"
        common = ("plan", source, "--device", "l4", "--budget", "1GiB", "--allow", "cpu-optimizer-step")
        assert main([*common, *more]) == 2
        refused.append(" ".join(capsys.readouterr().err.split()))
    assert "a step on the CPU has its state in host memory; pass --host SIZE" in refused[0]
    assert "only Adam and AdamW are stepped on the CPU; SGD steps" in refused[1]
