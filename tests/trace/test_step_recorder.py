"""What a recorded step says: whose bytes there are, when they live, who saved what, and where phases begin."""

import threading
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from zoo import MODELS

from memwall.trace.records import Step, Storage, Trace
from memwall.trace.step_recorder import StepRecorder

FLOAT_BYTES = 4

pytestmark = pytest.mark.usefixtures("one_thread")


def bytes_by_category(step: Step) -> Counter[str]:
    found: Counter[str] = Counter()
    for storage in step.storages:
        found[storage.category] += storage.nbytes
    return found


def born_by(trace: Trace, step: Step, name: str) -> list[Storage]:
    return [s for s in step.storages if s.birth >= 0 and trace.names[step.ops[s.birth].name] == name]


def test_every_byte_has_its_category(record_one: Callable[..., tuple[Trace, Step]]) -> None:
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


def test_tied_weights_count_once(record_one: Callable[..., tuple[Trace, Step]]) -> None:
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


def test_what_the_batch_holds_was_there_before_the_step_even_if_autograd_saves_it_first(
    record_one: Callable[..., tuple[Trace, Step]],
) -> None:
    """A convolution's input is saved before the operation that reads it runs."""
    model = nn.Conv2d(3, 4, 3)
    images = torch.randn(2, 3, 16, 16)
    _, step = record_one(model, lambda: model(images).sum())
    (found,) = [s for s in step.storages if s.nbytes == images.nbytes]
    assert (found.category, found.birth, found.death) == ("input", -1, len(step.ops))


def test_a_view_is_no_storage_and_a_saved_view_is_a_part_of_its_base(
    record_one: Callable[..., tuple[Trace, Step]],
) -> None:
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


def test_an_in_place_operation_writes_to_a_storage_and_makes_none(
    record_one: Callable[..., tuple[Trace, Step]],
) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 8))
    batch = torch.randn(5, 8)
    trace, step = record_one(model, lambda: model(batch).sum())
    (relu,) = [op for op in step.ops if trace.names[op.name] == "aten.relu_.default"]
    assert relu.writes == relu.inputs == relu.outputs
    written = step.storages[relu.writes[0]]
    assert trace.names[step.ops[written.birth].name] == "aten.addmm.default"


def test_phases_begin_where_they_do(record_one: Callable[..., tuple[Trace, Step]], mlp: type[nn.Module]) -> None:
    model = mlp()
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


def test_accumulation_is_marked_and_its_gradients_stand_from_the_first_backward_on(
    record_steps: Callable[..., tuple[Trace, list[Step]]], mlp: type[nn.Module]
) -> None:
    model = mlp()
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


def test_several_forwards_before_one_backward_are_one_micro_batch(
    record_steps: Callable[..., tuple[Trace, list[Step]]], mlp: type[nn.Module]
) -> None:
    model = mlp()
    batch = torch.randn(5, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        for _ in range(3):
            (model(batch).sum() + model(2 * batch).sum()).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    trace, _ = record_steps(model, [step], optimizer)
    assert trace.num_micro_batches == 3


def test_an_evaluation_inside_the_step_is_a_phase_of_its_own(
    record_one: Callable[..., tuple[Trace, Step]], mlp: type[nn.Module]
) -> None:
    model = mlp()
    batch = torch.randn(5, 8)

    def forward() -> Tensor:
        with torch.no_grad():
            model(batch)
        return model(batch).sum()

    _, step = record_one(model, forward)
    assert [name for name, _ in step.marks][:3] == ["eval", "forward", "loss"]
    assert {op.phase for op in step.ops[: step.marks[1][1]]} == {"eval"}
    assert [call.backward_start >= 0 for call in step.calls] == [False] * 3 + [True] * 3


def test_a_saved_tensor_belongs_to_the_module_that_ran_and_lives_from_packing_to_release(
    record_one: Callable[..., tuple[Trace, Step]], mlp: type[nn.Module]
) -> None:
    model = mlp()
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


def test_a_call_knows_its_arguments_its_results_and_its_backward(
    record_one: Callable[..., tuple[Trace, Step]], mlp: type[nn.Module]
) -> None:
    model = mlp()
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


def test_a_shared_module_has_one_call_for_each_time_it_ran(record_one: Callable[..., tuple[Trace, Step]]) -> None:
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


def test_the_micro_batch_is_the_first_dimension_of_what_the_model_is_called_with(
    record_one: Callable[..., tuple[Trace, Step]], mlp: type[nn.Module]
) -> None:
    class Named(mlp):
        def forward(self, *, x: Tensor) -> Tensor:
            return super().forward(x)

    positional, named, batch = mlp(), Named(), torch.randn(7, 8)
    assert record_one(positional, lambda: positional(batch).sum())[0].micro_batch == 7
    assert record_one(named, lambda: named(x=batch).sum())[0].micro_batch == 7


def test_bytes_that_grow_with_the_batch_are_marked(
    record_one: Callable[..., tuple[Trace, Step]], mlp: type[nn.Module]
) -> None:
    model = mlp()
    batch = torch.randn(6, 8)
    _, step = record_one(model, lambda: model(batch).sum())
    growing = Counter(s.nbytes for s in step.storages if s.batched)
    assert growing[6 * 32 * FLOAT_BYTES] >= 2
    assert not any(s.batched for s in step.storages if s.category in ("parameter", "gradient", "optimizer_state"))


def test_a_sparse_gradient_gives_its_category_to_no_other_storage(
    record_one: Callable[..., tuple[Trace, Step]],
) -> None:
    """It has no storage of its own; what backward made for it are temporaries."""
    model = nn.Embedding(50, 8, sparse=True)
    numbers = torch.arange(20).reshape(4, 5)
    _, step = record_one(model, lambda: model(numbers).pow(2).sum())
    assert [s for s in step.storages if s.category == "gradient"] == []


def test_an_operators_own_workspace_lives_while_it_runs(record_one: Callable[..., tuple[Trace, Step]]) -> None:
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


def test_an_exception_that_the_script_catches_in_forward_does_not_shift_the_calls_after_it(
    record_one: Callable[..., tuple[Trace, Step]],
) -> None:
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


def test_a_recording_ended_by_another_thread_leaves_the_thread_that_it_began_in_as_it_was() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), torch.randn(2, 4)
    model(x).sum().backward()
    expected = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    recorder, is_recording, is_stopped = StepRecorder([model]), threading.Event(), threading.Event()

    def train() -> None:
        recorder.start()
        before = model(x).sum()
        is_recording.set()
        is_stopped.wait()
        before.backward()  # what was saved meanwhile is there
        model(x).sum().backward()

    thread = threading.Thread(target=train)
    thread.start()
    is_recording.wait()
    recorder.stop()
    num_ops = len(recorder.log.ops)
    is_stopped.set()
    thread.join()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        assert gradient is not None
        torch.testing.assert_close(parameter.grad, 2 * gradient)
    assert len(recorder.log.ops) == num_ops
    assert not _get_current_dispatch_mode_stack()
