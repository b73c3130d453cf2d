"""Steps put into a trace: the first and the steady one, the same records each time, and no hook left behind."""

import sys
from collections.abc import Callable

import msgspec
import pytest
import torch
from torch import Tensor, nn
from zoo import MODELS, optimizers, trained_parameters

from memwall.errors import TraceError
from memwall.predict.curve import live_curve
from memwall.trace.records import Step, Trace
from memwall.trace.step_recorder import StepRecorder
from memwall.trace.steps import steady_after
from memwall.trace.trace_builder import TraceBuilder, record
from memwall.trace.workload import Workload

FLOAT_BYTES = 4

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("optimizer_name", ["adamw_foreach", "adamw_for_loop", "sgd_momentum"])
def test_the_first_step_makes_the_optimizers_state_and_predicts_the_steady_one(
    optimizer_name: str, record_steps: Callable[..., tuple[Trace, list[Step]]]
) -> None:
    case = MODELS["gpt"]("tiny")
    optimizer = optimizers()[optimizer_name](trained_parameters(case.model))

    def step() -> None:
        case.loss(case.model, case.batch).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    _, (first, second) = record_steps(case.model, [step, step], optimizer)
    assert (first.kind, second.kind) == ("first", "steady")
    # Not the step counters of four bytes: torch.tensor() makes them without an operation.
    state = [s for s in first.storages if s.category == "optimizer_state" and s.nbytes > FLOAT_BYTES]
    assert sum(s.nbytes for s in state) >= sum(p.nbytes for p in trained_parameters(case.model))
    assert all(s.birth >= 0 and s.death == len(first.ops) for s in state)
    assert all(s.birth == -1 for s in second.storages if s.category == "optimizer_state")
    derived = steady_after(first, gradients_persist=False)
    peaks = [int(live_curve(s.storages, len(s.ops)).max()) for s in (derived, second)]
    assert peaks[1] <= peaks[0] <= 1.01 * peaks[1]
    assert steady_after(second, gradients_persist=False) is second


def test_the_state_of_several_optimizers_is_found_and_predicted(
    record_steps: Callable[..., tuple[Trace, list[Step]]],
) -> None:
    case = MODELS["gpt"]("tiny")
    parameters = trained_parameters(case.model)
    muon = torch.optim.Muon([p for p in parameters if p.ndim == 2])
    adamw = torch.optim.AdamW([p for p in parameters if p.ndim != 2])

    def step() -> None:
        case.loss(case.model, case.batch).backward()
        for optimizer in (muon, adamw):
            optimizer.step()
            optimizer.zero_grad()

    trace, (first, second) = record_steps(case.model, [step, step], [muon, adamw])
    assert trace.optimizer == "Muon + AdamW"
    assert (first.kind, second.kind) == ("first", "steady")
    expected = sum(p.nbytes if p.ndim == 2 else 2 * p.nbytes for p in parameters)
    for recorded in (first, second):
        state = (s.nbytes for s in recorded.storages if s.category == "optimizer_state")
        assert sum(nbytes for nbytes in state if nbytes > FLOAT_BYTES) == expected
    derived = steady_after(first, gradients_persist=False)
    peaks = [int(live_curve(s.storages, len(s.ops)).max()) for s in (derived, second)]
    assert peaks[1] <= peaks[0] <= 1.01 * peaks[1]


def test_a_step_in_which_one_of_several_optimizers_makes_its_state_is_a_first_one(
    record_steps: Callable[..., tuple[Trace, list[Step]]], mlp: type[nn.Module]
) -> None:
    model = mlp()
    optimizers = [torch.optim.Adam([parameter]) for parameter in model.parameters()]

    def step_of(due: list[torch.optim.Optimizer]) -> Callable[[], None]:
        def step() -> None:
            model(torch.randn(5, 8)).sum().backward()
            for optimizer in due:
                optimizer.step()

        return step

    _, steps = record_steps(model, [step_of(optimizers[:1]), step_of(optimizers), step_of(optimizers)], optimizers)
    assert [step.kind for step in steps] == ["first", "first", "steady"]


