"""Autocast's lists of operators, as CUDA has them."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memwall.machine.hardware import hardware_named
from memwall.predict.cuda.translate import recording_for
from memwall.trace.records import Trace
from memwall.trace.workload import Workload

pytestmark = pytest.mark.usefixtures("one_thread")
AUTOCAST: dict[str, Callable[[Tensor], Tensor]] = {
    "power": lambda x: x.pow(3.0),
    "softmax": lambda x: x.softmax(-1),
    "log-softmax": lambda x: F.log_softmax(x, -1),
    "layer norm": lambda x: F.layer_norm(x, (64,)),
    "sum": lambda x: x.sum(-1),
    "cumulative sum": lambda x: x.cumsum(0),
    "cross entropy": lambda x: F.cross_entropy(x, torch.zeros(len(x), dtype=torch.int64)),
}


@pytest.mark.parametrize("name", sorted(AUTOCAST))
def test_autocast_runs_in_float32_what_it_does_on_cuda(
    name: str, workload_of: Callable[..., Workload], recorded: Callable[..., Trace]
) -> None:
    """GIVEN a product in bfloat16 WHEN one of CUDA's operators follows THEN its result is float32."""

    def dtypes() -> set[torch.dtype]:
        seen = []

        def loss(model: nn.Module, batch: Tensor) -> Tensor:
            with torch.autocast("cuda", dtype=torch.bfloat16):
                result = AUTOCAST[name](model(batch))
            seen.append(result.dtype)
            return result.float().sum()

        workload = workload_of(lambda: nn.Linear(64, 64), lambda: torch.ones(8, 64), loss=loss)
        recorded(workload, "a100-80gb")
        return set(seen)

    assert dtypes() == {torch.float32}


JOINED = {
    "cat": lambda x: torch.cat((x, x.float())),
    "stack": lambda x: torch.stack((x, x.float())),
}


@pytest.mark.parametrize("name", sorted(JOINED))
def test_what_is_joined_with_float32_is_read_where_it_is(
    name: str, workload_of: Callable[..., Workload], recorded: Callable[..., Trace]
) -> None:
    """GIVEN a product in bfloat16 THEN it has one copy in float32, the one that the script makes."""

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return JOINED[name](model(batch)).sum()

    step = recorded(workload_of(lambda: nn.Linear(64, 48), lambda: torch.ones(8, 64), loss=loss), "a100-80gb").steps[-1]
    copies = [s for s in step.storages if s.nbytes == 4 * 8 * 48 and s.phase in ("forward", "loss") and s.birth >= 0]
    assert len(copies) == 1


@pytest.mark.parametrize(("dtype", "num_large"), [(torch.float16, 1), (torch.bfloat16, 2)])
def test_softmax_is_fused_with_its_cast_from_float16(
    dtype: torch.dtype, num_large: int, workload_of: Callable[..., Workload], recorded: Callable[..., Trace]
) -> None:
    """WHEN softmax makes float32 of half precision THEN only bfloat16 has a float32 copy of the input."""

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        with torch.autocast("cuda", dtype=dtype):
            return F.log_softmax(model(batch), -1)[0, 0]

    workload = workload_of(lambda: nn.Linear(64, 48), lambda: torch.ones(8, 64), loss=loss)
    step = recorded(workload, "a100-80gb").steps[-1]
    large = [s for s in step.storages if s.nbytes == 4 * 8 * 48 and s.phase in ("forward", "loss") and s.birth >= 0]
    assert len(large) == num_large


def test_autocast_on_a_cpu_is_itself_again_afterwards() -> None:
    with recording_for(hardware_named("l4")).choices():
        pass
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.ones(3, dtype=torch.bfloat16).softmax(-1).dtype == torch.bfloat16
