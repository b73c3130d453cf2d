"""Further tables as a user sees them on 80 and 160 columns: estimates, snapshots, and snapshots beside each other."""

import pickle
from pathlib import Path

import pytest
from cuda_history import MIB, History, frame
from golden_text import drawn, golden
from msgspec.structs import asdict, replace

from memwall.planning.estimate import Estimate
from memwall.planning.forecast import PeakBytes
from memwall.planning.planfile import Plan
from memwall.predict.cuda_allocator.advice import AllocatorAdvice
from memwall.predict.curve import peak_of
from memwall.predict.host import HostBytes
from memwall.predict.snapshot.analysis import DeviceAnalysis, analyse_device
from memwall.report.comparison import snapshot_side
from memwall.report.difference import difference_of
from memwall.report.text import difference_report, estimate_report, snapshot_report
from memwall.trace.records import Trace
from memwall.trace.snapshot.read import load_snapshot
from memwall.trace.snapshot.records import Snapshot
from memwall.trace.workload_facts import WorkloadFacts

GIB = 1 << 30
MODEL, TRAIN = frame("/home/me/[bold]model.py", 7, "forward"), frame("/home/me/train.py", 42, "step")
BEST = "expandable_segments:True,large_segment_size_mb:20"


def snapshot_of(folder: Path, num_mib: int) -> tuple[Snapshot, DeviceAnalysis]:
    """Two blocks of a category and one of none, a failed request, and 12 MiB that the last of them strands."""
    history = History()
    history.segment(0, 20 * MIB)
    history.alloc(0, 8 * MIB, 8 * MIB, [MODEL, TRAIN], "activation")
    history.alloc(8 * MIB, 4 * MIB, 4 * MIB, [TRAIN], "gradient")
    history.segment(100 * MIB, 2 * GIB)
    history.alloc(100 * MIB, num_mib * MIB, num_mib * MIB, [TRAIN])
    history.free(0)
    history.oom(64 * MIB, 5 * MIB)
    (folder / "s.pickle").write_bytes(pickle.dumps(history.snapshot()))
    snapshot = load_snapshot(folder / "s.pickle")
    return snapshot, analyse_device(snapshot, 0)[0]


@pytest.fixture
def estimate(plan: Plan, trace: Trace) -> Estimate:
    first = PeakBytes(allocated_bytes=30 * GIB, reserved_bytes=31 * GIB, process_bytes=32 * GIB, host_bytes=3 * GIB)
    steady = replace(first, allocated_bytes=40 * GIB, reserved_bytes=44 * GIB, process_bytes=45 * GIB)
    shared = asdict(plan.forecast) | {
        "device": "h200",
        "source": "fake",
        "fits": False,
        "budget_bytes": 40 * GIB,
        "margin_bytes": 2 * GIB,
        "peak": steady,
        "phases": {"build": replace(first, host_bytes=9 * GIB), "first_step": first, "steady_step": steady},
        "actions": (),
        "peak_phase": "steady_step",
        "workload": WorkloadFacts(
            dtype="bfloat16",
            autocast="none",
            optimizer="AdamW",
            micro_batch=4,
            num_micro_batches=2,
            input_shape=(4, 2048),
            tokens_per_sample=2048,
        ),
        "relaxations": ("a smaller micro-batch: --batch 2",),
        "allocator": AllocatorAdvice(
            settings=BEST,
            reserved_bytes=41 * GIB,
            reserved_spread_bytes=(41 * GIB, 42 * GIB),
            default_reserved_bytes=44 * GIB,
            lower_bound_bytes=40 * GIB,
            guards=("MemPools",),
            guarded_settings="",
            guarded_reserved_bytes=44 * GIB,
            torch_versions="simulated for torch 2.13",
            num_tried=40,
            notes=(),
        ),
    }
    return Estimate(
        **shared,
        product="NVIDIA H200 SXM",
        torch_version="2.13.0",
        micro_batch=4,
        num_micro_batches=2,
        waiting_batch_bytes=64 * MIB,
        host=HostBytes(
            process_bytes=(2 * GIB, 4 * GIB),
            weights_bytes=7 * GIB,
            shard_bytes=5 * GIB,
            state_bytes=14 * GIB,
            largest_state_bytes=GIB,
            pinned_bytes=MIB,
            loader_bytes=MIB,
        ),
        margin_basis="95 % of published runs",
        context_bytes=(GIB // 2, 2 * GIB),
        attention_kernels={"flash": 12},
        attention_calls=(),
        in_peak=peak_of(trace, trace.steps[1]),
    )


@pytest.mark.parametrize("width", [80, 160])
class TestExactText:
    def test_estimate(self, estimate: Estimate, width: int) -> None:
        assert drawn(estimate_report(estimate), width) == golden(f"estimate_{width}.txt")

    def test_snapshot(self, tmp_path: Path, width: int) -> None:
        analysis = replace(snapshot_of(tmp_path, 1024)[1], notes=("the device ran out (retries: 1)",))
        assert drawn(snapshot_report([analysis]), width) == golden(f"snapshot_{width}.txt")

    def test_two_snapshots(self, tmp_path: Path, width: int) -> None:
        sides = []
        for name, num_mib in (("old.pickle", 1024), ("new.pickle", 1536)):
            snapshot, analysis = snapshot_of(tmp_path, num_mib)
            sides.append(snapshot_side(snapshot, [analysis], name))
        difference = difference_of(*sides, fail_over_percent=2.5)
        assert drawn(difference_report(difference), width) == golden(f"diff_snapshot_{width}.txt")
