"""A technique is a record and a handler: one that only this file knows is applied, checked and taken back as any."""

import copy
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from block_models import PLACED, WIDTH, Model, train
from plans import plan_of
from torch import Tensor, nn

from memwall.apply.applied import AppliedPlan
from memwall.apply.effect import Effect
from memwall.apply.memory.allocator import AllocatorHandler
from memwall.apply.microbatch import MicroBatches
from memwall.apply.optimizer_state.state_keeper import StateKeeper
from memwall.apply.streaming.parameter_keeper import ParameterKeeper
from memwall.apply.technique import Handler, Target, handler_of, register, unregister
from memwall.errors import ApplyError, IntegrationError, NoEffectError, NotExactError, StoreError
from memwall.integrations.deepspeed import apply_rest
from memwall.planning import technique
from memwall.planning.action import Action
from memwall.planning.techniques.allocator import AllocatorReuse
from memwall.planning.techniques.parameters import ParameterPlacement
from memwall.planning.techniques.recompute import Recompute
from memwall.session.session import Session


class Halve(Action, frozen=True, kw_only=True, tag="halve"):
    """Halves what a module returns."""

    module: str


class Halving(technique.Technique[Halve]):
    record = Halve
    order = 98


class HalveHandler(Handler[Halve]):
    """Does that by a hook, and counts on its target what else it is told."""

    num_calls = 0

    @classmethod
    def absent(cls, target: Target) -> None:
        seen.append("absent")

    def apply(self, target: Target) -> None:
        handle = target.model.get_submodule(self.action.module).register_forward_hook(self._halve)
        target.on_undo(handle.remove)

    def _halve(self, module: nn.Module, args: object, out: Tensor) -> Tensor:
        self.num_calls += 1
        return out / 2

    def optimizer_known(self, target: Target, optimizer: torch.optim.Optimizer) -> None:
        seen.append(type(optimizer).__name__)

    def effect(self, target: Target) -> "HalveEffect":
        return HalveEffect(self)


class HalveEffect(Effect):
    """The module was called."""

    name, expected = "halving", "a module's results are halved"

    def __init__(self, handler: HalveHandler) -> None:
        self._handler = handler

    def is_seen(self) -> bool:
        return self._handler.num_calls > 0

    def contrary(self) -> str:
        return "" if self._handler.num_calls else f"'{self._handler.action.module}' was not called"

    def close(self) -> None:
        seen.append("closed")


class Scale(Action, frozen=True, kw_only=True, tag="scale"):
    """Says that it multiplies what a module returns by one; by two where `factor` is wrong."""

    module: str
    factor: float = 1.0
    can_repair: bool = True


class Scaling(technique.Technique[Scale]):
    record = Scale
    order = 97


class ScaleHandler(Handler[Scale]):
    """Compares, while it proves itself, what it returns with what the module does."""

    is_proving, found = False, ""

    def apply(self, target: Target) -> None:
        handle = target.model.get_submodule(self.action.module).register_forward_hook(self._scale)
        target.on_undo(handle.remove)

    def set_proving(self, target: Target, *, is_proving: bool) -> None:
        self.is_proving = is_proving

    def _scale(self, module: nn.Module, args: object, out: Tensor) -> Tensor:
        scaled = out * self.action.factor
        if self.is_proving and not torch.equal(scaled, out):
            self.found = "what it returns is not what the module does"
        return out if self.found and self.action.can_repair else scaled

    def lost(self, target: Target) -> str:
        return self.found if self.action.can_repair else ""

    def disproof(self, target: Target) -> str:
        return "" if self.action.can_repair else self.found


seen: list[str] = []


@pytest.fixture(autouse=True)
def _toy() -> Iterator[None]:
    register("halve")(HalveHandler)
    register("scale")(ScaleHandler)
    technique.register(Halving())
    technique.register(Scaling())
    seen.clear()
    yield
    for tag in ("halve", "scale"):
        technique.unregister(tag)
        unregister(tag)


def applied_to(model: nn.Module, *actions: Action, keeper: StateKeeper | None = None) -> AppliedPlan:
    return AppliedPlan(
        model,
        actions,
        block_order=(),
        disk=None,
        disk_capacity_bytes=None,
        allocator=AllocatorHandler(),
        micro=MicroBatches(),
        keeper=keeper or StateKeeper(None, None),
        parameters=ParameterKeeper(None, None),
        is_cooperative=False,
    )


# -- a new technique ---------------------------------------------------------------------------------------------------


def test_a_new_technique_is_applied_seen_at_work_and_taken_back() -> None:
    model, x = Model(), torch.ones(8, WIDTH)
    plain = model.blocks[1](x)
    applied = applied_to(model, Halve(module="blocks.1"), Recompute(block="blocks.0"))
    applied.apply()
    assert torch.equal(model.blocks[1](x), plain / 2)
    applied.effects.check()
    assert seen == ["closed"], "its effect was seen, and is watched no longer"
    applied.add_optimizer(torch.optim.SGD(model.parameters()))
    assert seen == ["closed", "SGD"]
    applied.undo()
    assert torch.equal(model.blocks[1](x), plain)


def test_a_new_technique_without_effect_stops_a_session() -> None:
    model = Model(lambda block, x: block.forward(x))
    plan = plan_of(model, Halve(module="blocks.1"))
    with pytest.raises(NoEffectError, match=r"halving has no effect: .* 'blocks\.1' was not called"):  # noqa: SIM117
        with Session(plan=plan) as session:
            train(session, model)


