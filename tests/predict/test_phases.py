"""The phases of a run on a device, held against sums that can be done by hand."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn

from memwall.machine.hardware import hardware_named
from memwall.predict.cuda.translate import recording_for, translated
from memwall.predict.cuda_allocator.step_peaks import step_peaks
from memwall.predict.cuda_allocator.torch_releases import VersionProfile, profile_for
from memwall.predict.phases import (
    PhasePeak,
    Phases,
    evaluation_bytes,
    returned_bytes,
    waiting_bytes,
    with_waiting_batches,
)
from memwall.trace.fake import record_fake_run
from memwall.trace.records import Step
from memwall.trace.workload import Workload

MIB = 1 << 20
WIDTH, NUM_LAYERS, ROWS = 512, 4, 1_024
WEIGHTS = NUM_LAYERS * (WIDTH * WIDTH + WIDTH) * 4
BATCH = ROWS * WIDTH * 4
# A100: 8,320 KiB for each thread that multiplies (test_translate.py); the backward thread's stands too.
WORKSPACES = 2 * (4096 * 1024 * 2 + 16 * 1024 * 8)

pytestmark = pytest.mark.usefixtures("one_thread")

Steps = tuple[Step, Step, Step]


@pytest.fixture(scope="module")
def profile() -> VersionProfile:
    return profile_for("2.13.0")[0]


@pytest.fixture(scope="module")
def run_of(workload_of: Callable[..., Workload]) -> Callable[..., Steps]:
    """(rows evaluated) -> a first step, a steady one and an evaluation of four linear layers with AdamW, translated."""

    def of(rows: int = ROWS) -> Steps:
        workload = workload_of(
            lambda: nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS))),
            lambda: torch.ones(ROWS, WIDTH),
            optimizer=torch.optim.AdamW,
        )
        hardware = hardware_named("a100-80gb")
        recording = recording_for(hardware)
        run = record_fake_run(
            workload, lambda: torch.ones(rows, WIDTH), workspaces=recording.workspaces, choices=recording.choices()
        )
        assert run.evaluation is not None
        training, evaluation = (translated(trace, hardware) for trace in (run.training, run.evaluation))
        return *training.steps, *evaluation.steps  # type: ignore[return-value]

    return of


@pytest.fixture(scope="module")
def steps(run_of: Callable[..., Steps]) -> Steps:
    return run_of()


def peaks_of(steps: Steps, profile: VersionProfile, num_batches: int = 1) -> dict[str, PhasePeak]:
    found = Phases(steps[:2], steps[2], num_batches=num_batches).peaks(profile)
    assert found is not None
    return found


def test_each_phase_holds_what_it_must(steps: Steps, profile: VersionProfile) -> None:
    """Weights; beside them two moments; between steps also workspaces and the batch; in evaluation two activations."""
    found = peaks_of(steps, profile)
    assert list(found) == ["build", "first_step", "steady_step", "eval", "save", "resume"]
    assert found["build"].allocated_bytes == WEIGHTS
    assert found["resume"].allocated_bytes == 3 * WEIGHTS
    assert found["save"].allocated_bytes == 3 * WEIGHTS + BATCH + WORKSPACES
    # The training batch, the one evaluated, and a layer's input and output: nothing is saved for backward.
    assert found["eval"].allocated_bytes == 3 * WEIGHTS + WORKSPACES + 2 * BATCH + 2 * BATCH
    assert found["steady_step"].allocated_bytes > found["eval"].allocated_bytes


def test_reserved_is_never_less_than_live_and_stays_until_the_end(steps: Steps, profile: VersionProfile) -> None:
    found = peaks_of(steps, profile)
    assert all(peak.reserved_bytes >= peak.allocated_bytes for peak in found.values())
    assert found["save"].reserved_bytes >= found["steady_step"].reserved_bytes
    assert found["save"].reserved_bytes >= found["eval"].reserved_bytes
    # A process that resumes has not trained yet.
    assert found["resume"].reserved_bytes < found["steady_step"].reserved_bytes


def test_training_is_forecast_as_without_the_other_phases(steps: Steps, profile: VersionProfile) -> None:
    alone = step_peaks(steps[:2], profile) or ()
    for found in (peaks_of(steps, profile), Phases(steps[:2], None).peaks(profile) or {}):
        assert found["first_step"].reserved_bytes == alone[0].reserved_bytes
        assert found["steady_step"].reserved_bytes == max(peak.reserved_bytes for peak in alone[1:])
    assert "eval" not in found


def test_a_larger_batch_in_evaluation_can_be_the_peak_of_the_run(
    run_of: Callable[..., Steps], profile: VersionProfile
) -> None:
    larger = peaks_of(run_of(16 * ROWS), profile)
    assert larger["eval"].allocated_bytes == 3 * WEIGHTS + WORKSPACES + BATCH + 3 * 16 * BATCH
    assert larger["eval"].reserved_bytes > larger["steady_step"].reserved_bytes
    assert larger["eval"].host_bytes > larger["steady_step"].host_bytes


def test_an_evaluation_that_finds_nothing_cached_needs_its_tensors_and_little_more(
    run_of: Callable[..., Steps], profile: VersionProfile
) -> None:
    steps = run_of(16 * ROWS)
    found, alone_bytes = peaks_of(steps, profile)["eval"], evaluation_bytes(steps[2], steps[1], profile)
    assert found.allocated_bytes <= alone_bytes < 1.1 * found.allocated_bytes
    assert alone_bytes < found.reserved_bytes


def test_batches_that_wait_are_there_in_every_phase_that_trains_or_follows(
    steps: Steps, profile: VersionProfile
) -> None:
    one, eight = peaks_of(steps, profile), peaks_of(steps, profile, num_batches=8)
    assert waiting_bytes(steps[1], 8) == 7 * BATCH
    for phase in ("first_step", "steady_step", "eval", "save"):
        assert eight[phase].allocated_bytes - one[phase].allocated_bytes == 7 * BATCH
        assert eight[phase].reserved_bytes > one[phase].reserved_bytes
    for phase in ("build", "resume"):
        assert eight[phase] == one[phase]
    assert eight["steady_step"].host_bytes == one["steady_step"].host_bytes
    assert with_waiting_batches(steps[1], 1) == steps[1]


def test_what_the_loss_makes_beside_the_model_counts_in_evaluation(
    workload_of: Callable[..., Workload], profile: VersionProfile
) -> None:
    """A copy of what a bfloat16 model returns, in float32, lives until the evaluation's last operation."""
    workload = workload_of(lambda: nn.Linear(16, WIDTH), lambda: torch.ones(ROWS, 16), torch.bfloat16)
    run = record_fake_run(workload, workload.make_batch)
    assert run.evaluation is not None
    training, evaluation = (translated(trace, hardware_named("a100-80gb")) for trace in (run.training, run.evaluation))
    found = peaks_of((*training.steps, *evaluation.steps), profile)
    assert found["eval"].allocated_bytes >= found["save"].allocated_bytes + BATCH // 2 + BATCH


