"""What of a model's autograd saves too, and stays in memory: parameters, buffers and views of them."""

import numpy as np
import torch
from torch import nn

from memwall.apply.offload.parking import parameter_guard


def test_parameters_buffers_and_views_of_them_stay() -> None:
    linear, norm = model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    stays = parameter_guard([model])
    assert stays(linear.weight)
    assert stays(linear.weight.detach().t()[2:])
    assert stays(norm.running_mean)


def test_what_was_computed_from_them_may_leave() -> None:
    model = nn.Linear(8, 8)
    stays = parameter_guard([model])
    assert not stays(torch.ones(8))
    assert not stays(model.weight * 2)


def test_a_parameter_stays_that_has_come_back_elsewhere() -> None:
    """GIVEN a parameter that leaves between its uses WHEN others have taken its place meanwhile THEN it stays."""
    model = nn.Linear(512, 512)
    stays = parameter_guard([model])
    storage = model.weight.untyped_storage()
    place, num_bytes = storage.data_ptr(), storage.nbytes()
    storage.resize_(0)
    others = [torch.empty(512, 512) for _ in range(4)]
    storage.resize_(num_bytes)
    assert len(others) == 4
    assert storage.data_ptr() != place
    assert stays(model.weight.detach().t())


def test_what_could_have_the_identity_of_one_that_is_gone_may_leave() -> None:
    """GIVEN a weight that is gone, whose memory something else has, WHEN a thousand tensors are made THEN all leave."""
    model, memory = nn.Linear(8, 8), np.ones((8, 8), np.float32)
    model.weight = nn.Parameter(torch.from_numpy(memory))
    stays = parameter_guard([model])
    model.weight = nn.Parameter(torch.ones(8, 8))
    assert memory.all()
    assert not any(stays(torch.ones(1) * number) for number in range(1000))
