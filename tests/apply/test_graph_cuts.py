"""Cuts of compiled graphs go by the peaks of steps that ran: deeper while that lowers them, and then up."""

from collections.abc import Callable
from typing import Any

import pytest

from memwall.apply.techniques import compiled_graphs
from memwall.apply.techniques.compiled_graphs import GraphCuts

MIB = 1 << 20


@pytest.fixture
def cuts(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[float]]:
    """Follows cuts of one graph, of 1,000 MiB saved, from a room in MiB on: no plan ever fits, by peaks in MiB."""

    def follow(room: int, peaks: dict[float, int], own: float = 1.0) -> list[float]:
        asked: list[Any] = []
        monkeypatch.setattr(compiled_graphs, "cut_by", lambda choose: asked.append(choose) or (lambda: None))
        graphs, tried = GraphCuts(lambda: room * MIB), []
        while True:
            tried.append(asked[0](lambda ratio: int(1000 * MIB * ratio), own))
            if not graphs.recut(peaks[tried[-1]] * MIB):
                return tried

    return follow


def test_cuts_go_deeper_while_that_lowers_the_peak(cuts: Callable[..., list[float]]) -> None:
    assert cuts(2000, {1.0: 2000, 0.75: 1800, 0.5: 1600, 0.25: 1400, 0.1: 1300}) == [1.0, 0.75, 0.5, 0.25, 0.1]


def test_a_cut_that_needs_more_is_followed_by_those_above(
    cuts: Callable[..., list[float]],
) -> None:
    """GIVEN room for 25 % WHEN 10 % has a higher peak THEN 50 % is taken, and 75 % as that was lower."""
    assert cuts(300, {0.25: 2017, 0.1: 2100, 0.5: 1575, 0.75: 1700}) == [0.25, 0.1, 0.5, 0.75]


def test_cuts_above_end_where_the_peak_rises(cuts: Callable[..., list[float]]) -> None:
    assert cuts(300, {0.25: 1500, 0.1: 1400, 0.5: 1600}) == [0.25, 0.1, 0.5]


def test_no_cut_saves_more_than_the_script_asks_for(cuts: Callable[..., list[float]]) -> None:
    assert cuts(300, {0.25: 2017, 0.1: 2100, 0.5: 1575}, own=0.5) == [0.25, 0.1, 0.5]
