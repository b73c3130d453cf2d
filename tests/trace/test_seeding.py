"""Whatever seeds the generators of CUDA devices is heard; who only reads them is not."""

from collections.abc import Callable

import pytest
import torch

from memwall.trace.seeding import made_hearing

SEEDING: dict[str, Callable[[], object]] = {
    "the CPU's as well": lambda: torch.manual_seed(0),
    "all devices": lambda: torch.cuda.manual_seed_all(0),
    "at random": lambda: torch.cuda.seed_all(),
    "one at random": lambda: torch.cuda.seed(),
    "states of a checkpoint": lambda: torch.cuda.set_rng_state_all([]),
}


@pytest.fixture(autouse=True)
def _cuda_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is put off until CUDA starts in this process."""
    monkeypatch.setattr("torch.cuda.random._lazy_call", lambda *_, **__: None)


@pytest.mark.parametrize("name", SEEDING)
def test_seeding_is_heard(name: str) -> None:
    with torch.random.fork_rng(devices=[]):
        _, is_seeding = made_hearing(SEEDING[name])
    assert is_seeding


def test_drawing_is_not() -> None:
    with torch.random.fork_rng(devices=[]):
        assert not made_hearing(lambda: torch.rand(3))[1]
