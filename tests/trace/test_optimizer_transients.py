"""What the optimizer's step takes on top of its state on CUDA, against the real step with the same implementation.

Every optimizer of torch.optim whose step needs no closure, in each implementation it has; and one that nobody has
heard of. Widths are unequal, so that nothing can be a multiple by chance.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

import pytest
import torch
from fake_steps import record_fake
from oracle import count_allocations
from torch import Tensor, nn

from memwall.trace.records import Step
from memwall.trace.workload import Workload

# Unequal, so that the largest tensor and the sum of all are no multiples of each other.
WIDTHS = (64, 48, 200, 8, 120)
IMPLEMENTATIONS: dict[str, dict[str, bool]] = {
    "for-loop": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adadelta": torch.optim.Adadelta,
    "adafactor": torch.optim.Adafactor,
    "adagrad": torch.optim.Adagrad,
    "adam": torch.optim.Adam,
    "adamax": torch.optim.Adamax,
    "adamw": torch.optim.AdamW,
    "adamw-amsgrad": lambda p, **how: torch.optim.AdamW(p, amsgrad=True, **how),
    "adamw-maximize": lambda p, **how: torch.optim.AdamW(p, maximize=True, **how),
    "asgd": torch.optim.ASGD,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "rmsprop": torch.optim.RMSprop,
    "rmsprop-centered": lambda p, **how: torch.optim.RMSprop(p, centered=True, momentum=0.9, **how),
    "rprop": torch.optim.Rprop,
    "sgd": torch.optim.SGD,
    "sgd-decay": lambda p, **how: torch.optim.SGD(p, weight_decay=0.1, **how),
    "sgd-momentum-decay": lambda p, **how: torch.optim.SGD(p, momentum=0.9, weight_decay=0.1, **how),
    "sgd-momentum": lambda p, **how: torch.optim.SGD(p, momentum=0.9, nesterov=True, **how),
}
FUSED = {name for name in OPTIMIZERS if name.startswith(("adagrad", "adam", "adamw", "sgd"))} - {"adamax"}
WITHOUT_IMPLEMENTATIONS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "muon": torch.optim.Muon,
    "unheard of": lambda p, lr: Unheard(p, lr),
}


class Unheard(torch.optim.Optimizer):
    """Keeps half of a copy of each parameter, and takes two and a half copies of one for its step."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["kept"] = torch.zeros_like(p, dtype=torch.float16)
                kept = state["kept"].float()
                change = kept + p.grad
                state["kept"].copy_(change)
                p.sub_(change, alpha=group["lr"])


pytestmark = pytest.mark.usefixtures("one_thread")


def model() -> nn.Module:
    return nn.Sequential(*(nn.Linear(a, b, bias=False) for a, b in pairwise(WIDTHS)))


def foreseen(steps: Iterable[Step]) -> list[int]:
    """Most bytes at once that are born in the optimizer's phase of each step."""
    found = []
    for step in steps:
        live = Counter[int]()
        for storage in step.storages:
            if storage.birth >= 0 and storage.phase == "optimizer":
                for operation in range(storage.birth, min(storage.death, len(step.ops))):
                    live[operation] += storage.nbytes
        found.append(max(live.values(), default=0))
    return found


def real(make: Callable[[Any], torch.optim.Optimizer]) -> list[int]:
    """The same of real steps, as torch's allocator counts them."""
    parameters = list(model().parameters())
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer = make(parameters)
    found = []
    for _ in range(2):
        state = [value for held in optimizer.state.values() for value in held.values() if isinstance(value, Tensor)]
        held = [*parameters, *(p.grad for p in parameters if p.grad is not None), *state]
        count = count_allocations(optimizer.step, held)
        found.append(count.peak_bytes - count.start_bytes)
    return found


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_on_cuda_takes_what_the_foreach_implementation_takes(name: str) -> None:
    """GIVEN an optimizer left to torch THEN it is the foreach one."""
    assert_foreseen(OPTIMIZERS[name], {}, IMPLEMENTATIONS["for-loop" if name == "adafactor" else "foreach"])


@pytest.mark.parametrize(
    ("name", "implementation"),
    [(name, "for-loop") for name in OPTIMIZERS] + [(name, "fused") for name in sorted(FUSED)],
)
def test_an_implementation_that_was_asked_for_is_the_one_foreseen(name: str, implementation: str) -> None:
    how = IMPLEMENTATIONS[implementation]
    assert_foreseen(OPTIMIZERS[name], how, how)


@pytest.mark.parametrize("name", WITHOUT_IMPLEMENTATIONS)
def test_an_optimizer_that_torch_chooses_nothing_for_is_run_not_guessed(name: str) -> None:
    """Beside the real step on a CPU, whose products of bfloat16 make copies for themselves."""
    assert_foreseen(WITHOUT_IMPLEMENTATIONS[name], {}, {}, has_cpu_workspaces=True)


def assert_foreseen(
    make: Callable[..., torch.optim.Optimizer],
    asked: dict[str, bool],
    expected: dict[str, bool],
    *,
    has_cpu_workspaces: bool = False,
) -> None:
    """Within what operators need inside themselves, and the numbers of single elements that count steps."""
    workload = Workload(
        model=model,
        batch=lambda: torch.ones(1, WIDTHS[0]),
        loss=lambda model, batch: model(batch).sum(),
        optimizer=lambda p: make(p, lr=0.1, **asked),
    )
    trace = record_fake(workload, target="cuda", has_cpu_workspaces=has_cpu_workspaces)
    weight_bytes = sum(p.numel() * p.element_size() for p in model().parameters())
    found = real(lambda p: make(p, lr=0.1, **expected))
    assert foreseen(trace.steps) == pytest.approx(found, abs=0.005 * weight_bytes)
