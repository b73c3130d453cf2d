"""Room between steps is left while nobody knows what a loop takes there, and then as much as it took."""

import pytest

from memwall.session.measurements import Measurements
from memwall.session.watch.room import RoomBetweenSteps

MIB = 1 << 20


class Meter:
    """Holds 100 MiB, and at most what it is told."""

    device = "cpu"
    can_reset = True
    most_bytes = 100 * MIB

    def now_bytes(self) -> int:
        return 100 * MIB

    def peak_bytes(self) -> int:
        return self.most_bytes

    def reset_peak(self) -> bool:
        return self.can_reset


def left_after(used_mib: list[int], *, meter: Meter, seen: tuple[int, ...] = ()) -> list[int]:
    """Returns the MiB left after each step, of 64 that are asked for, where so many are used after it."""
    room = RoomBetweenSteps(Measurements(meter=meter))  # type: ignore[arg-type]
    left = []
    for number, used in enumerate(used_mib):
        left.append(room.after_step(64 * MIB) // MIB)
        room.begin_looking()
        meter.most_bytes = (100 + used) * MIB
        if number in seen:
            room.begin_making()
        room.before_step()
    return left


@pytest.mark.parametrize(
    ("used_mib", "left_mib"),
    [([0] * 5, [64, 64, 64, 0, 0]), ([0, 40, 0, 0], [64, 64, 64, 40]), ([90] * 4, [64, 64, 64, 64])],
)
def test_what_was_used_after_three_steps_is_left_from_then_on(used_mib: list[int], left_mib: list[int]) -> None:
    assert left_after(used_mib, meter=Meter()) == left_mib


def test_what_a_hook_has_made_room_for_is_not_counted() -> None:
    assert left_after([90, 0, 0, 0, 0], meter=Meter(), seen=(0,)) == [64, 64, 64, 64, 0]


def test_all_is_left_where_that_is_cheap() -> None:
    room = RoomBetweenSteps(Measurements(meter=Meter()))  # type: ignore[arg-type]
    for _ in range(5):
        assert room.after_step(64 * MIB, is_cheap=True) == 64 * MIB
        room.begin_looking()
        room.before_step()


def test_all_is_left_where_the_system_does_not_tell() -> None:
    meter = Meter()
    meter.can_reset = False
    assert left_after([0] * 5, meter=meter) == [64] * 5


def test_a_state_dict_after_step_upon_step_is_no_checkpoint() -> None:
    measured = Measurements(meter=Meter())  # type: ignore[arg-type]
    room = RoomBetweenSteps(measured)
    found = []
    for measured.num_steps in (1, 2, 3, 4, 4, 7):
        found.append(room.is_saved_in_turn())
    assert found == [False, False, False, True, True, False]
