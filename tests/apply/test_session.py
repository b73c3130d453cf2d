"""A session from its first step to its end: what it promises a training loop, on models large enough to need a plan.

Budgets are of this very process, so they are asked for first: a budget that is too small names the smallest feasible.
"""

import gc
import threading
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
import torch
from torch import Tensor, nn
from zoo import Batch, Case, Decoder, FeedForward, ResNet

import memwall
from memwall.apply.applied import AppliedPlan
from memwall.apply.malloc import MallocHandler
from memwall.apply.microbatch import MicroBatches, count_terms
from memwall.apply.session import Session
from memwall.errors import ApplyError, InfeasibleError, PlanError, UsageError
from memwall.plan.actions import Accumulate, Action, AllocatorReuse, Autocast, Offload, Recompute
from memwall.plan.forecast import Forecast, PeakBytes
from memwall.plan.planfile import Plan
from memwall.plan.search import Settings, make_plan
from memwall.predict.malloc import unavailable_reason
from memwall.predict.process import TrimPoints
from memwall.trace.meter import process_bytes, return_free_memory
from memwall.trace.modules import fingerprint
from memwall.trace.records import Trace

MIB = 1 << 20
NUM_STEPS = 4


def gpt() -> Case:
    torch.manual_seed(0)
    text = torch.randint(256, (10, 129))

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return nn.functional.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["targets"].flatten())

    batch = {"tokens": text[:, :-1].contiguous(), "targets": text[:, 1:].contiguous()}
    return Case(Decoder(256, 128, 128, 4, [FeedForward(128) for _ in range(6)]), batch, loss)


def resnet() -> Case:
    torch.manual_seed(0)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return nn.functional.cross_entropy(model(batch["images"]), batch["classes"])

    return Case(ResNet(16, (2, 2)), {"images": torch.randn(40, 3, 96, 96), "classes": torch.randint(10, (40,))}, loss)


MODELS: dict[str, Callable[[], Case]] = {"gpt": gpt, "resnet": resnet}


class Trained(NamedTuple):
    state: dict[str, Tensor]
    losses: list[float]


