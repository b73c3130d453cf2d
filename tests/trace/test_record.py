"""What a recorded step says: whose bytes there are, when they live, who saved what, and where phases begin."""

import sys
from collections import Counter
from collections.abc import Callable, Sequence

import msgspec
import pytest
import torch
from torch import Tensor, nn
from zoo import MODELS, optimizers, trained_parameters

from memwall.errors import TraceError
from memwall.predict.curve import live_curve
from memwall.trace.build import steady_after
from memwall.trace.record import TraceBuilder, record
from memwall.trace.records import Step, Storage, Trace
from memwall.trace.workload import Workload

FLOAT_BYTES = 4


pytestmark = pytest.mark.usefixtures("one_thread")


def record_steps(
    model: nn.Module, steps: Sequence[Callable[[], object]], optimizer: torch.optim.Optimizer | None = None
) -> tuple[Trace, list[Step]]:
    """Each callable as one recorded step."""
    builder = TraceBuilder([model])
    found = []
    for step in steps:
        builder.start_step(optimizer)
        try:
            step()
            found.append(builder.finish_step(optimizer))
        finally:
            builder.cancel_step()
    return builder.trace(optimizer), found


def record_one(
    model: nn.Module, forward: Callable[[], Tensor], optimizer: torch.optim.Optimizer | None = None
) -> tuple[Trace, Step]:
    """One step of `forward`, backward, an SGD step and dropped gradients."""
    optimizer = optimizer or torch.optim.SGD(trained_parameters(model), lr=0.1)

    def step() -> None:
        forward().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    trace, steps = record_steps(model, [step], optimizer)
    return trace, steps[0]


def bytes_by_category(step: Step) -> Counter[str]:
    found: Counter[str] = Counter()
    for storage in step.storages:
        found[storage.category] += storage.nbytes
    return found


def born_by(trace: Trace, step: Step, name: str) -> list[Storage]:
    return [s for s in step.storages if s.birth >= 0 and trace.names[step.ops[s.birth].name] == name]


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.sin(self.up(x)))


def test_every_byte_has_its_category() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Sigmoid(), nn.Linear(16, 4))
    optimizer = torch.optim.Adam(model.parameters())
    batch = torch.randn(10, 8)
    _, step = record_one(model, lambda: model(batch).sum(), optimizer)
    parameter_bytes = sum(p.nbytes for p in model.parameters())
    found = bytes_by_category(step)
    assert found["parameter"] == parameter_bytes
    assert found["gradient"] == parameter_bytes
    # Two moments per parameter, and one step counter of four bytes for each of the six.
    assert found["optimizer_state"] == 2 * parameter_bytes + 6 * FLOAT_BYTES
    assert found["buffer"] == 2 * 16 * FLOAT_BYTES + 8
    assert found["input"] == batch.nbytes
    # Saved: the norm's input, its two statistics, and the sigmoid's result, which is the last layer's input too.
    assert found["activation"] == (10 * 16 + 2 * 16 + 10 * 16) * FLOAT_BYTES


def test_tied_weights_count_once() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.head = nn.Embedding(50, 8), nn.Linear(8, 50, bias=False)
            self.head.weight = self.tokens.weight

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(self.tokens(tokens))

    model = Tied()
    trace, step = record_one(model, lambda: model(torch.arange(6)).sum())
    assert bytes_by_category(step)["parameter"] == 50 * 8 * FLOAT_BYTES
    assert sum(module.parameter_bytes for module in trace.modules) == 2 * 50 * 8 * FLOAT_BYTES


def test_what_the_batch_holds_was_there_before_the_step_even_if_autograd_saves_it_first() -> None:
    """A convolution's input is saved before the operation that reads it runs."""
    model = nn.Conv2d(3, 4, 3)
    images = torch.randn(2, 3, 16, 16)
    _, step = record_one(model, lambda: model(images).sum())
    (found,) = [s for s in step.storages if s.nbytes == images.nbytes]
    assert (found.category, found.birth, found.death) == ("input", -1, len(step.ops))


def test_a_view_is_no_storage_and_a_saved_view_is_a_part_of_its_base() -> None:
    model = nn.Linear(8, 24)
    batch = torch.randn(5, 8)

    def forward() -> Tensor:
        query, key, value = model(batch).chunk(3, dim=1)
        return (query * key * value).sum()

    trace, step = record_one(model, forward)
    assert not born_by(trace, step, "aten.split.Tensor")
    (base,) = [i for i, s in enumerate(step.storages) if s.birth >= 0 and s.nbytes == 5 * 24 * FLOAT_BYTES][:1]
    parts = [save.nbytes for save in step.saved if save.storage == base]
    assert parts == [5 * 8 * FLOAT_BYTES] * len(parts)
    assert len(parts) == 3


