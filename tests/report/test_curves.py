"""Thinning a curve for drawing: the peak stays, the layers add up."""

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memwall.report.curves import Curve, PhaseBand, curve_of, kept_points
from memwall.trace.records import Step, Trace

MIB = 1 << 20


@given(values=st.lists(st.integers(0, 1 << 40), min_size=1, max_size=400), most=st.sampled_from([8, 20, 64]))
def test_few_enough_points_and_the_peak_among_them(values: list[int], most: int) -> None:
    curve = np.array(values, dtype=np.int64)
    kept = kept_points(curve, most)
    assert len(kept) <= max(most, 1)
    assert list(kept) == sorted(set(kept))
    assert int(curve.argmax()) in kept
    assert {0, len(values) - 1} <= set(kept)


@given(heights=st.lists(st.integers(1, 1 << 40), min_size=20, max_size=20))
def test_every_spike_that_stands_alone_survives(heights: list[int]) -> None:
    """GIVEN 2,000 operations and one spike in each hundred, WHEN 80 points are kept, THEN all 20 spikes are."""
    curve = np.zeros(2000, dtype=np.int64)
    spikes = [100 * k + 37 for k in range(20)]
    curve[spikes] = heights
    assert set(spikes) <= set(kept_points(curve, 80))


def _long_step(step: Step, num_ops: int, spike_at: int) -> Step:
    """One operation after another, flat but for one storage that lives for one of them."""
    ops = tuple(msgspec.structs.replace(step.ops[0], seconds=1e-6) for _ in range(num_ops))
    flat = msgspec.structs.replace(step.storages[0], death=num_ops)
    spike = msgspec.structs.replace(step.storages[1], birth=spike_at, death=spike_at + 1)
    small = tuple(
        msgspec.structs.replace(step.storages[1], nbytes=k % 7 + 1, birth=k, death=k + 1) for k in range(num_ops)
    )
    return msgspec.structs.replace(step, ops=ops, storages=(flat, spike, *small))


@pytest.mark.parametrize("spike_at", [0, 1, 2499, 3333, 4999])
def test_a_peak_of_one_operation_in_thousands_is_drawn(trace: Trace, step: Step, spike_at: int) -> None:
    curve = curve_of(trace, _long_step(step, 5000, spike_at), "long", "simulated")
    # The end of the step is one point more.
    assert len(curve.positions) <= 2001
    assert curve.peak.op == spike_at
    assert max(curve.total_bytes) == curve.peak.live_bytes + trace.base_bytes


def test_the_layers_add_up_to_the_total_and_rest_on_the_base(trace: Trace, step: Step) -> None:
    curve = curve_of(trace, step, "free run", "cpu-measured", budget_bytes=900 * MIB)
    sums = np.sum([layer.live_bytes for layer in curve.layers], axis=0)
    assert tuple(sums) == curve.total_bytes
    assert [total // MIB for total in curve.total_bytes] == [440, 600, 608, 800, 688, 488, 488, 400, 400]
    assert [layer.category for layer in curve.layers] == [
        "base",
        "parameter",
        "gradient",
        "input",
        "activation",
        "temporary",
    ]
    assert curve.budget_bytes == 900 * MIB


def test_positions_are_seconds_and_end_with_the_step(trace: Trace, step: Step) -> None:
    curve = curve_of(trace, step, "free run", "cpu-measured")
    assert curve.position_unit == "seconds"
    assert curve.positions == pytest.approx((0, 0.25, 0.5, 0.5005, 1.0005, 1.5005, 1.6255, 1.7505, 1.7505))
    assert curve.peak_position == pytest.approx(0.5005)
    assert [band.phase for band in curve.bands] == ["forward", "loss", "backward", "optimizer"]


def test_positions_are_operations_where_no_time_is_known(trace: Trace, step: Step) -> None:
    untimed = msgspec.structs.replace(step, ops=tuple(msgspec.structs.replace(op, seconds=0.0) for op in step.ops))
    curve = curve_of(trace, untimed, "fake", "simulated")
    assert curve.position_unit == "operations"
    assert curve.positions == (0, 1, 2, 3, 4, 5, 6, 7, 8)
    assert curve.bands[2] == PhaseBand(phase="backward", begin=3, end=5)


def test_a_curve_is_a_frozen_record(trace: Trace, step: Step) -> None:
    curve = curve_of(trace, step, "free run", "cpu-measured")
    assert msgspec.json.decode(msgspec.json.encode(curve), type=Curve) == curve
    with pytest.raises(AttributeError):
        curve.name = "other"  # type: ignore[misc]