def train(case: Case, model: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int = NUM_STEPS) -> Trained:
    losses = []
    for _ in range(num_steps):
        loss = case.loss(model, case.batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(float(loss))
    return Trained(dict(model.state_dict()), losses)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


@cache
def freely_trained(name: str) -> Trained:
    case = MODELS[name]()
    return train(case, case.model, adamw(case.model))


@cache
def least_bytes(name: str) -> int:
    """What a budget far below what is needed gets for an answer, after one step."""
    case = MODELS[name]()
    optimizer = adamw(case.model)
    return_free_memory()
    with (
        pytest.raises(InfeasibleError) as error,
        memwall.fit(case.model, optimizer, budget=process_bytes() + 8 * MIB) as session,
    ):
        train(case, case.model, optimizer)
    assert session.measured.num_steps == 1
    assert left_behind(case.model) == []
    return error.value.smallest_feasible_bytes


def assert_same(found: Trained, expected: Trained) -> None:
    assert found.losses == expected.losses
    different = [key for key, value in expected.state.items() if not torch.equal(found.state[key], value)]
    assert not different


def left_behind(model: nn.Module) -> list[str]:
    """Names of modules that carry a hook or a forward of their own, and of global hooks."""
    found = [
        path or type(model).__name__
        for path, module in model.named_modules()
        if module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in module.__dict__
    ]
    hooks = torch.nn.modules.module
    if hooks._global_forward_hooks or hooks._global_forward_pre_hooks:
        found.append("global module hooks")
    if torch._C._len_torch_dispatch_stack():
        found.append("a dispatch mode")
    if torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
        found.append("saved tensor hooks")
    return found


@pytest.mark.parametrize("name", sorted(MODELS))
def test_under_a_budget_that_forces_actions_the_weights_are_the_free_runs(name: str, tmp_path: Path) -> None:
    """GIVEN a run that does not fit WHEN it gets what its error asked for THEN it fits, to the same bits."""
    expected = freely_trained(name)
    # Sessions before this one have warmed libraries up, which stay.
    budget_bytes = least_bytes(name) + 30 * MIB
    case = MODELS[name]()
    optimizer = adamw(case.model)
    threads = set(threading.enumerate())
    shown: list[Plan] = []
    with memwall.fit(case.model, optimizer, budget=budget_bytes, disk=str(tmp_path)) as session:
        session.on_plan = lambda session: shown.append(session.plan)
        found = train(case, case.model, optimizer)
    assert_same(found, expected)

    assert session.plan is not None
    assert shown == [session.plan]
    assert any(isinstance(action, Recompute | Offload) for action in session.plan.actions)
    assert all(action.exactness == "bit-exact" for action in session.plan.actions)
    forecast = session.plan.forecast
    assert forecast.plain_peak is not None
    steady_bytes = forecast.phases["steady_step"].process_bytes
    assert steady_bytes + forecast.margin_bytes <= budget_bytes < forecast.plain_peak.process_bytes
    assert session.measured.num_steps == NUM_STEPS
    assert len(session.measured.step_seconds) == NUM_STEPS - 1
    assert session.measured.peak_bytes <= budget_bytes

    assert session.state == "closed"
    assert left_behind(case.model) == []
    assert not optimizer._optimizer_step_post_hooks
    assert set(threading.enumerate()) <= threads
    assert list(tmp_path.iterdir()) == []


def test_its_plan_can_be_saved_and_given_to_the_next_run(tmp_path: Path) -> None:
    """GIVEN the plan of a run WHEN another run is given its file THEN that run needs no recording, and the bits are."""
    case = gpt()
    optimizer = adamw(case.model)
    with memwall.fit(case.model, optimizer, budget=least_bytes("gpt") + 30 * MIB, disk=str(tmp_path)) as session:
        train(case, case.model, optimizer, num_steps=1)
    assert session.plan is not None  # a first step that was alone is planned for as well
    session.plan.save(tmp_path / "plan.json")

    case = gpt()
    optimizer = adamw(case.model)
    plan = memwall.Plan.load(tmp_path / "plan.json")
    with memwall.fit(case.model, optimizer, plan=plan, disk=str(tmp_path)) as again:
        found = train(case, case.model, optimizer)
    assert_same(found, freely_trained("gpt"))
    assert again.trace is None
    assert again.plan == plan
    assert len(again.measured.step_seconds) == NUM_STEPS
    assert left_behind(case.model) == []


def test_lower_precision_is_planned_where_it_is_allowed_and_nothing_else_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # How much less it takes depends on this process; so the budget is met by it, and by nothing else.
    def planned(trace: Trace, settings: Settings) -> Plan:
        budget_bytes = settings.budget_bytes if trace.autocast == "bfloat16" else trace.base_bytes
        return make_plan(trace, msgspec.structs.replace(settings, budget_bytes=budget_bytes))

    monkeypatch.setattr("memwall.apply.session.make_plan", planned)
    case = resnet()
    optimizer = adamw(case.model)
    with memwall.fit(case.model, optimizer, budget="100GiB", disk=str(tmp_path), allow=["precision"]) as session:
        losses = train(case, case.model, optimizer).losses
    assert session.plan is not None
    assert session.trace is not None
    assert session.trace.autocast == "bfloat16"
    assert session.plan.actions[0] == Autocast(dtype="bfloat16")
    expected = freely_trained("resnet").losses
    assert losses[0] == expected[0]
    assert losses != expected
    assert losses == pytest.approx(expected, rel=0.05)
    assert left_behind(case.model) == []


def test_enough_room_costs_a_run_nothing_but_its_first_step(tmp_path: Path) -> None:
    case = gpt()
    optimizer = adamw(case.model)
    with memwall.fit(case.model, optimizer, budget="100GiB", disk=str(tmp_path)) as session:
        found = train(case, case.model, optimizer)
    assert_same(found, freely_trained("gpt"))
    assert session.plan is not None
    assert session.plan.actions == ()
    assert session.measured.bytes_to_tier == session.measured.first_step_bytes_to_tier > 0


def test_an_exception_in_any_step_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    threads = set(threading.enumerate())
    for failing_step in (0, 2):
        model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        case = Case(model, {"x": torch.ones(2, 8)}, lambda model, batch: model(batch["x"]).sum())
        optimizer = adamw(model)
        with (
            pytest.raises(ZeroDivisionError),
            memwall.fit(model, optimizer, budget="100GiB", disk=str(tmp_path)),
        ):
            train(case, model, optimizer, num_steps=failing_step)
            case.loss(model, case.batch)
            raise ZeroDivisionError
        gc.collect()
        assert left_behind(model) == []
        assert set(threading.enumerate()) <= threads
    assert list(tmp_path.iterdir()) == []


# -- plans made by hand ------------------------------------------------------------------------------------------------


def plan_for(model: nn.Module, *actions: Action) -> Plan:
    forecast = Forecast(
        device="cpu",
        source="recorded",
        fits=True,
        budget_bytes=1 << 40,
        margin_bytes=0,
        peak=PeakBytes(allocated_bytes=1, process_bytes=1),
        phases={},
        step_seconds=None,
        not_modelled=(),
        actions=actions,
    )
    return Plan(
        model_fingerprint=fingerprint([model]), trace_hash="", micro_batch=4, num_micro_batches=1, forecast=forecast
    )


def test_a_plan_for_another_model_is_refused_before_anything_changes() -> None:
    plan = plan_for(nn.Linear(2, 2))
    model = nn.Linear(3, 2)
    with pytest.raises(PlanError) as error:
        memwall.fit(model, torch.optim.SGD(model.parameters()), plan=plan)
    assert str(error.value) == (
        f"the plan was made for another model: it names {plan.model_fingerprint[:12]}, this Linear is "
        f"{fingerprint([model])[:12]}; make a plan for this model with `memwall plan`, or run with --budget"
    )
    assert left_behind(model) == []


def test_a_plan_for_a_device_that_is_not_here_is_refused() -> None:
    model = nn.Linear(2, 2)
    plan = plan_for(model)
    plan = Plan(
        model_fingerprint=plan.model_fingerprint,
        trace_hash="",
        micro_batch=4,
        num_micro_batches=1,
        forecast=Forecast(
            device="cuda",
            source="recorded",
            fits=True,
            budget_bytes=1,
            margin_bytes=0,
            peak=PeakBytes(allocated_bytes=1, process_bytes=1),
            phases={},
            step_seconds=None,
            not_modelled=(),
        ),
    )
    with pytest.raises(PlanError, match=r"^the plan is for device cuda, "):
        memwall.fit(model, torch.optim.SGD(model.parameters()), plan=plan)


@pytest.mark.parametrize("choice", [{}, {"budget": "1GiB", "plan": "both"}])
def test_a_session_follows_a_budget_or_a_plan(choice: dict[str, str]) -> None:
    model = nn.Linear(2, 2)
    arguments = {key: plan_for(model) if value == "both" else value for key, value in choice.items()}
    with pytest.raises(UsageError) as error:
        memwall.fit(model, torch.optim.SGD(model.parameters()), **arguments)
    assert str(error.value) == "give either a budget or a plan, not both and not neither"


def test_a_session_trains_one_model() -> None:
    model = nn.Linear(2, 2)
    session = memwall.fit(model, torch.optim.SGD(model.parameters()), plan=plan_for(model))
    with session, pytest.raises(ApplyError) as error:
        session.attach(nn.Linear(2, 2), None)
    assert str(error.value) == "this session already trains a model; use one session for each"


@pytest.mark.skipif(bool(unavailable_reason()), reason=f"malloc cannot be steered here: {unavailable_reason()}")
def test_a_watched_heap_is_trimmed_before_a_block_would_exceed_the_limit() -> None:
    """GIVEN a limit that is always reached WHEN a step runs THEN the heap is trimmed where the plan says, and after."""
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 4))
    malloc = MallocHandler()
    action = AllocatorReuse(
        policy="heap", limit_bytes=1, trims=TrimPoints(forward={"0": 1}, backward={"0": 1, "1": 1}, optimizer_bytes=1)
    )
    applied = AppliedPlan(
        model,
        plan_for(model, action),
        block_order=("0", "1"),
        disk=None,
        disk_capacity_bytes=None,
        malloc=malloc,
        micro=MicroBatches(),
        is_cooperative=False,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        applied.apply()
        assert malloc.policy is not None
        applied.begin_step()
        out = model(torch.ones(2, 4))
        assert malloc.num_trims == 1
        out.sum().backward()
        assert malloc.num_trims == 3
        optimizer.step()
        assert malloc.num_trims == 4
    finally:
        applied.undo()
        malloc.undo()
    optimizer.step()
    assert malloc.num_trims == 4
    assert malloc.policy is None
    assert left_behind(model) == []


def test_an_action_that_cannot_be_applied_takes_back_the_ones_before_it() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    plan = plan_for(model, Recompute(block="0"), Accumulate(micro_batch=1, num_micro_batches=4))
    with (
        pytest.raises(ApplyError, match=r"write `for micro in session.step\(batch\)`$"),
        memwall.fit(model, torch.optim.SGD(model.parameters()), plan=plan),
    ):
        model(torch.ones(4, 4))
    assert left_behind(model) == []


# -- accumulation ------------------------------------------------------------------------------------------------------


class TokenModel(nn.Module):
    """Scores each token by itself, in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(13, 5, dtype=torch.float64), nn.Linear(5, 7, dtype=torch.float64)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.tokens(tokens)))


def causal_loss(model: nn.Module, batch: Batch) -> Tensor:
    logits = model(batch["input_ids"])[:, :-1]
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten())


def token_loss(model: nn.Module, batch: Batch) -> Tensor:
    return nn.functional.cross_entropy(model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())


def sample_loss(model: nn.Module, batch: Batch) -> Tensor:
    return nn.functional.cross_entropy(model(batch["input_ids"]).mean(1), batch["labels"])


def ragged_text() -> Batch:
    """Six samples, of which one has no label that counts, and the first labels do not always count."""
    torch.manual_seed(0)
    batch = {"input_ids": torch.randint(13, (6, 8)), "labels": torch.randint(7, (6, 8))}
    for row, (begin, end) in enumerate([(0, 8), (1, 3), (0, 2), (8, 8), (5, 8), (0, 7)]):
        batch["labels"][row, :begin] = -100
        batch["labels"][row, end:] = -100
    return batch


def ragged_classes() -> Batch:
    torch.manual_seed(0)
    return {"input_ids": torch.randint(13, (6, 8)), "labels": torch.tensor([3, -100, 1, -100, -100, 6])}


def num_labels(batch: Batch) -> int:
    return int((batch["labels"] != -100).sum())


class Seq2SeqConfig:
    is_encoder_decoder = True


class OwnConfig:
    is_encoder_decoder = False


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("micro_batch", [1, 2, 3, 4, 5, 6])
@pytest.mark.parametrize(
    ("loss", "make_batch", "count", "config"),
    [
        pytest.param(causal_loss, ragged_text, None, OwnConfig, id="causal"),
        pytest.param(token_loss, ragged_text, num_labels, OwnConfig, id="counted by the caller"),
        pytest.param(token_loss, ragged_text, None, Seq2SeqConfig, id="encoder-decoder"),
        pytest.param(sample_loss, ragged_classes, None, OwnConfig, id="classes"),
    ],
)
def test_the_gradient_of_a_split_batch_is_that_of_the_whole(
    micro_batch: int,
    loss: Callable[[nn.Module, Batch], Tensor],
    make_batch: Callable[[], Batch],
    count: Callable[[Batch], int] | None,
    config: type,
) -> None:
    torch.manual_seed(0)
    model, batch = TokenModel(), make_batch()
    model.config = config()
    loss(model, batch).backward()
    expected = gradients(model)
    model.zero_grad()
    plan = plan_for(model, Accumulate(micro_batch=micro_batch, num_micro_batches=-(-6 // micro_batch)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with memwall.fit(model, optimizer, plan=plan) as session:
        sizes = []
        for micro in session.step(batch, count=count):
            session.backward(loss(model, micro))
            sizes.append(len(micro["labels"]))
        optimizer.step()
    assert sizes == [micro_batch] * (6 // micro_batch) + [6 % micro_batch] * (6 % micro_batch > 0)
    for found, value in zip(gradients(model), expected, strict=True):
        torch.testing.assert_close(found, value, rtol=1e-12, atol=1e-15)


def test_a_batch_without_any_label_that_counts_is_refused() -> None:
    batch = ragged_text()
    batch["labels"][:] = -100
    with pytest.raises(ApplyError) as error:
        next(MicroBatches().split(batch, None))
    assert str(error.value) == "the batch has no loss term (all labels are ignored); skip this batch"


def test_batches_of_any_nesting_are_split_along_their_samples() -> None:
    batch = {
        "scale": torch.tensor(2.0),
        "pair": (torch.arange(4), [torch.arange(8).view(4, 2)]),
        "shared": torch.zeros(1, 3),
        "name": "a",
    }
    micro = MicroBatches()
    micro.micro_batch = 3
    first, second = micro.split(batch, None)
    assert [len(part["pair"][0]) for part in (first, second)] == [3, 1]
    assert torch.equal(second["pair"][1][0], torch.tensor([[6, 7]]))
    assert first["shared"].shape == (1, 3)
    assert (float(first["scale"]), first["name"]) == (2.0, "a")
    assert count_terms(batch) == 4


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """So that no worker of torch's own counts as left behind."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def test_a_session_that_never_ran_is_closed_without_a_trace_or_plan() -> None:
    model = nn.Linear(2, 2)
    with memwall.fit(model, torch.optim.SGD(model.parameters()), budget="1GiB") as session:
        assert session.state == "waiting"
    assert isinstance(session, Session)
    assert (session.state, session.plan, session.trace) == ("closed", None, None)
    session.close()
    assert left_behind(model) == []
