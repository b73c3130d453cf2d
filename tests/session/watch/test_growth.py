"""A run that needs more with each step is told so within 20 steps, with the lines; one that does not never is."""

import logging
import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import memwall
from memwall.session.watch.growth import GrowthWatch

MIB = 1 << 20
BUDGET_BYTES = 1 << 40


@pytest.fixture(autouse=True)
def _log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)


def watched(values: Sequence[int], *, is_compiled: bool = False, step: Callable[[int], object] = lambda _: None) -> int:
    """Runs steps that begin with so many bytes; returns how many."""
    watch = GrowthWatch(budget_bytes=lambda: BUDGET_BYTES, is_compiled=lambda: is_compiled)
    for i, standing_bytes in enumerate(values):
        watch.begin_step(standing_bytes)
        step(i)
        watch.end_step()
    watch.close()
    return len(values)


def test_the_lines_that_keep_tensors_are_named_within_24_steps(caplog: pytest.LogCaptureFixture) -> None:
    """GIVEN a loop that keeps an output of each step with its graph THEN its lines are named, and what to keep."""
    kept: list[Tensor] = []

    def step(_: int) -> None:
        output = torch.ones(MIB // 4, requires_grad=True).exp()
        (output * 2).sum()  # of which nothing is kept
        kept.append(output)

    watched([100 * MIB + 2 * MIB * i for i in range(24)], step=step)
    (message,) = caplog.messages
    assert message.startswith(
        "memory grows by 2.0 MiB with each step, and what is held between steps reaches the budget in about "
    )
    assert "what step 20 of the plan made here still lives 3 steps later: " in message
    assert re.search(r"test_growth\.py:\d+ step \(2\.0 MiB\)\. A list or a dictionary", message)


def test_what_is_held_outside_tensors_is_said_only_once_it_has_risen_for_longer(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def step(_: int) -> None:
        torch.ones(MIB)

    rising = [100 * MIB + MIB * i for i in range(110)]
    watched(rising[:100], step=step)
    assert caplog.messages == []
    watched(rising, step=step)
    assert "no tensor of step 20 of the plan is held: it is Python objects" in caplog.messages[0]


def test_tensors_that_stand_for_others_are_no_failure(caplog: pytest.LogCaptureFixture) -> None:
    """GIVEN steps that make tensors without storage, as FSDP2's are WHEN they are noted THEN all goes on."""

    class Wrapper(Tensor):
        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            torch.ones(2)
            return made()

    def made() -> Tensor:
        return Tensor._make_wrapper_subclass(Wrapper, (2, 2))  # type: ignore[attr-defined,no-any-return]

    watched([100 * MIB + MIB * i for i in range(24)], step=lambda _: made() * 2)
    assert caplog.messages == []


def test_a_compiled_model_is_not_looked_into(caplog: pytest.LogCaptureFixture) -> None:
    watched([100 * MIB + MIB * i for i in range(20)], is_compiled=True)
    assert "which lines do that is not known" in caplog.messages[0]


def test_open_files_that_grow_are_said_with_the_last_one(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    opened = []

    def step(i: int) -> None:
        opened.extend((tmp_path / f"{i}-{j}").open("w") for j in range(4))

    try:
        watched([MIB] * 25, step=step)
    finally:
        for file in opened:
            file.close()
    (message,) = caplog.messages
    assert message.startswith("open files grow by 4.0 with each step: ")
    assert message.endswith("-3")


@settings(max_examples=40)
@given(
    st.integers(0, 2**31),
    st.sampled_from(["lengths", "warming", "jumps", "sawtooth", "noise"]),
)
def test_nothing_is_said_of_300_healthy_steps(seed: int, kind: str) -> None:
    """GIVEN samples of different length, a heap that warms up, epochs that load something, Python's collector, noise
    of a heap WHEN 300 steps run THEN nothing is said.
    """
    draw = random.Random(seed)
    jump = draw.randrange(20, 280)
    shape = {
        "lengths": lambda i: draw.randrange(0, 400 * MIB),
        "warming": lambda i: 300 * MIB * (1 - 0.8**i),
        "jumps": lambda i: 200 * MIB * (i >= jump),
        "sawtooth": lambda i: (i % 3) * 50 * MIB,
        "noise": lambda i: 0,
    }[kind]
    values = [(1 << 30) + shape(i) + draw.randrange(0, 2 * MIB) for i in range(300)]
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("memwall.session.watch.growth._log.warning", lambda *parts: said.append(str(parts)))
        watched([int(value) for value in values])
    assert said == []


@pytest.mark.slow
def test_a_session_says_what_its_loop_keeps_and_trains_to_the_same_bits(caplog: pytest.LogCaptureFixture) -> None:
    """GIVEN a loop that keeps losses with their graphs WHEN it runs under fit THEN the warning names its line."""

    def trained(**options: str) -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        kept = []
        session = memwall.fit(model, optimizer, budget="64GiB") if options else None
        for i in range(28):
            x = torch.randn(256, 256, generator=torch.Generator().manual_seed(i))
            loss = model(x).square().mean()
            loss.backward()
            kept.append(model[0](x))
            optimizer.step()
            optimizer.zero_grad()
        if session is not None:
            session.close()
        return model

    plain = trained()
    watched_model = trained(budget="64GiB")
    (message,) = [text for text in caplog.messages if text.startswith("memory grows by")]
    assert "test_growth.py:" in message
    assert " trained (" in message
    for one, other in zip(plain.parameters(), watched_model.parameters(), strict=True):
        assert torch.equal(one, other)
