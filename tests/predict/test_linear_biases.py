"""Linear layers of what is not contiguous: a plain step adds their biases in place, a watched one does not."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from memwall.machine.hardware import hardware_named
from memwall.predict.cuda.translate import translated
from memwall.predict.in_place import with_biases_in_place
from memwall.trace.records import Trace
from memwall.trace.trace_builder import record
from memwall.trace.workload import Workload

ROWS, WIDTH = 64, 32
RESULT = ROWS * ROWS * WIDTH * 4

pytestmark = pytest.mark.usefixtures("one_thread")


class Transposed(nn.Module):
    """Runs a linear layer, or the same written by hand, over a transposed input."""

    def __init__(self, *, is_by_hand: bool) -> None:
        super().__init__()
        self.before, self.layer = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.is_by_hand = is_by_hand

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.before(x)).transpose(0, 1)
        return torch.tanh(x @ self.layer.weight.t() + self.layer.bias if self.is_by_hand else self.layer(x))


@pytest.fixture
def step_of(workload_of: Callable[..., Workload]) -> Callable[..., Trace]:
    """(is_by_hand) -> two steps, recorded on real tensors."""
    return lambda is_by_hand: record(
        workload_of(lambda: Transposed(is_by_hand=is_by_hand), lambda: torch.ones(ROWS, ROWS, WIDTH))
    )


def results_of(trace: Trace) -> list[int]:
    """Returns the bytes of what the step's products and sums make in forward, as large as a layer's result."""
    step = trace.steps[-1]
    names = {number: trace.names[op.name] for number, op in enumerate(step.ops) if op.phase == "forward"}
    made = [storage for storage in step.storages if names.get(storage.birth) in ("aten.mm.default", "aten.add.Tensor")]
    return [storage.nbytes for storage in made if storage.nbytes == RESULT]


def test_a_layer_adds_its_bias_to_the_product(step_of: Callable[..., Trace]) -> None:
    trace = step_of(is_by_hand=False)
    assert results_of(trace) == [RESULT] * 2  # what the recorder made torch do
    on_device = translated(trace, hardware_named("l4"))
    assert results_of(on_device) == [RESULT]
    step, changed = trace.steps[-1], on_device.steps[-1]
    assert len(changed.saved) == len(step.saved)
    assert all(changed.storages[saving.storage].nbytes for saving in changed.saved if saving.nbytes)


def test_a_sum_written_by_hand_is_a_tensor_of_its_own(step_of: Callable[..., Trace]) -> None:
    trace = step_of(is_by_hand=True)
    assert results_of(translated(trace, hardware_named("l4"))) == [RESULT] * 2


class Linear(nn.Linear):
    """Has the name of torch's own, and makes a product and a sum."""

    def forward(self, input: Tensor) -> Tensor:
        return input @ self.weight.t() + self.bias


def reading_its_product() -> nn.Linear:
    """Returns torch's own layer with a forward that reads its product as well."""
    layer = nn.Linear(WIDTH, WIDTH)

    def forward(input: Tensor) -> Tensor:
        product = input @ layer.weight.t()
        return torch.tanh(product) * (product + layer.bias)

    layer.forward = forward  # type: ignore[method-assign]
    return layer


def test_a_class_of_the_users_is_not_torchs_for_its_name(workload_of: Callable[..., Workload]) -> None:
    """GIVEN a user's own class called Linear WHEN it adds its bias to a product THEN that sum is a new tensor."""
    trace = record(workload_of(lambda: nn.Sequential(Linear(WIDTH, WIDTH), nn.Tanh()), lambda: torch.ones(ROWS, WIDTH)))
    assert [module.class_name for module in trace.modules[1:]] == [f"{__name__}.Linear", "Tanh"]
    assert with_biases_in_place(trace.steps[-1], trace.names, trace.modules) == trace.steps[-1]


def test_a_product_that_outlives_the_sum_is_left_alone(workload_of: Callable[..., Workload]) -> None:
    """GIVEN a linear layer's step in which the product is alive after the sum THEN nothing changes."""
    trace = record(workload_of(reading_its_product, lambda: torch.ones(ROWS, WIDTH)))
    step = trace.steps[-1]
    product = next(op for op in step.ops if trace.names[op.name] == "aten.mm.default")
    assert trace.modules[product.module].class_name == "Linear"
    assert with_biases_in_place(step, trace.names, trace.modules) == step
