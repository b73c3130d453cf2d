"""A run that needs more with each step is told so within 20 steps, with the lines; one that does not never is."""

import logging
import os
import random
import re
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import memwall
from memwall.machine.meter import mapped_bytes, process_bytes
from memwall.session.watch.growth import GrowthWatch

MIB = 1 << 20
BUDGET_BYTES = 1 << 40


@pytest.fixture(autouse=True)
def _log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has no page of a library, as this process touches more of them, be taken for growth."""
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr("memwall.session.watch.growth.mapped_bytes", lambda: MIB)


def watched(
    values: Sequence[int],
    *,
    model: nn.Module | None = None,
    step: Callable[[int], object] = lambda _: None,
    disk: str | None = None,
    budget_bytes: int = BUDGET_BYTES,
) -> int:
    """Runs steps that begin with so many bytes; returns how many."""
    followed = nn.Module() if model is None else model
    watch = GrowthWatch(budget_bytes=lambda: budget_bytes, model=lambda: followed, disk=lambda: disk)
    for i, standing_bytes in enumerate(values):
        watch.begin_step(standing_bytes, torch.device("cpu"))
        step(i)
        watch.end_step()
    watch.close()
    return len(values)


def test_the_lines_that_keep_tensors_are_named_within_20_steps(caplog: pytest.LogCaptureFixture) -> None:
    """GIVEN a loop that keeps an output of each step with its graph THEN its lines are named, and what to keep."""
    kept: list[Tensor] = []

    def step(_: int) -> None:
        output = torch.ones(MIB // 4, requires_grad=True).exp()
        (output * 2).sum()  # of which nothing is kept
        kept.append(output)

    watched([100 * MIB + 2 * MIB * i for i in range(20)], step=step)
    (message,) = caplog.messages
    assert message.startswith(
        "memory grows by 2.0 MiB with each step, and what is held between steps reaches the budget in about "
    )
    assert "what step 16 of the plan made here still lives 3 steps later: " in message
    assert re.search(r"test_growth\.py:\d+ step \(2\.0 MiB\)\. A list or a dictionary", message)


def test_modules_that_keep_tensors_are_named_with_their_line(caplog: pytest.LogCaptureFixture) -> None:
    """GIVEN blocks that keep what they have computed WHEN it grows THEN the line is named once, with its modules."""

    class Block(nn.Module):
        def __init__(self, num_numbers: int) -> None:
            super().__init__()
            self.num_numbers, self.seen = num_numbers, list[Tensor]()

        def forward(self, x: Tensor) -> Tensor:
            self.seen.append(torch.ones(self.num_numbers))
            return x

    model = nn.Sequential(Block(MIB // 8), Block(MIB // 4))
    watched([100 * MIB + 2 * MIB * i for i in range(20)], model=model, step=lambda _: model(torch.ones(1)))
    assert re.search(r"test_growth\.py:\d+ forward in 1 and 1 modules more \(1\.5 MiB\)", caplog.messages[0])


def test_state_that_a_step_writes_into_is_none_that_it_has_made(caplog: pytest.LogCaptureFixture) -> None:
    """GIVEN a step that updates what is there, and keeps nothing WHEN memory grows THEN no line is named."""
    state, views = torch.zeros(MIB), list[Tensor]()

    def step(_: int) -> None:
        views[:] = [state.add_(1)[: MIB // 2]]
        torch._foreach_mul_([state], 2.0)

    watched([100 * MIB + 2 * MIB * i for i in range(110)], step=step)
    assert "no tensor of step 16 of the plan is held" in caplog.messages[0]


def test_a_local_tensor_of_a_method_that_loops_dies_as_without_notes(caplog: pytest.LogCaptureFixture) -> None:
    """GIVEN a loop in a method, which deletes what it made WHEN a step is noted THEN it is gone, and not accused."""
    model, noted = nn.Linear(1, 1), []
    watch = GrowthWatch(budget_bytes=lambda: BUDGET_BYTES, model=lambda: model, disk=lambda: None)

    class Trainer:
        def train(self) -> None:
            for number in range(24):
                watch.begin_step(100 * MIB + 2 * MIB * number, torch.device("cpu"))
                noted.append(watch._births is not None)
                big = torch.ones(MIB)
                big.sum()  # is noted while the other is there
                seen = weakref.ref(big)
                del big
                assert seen() is None
                watch.end_step()

    Trainer().train()
    watch.close()
    assert any(noted)
    assert not any("test_growth.py" in message for message in caplog.messages)


def test_a_module_that_fails_is_left(caplog: pytest.LogCaptureFixture) -> None:
    """GIVEN a module that raises and a loop that goes on WHEN it keeps what it makes THEN that is within no module."""

    class Failing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError("no input fits")

    model, kept = nn.Sequential(nn.Identity(), Failing()), list[Tensor]()

    def step(_: int) -> None:
        with pytest.raises(ValueError, match="no input fits"):
            model(torch.ones(1))
        kept.append(torch.ones(MIB // 2))

    watched([100 * MIB + 2 * MIB * i for i in range(20)], model=model, step=step)
    assert re.search(r"test_growth\.py:\d+ step \(2\.0 MiB\)", caplog.messages[0])


class Samples(Dataset[Tensor]):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, number: int) -> Tensor:
        return torch.full((MIB,), float(number))


def test_kept_batches_of_a_worker_are_said_with_their_line(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GIVEN batches that come in shared memory, and are kept THEN it is said that it grows, and where they come."""
    monkeypatch.setattr("memwall.session.watch.growth.mapped_bytes", mapped_bytes)
    watch = GrowthWatch(budget_bytes=lambda: BUDGET_BYTES, model=nn.Module, disk=lambda: None)
    kept = []
    for batch in DataLoader(Samples(), num_workers=1):
        watch.begin_step(process_bytes(), batch.device)
        batch.sum()  # has its pages counted
        kept.append(batch)
        watch.end_step()
    watch.close()
    message = caplog.messages[0]
    assert re.match(r"memory grows by [34]\.\d MiB with each step", message)
    assert re.search(r"test_growth\.py:\d+ test_kept_batches\w+ \(4\.0 MiB\)", message)