def test_an_in_place_operation_writes_to_a_storage_and_makes_none() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 8))
    batch = torch.randn(5, 8)
    trace, step = record_one(model, lambda: model(batch).sum())
    (relu,) = [op for op in step.ops if trace.names[op.name] == "aten.relu_.default"]
    assert relu.writes == relu.inputs == relu.outputs
    written = step.storages[relu.writes[0]]
    assert trace.names[step.ops[written.birth].name] == "aten.addmm.default"


def test_phases_begin_where_they_do() -> None:
    model = Mlp()
    batch = torch.randn(5, 8)
    trace, step = record_one(model, lambda: model(batch).square().sum())
    assert [name for name, _ in step.marks] == ["forward", "loss", "backward", "other", "optimizer", "other"]
    at = dict(reversed(step.marks))
    phases = [op.phase for op in step.ops]
    assert set(phases[at["forward"] : at["loss"]]) == {"forward"}
    assert [trace.names[op.name] for op in step.ops[at["loss"] : at["backward"]]][:2] == [
        "aten.pow.Tensor_Scalar",
        "aten.sum.default",
    ]
    assert set(phases[at["optimizer"] :]) <= {"optimizer", "other"}
    assert phases.count("backward") == sum(op.phase == "backward" for op in step.ops[at["backward"] : at["optimizer"]])


