"""Small hand-made records: a step of eight operations, a plan with one action of each kind, a run under it."""

import msgspec
import pytest

from memwall.machine.tiers import Machine
from memwall.observe.run_report import Measured, RunReport
from memwall.planning.action import Action
from memwall.planning.forecast import Forecast, Lever, PeakBytes
from memwall.planning.planfile import Plan
from memwall.planning.techniques.accumulate import Accumulate
from memwall.planning.techniques.allocator import AllocatorReuse
from memwall.planning.techniques.autocast import Autocast
from memwall.planning.techniques.kernels import FusedKernels
from memwall.planning.techniques.offload import Offload
from memwall.planning.techniques.optimizer_state import OptimizerPlacement
from memwall.planning.techniques.parameters import ParameterPlacement
from memwall.planning.techniques.recompute import Recompute
from memwall.report.run_grids import Outcome
from memwall.trace.records import Category, Module, Op, Phase, Step, Storage, Trace

MIB = 1 << 20


def _op(name: int, phase: Phase, module: int, seconds: float) -> Op:
    return Op(name=name, module=module, phase=phase, seconds=seconds, flops=0, inputs=(), outputs=(), writes=())


def _storage(num_mib: float, category: Category, birth: int, death: int, module: int, line: int = -1) -> Storage:
    return Storage(
        nbytes=int(num_mib * MIB),
        device="cpu",
        category=category,
        birth=birth,
        dropped=death,
        death=death,
        module=module,
        phase="forward" if birth < 3 else "backward",
        batched=category == "activation",
        line=line,
    )


def _module(path: str, class_name: str, parent: int) -> Module:
    return Module(
        path=path,
        class_name=class_name,
        parent=parent,
        container="none",
        is_leaf=parent >= 0,
        has_batch_norm=False,
        is_wrappable=True,
        parameter_bytes=0,
    )


@pytest.fixture
def step() -> Step:
    """Live MiB while each operation runs: 140, 300, 308, 500, 388, 188, 188, 100."""
    return Step(
        kind="steady",
        ops=(
            _op(0, "forward", 1, 0.25),
            _op(0, "forward", 2, 0.25),
            _op(1, "loss", -1, 0.0005),
            _op(0, "backward", 2, 0.5),
            _op(0, "backward", 2, 0.5),
            _op(2, "optimizer", -1, 0.125),
            _op(2, "optimizer", -1, 0.125),
            _op(1, "other", -1, 0.0),
        ),
        storages=(
            _storage(100, "parameter", -1, 8, 0),
            _storage(40, "activation", 0, 5, 1, 0),
            _storage(160, "activation", 1, 5, 2, 1),
            _storage(8, "temporary", 2, 3, -1, 2),
            _storage(88, "gradient", 3, 7, 2, 1),
            _storage(112, "temporary", 3, 4, 2),
            _storage(0.03125, "input", 3, 4, -1),
            # On another device: no byte of this one.
            msgspec.structs.replace(_storage(900, "activation", 0, 8, 1), device="cuda:0"),
        ),
        saved=(),
        calls=(),
        marks=(),
        wall_seconds=2.0,
        process_peak_bytes=800 * MIB,
    )


@pytest.fixture
def trace(step: Step) -> Trace:
    first = msgspec.structs.replace(step, kind="first", ops=step.ops[:6], storages=step.storages[:3])
    return Trace(
        schema="memwall.trace/2",
        source="recorded",
        device="cpu",
        torch_version="2.13.0",
        num_threads=2,
        model_fingerprint="ab",
        optimizer="AdamW",
        micro_batch=4,
        gradients_persist=False,
        num_micro_batches=1,
        autocast="none",
        is_parked=False,
        base_bytes=300 * MIB,
        workspace_bytes=12 * MIB,
        machine=Machine(),
        names=("aten.mm.default", "aten.add.Tensor", "aten._foreach_add_.List"),
        modules=(_module("", "GPT", -1), _module("blocks.0", "Block", 0), _module("blocks[bold].1", "Block", 0)),
        steps=(first, step),
        lines=("models/gpt.py:17 forward", "models/gpt[bold].py:23 forward", "train.py:40 step"),
    )


