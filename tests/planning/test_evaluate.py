"""The evaluator against sums and queues worked out by hand."""

from typing import NamedTuple

import pytest
from msgspec.structs import replace

from memwall.planning.link_waits import OnTheWay, hidden_bytes, leaving, piece_bytes
from memwall.planning.solver.evaluate import evaluate
from memwall.planning.solver.instance import BlockOptions, Instance, Link, Option, Row

KEEP, OFFLOAD = 0, 1


class _Block(NamedTuple):
    """A block and what of it moves."""

    parts: tuple[OnTheWay, ...] = ()
    forward: float = 1.0
    backward: float = 2.0
    extra: float = 0.0


def _moving(num_bytes: int, *, left: float = 0.0, asked: float = 0.0, forward: float = 1.0) -> _Block:
    return _Block((OnTheWay(num_bytes, left, asked),), forward=forward)


def _linked(
    *blocks: _Block, window_bytes: int = 1000, write: float = 10.0, read: float = 1e9, pieces_of: int = 0
) -> Instance:
    link = Link(
        write_bytes_per_second=write,
        read_bytes_per_second=read,
        window_bytes=window_bytes,
        capacity_bytes=10**9,
        piece_bytes=pieces_of,
    )
    granule_bytes = max((piece_bytes(part.link_bytes, link) for block in blocks for part in block.parts), default=0)
    keep = Option(name="keep", extra_seconds=0.0, moved_bytes=0)
    options = [
        Option(
            name="offload",
            extra_seconds=block.extra,
            moved_bytes=sum(part.link_bytes for part in block.parts),
            hidden_bytes=hidden_bytes(block.parts, link),
            leaving=leaving(block.parts, link, granule_bytes),
        )
        for block in blocks
    ]
    rows = (Row(label="loss", fixed_bytes=0, held=((0, 0),) * len(blocks)),)
    paired = [
        BlockOptions(
            path=str(number), options=(keep, option), forward_seconds=block.forward, backward_seconds=block.backward
        )
        for number, (block, option) in enumerate(zip(blocks, options, strict=True))
    ]
    return Instance(blocks=tuple(paired), rows=rows, budget_bytes=0, link=link)


def _stalls(instance: Instance, *options: int) -> float:
    return evaluate(instance, options).stall_seconds


def _still(path: str) -> BlockOptions:
    options = tuple(Option(name=name, extra_seconds=0.0, moved_bytes=0) for name in ("keep", "full"))
    return BlockOptions(path=path, options=options, forward_seconds=1.0, backward_seconds=2.0)


def test_the_peak_is_the_largest_row() -> None:
    blocks = (_still("a"), _still("b"))
    rows = (
        Row(label="forward of a", fixed_bytes=100, held=((30, 5), (0, 0))),
        Row(label="loss", fixed_bytes=80, held=((40, 0), (20, 7))),
        Row(label="backward of b", fixed_bytes=100, held=((40, 0), (0, -10))),
    )
    instance = Instance(blocks=blocks, rows=rows, budget_bytes=139, link=None)

    keep_all = evaluate(instance, (0, 0))
    assert (keep_all.peak_bytes, keep_all.fits) == (140, False)
    # An option may free part of what was fixed: 100 + 40 - 10.
    freeing = evaluate(instance, (0, 1))
    assert (freeing.peak_bytes, freeing.fits) == (130, True)


def test_exactly_the_budget_fits_and_one_byte_less_does_not() -> None:
    rows = (Row(label="loss", fixed_bytes=1 << 60, held=((1, 0),)),)
    instance = Instance(blocks=(_still("a"),), rows=rows, budget_bytes=(1 << 60) + 1, link=None)
    assert evaluate(instance, (0,)).fits
    assert not evaluate(replace(instance, budget_bytes=1 << 60), (0,)).fits


def test_a_device_does_not_wait_for_what_the_window_has_room_for() -> None:
    """A tensor that is still on its way when backward begins never leaves."""
    instance = _linked(_moving(40), _Block())
    assert _stalls(instance, OFFLOAD, KEEP) == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize(("left", "stall"), [(0.0, 2.0), (1.0, 3.0)])
def test_a_disk_is_waited_for_until_all_has_left(left: float, stall: float) -> None:
    # 40 bytes leave in 4 s, of which the two forwards last 2 s, or what is left of them.
    instance = _linked(_moving(40, left=left), _Block(), pieces_of=10)
    assert _stalls(instance, OFFLOAD, KEEP) == pytest.approx(stall, abs=1e-6)


def test_what_is_larger_than_the_window_is_waited_for_where_it_leaves() -> None:
    # A device holds all of the 50 bytes until their copy is done; of a disk's staging memory the last 30 take the room.
    whole = _linked(_moving(50), _Block(forward=9.0), window_bytes=30)
    assert _stalls(whole, OFFLOAD, KEEP) == pytest.approx(5.0, abs=1e-6)
    pieces = _linked(_moving(50), _Block(forward=9.0), window_bytes=30, pieces_of=10)
    assert _stalls(pieces, OFFLOAD, KEEP) == pytest.approx(2.0, abs=1e-6)


