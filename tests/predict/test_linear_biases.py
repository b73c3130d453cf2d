"""Linear layers of what is not contiguous: a plain step adds their biases in place, a watched one does not."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from memwall.machine.hardware import hardware_named
from memwall.planning.blocks import find_blocks
from memwall.predict.call_rules import Treatment
from memwall.predict.cuda.translate import translated
from memwall.predict.in_place import with_biases_in_place
from memwall.predict.treatment import StepModel
from memwall.trace.records import Step, Trace
from memwall.trace.steps import steady_step
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


def test_what_recompute_gives_back_dies_before_the_bias_of_its_layer_is_summed(
    workload_of: Callable[..., Workload],
) -> None:
    """GIVEN a bias that is added to many rows WHEN its layer's input was recomputed THEN autograd, which sums its
    gradient before it lets go of what it has saved itself, has nothing but the operation hold that."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.down(nn.functional.gelu(self.up(x)))

    trace = record(workload_of(lambda: nn.Sequential(Block(), Block()), lambda: torch.ones(ROWS, ROWS, WIDTH)))
    step, wide_bytes = steady_step(trace), ROWS * ROWS * 4 * WIDTH * 4
    model = StepModel(step, trace.names, find_blocks(trace, step))
    plain, treated = step, model.treated({"0": Treatment(recompute=True)})

    def held_in_sums(step: Step) -> list[int]:
        """Counts what is as large as nothing else, what GELU was given and has made, while each bias is summed."""
        sums = [n for n, op in enumerate(step.ops) if trace.names[op.name] == "aten.sum.dim_IntList"]
        wide = [s for s in step.storages if s.category == "activation" and s.nbytes == wide_bytes]
        return [sum(s.birth <= number < s.death for s in wide) for number in sums]

    # Backward sums those of the second block first, of each the inner layer's last.
    assert held_in_sums(plain) == [4, 2, 2, 0]
    assert held_in_sums(treated) == [2, 0, 1, 0]
