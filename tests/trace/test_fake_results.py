"""Where fake results differ from real ones."""

from collections.abc import Callable

import pytest
import torch.nn.functional as F
from fake_steps import record_fake
from torch import Tensor, nn

from memwall.trace.records import Step, Trace
from memwall.trace.trace_builder import record
from memwall.trace.workload import Workload

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("reduced", [F.mse_loss, F.smooth_l1_loss])
def test_a_reduced_loss_holds_as_many_bytes_as_its_input(
    reduced: Callable[[Tensor, Tensor], Tensor], workload_of: Callable[..., Workload]
) -> None:
    workload = workload_of(lambda model, batch: reduced(model(batch), batch))
    for trace in (record(workload), record_fake(workload)):
        (op,) = [op for op in trace.steps[1].ops if trace.names[op.name].endswith(f"{reduced.__name__}.default")]
        assert trace.steps[1].storages[op.outputs[0]].nbytes == 4 * 8 * 4


def test_the_gradient_that_a_layer_norm_hands_on_is_contiguous_whatever_it_gets(
    workload_of: Callable[..., Workload], names_of: Callable[[Trace, Step], list[str]]
) -> None:
    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        tokens = model(batch).view(2, 4, 4)
        return F.layer_norm(tokens, (4,)).transpose(1, 2).contiguous().sin().sum()

    live, fake = record(workload_of(loss)), record_fake(workload_of(loss))
    assert names_of(fake, fake.steps[1]) == names_of(live, live.steps[1])