def test_a_tensor_waits_for_the_oldest_until_the_window_has_room() -> None:
    # At 0.5 s the second finds 20 of 30 taken, by a copy that is done at 2 s.
    parts = (OnTheWay(20, 0.0, 0.0), OnTheWay(20, 0.5, 0.0))
    assert _stalls(_linked(_Block(parts), _Block(forward=9.0), window_bytes=30), 1, 0) == pytest.approx(1.5, abs=1e-6)
    assert _stalls(_linked(_Block(parts), _Block(forward=9.0), window_bytes=40), 1, 0) == pytest.approx(0.0, abs=1e-6)


def test_what_the_block_before_has_queued_is_waited_for_as_far_as_the_window_is_full() -> None:
    # After the first forward 20 are queued. In a window of 60 the second's 20 find room beside them, whatever of the
    # one tensor is still there; in one of 40 they wait for all of it.
    blocks = (_moving(30), _moving(20), _Block(forward=9.0))
    assert _stalls(_linked(*blocks, window_bytes=80), 1, 1, 0) == pytest.approx(0.0, abs=1e-6)
    assert _stalls(_linked(*blocks, window_bytes=40), 1, 1, 0) == pytest.approx(2.0, abs=1e-6)


def test_what_fits_the_window_gives_room_up_as_a_whole_whatever_larger_ones_do() -> None:
    # The 30 leave as a whole, so the 4 behind them wait for the 2 s that are left; the 50 of another block do not help.
    blocks = (_moving(30), _moving(4), _Block(forward=9.0), _moving(50))
    instance = _linked(*blocks, window_bytes=32, pieces_of=4)
    assert _stalls(instance, OFFLOAD, OFFLOAD, KEEP, KEEP) == pytest.approx(2.0, abs=1e-6)


def test_a_wait_is_time_for_the_link() -> None:
    # Without the second's wait of 5 s the third would find 50 more bytes queued.
    blocks = (_moving(50, left=1.0), _moving(50, left=1.0), _moving(50, left=1.0), _Block(forward=9.0))
    instance = _linked(*blocks, window_bytes=50)
    # Each later one waits for the copy before, which its own forward has hidden a second of.
    assert _stalls(instance, 1, 1, 1, 0) == pytest.approx(4.0 + 4.0, abs=1e-6)


def test_reading_hides_behind_the_backward_of_the_next_block_and_its_recomputation() -> None:
    instance = _linked(_moving(50), _Block(extra=1.0), write=1e9, read=10.0)
    assert _stalls(instance, OFFLOAD, KEEP) == pytest.approx(3.0, abs=1e-6)
    recomputing = evaluate(instance, (OFFLOAD, 1))
    assert recomputing.stall_seconds == pytest.approx(2.0, abs=1e-6)
    assert recomputing.extra_seconds == pytest.approx(3.0, abs=1e-6)


def test_reading_goes_one_block_ahead_only() -> None:
    # The 100 s of backward of the last are no use to the first.
    instance = _linked(_moving(50), _Block(), _Block(backward=100.0), write=1e9, read=10.0)
    assert _stalls(instance, OFFLOAD, KEEP, KEEP) == pytest.approx(3.0, abs=1e-6)


def test_reading_goes_on_beside_the_own_backward_as_far_as_that_asks_late() -> None:
    # 20 bytes come back in 2 s, in which the block before it has passed; what left first is asked for 1.5 s later.
    parts = (OnTheWay(20, 0.0, 1.5), OnTheWay(20, 0.5, 0.0))
    alone = _linked(_Block(parts), write=1e9, read=10.0)
    assert _stalls(alone, OFFLOAD) == pytest.approx(2.5, abs=1e-6)
    behind = _linked(_Block(parts), _Block(backward=2.0), write=1e9, read=10.0)
    assert _stalls(behind, OFFLOAD, KEEP) == pytest.approx(0.5, abs=1e-6)


def test_a_block_that_reads_beside_its_own_backward_leaves_the_link_less_for_the_one_before() -> None:
    late = _Block((OnTheWay(20, 0.0, 2.0),), backward=2.0)
    instance = _linked(_moving(20), late, write=1e9, read=10.0)
    # The second's 20 bytes take its whole backward, and nobody waits; then the first's 20 are yet to come.
    assert _stalls(instance, OFFLOAD, OFFLOAD) == pytest.approx(2.0, abs=1e-6)
    assert _stalls(instance, OFFLOAD, KEEP) == pytest.approx(0.0, abs=1e-6)


def test_nothing_hides_the_reading_of_the_last_block() -> None:
    assert _stalls(_linked(_moving(50), write=1e9, read=10.0), OFFLOAD) == pytest.approx(5.0, abs=1e-6)


def test_moving_needs_a_link_and_room_on_the_tier() -> None:
    instance = _linked(_moving(50))
    assert instance.link is not None
    assert evaluate(instance, (OFFLOAD,)).moved_bytes == 50
    assert evaluate(instance, (OFFLOAD,)).fits
    assert not evaluate(replace(instance, link=None), (OFFLOAD,)).fits
    assert not evaluate(replace(instance, link=replace(instance.link, capacity_bytes=49)), (OFFLOAD,)).fits
