"""Units wait for a link that carries one collective after the other."""

import pytest

from memwall.predict.sharding.passes import waiting_seconds

NONE = (0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("computed", "gathers", "reductions", "num_ahead", "expected"),
    [
        ((1, 1, 1), (1, 1, 1), NONE, 1, 1),  # the first gather hides behind nothing
        ((1, 1, 1), (1, 2, 1), NONE, 1, 2),
        ((3, 1, 1), (1, 1, 3), NONE, 1, 3),  # the last one hides behind the unit before it alone
        ((3, 1, 1), (1, 1, 3), NONE, 2, 1),
        ((1, 1, 1), NONE, (1, 1, 1), 1, 1),  # the last reduction hides behind nothing
        ((1, 1, 1), NONE, (5, 0, 1), 1, 4),
        ((1, 1, 1), (0, 0, 2), (4, 0, 0), 1, 5),  # a gather waits for the reduction that could begin before it
    ],
)
def test_what_hides_behind_what(
    computed: tuple[float, ...],
    gathers: tuple[float, ...],
    reductions: tuple[float, ...],
    num_ahead: int,
    expected: float,
) -> None:
    assert waiting_seconds(computed, gathers, reductions, num_ahead) == expected