@pytest.fixture
def actions() -> tuple[Action, ...]:
    recomputes = tuple(
        Recompute(block=f"blocks.{k}", saved_bytes=20 * MIB, cost_seconds=0.05) for k in (0, 1, 2, 10, 9, 4)
    )
    selective = tuple(
        Recompute(block=f"blocks.{k}.mlp", kept_ops=(3, 7), num_ops=27, saved_bytes=10 * MIB, cost_seconds=0.001)
        for k in (5, 6)
    )
    return (
        *recomputes,
        *selective,
        Offload(
            block="blocks.7",
            scope="saved",
            tier="disk",
            min_bytes=MIB,
            window_bytes=MIB,
            saved_bytes=28 * MIB,
            cost_seconds=0.11,
        ),
        Offload(block="blocks.0", scope="inputs", tier="host", min_bytes=MIB, window_bytes=MIB),
        Accumulate(micro_batch=2, num_micro_batches=4, saved_bytes=600 * MIB, cost_seconds=0.4),
        Autocast(dtype="bfloat16"),
        FusedKernels(modules=("blocks.0.norm", "blocks.1.norm")),
        OptimizerPlacement(
            tier="disk",
            resident_bytes=100 * MIB,
            bucket_bytes=16 * MIB,
            min_bytes=MIB // 16,
            saved_bytes=300 * MIB,
            cost_seconds=0.3,
        ),
        ParameterPlacement(
            tier="disk",
            blocks=("blocks.0", "blocks.1"),
            window_bytes=4 * MIB,
            min_bytes=MIB // 4,
            written_bytes=330 * MIB,
            saved_bytes=330 * MIB,
            cost_seconds=0.4,
        ),
        AllocatorReuse(policy="tight", limit_bytes=470 * MIB),
    )


@pytest.fixture
def plan(actions: tuple[Action, ...]) -> Plan:
    steady = PeakBytes(allocated_bytes=150 * MIB, process_bytes=455 * MIB, disk_bytes=56 * MIB)
    first = PeakBytes(allocated_bytes=100 * MIB, process_bytes=460 * MIB)
    forecast = Forecast(
        device="cpu",
        source="recorded",
        fits=True,
        budget_bytes=480 * MIB,
        margin_bytes=12 * MIB,
        peak=PeakBytes(allocated_bytes=150 * MIB, process_bytes=460 * MIB, disk_bytes=56 * MIB),
        phases={"steady_step": steady, "first_step": first},
        step_seconds=1.5,
        not_modelled=("data loading between steps", "pages other libraries touch late"),
        actions=actions,
        levers=(
            Lever(name="recompute", freed_bytes=220 * MIB, cost_seconds=0.55, num_blocks=11, num_blocks_used=6),
            Lever(name="optimizer state to disk", freed_bytes=300 * MIB, cost_seconds=0.3 * 2.5),
        ),
        binding=("the peak in backward of blocks.3",),
        smallest_feasible_budget_bytes=430 * MIB,
        plain_peak=PeakBytes(allocated_bytes=500 * MIB, process_bytes=2048 * MIB),
        plain_step_seconds=1.2,
        moved_bytes_per_step=56 * MIB,
    )
    return Plan(model_fingerprint="ab", trace_hash="cd", micro_batch=2, num_micro_batches=4, forecast=forecast)


@pytest.fixture
def run(plan: Plan) -> RunReport:
    return RunReport(
        plan_hash=plan.plan_hash,
        budget_bytes=480 * MIB,
        forecast=plan.forecast,
        measured=Measured(
            peak=PeakBytes(allocated_bytes=160 * MIB, process_bytes=458 * MIB),
            first_step_peak_bytes=450 * MIB,
            step_seconds_median=1.6,
            steps=20,
            oom_recoveries=0,
            bytes_moved={"disk": 20 * 56 * MIB},
            bytes_moved_per_step=56 * MIB,
            plan_seconds=0.75,
        ),
        within_budget=True,
    )


@pytest.fixture
def outcomes() -> tuple[Outcome, ...]:
    return (
        Outcome(
            name="free run",
            peak_predicted_bytes=2000 * MIB,
            peak_measured_bytes=2048 * MIB,
            step_seconds=1.2,
            losses=(5.5, 4.25, 3.125),
        ),
        Outcome(
            name="under the plan",
            peak_predicted_bytes=455 * MIB,
            peak_measured_bytes=458 * MIB,
            step_seconds=1.6,
            losses=(5.5, 4.25, 3.125),
            actions="recompute 8, offload 2",
        ),
    )
