"""The bounds of a step that moves bytes, and the batch that hides them, against figures worked out by hand.

The figures are derived, for a device of 400 TFLOPS: 6 operations a parameter and token in a step, 24 h^2 a token in the
forward of a layer of width h.
"""

from math import inf

import msgspec
import pytest

from memwall.predict.link_time import LinkTime

FLOPS = 400e12
NUM_PARAMETERS = 10**9


def link(
    *, written: float = 0, read: float = 0, batched: float = 0, write_speed: float = 1e9, compute: float = 1.0
) -> LinkTime:
    return LinkTime(
        tier="disk",
        written_bytes=int(written),
        read_bytes=int(read),
        batched_bytes=int(batched),
        write_bytes_per_second=write_speed,
        read_bytes_per_second=2e9,
        compute_seconds=compute,
    )


def one_token(bytes_per_parameter: float, write_speed: float) -> LinkTime:
    """What a step of one token writes and computes."""
    compute_seconds = 6 * NUM_PARAMETERS / FLOPS
    return link(written=bytes_per_parameter * NUM_PARAMETERS, write_speed=write_speed, compute=compute_seconds)


@pytest.mark.parametrize(
    ("bytes_per_parameter", "write_speed", "thousand_tokens"), [(12, 11e9, 73), (12, 26e9, 31), (2, 11e9, 12)]
)
def test_tokens_from_which_on_writes_are_hidden(
    bytes_per_parameter: float, write_speed: float, thousand_tokens: int
) -> None:
    found = one_token(bytes_per_parameter, write_speed).hiding_samples(1)
    assert round(found / 1000) == thousand_tokens
    # A model of another size, and a step of another batch, need as many.
    assert link(
        written=7 * bytes_per_parameter * NUM_PARAMETERS,
        write_speed=write_speed,
        compute=7 * 6 * NUM_PARAMETERS / FLOPS * 512,
    ).hiding_samples(512) == pytest.approx(found)


@pytest.mark.parametrize(
    ("width", "bytes_per_token", "gigabytes_per_second"),
    [(4096, 2 * 4096, 8.1), (1024, 2 * 1024, 33), (4096, 34 * 4096, 138), (1024, 34 * 1024, 553)],
)
def test_speed_from_which_on_what_a_layer_saves_is_hidden(
    width: int, bytes_per_token: int, gigabytes_per_second: float
) -> None:
    compute_seconds = 24 * width**2 / FLOPS
    speed = bytes_per_token / compute_seconds
    assert speed / 1e9 == pytest.approx(gigabytes_per_second, rel=0.015)
    for factor, larger in ((0.99, "moving"), (1.01, "computing")):
        found = link(written=bytes_per_token, write_speed=factor * speed, compute=compute_seconds)
        assert ("computing" if found.ideal_seconds == compute_seconds else "moving") == larger


def test_a_day_of_steps_that_write_168_gb_every_ten_seconds() -> None:
    assert link(written=168e9).written_bytes_per_day(10.0) == pytest.approx(1.45e15, rel=0.002)


def test_bounds() -> None:
    found = link(written=1e9, read=1e9, compute=2.0)
    assert found.moving_seconds == 1.5
    assert (found.ideal_seconds, found.serial_seconds) == (2.0, 3.5)
    slow = msgspec.structs.replace(found, write_bytes_per_second=1e8)
    assert (slow.ideal_seconds, slow.serial_seconds) == (10.5, 12.5)


def test_what_the_optimizer_computes_hides_moving_but_does_not_grow_with_the_batch() -> None:
    found = msgspec.structs.replace(link(written=3e9, compute=1.0), fixed_seconds=0.4)
    samples = found.hiding_samples(8)
    assert samples == pytest.approx(8 * 2.6 / 0.6)
    grown = msgspec.structs.replace(found, compute_seconds=0.4 + 0.6 * samples / 8)
    assert grown.compute_seconds == pytest.approx(grown.moving_seconds)
    assert msgspec.structs.replace(found, compute_seconds=5.0, fixed_seconds=4.0).hiding_samples(8) == 0.0


def test_what_grows_with_the_batch_is_never_hidden_by_a_larger_one() -> None:
    state, saved = link(written=4e9, read=4e9, compute=3.0), link(written=4e9, read=4e9, batched=4e9, compute=3.0)
    assert state.hiding_samples(8) == 16.0
    assert saved.hiding_samples(8) == inf
    half = msgspec.structs.replace(saved, batched_bytes=10**9)
    assert half.hiding_samples(8) == pytest.approx(8 * 4.5 / 1.5)
    assert msgspec.structs.replace(saved, compute_seconds=7.0).hiding_samples(8) == 0.0
