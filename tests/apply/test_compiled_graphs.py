"""Where it is allowed a compiled model's graphs save what the budget has room for; the rest is computed in backward."""

import gc
import logging
import weakref
from collections.abc import Iterator
from pathlib import Path
from shutil import which
from typing import Any

import pytest
import torch
from compiled_regions import REGIONS
from plans import plan_of
from torch import Tensor, nn
from torch._higher_order_ops import wrap
from warm_python import printed_by

import memwall
from memwall.errors import InfeasibleError, NoEffectError
from memwall.machine.meter import process_bytes, return_free_memory
from memwall.planning.techniques.compiled_graphs import CompiledGraphs
from memwall.predict.curve import live_peak_bytes

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not hasattr(wrap, "InductorCompiledCallable"), reason="compiled code is no operation there yet"),
]

MIB = 1 << 20
HAS_COMPILER = which("g++") is not None
WIDTH, BATCH, LAYERS = 64, 32768, 3


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


def train(model: nn.Module, num_steps: int = 3, **fit: Any) -> tuple[list[Tensor], Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loop() -> None:
        for number in range(num_steps):
            batch = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(number))
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    if not fit:
        loop()
        return list(model.parameters()), None
    with memwall.fit(model, optimizer, **fit) as session:
        loop()
    return list(model.parameters()), session


@pytest.fixture
def models(request: pytest.FixtureRequest) -> Iterator[nn.Module]:
    """Yields equal models, each compiled by a compiler that has seen nothing."""
    backend = getattr(request, "param", REGIONS)

    def fresh() -> Iterator[nn.Module]:
        while True:
            torch.compiler.reset()
            torch.manual_seed(0)
            yield torch.compile(nn.Sequential(*(Layer() for _ in range(LAYERS))), backend=backend)  # type: ignore[misc]

    return fresh()


def budget(more_bytes: int) -> int:
    return_free_memory()
    return process_bytes() + more_bytes


def cut_of(session: Any) -> CompiledGraphs:
    (action,) = (each for each in session.plan.actions if isinstance(each, CompiledGraphs))
    return action


def live_bytes(session: Any) -> int:
    return live_peak_bytes(session.trace.steps[0], "cpu")


@pytest.mark.parametrize(
    "models",
    [
        pytest.param(REGIONS, id="graphs", marks=pytest.mark.exhaustive if HAS_COMPILER else ()),
        pytest.param(
            "inductor", marks=[pytest.mark.slow(seconds=40), pytest.mark.skipif(not HAS_COMPILER, reason="needs g++")]
        ),
    ],
    indirect=True,
)
def test_graphs_save_what_there_is_room_for(models: Iterator[nn.Module], caplog: pytest.LogCaptureFixture) -> None:
    expected, free = train(next(models), budget="20GiB", allow=["graphs"])
    assert free.plan.actions == ()
    with caplog.at_level(logging.WARNING):
        found, session = train(next(models), budget=budget(240 * MIB), allow=["graphs"])
    assert not [
        record.getMessage()
        for record in caplog.records
        if record.name.startswith("memwall") and record.levelno >= logging.WARNING
    ]
    assert all(map(torch.equal, found, expected))
    assert 0.1 <= cut_of(session).ratio < 1.0
    assert live_bytes(session) <= live_bytes(free) - (cut_of(session).saved_bytes or 0) + 16 * MIB

    planned, _ = train(next(models), plan=session.plan)
    assert all(map(torch.equal, planned, expected))


# In a process of its own: what tests before have left free would be room for the step.
_CUT_DEEPER = """
import json, sys
import torch
sys.path[:0] = sys.argv[1:]
import test_compiled_graphs as own
from memwall.apply.techniques import compiled_graphs
compiled_graphs._SHARE = 100

def fresh():
    torch.compiler.reset()
    torch.manual_seed(0)
    return torch.compile(torch.nn.Sequential(*(own.Layer() for _ in range(own.LAYERS))), backend=own.REGIONS)

own.train(fresh(), num_steps=1, budget="20GiB", allow=["graphs"])  # what the compiler takes once is there then
_, session = own.train(fresh(), num_steps=4, budget=own.budget(140 << 20), allow=["graphs"])
print(json.dumps([own.cut_of(session).ratio, torch._functorch.config.activation_memory_budget]))
"""


def test_a_step_that_does_not_fit_is_compiled_again_with_less_saved() -> None:
    """GIVEN room that was thought to be there WHEN the recorded step shows it is not THEN the graph is cut deeper."""
    ratio, left = printed_by(_CUT_DEEPER, *map(str, Path(__file__).parents[:2]))
    assert ratio < 1.0
    assert left == 1.0


def test_a_plan_has_no_effect_on_a_model_that_was_called_before(models: Iterator[nn.Module]) -> None:
    model = next(models)
    model(torch.randn(BATCH, WIDTH)).sum().backward()
    with pytest.raises(NoEffectError, match="nothing has been compiled since"):
        train(model, plan=plan_of(model, CompiledGraphs(ratio=0.1)))


def test_a_model_is_not_kept_alive_by_how_its_graphs_were_cut(models: Iterator[nn.Module]) -> None:
    model = next(models)
    train(model, num_steps=2, budget="20GiB", allow=["graphs"])
    alive = weakref.ref(model)
    del model
    torch.compiler.reset()
    gc.collect()
    assert alive() is None


def test_what_was_not_allowed_is_advised(models: Iterator[nn.Module]) -> None:
    with pytest.raises(InfeasibleError, match="--allow graphs"):
        train(next(models), budget=budget(40 * MIB))
