"""The window of a device's offloads: how long sources are held, what never goes, and what comes back early."""

from memwall.predict.offload_window import Passage, Passing, through_window


def leaving(*sizes: int) -> list[Passing]:
    """Returns what leaves at 0, 1, 2, ... and is asked back from 100 on, the last one first, 10 apart."""
    times = [(100 + 10 * (len(sizes) - 1 - number), 0) for number in range(len(sizes))]
    return [
        Passing(size, (number, 0), time, time) for number, (size, time) in enumerate(zip(sizes, times, strict=True))
    ]


def test_a_source_is_held_until_more_than_the_window_left_after_it() -> None:
    passages = through_window(leaving(10, 10, 10, 10), 25)
    assert [passage.held_until for passage in passages] == [(2, 0), (3, 0), None, None]


def test_what_is_larger_than_the_window_is_let_go_at_once() -> None:
    assert through_window(leaving(30, 10), 25)[0].held_until == (0, 0)


def test_as_many_come_back_ahead_as_the_window_has_room_for() -> None:
    """When the one that is taken was loaded before, its own bytes are room, too."""
    passages = through_window(leaving(10, 10, 10, 10), 10, holds_sources=False)
    assert [passage.back for passage in passages] == [(120, 0), (110, 0), (100, 0), (100, 0)]
    assert through_window(leaving(10, 10), 0, holds_sources=False)[0].back == (110, 0)


def test_a_block_that_is_asked_back_comes_whole_whatever_the_window_is() -> None:
    early = [one._replace(prefetch=(50, 0)) for one in leaving(10, 10, 10)]
    assert {passage.back for passage in through_window(early, 0, holds_sources=False)} == {(50, 0)}


def test_what_has_come_back_makes_room_for_what_leaves_later() -> None:
    """The second of two passes, as accumulation has them, finds the window empty."""
    first, second = Passing(10, (0, 0), (5, 0), (5, 0)), Passing(10, (8, 0), (12, 0), (12, 0))
    assert through_window([first, second], 10) == [Passage(None, (5, 0)), Passage(None, (12, 0))]
