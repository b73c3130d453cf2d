"""The faults that `make mutations` brings back are changes of places that are still there."""

from pathlib import Path

import pytest
from mutations.table import MUTATIONS, Mutation

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.fault)
def test_the_place_of_a_fault_is_there_once(mutation: Mutation) -> None:
    assert (ROOT / mutation.path).read_text().count(mutation.text) == 1
    assert all((ROOT / test.partition("::")[0]).exists() for test in mutation.tests)
