"""Tensor parallelism is refused."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import memwall
from memwall.errors import UsageError


@pytest.mark.usefixtures("one_rank")
def test_tensor_parallelism_is_refused() -> None:
    model = parallelize_module(nn.Linear(2, 2), init_device_mesh("cpu", (1,)), ColwiseParallel())
    with pytest.raises(UsageError, match=r"DTensors that fully_shard did not make.*\(tensor parallelism\)"):
        memwall.fit(model, torch.optim.SGD(model.parameters(), lr=0.1), budget="1GiB")
