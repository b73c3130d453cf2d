"""What the tests of optimizer state on disk share."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from memwall.apply.optimizer_state import OptimizerState
from memwall.store.scratch import ScratchFile
from memwall.store.transfer import TransferPool

KIB = 1 << 10


@pytest.fixture
def state_pool(tmp_path: Path) -> Iterator[TransferPool]:
    """Small blocks, so that a bucket takes several."""
    with TransferPool(ScratchFile(tmp_path), block_bytes=8 * KIB) as made:
        yield made


@pytest.fixture
def keep(state_pool: TransferPool) -> Callable[..., OptimizerState]:
    """Puts an optimizer's state on disk; almost every tensor of a small model moves."""

    def put(optimizer: torch.optim.Optimizer, **settings: int) -> OptimizerState:
        return OptimizerState(
            optimizer, state_pool, **({"resident_bytes": 0, "bucket_bytes": 40 * KIB, "min_bytes": KIB} | settings)
        )

    return put