class Scratching(nn.Module):
    """Weights of 11.5 MiB, whose forward makes three tensors of 12 MiB: blocks that gradient and moments find free."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(23 << 17))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            scratch = [batch.new_zeros(12 << 18) for _ in range(3)]
        return self.weight.sum() * scratch[0][0]


def test_remainders_of_blocks_stand_between_steps(
    workload_of: Callable[..., Workload], profile: VersionProfile
) -> None:
    """GIVEN state that takes larger blocks, too little of them left to split off WHEN a run is saved THEN it counts."""
    workload = workload_of(Scratching, lambda: torch.ones(8), optimizer=torch.optim.AdamW)
    run = record_fake_run(workload, workload.make_batch)
    training = translated(run.training, hardware_named("a100-80gb"))
    found = Phases((training.steps[0], training.steps[1]), None).peaks(profile)
    assert found is not None
    batch_bytes = 512
    assert found["save"].allocated_bytes == 3 * 12 * MIB + batch_bytes


def test_an_evaluation_has_the_state_where_training_has_it(
    workload_of: Callable[..., Workload], profile: VersionProfile
) -> None:
    """GIVEN AdamW whose kernel reads steps on the device WHEN a batch is evaluated THEN they stand there as well."""
    model, batch = (lambda: nn.Linear(WIDTH, WIDTH, bias=False)), (lambda: torch.ones(ROWS, WIDTH))
    fused = partial(torch.optim.AdamW, fused=True)
    run = record_fake_run(workload_of(model, batch, optimizer=fused), batch)
    assert run.evaluation is not None
    training, evaluation = (translated(trace, hardware_named("a100-80gb")) for trace in (run.training, run.evaluation))
    found = peaks_of((*training.steps, *evaluation.steps), profile)
    step_bytes = 512
    assert found["save"].allocated_bytes == 3 * WIDTH * WIDTH * 4 + step_bytes + BATCH + WORKSPACES
    # The batch that is evaluated, what the layer makes of it, and the sum.
    assert found["eval"].allocated_bytes == found["save"].allocated_bytes + 2 * BATCH + 512


def test_a_checkpoint_holds_weights_and_state(steps: Steps, profile: VersionProfile) -> None:
    found = peaks_of(steps, profile)
    assert found["save"].disk_bytes == 3 * WEIGHTS
    assert {name for name, peak in found.items() if peak.disk_bytes is not None} == {"save"}


def test_what_a_model_returns_is_told(steps: Steps) -> None:
    assert returned_bytes(steps[2]) == BATCH


def test_a_device_that_is_too_small_runs_out_of_memory(run_of: Callable[..., Steps], profile: VersionProfile) -> None:
    """Also where only the evaluation needs more than there is."""
    larger = run_of(16 * ROWS)
    found = peaks_of(larger, profile)
    for capacity in (found["build"].allocated_bytes // 2, found["steady_step"].reserved_bytes + MIB):
        assert Phases(larger[:2], larger[2]).peaks(profile, capacity_bytes=capacity) is None
    assert Phases(larger[:2], None).peaks(profile, capacity_bytes=found["steady_step"].reserved_bytes) is not None
