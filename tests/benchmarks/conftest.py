"""Tests of the programs in benchmarks/, which `make test-benchmarks` runs."""

import pytest


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker("benchmark")
