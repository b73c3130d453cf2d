"""The modes: which techniques each allows follows from their exactness; what a mode offers need not be possible."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

import memwall
from memwall.errors import UsageError
from memwall.planning.modes import MODES, allowed_words, every_word, has_mode
from memwall.planning.ranks.kinds import KINDS
from memwall.planning.search import plan
from memwall.planning.technique import techniques
from memwall.session.first_plan import asked
from memwall.trace.records import Trace

pytestmark = pytest.mark.usefixtures("one_thread", "without_malloc")


def test_each_mode_allows_what_is_as_exact_as_it_says_and_no_more() -> None:
    for mode, (_, exactness) in MODES.items():
        expected = {one.allow for one in techniques() if one.allow and one.allow_exactness in exactness}
        expected |= {kind.allow for kind in KINDS if kind.allow and "changes-numerics" in exactness}
        assert set(allowed_words([mode])) == {mode} | expected
    assert allowed_words(["exact"]) == ("exact",)
    asks_for_like_steps = {"gradient-release"}  # which no mode can know of a loop
    assert every_word().keys() == set(allowed_words(["smallest"])) - {"smallest"} | asks_for_like_steps


def test_what_was_allowed_stays_so_when_it_is_read_again() -> None:
    for mode in MODES:
        assert allowed_words(allowed_words([mode])) == allowed_words([mode])
    assert allowed_words(["precision", "kernels", "precision"]) == ("precision", "kernels")
    assert not has_mode(["precision"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["exact", "kernels"], "the mode exact rules out kernels, .* or take balanced"),
        (["balanced", "precision"], "the mode balanced rules out precision, .* or take smallest"),
        (["balanced", "smallest"], "balanced and smallest are modes; expected one of them"),
        (["precison"], "allow: 'precison' is not known; expected one or more of .*, or a mode: exact"),
    ],
)
def test_a_contradiction_is_refused(words: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        allowed_words(words)
    with pytest.raises(UsageError, match=message):
        asked(1 << 30, None, disk=None, no_disk=False, allow=words)


def test_what_a_mode_offers_and_cannot_be_done_is_left_out(a_trace: Callable[[str], Trace]) -> None:
    """GIVEN a step on a CPU WHEN a mode allows all THEN it is planned; by its own word the CPU step is refused."""
    trace = a_trace("gpt")
    assert plan(trace, budget="1TiB", allow=("smallest",)).actions == plan(trace, budget="1TiB").actions
    with pytest.raises(UsageError, match="--allow cpu-optimizer-step: a step is taken to the CPU from CUDA only"):
        plan(trace, budget="1TiB", allow=("cpu-optimizer-step",))


def test_a_loop_trains_under_a_mode() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    before = [p.detach().clone() for p in model.parameters()]
    with memwall.fit(model, optimizer, budget="100GiB", allow=["balanced"]) as session:
        for _ in range(3):
            model(torch.randn(4, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert session.plan is not None
        assert session.plan.forecast.fits
    assert not any(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
