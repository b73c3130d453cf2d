"""What the benchmarks' page says of io_uring is what was measured."""

import json

import io_engines

ROWS = json.loads(io_engines.OUTPUT.read_text())["rows"]
PAGE = io_engines.README.read_text()


def quartiles(arm: io_engines.Arm, row: dict[str, object]) -> list[float]:
    """Of an arm's ratio, for the blocks and the direction of `row`."""
    (found,) = (
        other["speed_ratio_to_store"]
        for other in ROWS
        if (other["arm"], other["block_bytes"], other["direction"]) == (arm.name, row["block_bytes"], row["direction"])
    )
    return found


def test_the_table_is_the_measured_one() -> None:
    assert io_engines.table(ROWS) in PAGE


def test_no_arm_is_further_from_the_stores_than_a_second_one_of_its_kind() -> None:
    again = io_engines.ARMS[io_engines.ARMS.index(io_engines.STORE) + 1]
    assert again.name == "the same again"
    assert all(quartiles(arm, row)[0] <= quartiles(again, row)[2] for row in ROWS for arm in io_engines.ARMS)
    assert "In no column does the lower quartile of an arm lie above the upper one of the second arm" in PAGE
