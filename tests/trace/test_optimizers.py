"""What memwall knows of a class of optimizers is asked of one table, by the class itself and not by its name alone."""

import torch

from memwall.trace.optimizers import STEPPED_ALONE, has_moments, known_class, leaves_foreach_to_torch


def test_a_class_is_known_by_itself_and_not_by_its_name() -> None:
    class Derived(torch.optim.SGD):
        pass

    stranger = type("SGD", (torch.optim.Optimizer,), {})

    assert known_class(Derived) is torch.optim.SGD
    assert known_class(stranger) is None
    assert known_class(torch.optim.LBFGS) is None


def test_each_class_that_torch_steps_alone_is_there_under_its_name() -> None:
    assert all(known_class(getattr(torch.optim, name)) is not None for name in STEPPED_ALONE - {"Lion"})


def test_questions_to_the_table_are_answered_for_an_optimizer() -> None:
    parameter = torch.nn.Parameter(torch.ones(2, 2))

    assert has_moments(torch.optim.AdamW([parameter]))
    assert not has_moments(torch.optim.NAdam([parameter]))
    assert leaves_foreach_to_torch(torch.optim.LBFGS([parameter]))
    assert not leaves_foreach_to_torch(torch.optim.Adafactor([parameter]))
