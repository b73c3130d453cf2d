"""The evaluator against sums and queues worked out by hand."""

import pytest
from msgspec.structs import replace

from memwall.planning.solver.evaluate import evaluate
from memwall.planning.solver.instance import BlockOptions, Instance, Link, Option, Row

KEEP, OFFLOAD = 0, 1


def _block(
    path: str, *, moved_bytes: int, forward: float = 1.0, backward: float = 2.0, extra: float = 0.0
) -> BlockOptions:
    options = (
        Option(name="keep", extra_seconds=0.0, moved_bytes=0),
        Option(name="offload", extra_seconds=extra, moved_bytes=moved_bytes),
    )
    return BlockOptions(path=path, options=options, forward_seconds=forward, backward_seconds=backward)


def _linked(*blocks: BlockOptions, window_bytes: int = 1000, write: float = 10.0, read: float = 1e9) -> Instance:
    link = Link(
        write_bytes_per_second=write,
        read_bytes_per_second=read,
        window_bytes=window_bytes,
        capacity_bytes=10**9,
    )
    rows = (Row(label="loss", fixed_bytes=0, held=((0, 0),) * len(blocks)),)
    return Instance(blocks=blocks, rows=rows, budget_bytes=0, link=link)


def test_the_peak_is_the_largest_row() -> None:
    blocks = (_block("a", moved_bytes=0), _block("b", moved_bytes=0))
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
    instance = Instance(blocks=(_block("a", moved_bytes=0),), rows=rows, budget_bytes=(1 << 60) + 1, link=None)
    assert evaluate(instance, (0,)).fits
    assert not evaluate(replace(instance, budget_bytes=1 << 60), (0,)).fits


def test_writing_hides_behind_the_forwards_that_follow() -> None:
    # 10 bytes leave during the second forward, which lasts as long as they take; then the queue is empty.
    instance = _linked(_block("a", moved_bytes=10), _block("b", moved_bytes=0))
    assert evaluate(instance, (OFFLOAD, KEEP)).stall_seconds == pytest.approx(0.0, abs=1e-6)


def test_a_block_does_not_drain_during_its_own_forward() -> None:
    # Bytes enter the queue when the forward ends, so the last block's 10 bytes are all waited for.
    instance = _linked(_block("a", moved_bytes=0), _block("b", moved_bytes=10, forward=100.0))
    assert evaluate(instance, (KEEP, OFFLOAD)).stall_seconds == pytest.approx(1.0, abs=1e-6)


def test_what_is_queued_after_the_last_forward_is_a_stall() -> None:
    # 40 queued, 10 drain during the second forward, 30 at 10 per second are left.
    instance = _linked(_block("a", moved_bytes=40), _block("b", moved_bytes=0))
    assert evaluate(instance, (OFFLOAD, KEEP)).stall_seconds == pytest.approx(3.0, abs=1e-6)


def test_a_full_window_makes_the_executor_wait_but_loses_no_link_time() -> None:
    blocks = [_block(name, moved_bytes=40) for name in "abc"] + [_block("d", moved_bytes=0, forward=4.0)]
    wide = _linked(*blocks, window_bytes=1000)
    narrow = _linked(*blocks, window_bytes=40)
    choice = (OFFLOAD, OFFLOAD, OFFLOAD, KEEP)
    # Wide: 120 - 10 - 10 - 40 = 60 left. Narrow: 40 in a, full again after b (+3 s) and after c (+3 s), empty after d.
    assert evaluate(wide, choice).stall_seconds == pytest.approx(6.0, abs=1e-6)
    assert evaluate(narrow, choice).stall_seconds == pytest.approx(6.0, abs=1e-6)
    # With nothing long at the end to hide behind, waiting for room costs what draining later would not have.
    idle = [_block("a", moved_bytes=40), _block("b", moved_bytes=40), _block("c", moved_bytes=0, forward=7.0)]
    assert evaluate(_linked(*idle, window_bytes=1000), (1, 1, 0)).stall_seconds == pytest.approx(0.0, abs=1e-6)
    assert evaluate(_linked(*idle, window_bytes=40), (1, 1, 0)).stall_seconds == pytest.approx(3.0, abs=1e-6)


def test_bytes_beyond_the_window_leave_during_their_own_forward() -> None:
    # 50 bytes, window 30: 20 leave during the own forward of 1 s at 10 per second, 1 s late; 30 hide behind b.
    instance = _linked(_block("a", moved_bytes=50), _block("b", moved_bytes=0, forward=3.0), window_bytes=30)
    assert evaluate(instance, (OFFLOAD, KEEP)).stall_seconds == pytest.approx(1.0, abs=1e-6)


def test_reading_hides_behind_the_backward_of_the_next_block_and_its_recomputation() -> None:
    blocks = (_block("a", moved_bytes=50), _block("b", moved_bytes=0, backward=2.0, extra=1.0))
    instance = _linked(*blocks, write=1e9, read=10.0)
    assert evaluate(instance, (OFFLOAD, KEEP)).stall_seconds == pytest.approx(3.0, abs=1e-6)
    recomputing = evaluate(instance, (OFFLOAD, 1))
    assert recomputing.stall_seconds == pytest.approx(2.0, abs=1e-6)
    assert recomputing.extra_seconds == pytest.approx(3.0, abs=1e-6)


def test_reading_goes_one_block_ahead_only() -> None:
    # The 100 s of backward of c are no use to a.
    blocks = (
        _block("a", moved_bytes=50),
        _block("b", moved_bytes=0),
        _block("c", moved_bytes=0, backward=100.0),
    )
    assert evaluate(_linked(*blocks, write=1e9, read=10.0), (OFFLOAD, 0, 0)).stall_seconds == pytest.approx(
        3.0, abs=1e-6
    )


def test_no_more_than_the_window_is_read_ahead() -> None:
    blocks = (_block("a", moved_bytes=50), _block("b", moved_bytes=0, backward=100.0))
    instance = _linked(*blocks, write=1e9, read=10.0, window_bytes=20)
    assert evaluate(instance, (OFFLOAD, KEEP)).stall_seconds == pytest.approx(3.0, abs=1e-6)


def test_nothing_hides_the_reading_of_the_last_block() -> None:
    instance = _linked(_block("a", moved_bytes=50, backward=100.0), write=1e9, read=10.0)
    assert evaluate(instance, (OFFLOAD,)).stall_seconds == pytest.approx(5.0, abs=1e-6)


def test_moving_needs_a_link_and_room_on_the_tier() -> None:
    instance = _linked(_block("a", moved_bytes=50))
    assert instance.link is not None
    assert evaluate(instance, (OFFLOAD,)).moved_bytes == 50
    assert evaluate(instance, (OFFLOAD,)).fits
    assert not evaluate(replace(instance, link=None), (OFFLOAD,)).fits
    assert not evaluate(replace(instance, link=replace(instance.link, capacity_bytes=49)), (OFFLOAD,)).fits
