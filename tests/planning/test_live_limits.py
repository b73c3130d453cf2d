"""Limits on live bytes to solve for, most first."""

from memwall.planning.solver.live_limits import LiveLimits


def test_the_next_limit_is_smaller_by_what_the_replay_was_over() -> None:
    """GIVEN room for 1,000 WHEN the replay needs 1,250 THEN 800 is tried next, then what is left of that."""
    limits = LiveLimits(1000, lambda: 10, is_tightened=True)
    found = iter(limits)
    assert next(found) == 1000
    limits.over(1250)
    assert next(found) == 800
    limits.over(1001)  # a hair over: a step that changes the plan
    assert next(found) == 796


def test_it_ends_with_the_fewest_live_bytes_there_can_be() -> None:
    asked = []

    def least() -> int:
        asked.append(True)
        return 10

    found = []
    for live_bytes in LiveLimits(1000, least, is_tightened=True):
        found.append(live_bytes)
        assert bool(asked) == (live_bytes == 10)
    assert found[0] == 1000
    assert found[-1] == 10
    assert found == sorted(found, reverse=True)
    assert len(found) == 11
