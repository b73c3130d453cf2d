"""Whatever seeds the generators of CUDA devices is heard; who only reads them is not."""

from collections.abc import Callable

import pytest
import torch

from memwall.trace.seeding import hearing_seeds, made_hearing

SEEDING: dict[str, Callable[[], object]] = {
    "the CPU's as well": lambda: torch.manual_seed(0),
    "all devices": lambda: torch.cuda.manual_seed_all(0),
    "at random": lambda: torch.cuda.seed_all(),
    "one at random": lambda: torch.cuda.seed(),
    "states of a checkpoint": lambda: torch.cuda.set_rng_state_all([torch.zeros(16, dtype=torch.uint8)]),
}


@pytest.mark.parametrize("name", SEEDING)
def test_seeding_is_heard_and_not_done(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device's generators are the user's: nothing happens to them, now or once CUDA starts in this process."""
    done: list[object] = []
    monkeypatch.setattr("torch.cuda.random._lazy_call", lambda *call, **__: done.append(call))
    with torch.random.fork_rng(devices=[]):
        _, is_seeding = made_hearing(SEEDING[name])
    assert is_seeding
    assert not done


def test_all_who_hear_do_so_once() -> None:
    heard: list[str] = []
    with hearing_seeds(lambda: heard.append("outside")), hearing_seeds(lambda: heard.append("inside")):
        torch.cuda.manual_seed(0)
    assert heard == ["outside", "inside"]


def test_drawing_is_not() -> None:
    with torch.random.fork_rng(devices=[]):
        assert not made_hearing(lambda: torch.rand(3))[1]