def test_a_new_technique_that_is_disproved_is_dropped_in_the_same_step() -> None:
    model = Model()
    plain = copy.deepcopy(model)
    with Session(plan=plan_of(plain, Scale(module="blocks.1"))) as session:
        train(session, plain)
    assert session.measured.lost == {}
    with Session(plan=plan_of(model, Scale(module="blocks.1", factor=2.0))) as session:
        train(session, model)
    assert session.measured.lost == {("scale", ""): "what it returns is not what the module does"}
    assert all(map(torch.equal, model.parameters(), plain.parameters()))


def test_a_new_technique_that_cannot_put_a_step_right_ends_the_run_before_its_gradients_are_used() -> None:
    model = Model()
    before = copy.deepcopy(model)
    plan = plan_of(model, Scale(module="blocks.1", factor=2.0, can_repair=False))
    with pytest.raises(NotExactError, match=r"scale changes the training, .*: what it returns is not what"):  # noqa: SIM117
        with Session(plan=plan) as session:
            train(session, model)
    assert all(map(torch.equal, model.parameters(), before.parameters()))


def test_a_plan_without_it_has_it_take_back_what_it_left() -> None:
    applied_to(Model()).apply()
    assert seen == ["absent"]


def test_it_is_refused_under_deepspeed_unless_it_says_otherwise() -> None:
    class Engine:
        _config = type("_Config", (), {"_param_dict": {}})
        dp_world_size, module = 1, Model()

        def zero_optimization_stage(self) -> int:
            return 1

    with pytest.raises(IntegrationError, match="the plan has the action 'halve', which memwall applies to a model"):
        apply_rest(Engine(), plan_of(Engine.module, Halve(module="blocks.0")))


def test_an_action_that_nothing_applies_is_named() -> None:
    class Unknown(Action, tag="unknown"):
        pass

    with pytest.raises(ApplyError, match="the plan has the action 'unknown', and nothing in this memwall applies it"):
        applied_to(Model(), Unknown()).apply()


def test_a_tag_has_one_handler() -> None:
    with pytest.raises(ValueError, match="'halve' is handled by HalveHandler already"):
        register("halve")(HalveHandler)


def test_what_is_given_the_rest_of_the_memory_is_applied_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AllocatorHandler, "apply", lambda *_: None)
    applied = applied_to(Model(), AllocatorReuse(policy="tensor-heap"), Halve(module="blocks.0"))
    order: list[str] = []
    applied.on_undo = lambda undo, **_: order.append(undo.__qualname__.split(".")[0])  # type: ignore[method-assign]
    applied.apply()
    assert order == ["RemovableHandle", "AllocatorHandler", "AppliedPlan"]


def test_saved_tensors_have_what_other_techniques_leave_of_a_tier() -> None:
    parameters = ParameterPlacement(
        tier="disk", blocks=(), window_bytes=1, min_bytes=1, written_bytes=0, saved_bytes=300
    )
    applied = applied_to(Model())
    applied.disk_capacity_bytes, applied.host_limit_bytes = 1000, 500
    applied.handlers = (handler_of(parameters), handler_of(PLACED), handler_of(Halve(module="")))
    assert (applied.left_bytes("disk"), applied.left_bytes("host")) == (700, 500)


# -- undo --------------------------------------------------------------------------------------------------------------


def raising(error: BaseException) -> Callable[[], None]:
    def undo() -> None:
        raise error

    return undo


def test_everything_is_taken_back_last_first_whatever_of_it_fails() -> None:
    """GIVEN undos of which two fail, one by no error of memwall's WHEN a plan is undone THEN all of them have run."""
    applied, done = applied_to(Model()), list[int]()
    applied.on_undo(lambda: done.append(1))
    applied.on_undo(raising(StoreError("the disk is gone")))
    applied.on_undo(lambda: done.append(2))
    applied.on_undo(raising(RuntimeError("a bug")))
    applied.on_undo(lambda: done.append(3))
    with pytest.raises(RuntimeError, match="a bug") as error:
        applied.undo()
    assert done == [3, 2, 1]
    assert error.value.__notes__ == [
        "taking the plan back failed in another place as well: StoreError('the disk is gone')"
    ]
    applied.undo()
    assert done == [3, 2, 1]


def test_an_interrupt_is_not_lost_behind_an_error() -> None:
    applied = applied_to(Model())
    applied.on_undo(raising(KeyboardInterrupt()))
    applied.on_undo(raising(RuntimeError("a bug")))
    with pytest.raises(KeyboardInterrupt):
        applied.undo()


def test_what_cannot_be_applied_is_what_is_raised_and_what_then_fails_is_noted() -> None:
    applied = applied_to(Model(), Halve(module="blocks.7"))
    applied.on_undo(raising(RuntimeError("a bug")))
    with pytest.raises(AttributeError, match="has no attribute `7`") as error:
        applied.apply()
    assert error.value.__notes__ == ["taking the plan back failed as well: RuntimeError('a bug')"]


def test_state_stays_for_the_plan_that_follows(tmp_path: Path) -> None:
    applied, done = applied_to(Model()), list[str]()
    applied.on_undo(lambda: done.append("state"), is_state=True)
    applied.on_undo(lambda: done.append("the rest"))
    applied.undo(keeps_state=True)
    assert done == ["the rest"]
