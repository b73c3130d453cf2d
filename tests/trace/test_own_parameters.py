"""A module whose `parameters` is a method of its own class, in a trace and among streamed parameters."""

import torch
from torch import nn

from memwall.apply.streaming.stream_units import find_units
from memwall.trace.modules import ModuleTable


class Learner(nn.Module):
    """A learner of MAML, as others write it: `parameters` is its own, and takes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))
        self.scale = nn.Parameter(torch.ones(4))
        self.fast = [self.weight]

    def parameters(self) -> list[nn.Parameter]:  # type: ignore[override]
        return self.fast


def test_a_module_whose_parameters_take_no_arguments_is_recorded_whole() -> None:
    model = nn.Sequential(Learner(), nn.Linear(4, 2))
    assert [module.parameter_bytes for module in ModuleTable([model]).records] == [0, 20 * 4, 10 * 4]


def test_and_its_own_parameters_can_be_streamed() -> None:
    model = nn.Sequential(Learner(), nn.Linear(4, 2))
    units = find_units(model, ())
    assert [(unit.name, len(unit.parameters)) for unit in units] == [("0", 2), ("1", 2)]
