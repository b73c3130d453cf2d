"""The table of popular architectures: the page is that of the result file, and models are those that were published."""

import json

import architectures
import pytest
from architectures_list import ARCHITECTURES

ROWS = json.loads(architectures.OUTPUT.read_text())["rows"]


def test_the_page_is_that_of_the_result_file() -> None:
    assert architectures.PAGE.read_text() == architectures.page(ROWS)


@pytest.mark.parametrize("name", ROWS)
def test_a_model_has_the_parameters_that_were_published(name: str) -> None:
    """A published number is rounded, to one digit at worst, and may leave out the head."""
    published = ARCHITECTURES[name].published
    number = float(published.removesuffix("B")) * (1e9 if published.endswith("B") else 1e6)
    assert ROWS[name]["num_parameters"] == pytest.approx(number, rel=0.06)


def test_thirty_architectures_take_less_than_20_seconds_and_the_page_names_those_that_do_not() -> None:
    slow = {name: row["processor_seconds"] for name, row in ROWS.items() if row["processor_seconds"] >= 20}
    assert len(ROWS) - len(slow) >= 30
    page = architectures.PAGE.read_text()
    assert [name for name, seconds in slow.items() if f"{name} {seconds}" not in page] == []
