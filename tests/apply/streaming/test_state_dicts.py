"""Hooks on a model whose parameters are below its device are the model's own: copies of it have none."""

import copy
import io
from types import SimpleNamespace

import torch
from torch import nn

from memwall.apply.streaming.state_dicts import StateDictsBelow


def test_a_copy_and_a_saved_model_have_nothing_of_it() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    locked = SimpleNamespace(stream=(each for each in ()))  # like a stream, nothing that can be copied
    below = StateDictsBelow(model, SimpleNamespace(get=lambda _: None if locked is None else locked))  # type: ignore[arg-type]
    assert all(len(layer._state_dict_hooks) == 1 for layer in model)
    assert not any(layer._state_dict_hooks for layer in copy.deepcopy(model))
    torch.save(model, io.BytesIO())
    below.undo()
    assert not any(layer._state_dict_hooks for layer in model)
