"""A plan in effect on real models: the same bits as the plain run, and nothing left behind."""

import copy
import hashlib
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from block_models import WIDTH, Model, offload
from combinations import every_value
from plans import LINK, plan_of
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from zoo import MODELS, Case, optimizers, trained_parameters

import memwall
from memwall.apply.memory.allocator import hooked_heap
from memwall.errors import ApplyError, InfeasibleError, PlanError, UsageError
from memwall.integrations.accelerate import MemwallPlugin
from memwall.machine.meter import HeldBytes, process_bytes, process_peak_bytes
from memwall.planning.action import Action
from memwall.planning.block_problem import build_menus
from memwall.planning.blocks import find_blocks
from memwall.planning.menu import Costs
from memwall.planning.techniques.accumulate import Accumulate
from memwall.planning.techniques.allocator import AllocatorReuse
from memwall.planning.techniques.offload import Offload
from memwall.planning.techniques.recompute import Recompute
from memwall.predict.malloc.tensor_heap import heap_unavailable_reason
from memwall.predict.treatment import StepModel
from memwall.session.session import Session
from memwall.store.disk_tier import DiskTier
from memwall.trace.trace_builder import TraceBuilder

NUM_STEPS = 3
MIB = 1 << 20


def digest(model: nn.Module) -> str:
    """SHA-256 over parameters and buffers, BatchNorm statistics included."""
    found = hashlib.sha256()
    for tensor in (*model.parameters(), *model.buffers()):
        found.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def train(case: Case, model: nn.Module, session: Session | None = None, num_steps: int = NUM_STEPS) -> str:
    """Trains a model for some steps, within a session if there is one; returns the digest of what came out."""
    torch.manual_seed(1)
    optimizer = optimizers()["adamw_foreach"](trained_parameters(model))
    if session is not None:
        session.attach(model, optimizer)
    for _ in range(num_steps):
        case.loss(model, case.batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    return digest(model)


def block_actions(case: Case, kind: str) -> tuple[Action, ...]:
    """One action for every block of a model: recompute fully, selectively, or offload."""
    model = copy.deepcopy(case.model)
    optimizer = optimizers()["adamw_foreach"](trained_parameters(model))
    builder = TraceBuilder([model])
    builder.start_step(optimizer)
    case.loss(model, case.batch).backward()
    optimizer.step()
    step = builder.finish_step(optimizer)
    trace = builder.trace(optimizer)
    step_model = StepModel(step, trace.names, find_blocks(trace, step))
    menus = build_menus(trace, step_model, Costs(copy_seconds_per_byte=0.0, min_bytes=1, link=LINK))
    actions: list[Action] = []
    for menu in menus:
        kept = [t.kept_ops for t in menu.treatments if t is not None and t.kept_ops]
        if kind == "offload":
            actions.append(
                Offload(block=menu.block.path, scope="saved", tier="disk", min_bytes=1024, window_bytes=8 << 20)
            )
        elif any(t is not None and t.recompute for t in menu.treatments):
            chosen = kept[len(kept) // 2] if kind == "selective" and kept else ()
            actions.append(Recompute(block=menu.block.path, kept_ops=chosen))
    return tuple(actions)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind"),
    every_value(["gpt", "resnet", "unet", "encdec", "moe", "lora"], ["full", "selective", "offload"]),
)
def test_a_plan_trains_the_same_bits(name: str, kind: str, tmp_path: Path) -> None:
    """GIVEN a model WHEN every block is treated THEN weights and statistics are those of the plain run, bit for bit."""
    case = MODELS[name]("tiny")
    plain, planned = copy.deepcopy(case.model), copy.deepcopy(case.model)
    actions = block_actions(case, kind)
    assert actions
    expected = train(case, plain)
    with Session(plan=plan_of(planned, *actions), disk=str(tmp_path)) as session:
        assert train(case, planned, session) == expected
    assert session.measured.num_steps == NUM_STEPS
    if kind == "offload":
        assert session.measured.bytes_to_tier > 0


@pytest.mark.slow
@pytest.mark.skipif(bool(heap_unavailable_reason()), reason="no tensor heap here")
def test_where_memory_comes_from_changes_no_bit() -> None:
    """GIVEN a plan for the allocator alone WHEN it runs THEN bits are the plain run's, and it is taken back."""
    case = MODELS["gpt"]("tiny")
    plain, planned = copy.deepcopy(case.model), copy.deepcopy(case.model)
    expected = train(case, plain)
    plan = plan_of(planned, AllocatorReuse(policy="tensor-heap", limit_bytes=1 << 40))
    with Session(plan=plan) as session:
        assert train(case, planned, session) == expected
        assert session._live.in_effect.allocator.policy == "tensor-heap"
    assert session._live.in_effect.allocator.policy is None


@pytest.mark.slow
@pytest.mark.skipif(bool(heap_unavailable_reason()), reason="no tensor heap here")
@pytest.mark.parametrize("is_recorded", [True, False])
def test_tensors_of_the_heap_leave_from_where_they_lie_but_for_the_recorded_step(
    is_recorded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GIVEN saved tensors of whole pages WHEN they move THEN under a plan nothing copies them; the first step does."""
    moved: list[str] = []
    for name in ("_copy", "_let_leave"):
        original = getattr(DiskTier, name)
        monkeypatch.setattr(DiskTier, name, lambda *a, do=original, name=name: (moved.append(name), do(*a))[1])
    model = Model()
    plan = plan_of(model, offload("blocks.0"), offload("blocks.1"), AllocatorReuse(policy="tensor-heap"))
    settings = {"budget_bytes": 1 << 40} if is_recorded else {"plan": plan}
    with Session(**settings, disk=str(tmp_path)) as session:  # type: ignore[arg-type]
        session.attach(model, torch.optim.SGD(model.parameters()))
        model(torch.randn(4096, WIDTH)).sum().backward()
    assert moved
    assert ("_let_leave" in moved) is not is_recorded


@pytest.mark.slow
def test_nothing_is_left_behind(tmp_path: Path) -> None:
    """GIVEN a session that offloads WHEN it ends THEN forwards, hooks, threads and files are as before."""
    case = MODELS["gpt"]("tiny")
    threads = threading.active_count()
    with Session(plan=plan_of(case.model, *block_actions(case, "offload")), disk=str(tmp_path)) as session:
        train(case, case.model, session)
    assert not any("forward" in vars(module) for module in case.model.modules())
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in case.model.modules())
    assert threading.active_count() == threads
    assert list(tmp_path.iterdir()) == []


def test_an_exception_in_the_loop_leaves_nothing_behind(tmp_path: Path) -> None:
    """GIVEN a session that records WHEN the loop raises THEN recording is off and the model is as before."""
    case = MODELS["gpt"]("tiny")
    optimizer = torch.optim.AdamW(case.model.parameters())

    def interrupted() -> None:
        with memwall.fit(case.model, optimizer, budget="100GiB", disk=str(tmp_path)):
            case.loss(case.model, case.batch)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        interrupted()
    assert not torch.nn.modules.module._global_forward_pre_hooks
    assert torch._C._len_torch_dispatch_stack() == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_budget_that_cannot_be_met_says_what_can(tmp_path: Path) -> None:
    """GIVEN a budget below the process itself WHEN the first step ends THEN the error names the smallest feasible."""
    case = MODELS["gpt"]("tiny")
    optimizer = torch.optim.AdamW(case.model.parameters())

    def run() -> None:
        with memwall.fit(case.model, optimizer, budget="10MiB", disk=str(tmp_path)):
            for _ in range(2):
                case.loss(case.model, case.batch).backward()
                optimizer.step()

    with pytest.raises(InfeasibleError, match="cannot be met: the smallest feasible one is") as caught:
        run()
    assert caught.value.smallest_feasible_bytes > caught.value.budget_bytes == 10 << 20
    assert any("--allow precision" in line for line in caught.value.relaxations)


@pytest.mark.slow
def test_the_budget_that_can_be_met_has_room_for_what_comes_before_the_first_step(tmp_path: Path) -> None:
    """GIVEN a script whose own work holds more than its steps WHEN nothing fits THEN what is told has room for it."""
    case = MODELS["gpt"]("tiny")
    optimizer = torch.optim.AdamW(case.model.parameters())

    def run() -> None:
        with memwall.fit(case.model, optimizer, budget="10MiB", disk=str(tmp_path)):
            torch.ones((process_peak_bytes() - process_bytes() + 64 * MIB) // 4)
            for _ in range(2):
                case.loss(case.model, case.batch).backward()
                optimizer.step()

    before_bytes = process_peak_bytes()
    with pytest.raises(InfeasibleError, match="before its first step the script held") as caught:
        run()
    assert caught.value.smallest_feasible_bytes > before_bytes + 32 * MIB


@pytest.mark.slow
def test_a_step_that_uses_more_than_foreseen_brings_a_new_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN a running plan WHEN a step comes near the budget unforeseen THEN the next one has a new plan, once."""
    case = MODELS["gpt"]("tiny")
    optimizer = torch.optim.AdamW(case.model.parameters())
    budget = process_bytes() + 400 * MIB
    foreseen = []
    with memwall.fit(case.model, optimizer, budget=budget, disk=str(tmp_path)) as session:
        for number in range(6):
            case.loss(case.model, case.batch).backward()
            with monkeypatch.context() as meter:
                if number == 2:
                    held = HeldBytes(process_bytes(), budget - 4 * MIB)
                    meter.setattr(session.measured.meter, "held", lambda held=held: held)
                optimizer.step()
            foreseen.append(session.plan and session.plan.forecast.phases["steady_step"].process_bytes)
    assert session.measured.num_replans == 1
    assert session.measured.replaced_peak_bytes == budget - 4 * MIB > session.measured.peak_bytes
    assert foreseen[1] == foreseen[2] < budget - 100 * MIB
    assert foreseen[3] == pytest.approx(budget - 4 * MIB, rel=0.02)
    assert foreseen[3:] == [foreseen[3]] * 3


@pytest.mark.slow
def test_what_runs_between_steps_is_the_runs_peak_but_no_excess(tmp_path: Path) -> None:
    """GIVEN a running plan WHEN an evaluation needs much THEN the run's peak has it, and the plan stays."""
    case = MODELS["gpt"]("tiny")
    optimizer = torch.optim.AdamW(case.model.parameters())
    with memwall.fit(case.model, optimizer, budget=process_bytes() + 300 * MIB, disk=str(tmp_path)) as session:
        for number in range(5):
            case.loss(case.model, case.batch).backward()
            optimizer.step()
            before = process_bytes()
            if number in (2, 4):
                torch.ones(260 << 18).sum()
    assert session.measured.num_replans == 0
    assert session.measured.peak_bytes < before + 100 * MIB
    assert session.measured.overall_peak_bytes > before + 240 * MIB


@pytest.mark.slow
@pytest.mark.skipif(bool(heap_unavailable_reason()), reason=heap_unavailable_reason())
def test_memory_that_a_step_needs_outside_the_heap_is_kept_free_for_it() -> None:
    """GIVEN a limit WHEN a step also needs memory that is no tensor THEN free pages of the heap make up for it."""
    case = MODELS["gpt"]("tiny")
    optimizer = torch.optim.AdamW(case.model.parameters())
    warm = torch.ones(100 << 18)
    base_bytes = process_bytes() - warm.nbytes
    del warm
    action = AllocatorReuse(policy="tensor-heap", limit_bytes=base_bytes + 200 * MIB, outside_bytes=60 * MIB)
    with Session(plan=plan_of(case.model, action)) as session:
        session.attach(case.model, optimizer)
        for _ in range(3):
            loss = case.loss(case.model, case.batch)
            # 180 MiB of tensors come and go, 60 at a time with gaps between them that none of the next fits.
            narrow = [torch.ones(2 << 18) for _ in range(60)]
            del narrow[::2]
            wide = [torch.ones(10 << 18) for _ in range(5)]
            outside = bytearray(b"1") * (60 * MIB)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            del narrow, wide, outside
        assert session.measured.peak_bytes <= base_bytes + 202 * MIB


def test_two_sessions_cannot_hold_one_process_to_two_limits() -> None:
    """GIVEN an open session with a heap WHEN a second one wants it THEN it is refused, and the first is unharmed."""
    if heap_unavailable_reason():
        pytest.skip(heap_unavailable_reason())
    case = MODELS["gpt"]("tiny")
    plan = plan_of(case.model, AllocatorReuse(policy="tensor-heap"))
    first, second = copy.deepcopy(case.model), copy.deepcopy(case.model)
    with Session(plan=plan) as session:
        train(case, first, session)
        with (
            pytest.raises(ApplyError, match="another memwall session is open in this process"),
            Session(plan=plan) as other,
        ):
            train(case, second, other)
        inside = torch.ones(1 << 20)
        assert hooked_heap().figures().num_blocks > 0
        del inside
        assert session._live.in_effect.allocator.policy == "tensor-heap"


@pytest.mark.slow
def test_sparse_gradients_are_no_obstacle(tmp_path: Path) -> None:
    """GIVEN an embedding with sparse gradients WHEN a budget is asked for THEN the run is recorded and planned."""
    model = nn.Sequential(nn.Embedding(1000, 16, sparse=True), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with memwall.fit(model, optimizer, budget="8GiB", disk=str(tmp_path)) as session:
        for _ in range(3):
            loss = model(torch.arange(32)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert session.measured.num_steps == 3


@pytest.mark.slow
def test_a_caught_end_of_planning_ends_the_session_quietly(tmp_path: Path) -> None:
    """GIVEN a budget that nothing meets WHEN the loop catches the error THEN leaving the session raises no other."""
    case = MODELS["gpt"]("tiny")
    optimizer = torch.optim.AdamW(case.model.parameters())
    with memwall.fit(case.model, optimizer, budget="10MiB", disk=str(tmp_path)) as session:
        case.loss(case.model, case.batch).backward()
        optimizer.step()
        with pytest.raises(InfeasibleError):
            session.end_step()
    assert session.state == "closed"
    assert isinstance(session.failure, InfeasibleError)


def test_a_plan_for_another_model_is_refused() -> None:
    """GIVEN a plan made for one model WHEN it is given to another THEN the error says so before anything changes."""
    case = MODELS["gpt"]("tiny")
    plan = plan_of(nn.Linear(2, 2))
    with pytest.raises(PlanError, match="the plan was made for another model"):
        memwall.fit(case.model, torch.optim.SGD(case.model.parameters()), plan=plan)


def test_a_plan_for_micro_batches_needs_a_loop_that_takes_them() -> None:
    """GIVEN a plan that accumulates WHEN the loop feeds whole batches THEN it is refused, never skipped."""
    case = MODELS["gpt"]("tiny")
    plan = plan_of(case.model, Accumulate(micro_batch=1, num_micro_batches=2))
    with pytest.raises(ApplyError, match=r"micro-batches of 1 samples, 2 per step"), Session(plan=plan) as session:
        train(case, case.model, session)


@pytest.mark.parametrize(
    "opens", ["fit", "accelerate", pytest.param("trainer", marks=pytest.mark.requires("transformers"))]
)
def test_a_budget_in_percent_is_of_the_model_s_device(opens: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN a model on the second CUDA device WHEN it may use 90 % THEN that is of this device, not of the host."""
    sizes = (1000, 2000)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)

    def properties(device: torch.device | int) -> SimpleNamespace:
        return SimpleNamespace(total_memory=sizes[device if isinstance(device, int) else device.index])

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    found: list[int | None] = []

    class Told:
        def __init__(self, *, budget_bytes: int | None, **_: object) -> None:
            found.append(budget_bytes)

        def attach(self, *_: object) -> None: ...

    monkeypatch.setattr("memwall.session.fit.Session", Told)
    model = nn.Module()
    with FakeTensorMode():
        model.weight = nn.Parameter(torch.empty(2, 2, device="cuda:1"))
    optimizer = torch.optim.SGD(model.parameters())
    if opens == "fit":
        memwall.fit(model, optimizer, budget="90%")
    elif opens == "accelerate":
        accelerator = SimpleNamespace(prepare=lambda *given: given, unwrap_model=lambda given: given)
        MemwallPlugin(budget="90%").prepare(accelerator, model, optimizer)
    else:
        from memwall.integrations.trainer import MemwallCallback

        MemwallCallback(budget="90%")._open(model)
    assert found == [1800]


def test_budget_and_plan_exclude_each_other() -> None:
    """GIVEN neither budget nor plan WHEN a session is asked for THEN the error says what is expected."""
    model = nn.Linear(2, 2)
    with pytest.raises(UsageError, match="either a budget or a plan"):
        memwall.fit(model, torch.optim.SGD(model.parameters()))
