"""The largest size whose forecast fits is found in few forecasts, and is the largest."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from memwall.cli.estimate_search import largest_that_fits


def forecasts(peak_bytes: Callable[[int], int], budget_bytes: int) -> Callable[[int], Any]:
    def of(size: int) -> Any:
        peak = peak_bytes(size)
        return SimpleNamespace(
            peak=SimpleNamespace(process_bytes=peak), margin_bytes=10, budget_bytes=budget_bytes,
            fits=peak + 10 <= budget_bytes,
        )  # fmt: skip

    return of


@pytest.mark.parametrize(
    ("peak", "budget", "most", "unit", "expected"),
    [
        (lambda n: 100 + 7 * n, 1000, 1 << 16, 1, 127),  # (1000 - 10 - 100) / 7
        (lambda n: 100 + n // 512 * 3, 1 << 40, 8192, 64, 8192),  # everything fits
        (lambda n: 100 + n * n, 100_000, 1 << 16, 1, 316),  # attention that holds its scores
        (lambda n: 100 + 7 * n + 400 * (n > 40), 1000, 1 << 16, 1, 70),  # a jump
        (lambda n: 100 + n, 4000, 5000, 64, 3840),  # a multiple of the unit
        (lambda n: 100 + n, 60, 5000, 1, 1),  # not even the least
    ],
)
def test_the_largest_size_that_fits(
    peak: Callable[[int], int], budget: int, most: int, unit: int, expected: int
) -> None:
    asked: list[int] = []
    size, forecast = largest_that_fits(
        forecasts(peak, budget), most=most, unit=unit, told=lambda size, _: asked.append(size)
    )
    assert size == expected
    assert forecast.peak.process_bytes == peak(expected)
    assert len(asked) == len(set(asked)) <= 15