def test_accumulation_is_marked_and_its_gradients_stand_from_the_first_backward_on() -> None:
    model = Mlp()
    batch = torch.randn(5, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        for _ in range(3):
            model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    trace, (found,) = record_steps(model, [step], optimizer)
    boundaries = [op for name, op in found.marks if name == "accumulation"]
    assert trace.num_micro_batches == 3
    assert len(boundaries) == 2
    assert [name for name, op in found.marks if op == boundaries[0]] == ["accumulation", "forward"]
    gradients = [s for s in found.storages if s.category == "gradient"]
    assert len(gradients) == 4
    assert all(s.birth < boundaries[0] and s.death > found.marks[-2][1] for s in gradients)
    # What the second pass adds to them is gone by the third.
    assert all(s.death <= boundaries[1] for s in found.storages if boundaries[0] <= s.birth < boundaries[1])


def test_an_evaluation_inside_the_step_is_a_phase_of_its_own() -> None:
    model = Mlp()
    batch = torch.randn(5, 8)

    def forward() -> Tensor:
        with torch.no_grad():
            model(batch)
        return model(batch).sum()

    _, step = record_one(model, forward)
    assert [name for name, _ in step.marks][:3] == ["eval", "forward", "loss"]
    assert {op.phase for op in step.ops[: step.marks[1][1]]} == {"eval"}
    assert [call.backward_start >= 0 for call in step.calls] == [False] * 3 + [True] * 3


def test_a_saved_tensor_belongs_to_the_module_that_ran_and_lives_from_packing_to_release() -> None:
    model = Mlp()
    batch = torch.randn(5, 8)
    trace, step = record_one(model, lambda: model(batch).sum())
    # The first layer saves the batch, sin its argument; the second layer its input and its weight.
    found = [(trace.modules[save.module].path, step.storages[save.storage].category) for save in step.saved]
    assert found == [("up", "input"), ("", "activation"), ("down", "activation"), ("down", "parameter")]
    backward = dict(reversed(step.marks))["backward"]
    for save in step.saved:
        assert save.packed <= backward <= save.unpacked < save.released <= len(step.ops)
    released = [save.released for save in step.saved]
    assert released == sorted(released, reverse=True)


def test_a_call_knows_its_arguments_its_results_and_its_backward() -> None:
    model = Mlp()
    batch = torch.randn(5, 8)
    trace, step = record_one(model, lambda: model(batch).sum())
    root, up, down = step.calls
    assert [trace.modules[call.module].path for call in step.calls] == ["", "up", "down"]
    assert root.start == up.start < up.end < down.start < down.end == root.end
    assert root.inputs == up.inputs
    assert [step.storages[i].category for i in up.inputs] == ["input"]
    assert down.outputs == root.outputs
    assert down.backward_start < down.backward_end <= up.backward_start < up.backward_end
    assert (root.backward_start, root.backward_end) == (down.backward_start, up.backward_end)


def test_a_shared_module_has_one_call_for_each_time_it_ran() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(self.inner(x).sin())

    model = Twice()
    trace, step = record_one(model, lambda: model(torch.randn(5, 8)).sum())
    first, second = [call for call in step.calls if trace.modules[call.module].path == "inner"]
    assert first.end < second.start < second.end <= second.backward_start < second.backward_end <= first.backward_start


def test_the_micro_batch_is_the_first_dimension_of_what_the_model_is_called_with() -> None:
    class Named(Mlp):
        def forward(self, *, x: Tensor) -> Tensor:
            return super().forward(x)

    positional, named, batch = Mlp(), Named(), torch.randn(7, 8)
    assert record_one(positional, lambda: positional(batch).sum())[0].micro_batch == 7
    assert record_one(named, lambda: named(x=batch).sum())[0].micro_batch == 7


def test_bytes_that_grow_with_the_batch_are_marked() -> None:
    model = Mlp()
    batch = torch.randn(6, 8)
    _, step = record_one(model, lambda: model(batch).sum())
    growing = Counter(s.nbytes for s in step.storages if s.batched)
    assert growing[6 * 32 * FLOAT_BYTES] >= 2
    assert not any(s.batched for s in step.storages if s.category in ("parameter", "gradient", "optimizer_state"))


def test_an_operators_own_workspace_lives_while_it_runs() -> None:
    """A convolution's column buffer is seen by no dispatch mode."""
    torch.manual_seed(0)
    model = MODELS["unet"]("tiny")
    optimizer = torch.optim.SGD(model.model.parameters(), lr=0.1)
    trace, step = record_one(model.model, lambda: model.loss(model.model, model.batch), optimizer)
    returned = {i for op in step.ops for i in op.outputs}
    own = [s for i, s in enumerate(step.storages) if s.birth >= 0 and i not in returned and s.category == "temporary"]
    by_convolutions = [s for s in own if "convolution" in trace.names[step.ops[s.birth].name]]
    assert by_convolutions
    assert all(s.death == s.birth + 1 for s in by_convolutions)


@pytest.mark.parametrize("optimizer_name", ["adamw_foreach", "adamw_for_loop", "sgd_momentum"])
def test_the_first_step_makes_the_optimizers_state_and_predicts_the_steady_one(optimizer_name: str) -> None:
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


def test_gradients_that_are_zeroed_in_place_stand_through_the_next_step() -> None:
    model = Mlp()
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


def test_recording_the_same_step_twice_gives_the_same_records() -> None:
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
def test_an_exception_anywhere_in_the_step_leaves_no_hook_behind(where: str) -> None:
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
    model = Mlp()
    record_one(model, lambda: model(torch.randn(5, 8)).sum())
    assert hooks_in_force() == before


def test_an_exception_that_the_script_catches_in_forward_does_not_shift_the_calls_after_it() -> None:
    class Fallible(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fails, self.works = nn.Linear(3, 3), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            try:
                self.fails(x)
            except RuntimeError:
                x = x.sin()
            return self.works(x)

    model = Fallible()
    trace, step = record_one(model, lambda: model(torch.randn(5, 8)).sum())
    assert [trace.modules[call.module].path for call in step.calls] == ["", "fails", "works"]
    root, fails, works = step.calls
    assert fails.end <= works.start < works.end == root.end
    assert [trace.modules[save.module].path for save in step.saved][-1] == "works"


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
            "the recorded step has no backward phase: loss.backward() was not called; record one whole training step",
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
    step: Callable[[nn.Module, torch.optim.Optimizer], None], message: str
) -> None:
    model = Mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = hooks_in_force()
    with pytest.raises(TraceError) as error:
        record_steps(model, [lambda: step(model, optimizer)], optimizer)
    assert str(error.value) == message
    assert hooks_in_force() == before


def test_finishing_what_was_not_begun_is_an_error() -> None:
    with pytest.raises(TraceError, match=r"^no step is being recorded$"):
        TraceBuilder([Mlp()]).finish_step(None)


def test_two_roots_are_told_apart_by_their_class_names() -> None:
    encoder, decoder, more = nn.Linear(8, 8), Mlp(), nn.Linear(8, 8)
    builder = TraceBuilder([encoder, decoder, more])
    optimizer = torch.optim.SGD([*encoder.parameters(), *decoder.parameters(), *more.parameters()], lr=0.1)
    builder.start_step(optimizer)
    more(decoder(encoder(torch.randn(3, 8)))).sum().backward()
    optimizer.step()
    builder.finish_step(optimizer)
    paths = [module.path for module in builder.trace(optimizer).modules]
    assert paths == ["", "Linear", "Mlp", "Mlp.up", "Mlp.down", "Linear#2"]


def test_the_fingerprint_changes_with_the_model_and_not_with_its_values() -> None:
    def fingerprint(width: int, seed: int) -> str:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(8, width), nn.Linear(width, 8))
        return record_one(model, lambda: model(torch.randn(2, 8)).sum())[0].model_fingerprint

    assert fingerprint(16, 0) == fingerprint(16, 1) != fingerprint(17, 0)
