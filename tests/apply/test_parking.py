"""What of a model's autograd saves too, and stays in memory: parameters, buffers and views of them."""

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