def test_shared_memory_is_growth(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN shared tensors that another thread makes and nothing frees THEN it is said, as no system takes it back."""
    monkeypatch.setattr("memwall.session.watch.growth.mapped_bytes", mapped_bytes)
    kept = list[Tensor]()
    with ThreadPoolExecutor(1) as others:

        def held() -> Iterator[int]:
            for _ in range(120):
                kept.append(others.submit(lambda: torch.empty(MIB // 2).share_memory_().fill_(1)).result())
                yield process_bytes()

        watch = GrowthWatch(budget_bytes=lambda: BUDGET_BYTES, model=nn.Module, disk=lambda: None)
        for now_bytes in held():
            watch.begin_step(now_bytes, torch.device("cpu"))
            watch.end_step()
        watch.close()
    assert "of the plan is held: it is Python objects" in caplog.messages[0]


def test_what_is_held_outside_tensors_is_said_only_once_it_has_risen_for_longer(
    caplog: pytest.LogCaptureFixture,
) -> None:
    draw = random.Random(0)
    rising = [100 * MIB + 4 * MIB * i + draw.randrange(6 * MIB) for i in range(110)]
    watched(rising[:98], step=lambda _: torch.ones(MIB))
    assert caplog.messages == []
    watched(rising, step=lambda _: torch.ones(MIB))
    assert "of the plan is held: it is Python objects" in caplog.messages[0]


def test_what_is_held_outside_tensors_and_passes_the_budget_soon_is_said_within_20_steps(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rising = [100 * MIB + 4 * MIB * i for i in range(20)]
    watched(rising, step=lambda _: torch.ones(MIB), budget_bytes=1000 * MIB)
    (message,) = caplog.messages
    assert "reaches the budget in about 207 of them; no tensor of step" in message


def test_pages_of_files_that_reach_the_budget_soon_are_no_growth(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = [0]
    monkeypatch.setattr("memwall.session.watch.growth.mapped_bytes", lambda: read[0])

    def step(number: int) -> None:
        read[0] = 4 * MIB * (number + 1)

    watched([100 * MIB + 4 * MIB * i for i in range(200)], step=step, budget_bytes=1000 * MIB)
    assert caplog.messages == []


def test_pages_of_files_are_no_growth(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN a loop that reads its samples from a mapped file, whose pages stay WHEN it runs THEN nothing is said."""
    read = [0]
    monkeypatch.setattr("memwall.session.watch.growth.mapped_bytes", lambda: read[0])

    def step(number: int) -> None:
        read[0] = MIB * (number + 1)

    watched([100 * MIB + MIB * i for i in range(400)], step=step)
    assert caplog.messages == []
    assert mapped_bytes() > 0


def test_tensors_that_stand_for_others_are_no_failure(caplog: pytest.LogCaptureFixture) -> None:
    """GIVEN steps that make tensors without storage, as FSDP2's are WHEN they are noted THEN all goes on."""

    class Wrapper(Tensor):
        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            torch.ones(2)
            return made()

    def made() -> Tensor:
        return Tensor._make_wrapper_subclass(Wrapper, (2, 2))  # type: ignore[attr-defined,no-any-return]

    watched([100 * MIB + MIB * i for i in range(18)], step=lambda _: made() * 2)
    assert caplog.messages == []


def test_a_compiled_model_is_not_looked_into(caplog: pytest.LogCaptureFixture) -> None:
    model = torch.compile(nn.Linear(1, 1))
    assert isinstance(model, nn.Module)
    watched([100 * MIB + MIB * i for i in range(20)], model=model)
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


def disk_with(monkeypatch: pytest.MonkeyPatch, free_bytes: Callable[[], int]) -> None:
    """Has each disk say that so much of it is free."""
    real = os.statvfs

    def said(path: str) -> SimpleNamespace:
        assert real(path)
        return SimpleNamespace(f_bavail=free_bytes(), f_frsize=1)

    monkeypatch.setattr(os, "statvfs", said)


def test_a_disk_that_a_file_fills_is_said_within_20_steps_with_the_file(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """GIVEN a log that grows in each step THEN the disk is said to be full soon, and what fills it."""
    left = [1000 * MIB]
    disk_with(monkeypatch, lambda: left[0])
    with (tmp_path / "all.log").open("wb", buffering=0) as file:

        def step(_: int) -> None:
            file.write(bytes(4 * MIB))
            left[0] -= 4 * MIB

        watched([MIB] * 21, step=step, disk=str(tmp_path))
    message = caplog.messages[0]
    assert "has 4.0 MiB less free with each step, and is full in about 2" in message
    assert "all.log has grown by 16.0 MiB in 4 of them" in message


def test_of_files_that_are_closed_again_none_is_named(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    left = [1000 * MIB]
    disk_with(monkeypatch, lambda: left[0])

    def step(_: int) -> None:
        left[0] -= 4 * MIB

    watched([MIB] * 21, step=step, disk=str(tmp_path))
    assert "no file that stays open grows: it is files that are written and closed, or another" in caplog.messages[0]


@pytest.mark.parametrize("kind", ["large", "saves", "others"])
def test_of_a_disk_that_lasts_nothing_is_said(
    kind: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """GIVEN a large disk, one that gets a file now and then, or others that write and delete THEN nothing is said."""
    number, draw = [0], random.Random(0)
    free_bytes = {
        "large": lambda: (1 << 50) - 4 * MIB * number[0],
        "saves": lambda: 100_000 * MIB - 300 * MIB * (number[0] // 50),
        "others": lambda: 10_000 * MIB - draw.randrange(2_000 * MIB),
    }[kind]
    disk_with(monkeypatch, free_bytes)

    def step(i: int) -> None:
        number[0] = i

    watched([MIB] * 300, step=step, disk=str(tmp_path))
    assert caplog.messages == []


@settings(max_examples=40)
@given(
    st.integers(0, 2**31),
    st.sampled_from(["lengths", "warming", "filling", "jumps", "sawtooth", "noise"]),
)
def test_nothing_is_said_of_300_healthy_steps(seed: int, kind: str) -> None:
    """GIVEN samples of different length, a heap that warms up, a cache that fills, epochs that load something,
    Python's collector, noise of a heap WHEN 300 steps run THEN nothing is said.
    """
    draw = random.Random(seed)
    jump, num_filling = draw.randrange(20, 280), draw.randrange(8, 50)
    shape = {
        "lengths": lambda i: draw.randrange(0, 400 * MIB),
        "warming": lambda i: 300 * MIB * (1 - 0.8**i),
        "filling": lambda i: 3 * MIB * min(i, num_filling),
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
            kept.append(model[0](x.repeat(4, 1)))  # more than what the heap has free at first
            optimizer.step()
            optimizer.zero_grad()
        if session is not None:
            session.close()
        return model

    plain = trained()
    watched_model = trained(budget="64GiB")
    (message,) = [text for text in caplog.messages if text.startswith("memory grows by")]
    assert "test_growth.py:" in message
    assert " trained in 0 (" in message
    for one, other in zip(plain.parameters(), watched_model.parameters(), strict=True):
        assert torch.equal(one, other)
