"""A default device or dtype that the script has set: what memwall makes for itself is as it is without."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import memwall
from memwall.apply.kernels.head import head_disagreement
from memwall.apply.kernels.match import candidates, disagreement
from memwall.apply.offload.packed import pack_seconds_per_element
from memwall.machine.memory_speed import copy_seconds_per_byte
from memwall.rows.initial import _levels

pytestmark = pytest.mark.usefixtures("one_thread")


def test_kernels_are_compared_with_a_module_where_that_is() -> None:
    norm, head = nn.RMSNorm(64), nn.Linear(64, 16)
    with torch.device("meta"):
        assert [disagreement(norm, found) for found in candidates(norm)] == [None]
        assert head_disagreement(head) is None


def test_the_cpu_is_measured() -> None:
    with torch.device("meta"):
        assert pack_seconds_per_element() > 0
        assert copy_seconds_per_byte() > 0


@pytest.fixture(params=[torch.float64, torch.bfloat16], ids=str)
def default_dtype(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(request.param)
    yield request.param
    torch.set_default_dtype(before)


def test_another_default_dtype_changes_no_measurement_or_comparison(default_dtype: torch.dtype) -> None:
    norm, head = nn.RMSNorm(64, dtype=torch.float32), nn.Linear(64, 16, dtype=torch.float32)
    assert pack_seconds_per_element() > 0
    assert [disagreement(norm, found) for found in candidates(norm)] == [None]
    assert head_disagreement(head) is None
    _levels.cache_clear()
    assert _levels("uniform").dtype == torch.float32


def test_a_model_of_another_default_dtype_is_planned(default_dtype: torch.dtype, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    with memwall.fit(model, optimizer, budget="64GiB", disk=str(tmp_path)) as session:
        for _ in range(2):
            model(torch.randn(4, 8)).sum().backward()
            optimizer.step()
    assert session.plan is not None
    assert next(model.parameters()).dtype == default_dtype
