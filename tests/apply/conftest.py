"""What the tests of recomputation share, and those of optimizer state and parameters on disk."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from block_models import executor_of
from offload_engines import Pool, a_pool
from torch import Tensor, nn
from zoo import trained_parameters

from memwall.apply.optimizer_state.bucketed_state import OptimizerState
from memwall.planning.block_problem import build_menus
from memwall.planning.blocks import find_blocks
from memwall.planning.menu import Costs, Menu
from memwall.planning.techniques.recompute import Recompute
from memwall.predict.malloc.tensor_heap import heap_unavailable_reason
from memwall.predict.process import TENSOR_HEAP
from memwall.predict.treatment import StepModel
from memwall.store.buckets import DiskSpace
from memwall.store.scratch import ScratchFile
from memwall.store.transfer import TransferPool
from memwall.trace.trace_builder import TraceBuilder

KIB = 1 << 10


@pytest.fixture
def state_pool(tmp_path: Path) -> Iterator[TransferPool]:
    """Small blocks, so that a bucket takes several."""
    with TransferPool(ScratchFile(tmp_path), block_bytes=8 * KIB) as made:
        yield made


@pytest.fixture
def keep(state_pool: TransferPool) -> Callable[..., OptimizerState]:
    """Puts an optimizer's state on disk; almost every tensor of a small model moves."""

    def put(optimizer: torch.optim.Optimizer, **settings: Any) -> OptimizerState:
        return OptimizerState(
            optimizer,
            DiskSpace(state_pool),
            **({"resident_bytes": 0, "bucket_bytes": 40 * KIB, "min_bytes": KIB} | settings),
        )

    return put


@pytest.fixture
def recomputed() -> Callable[..., AbstractContextManager[None]]:
    """A context in which these actions recompute blocks of a model."""

    @contextmanager
    def under(model: nn.Module, *actions: Recompute) -> Iterator[None]:
        executor = executor_of(model, *actions)
        executor.apply()
        try:
            yield
        finally:
            executor.undo()

    return under


@pytest.fixture
def after_a_step() -> Callable[[nn.Module, Callable[[], Tensor]], dict[str, Tensor]]:
    """Everything a step leaves: loss, gradients, buffers, and where the random numbers have got to."""

    def step(model: nn.Module, loss: Callable[[], Tensor]) -> dict[str, Tensor]:
        torch.manual_seed(1)
        model.zero_grad()
        value = loss()
        value.backward()
        found = {"loss": value.detach(), "random state": torch.get_rng_state()}
        found |= {f"{name}.grad": p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        found |= {name: buffer.clone() for name, buffer in model.named_buffers()}
        return found

    return step


@pytest.fixture
def assert_same_bits() -> Callable[[dict[str, Tensor], dict[str, Tensor]], None]:
    """Compares what two steps left."""

    def compare(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
        assert found.keys() == expected.keys()
        different = [name for name, value in expected.items() if not torch.equal(found[name], value)]
        assert not different

    return compare


@pytest.fixture
def menus_of() -> Callable[[nn.Module, Callable[[], Tensor]], tuple[Menu, ...]]:
    """What a plan could do to a model, from a recording of one step."""

    def record(model: nn.Module, loss: Callable[[], Tensor]) -> tuple[Menu, ...]:
        optimizer = torch.optim.SGD(trained_parameters(model), lr=0.0)
        builder = TraceBuilder([model])
        builder.start_step(optimizer)
        try:
            loss().backward()
            optimizer.step()
            step = builder.finish_step(optimizer)
        finally:
            builder.cancel_step()
        trace = builder.trace(optimizer)
        costs = Costs(copy_seconds_per_byte=0.0, min_bytes=1)
        return build_menus(trace, StepModel(step, trace.names, find_blocks(trace, step)), costs)

    return record


@pytest.fixture(params=["default", TENSOR_HEAP])
def pool(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pool]:
    """Once with tensors from malloc, once with tensors in a heap of their own."""
    if request.param == TENSOR_HEAP and heap_unavailable_reason():
        pytest.skip(heap_unavailable_reason())
    with a_pool(tmp_path, request.param, monkeypatch) as made:
        yield made
