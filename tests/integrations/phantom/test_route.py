"""`--route phantom` on the phantom itself: what it foresees is what a run there counts."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import route_specs
import torch

from memwall.errors import TraceError
from memwall.integrations.phantom.recording import record_on_phantom
from memwall.integrations.spec_trace import device_run_of_spec
from memwall.machine.hardware import hardware_named
from memwall.planning.estimate import Estimate, estimate
from memwall.planning.planfile import Plan
from memwall.torch_internals.trees import tree_map
from memwall.trace.records import Route
from memwall.trace.workload import Workload

pytestmark = [pytest.mark.slow(seconds=20), pytest.mark.phantom(card="h100-80gb", cudnn="real", numbers=False)]
SPECS = Path(route_specs.__file__)
H100 = hardware_named("h100-80gb")
GIB = 1 << 30
SCRIPT = """
import sys

sys.path.insert(0, {folder!r})
import route_specs
import torch

workload = route_specs.convolutions()
model = workload.make_model().cuda()
optimizer = workload.make_optimizer(model)
batch = tuple(tensor.cuda() for tensor in workload.make_batch())
for _ in range(4):
    workload.loss(model, batch).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
"""


def foreseen(name: str, route: Route) -> Estimate:
    run = device_run_of_spec(f"{SPECS}:{name}", H100, route=route)
    return estimate(run.training, H100, evaluation=run.evaluation, eval_failure=run.failure)


def counted(workload: Workload) -> list[tuple[int, int]]:
    """Returns what torch's allocator counts as allocated and reserved in each of three steps."""
    model = workload.make_model().cuda()
    optimizer = workload.make_optimizer(model)
    batch = tree_map(torch.Tensor.cuda, workload.make_batch())
    peaks = []
    for _ in range(3):
        torch.cuda.reset_peak_memory_stats()
        workload.loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        peaks.append((torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()))
    return peaks


def test_convolutions_are_foreseen_with_cudnns_own_workspaces() -> None:
    found = foreseen("convolutions", "phantom")
    first, *steady = counted(route_specs.convolutions())
    for phase, (allocated, reserved) in (("first_step", first), ("steady_step", max(steady))):
        assert found.phases[phase].allocated_bytes == pytest.approx(allocated, rel=0.001)
        assert found.phases[phase].reserved_bytes == pytest.approx(reserved, rel=0.005)
    assert (found.route, found.tag, found.source) == ("phantom", "simulated", "fake")
    assert not any("cuDNN's convolutions" in line for line in found.not_modelled)
    translated = foreseen("convolutions", "translate")
    assert translated.route == "translate"
    assert any("cuDNN's convolutions" in line for line in translated.not_modelled)
    assert (translated.peak.reserved_bytes or 0) < 0.95 * (found.peak.reserved_bytes or 0)


def test_recurrent_layers_are_foreseen_under_autocast() -> None:
    found = foreseen("recurrent", "phantom")
    first, *steady = counted(route_specs.recurrent())
    assert found.phases["first_step"].allocated_bytes == pytest.approx(first[0], rel=0.01)
    assert found.phases["steady_step"].allocated_bytes == pytest.approx(max(steady)[0], rel=0.01)
    assert found.workload is not None
    assert found.workload.autocast == "bfloat16"


@pytest.mark.requires("transformers")
def test_both_routes_agree_where_no_closed_library_asks_for_room() -> None:
    ours, theirs = (foreseen("gpt", route) for route in ("phantom", "translate"))
    for phase in ("build", "first_step", "steady_step", "eval"):
        one, other = ours.phases[phase], theirs.phases[phase]
        assert one.allocated_bytes == pytest.approx(other.allocated_bytes, rel=0.005), phase
        assert one.reserved_bytes == pytest.approx(other.reserved_bytes, rel=0.005), phase
    assert ours.attention_kernels == theirs.attention_kernels
    assert ours.step_seconds == pytest.approx(theirs.step_seconds, rel=0.02)


def test_a_mask_whose_values_nobody_knows_needs_a_share() -> None:
    with pytest.raises(TraceError, match=r"aten\.index\.Tensor selects by a mask of 4 elements.*mask_share"):
        foreseen("selecting", "phantom")
    run = device_run_of_spec(f"{SPECS}:selecting", H100, route="phantom", mask_share=0.5)
    assert run.training.is_phantom


@pytest.mark.requires("transformers")
def test_a_branch_on_the_batch_is_taken_as_in_a_real_step(tmp_path: Path) -> None:
    """GIVEN a mask of tokens that are all there THEN attention gets no mask, though the device's memory reads as 0."""
    from transformers import T5Config

    config = T5Config(d_model=128, d_ff=256, num_layers=2, num_heads=4, vocab_size=512).to_dict()
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**config, "architectures": ["T5ForConditionalGeneration"]}))
    runs = [
        device_run_of_spec(str(path), H100, batch=4, sequence=256, route=route) for route in ("phantom", "translate")
    ]
    ours, theirs = (estimate(run.training, H100) for run in runs)
    assert len(runs[0].training.steps[1].ops) == len(runs[1].training.steps[1].ops)
    assert ours.peak.allocated_bytes == pytest.approx(theirs.peak.allocated_bytes, rel=0.005)


@pytest.mark.parametrize("name", ["looking_up", "on_its_device"])
def test_what_scripts_do_is_recorded(name: str) -> None:
    workload = getattr(route_specs, name)()
    assert record_on_phantom(workload, workload.make_batch, H100).training.is_phantom


def test_a_step_that_fails_there_is_one_message_that_names_the_line() -> None:
    refused = r"^'.*:broken': a step on the phantom device failed: RuntimeError: .*route_specs\.py, line \d+\)$"
    with pytest.raises(TraceError, match=refused):
        foreseen("broken", "phantom")


def test_a_model_larger_than_the_host_is_foreseen() -> None:
    found = foreseen("huge", "phantom")
    assert found.fits is False
    assert found.phases["build"].allocated_bytes == 8 * 4 * (1 << 34)


def test_a_plan_of_the_phantoms_route_is_applied_there_and_holds(tmp_path: Path) -> None:
    """GIVEN a budget below the plain step's THEN what the plan foresees allocated is what the run has allocated."""
    plan, report, script = tmp_path / "plan.json", tmp_path / "run.json", tmp_path / "train.py"
    script.write_text(SCRIPT.format(folder=str(SPECS.parent)))
    memwall = [sys.executable, "-m", "memwall"]
    options = ["--device", "h100-80gb", "--route", "phantom", "--budget", "2.9GiB", "--host", "8GiB", "-o", str(plan)]
    made = subprocess.run([*memwall, "plan", f"{SPECS}:convolutions", *options], check=False, capture_output=True)
    assert made.returncode in (0, 4), made.stderr
    forecast = Plan.load(plan).forecast
    assert (forecast.route, forecast.tag) == ("phantom", "simulated")
    assert forecast.actions
    run = [*memwall, "run", "--plan", str(plan), "--report", str(report), str(script)]
    done = subprocess.run(run, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(report.read_text())
    assert found["within_budget"]
    assert found["measured"]["peak"]["allocated_bytes"] == pytest.approx(forecast.peak.allocated_bytes, rel=0.02)


def test_a_process_records_as_often_as_it_is_asked() -> None:
    """GIVEN a history of allocations that goes on THEN each recording reads its own part of it."""
    workload = route_specs.convolutions()
    runs = [record_on_phantom(workload, workload.make_batch, H100) for _ in range(2)]
    first, second = ([s.nbytes for s in run.training.steps[1].storages if s.birth >= 0] for run in runs)
    assert first == second
