"""Which live bytes to solve for, most first."""

from memwall.planning.live_budgets import Tightening


def test_the_next_budget_is_smaller_by_what_the_replay_was_over() -> None:
    """GIVEN room for 1,000 WHEN the replay needs 1,250 THEN 800 is tried next, then what is left of that."""
    tightening = Tightening(1000, lambda: 10)
    found = iter(tightening)
    assert next(found) == 1000
    tightening.over(1250)
    assert next(found) == 800
    tightening.over(1001)  # a hair over: a step that changes the plan
    assert next(found) == 796


def test_it_ends_with_the_fewest_live_bytes_there_can_be() -> None:
    asked = []

    def least() -> int:
        asked.append(True)
        return 10

    budgets = []
    for live_bytes in Tightening(1000, least):
        budgets.append(live_bytes)
        assert bool(asked) == (live_bytes == 10)
    assert budgets[0] == 1000
    assert budgets[-1] == 10
    assert budgets == sorted(budgets, reverse=True)
    assert len(budgets) == 11