def test_a_step_in_which_state_of_unfrozen_parameters_is_made_is_a_first_one(
    record_steps: Callable[..., tuple[Trace, list[Step]]], mlp: type[nn.Module]
) -> None:
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters())
    first, *others = model.parameters()

    def step_of(is_frozen: bool) -> Callable[[], None]:
        def step() -> None:
            for parameter in others:
                parameter.requires_grad_(not is_frozen)
            model(torch.randn(5, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    _, steps = record_steps(model, [step_of(True), step_of(False), step_of(False)], optimizer)
    assert [step.kind for step in steps] == ["first", "first", "steady"]
    assert len(optimizer.state[first]) == len(optimizer.state[others[0]])


def test_a_step_in_which_a_further_optimizer_shows_itself_is_a_first_one(mlp: type[nn.Module]) -> None:
    model = mlp()
    known, later = (torch.optim.Adam([parameter]) for parameter in list(model.parameters())[:2])
    builder = TraceBuilder([model])
    kinds = []
    for at_start, at_end in (([known], [known]), ([known], [known, later]), ([known, later], [known, later])):
        builder.start_step(at_start)
        model(torch.randn(5, 8)).sum().backward()
        for optimizer in at_end:
            optimizer.step()
        kinds.append(builder.finish_step(at_end).kind)
    assert kinds == ["first", "first", "steady"]


def test_gradients_that_are_zeroed_in_place_stand_through_the_next_step(
    record_steps: Callable[..., tuple[Trace, list[Step]]], mlp: type[nn.Module]
) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.randn(5, 8)

    def step() -> None:
        optimizer.zero_grad(set_to_none=False)
        model(batch).sum().backward()
        optimizer.step()

    trace, (first, second) = record_steps(model, [step, step], optimizer)
    assert trace.gradients_persist
    assert all(s.birth >= 0 for s in first.storages if s.category == "gradient")
    assert all(s.birth == -1 for s in second.storages if s.category == "gradient")
    derived = steady_after(first, gradients_persist=True)
    assert all(s.birth == -1 for s in derived.storages if s.category == "gradient")


def test_recording_the_same_step_twice_gives_the_same_records(
    record_steps: Callable[..., tuple[Trace, list[Step]]],
) -> None:
    case = MODELS["moe"]("tiny")
    optimizer = torch.optim.SGD(trained_parameters(case.model), lr=0.0)

    def step() -> None:
        case.loss(case.model, case.batch).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def without_times(step: Step) -> Step:
        ops = tuple(msgspec.structs.replace(op, seconds=0.0) for op in step.ops)
        return msgspec.structs.replace(step, ops=ops, wall_seconds=0.0, process_peak_bytes=0)

    trace, steps = record_steps(case.model, [step, step], optimizer)
    again, more = record_steps(case.model, [step, step], optimizer)
    assert without_times(steps[1]) == without_times(more[1])
    assert (trace.model_fingerprint, trace.modules, trace.names) == (
        again.model_fingerprint,
        again.modules,
        again.names,
    )


def hooks_in_force() -> list[object]:
    """Everything a recorder could leave behind."""
    module = torch.nn.modules.module
    optimizer = sys.modules[torch.optim.Optimizer.__module__]
    return [
        dict(module._global_forward_pre_hooks),
        dict(module._global_forward_hooks),
        dict(module._global_forward_hooks_always_called),
        dict(optimizer._global_optimizer_pre_hooks),
        dict(optimizer._global_optimizer_post_hooks),
        torch._C._len_torch_dispatch_stack(),
        torch._C._autograd._top_saved_tensors_default_hooks(False),
    ]


@pytest.mark.parametrize("where", ["forward", "loss", "backward", "optimizer"])
def test_an_exception_anywhere_in_the_step_leaves_no_hook_behind(
    where: str, record_one: Callable[..., tuple[Trace, Step]], mlp: type[nn.Module]
) -> None:
    class Failing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            y = self.inner(x)
            if where == "forward":
                raise ZeroDivisionError
            return y

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        out = model(batch).sum()
        if where == "loss":
            raise ZeroDivisionError
        if where == "backward":
            out.register_hook(lambda _: 1 / 0)
        return out

    def optimizer(parameters: object) -> torch.optim.Optimizer:
        made = torch.optim.SGD(parameters, lr=0.1)
        if where == "optimizer":
            made.register_step_pre_hook(lambda *_: 1 / 0)
        return made

    before = hooks_in_force()
    workload = Workload(model=Failing, batch=lambda: torch.ones(2, 4), loss=loss, optimizer=optimizer)
    with pytest.raises(ZeroDivisionError):
        record(workload)
    assert hooks_in_force() == before
    # And recording works again at once.
    model = mlp()
    record_one(model, lambda: model(torch.randn(5, 8)).sum())
    assert hooks_in_force() == before


def never_backward(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 8))
    optimizer.step()


def never_stepped(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 8)).sum().backward()


def only_evaluated(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    with torch.no_grad():
        model(torch.ones(2, 8))


def nothing(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    pass


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (
            never_backward,
            "the recorded step has no backward phase: loss.backward() was not called, or in another thread than the "
            "model; record one whole training step",
        ),
        (
            never_stepped,
            "the recorded step has no optimizer phase: optimizer.step() was not called; record one whole training step",
        ),
        (
            only_evaluated,
            "the recorded step has no forward phase: the model was not called with gradients on; "
            "record one whole training step",
        ),
        (nothing, "the recorded step ran no tensor operation; nothing can be planned from it"),
    ],
)
def test_half_a_step_is_an_error_that_names_the_missing_half(
    step: Callable[[nn.Module, torch.optim.Optimizer], None],
    message: str,
    record_steps: Callable[..., tuple[Trace, list[Step]]],
    mlp: type[nn.Module],
) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = hooks_in_force()
    with pytest.raises(TraceError) as error:
        record_steps(model, [lambda: step(model, optimizer)], optimizer)
    assert str(error.value) == message
    assert hooks_in_force() == before


@pytest.mark.parametrize("finishes", [True, False], ids=["finished", "cancelled"])
def test_what_was_noted_of_a_step_is_gone_when_it_ends(finishes: bool, mlp: type[nn.Module]) -> None:
    """GIVEN a hook that runs, which holds the recorder, and a graph that is kept."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    builder = TraceBuilder([model])
    builder.start_step(optimizer)
    running_hooks = tuple(nn.modules.module._global_forward_pre_hooks.values())
    loss = model(torch.randn(4, 8)).sum()
    loss.backward(retain_graph=True)
    optimizer.step()
    if finishes:
        builder.finish_step(optimizer)
    builder.cancel_step()
    held = [getattr(hook, "__self__", None) for hook in running_hooks]
    assert [one.log.ops + one.log.storages for one in held if isinstance(one, StepRecorder)] == [[]]
    del held, running_hooks
    gradients = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    loss.backward()
    assert all(
        torch.equal(p.grad, 2 * g) for p, g in zip(model.parameters(), gradients, strict=True) if p.grad is not None
    )


@pytest.mark.parametrize("is_held", [True, False], ids=["by a variable of the loop", "by one of a function"])
def test_what_a_loop_holds_is_there_until_the_next_step_has_made_it_again(is_held: bool, mlp: type[nn.Module]) -> None:
    """GIVEN a model whose result is held when the next step begins THEN that has both until its forward returns."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    builder = TraceBuilder([model])
    builder.start_step(optimizer)
    out = model(torch.randn(4, 8))
    out_bytes = out.nbytes
    out.square().mean().backward()
    optimizer.step()
    if not is_held:
        del out
    first = builder.finish_step(optimizer)
    steady = steady_after(first, gradients_persist=True)
    assert all(one.held_over < 0 for one in first.storages)
    again = [one for one in steady.storages if one.held_over >= 0]
    assert [(one.birth, one.nbytes) for one in again] == ([(-1, out_bytes)] if is_held else [])
    returned_at = max(call.end for call in steady.calls)
    assert all(one.death == returned_at < steady.storages[one.held_over].death for one in again)


def test_finishing_what_was_not_begun_is_an_error(mlp: type[nn.Module]) -> None:
    with pytest.raises(TraceError, match=r"^no step is being recorded$"):
        TraceBuilder([mlp()]).finish_step(None)


def test_two_roots_are_told_apart_by_their_class_names(mlp: type[nn.Module]) -> None:
    encoder, decoder, more = nn.Linear(8, 8), mlp(), nn.Linear(8, 8)
    builder = TraceBuilder([encoder, decoder, more])
    optimizer = torch.optim.SGD([*encoder.parameters(), *decoder.parameters(), *more.parameters()], lr=0.1)
    builder.start_step(optimizer)
    more(decoder(encoder(torch.randn(3, 8)))).sum().backward()
    optimizer.step()
    builder.finish_step(optimizer)
    paths = [module.path for module in builder.trace(optimizer).modules]
    assert paths == ["", "Linear", "Mlp", "Mlp.up", "Mlp.down", "Linear#2"]


def test_the_fingerprint_changes_with_the_model_and_not_with_its_values(
    record_one: Callable[..., tuple[Trace, Step]],
) -> None:
    def fingerprint(width: int, seed: int) -> str:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(8, width), nn.Linear(width, 8))
        return record_one(model, lambda: model(torch.randn(2, 8)).sum())[0].model_fingerprint

    assert fingerprint(16, 0) == fingerprint(16, 1) != fingerprint(17, 0)
