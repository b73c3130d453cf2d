"""Lengths of a data set's samples, and the batch of them that a forecast is for."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memwall.errors import UsageError
from memwall.trace.sample_lengths import chosen_batch, read_lengths

BATCH, NUM_STEPS, PLANTED_STEP, PLANTED_LENGTH = 4, 100, 50, 1_079


@pytest.fixture
def planted() -> list[int]:
    """Short samples for a hundred steps, and one long one in the third place of step 50."""
    lengths = [32 + number % 32 for number in range(BATCH * NUM_STEPS)]
    lengths[BATCH * (PLANTED_STEP - 1) + 2] = PLANTED_LENGTH
    return lengths


# -- reading -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content",
    [
        '{"input_ids": [5, 6, 7], "labels": [1]}\n{"input_ids": []}\n\n{"input_ids": [1, 2]}\n',
        '{"length": 3, "text": "abc"}\n{"length": 0}\n{"length": 2}',
        "3\n0\n\n  2  \n",
        # Tokens are counted, whatever a length says that was written before the sample was cut.
        '{"input_ids": [5, 6, 7], "length": 9}\n{"input_ids": []}\n{"input_ids": [1, 2]}\n',
    ],
    ids=["input_ids", "length", "numbers", "both"],
)
def test_lengths_are_read_in_their_order(content: str, tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_text(content)
    assert list(read_lengths(path)) == [3, 0, 2]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"input_ids": [1]}\n{"text": "a"}\n', r"data, line 2: expected an object with 'input_ids', .* found neither"),
        ('{"input_ids": [[1], [2]]}\n', r"data, line 1: expected an object .*: Expected `int`, got `array` - at .*"),
        ('{"length": -1}\n', r"data, line 1: expected an object .*: Expected `int` >= 0 - at `\$.length`"),
        ('{"input_ids": [1, 2\n', r"data, line 1: expected an object .*: Input data was truncated"),
        ("12\ntwelve\n", r"data, line 2: expected a number of tokens, found 'twelve'$"),
        ("-3\n", r"data, line 1: expected a number of tokens, found '-3'$"),
        ("9" * 50, r"data, line 1: expected a number of tokens, found '9{40}\.\.\.'$"),
        ("\x00\x01", r"data, line 1: expected a number of tokens, found '\\x00\\x01'$"),
        ("", r"data holds no sample with a token; expected a \.jsonl file"),
        ("0\n0\n", r"data holds no sample with a token"),
    ],
)
def test_a_line_without_a_length_is_named(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_text(content)
    with pytest.raises(UsageError, match=message):
        read_lengths(path)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"^cannot read .*data\.jsonl: No such file or directory; expected a \.jsonl"):
        read_lengths(tmp_path / "data.jsonl")


class SavedDataset:
    """As much of datasets.Dataset as is asked for."""

    def __init__(self, columns: dict[str, list[Any]]) -> None:
        self.columns, self.column_names = columns, list(columns)

    def select_columns(self, names: list[str]) -> "SavedDataset":
        return SavedDataset({name: self.columns[name] for name in names})

    def iter(self, batch_size: int) -> Iterator[dict[str, list[Any]]]:
        (length,) = {len(values) for values in self.columns.values()}
        for start in range(0, length, batch_size):
            yield {name: values[start : start + batch_size] for name, values in self.columns.items()}


TOKENISED = SavedDataset({"text": ["a"] * 2_500, "input_ids": [[1] * (number % 7) for number in range(2_500)]})


def with_library(monkeypatch: pytest.MonkeyPatch, found: object) -> None:
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_from_disk=lambda folder: found))


@pytest.mark.parametrize("found", [TOKENISED, {"test": SavedDataset({}), "train": TOKENISED}], ids=["one", "splits"])
def test_a_saved_data_set_is_read_where_its_library_is_installed(
    found: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_library(monkeypatch, found)
    assert list(read_lengths(tmp_path)) == [number % 7 for number in range(2_500)]


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (SavedDataset({"text": [], "label": []}), r"has the columns text, label; expected 'input_ids' or 'length'"),
        ({"test": TOKENISED}, r"has the splits test; give the folder of the one to train on$"),
    ],
)
def test_a_saved_data_set_without_lengths_is_refused(
    found: object, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_library(monkeypatch, found)
    with pytest.raises(UsageError, match=message):
        read_lengths(tmp_path)


def test_a_folder_needs_the_library_that_wrote_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UsageError, match=r"needs the datasets library: pip install datasets, or give a \.jsonl file"):
        read_lengths(tmp_path)


# -- choosing ----------------------------------------------------------------------------------------------------------


def test_an_outlier_is_found_with_its_sample_and_step(planted: list[int]) -> None:
    found = chosen_batch("dataset", planted, data="d", num_samples=BATCH)
    assert (found.num_samples, found.padded_length) == (BATCH, PLANTED_LENGTH)
    assert (found.longest_sample, found.longest_length) == (BATCH * (PLANTED_STEP - 1) + 3, PLANTED_LENGTH)
    assert (found.longest_step, found.num_batches) == (PLANTED_STEP, NUM_STEPS)
    assert found.num_longer_batches == 0


def test_steps_are_those_of_the_optimizer(planted: list[int]) -> None:
    """Step 50 of batches is in step 13 of four micro-batches each."""
    found = chosen_batch("dataset", planted, data="d", num_samples=BATCH, num_micro_batches=4)
    assert found.longest_step == 13


def test_the_percentile_leaves_the_outlier_out_and_counts_it(planted: list[int]) -> None:
    found = chosen_batch("p99", planted, data="d", num_samples=BATCH)
    assert found.padded_length == 63
    assert (found.num_longer_batches, found.num_batches) == (1, NUM_STEPS)
    assert (found.longest_length, found.longest_step) == (PLANTED_LENGTH, PLANTED_STEP)


def test_longer_samples_are_cut_and_counted(planted: list[int]) -> None:
    found = chosen_batch("dataset", planted, data="d", num_samples=BATCH, most_tokens=64)
    assert (found.padded_length, found.num_cut_samples, found.longest_step) == (64, 1, PLANTED_STEP)
    uncut = chosen_batch("dataset", planted, data="d", num_samples=BATCH, most_tokens=PLANTED_LENGTH)
    assert (uncut.padded_length, uncut.num_cut_samples) == (PLANTED_LENGTH, 0)


@given(st.lists(st.integers(0, 5_000), min_size=1, max_size=300), st.integers(1, 40))
def test_at_most_one_batch_in_a_hundred_is_longer_than_the_percentile(lengths: list[int], num_samples: int) -> None:
    """Against the definition: the least padded length that at least 99 % of the batches keep to."""
    padded = [max(lengths[start : start + num_samples]) for start in range(0, len(lengths), num_samples)]
    found = chosen_batch("p99", lengths, data="d", num_samples=num_samples)
    expected = min(length for length in padded if 100 * sum(other <= length for other in padded) >= 99 * len(padded))
    assert found.padded_length == expected
    assert 100 * found.num_longer_batches <= found.num_batches == len(padded)
    assert chosen_batch("dataset", lengths, data="d", num_samples=num_samples).padded_length == max(lengths)


def test_a_long_file_is_read_line_by_line(tmp_path: Path) -> None:
    """The last line counts, and lines of other lengths than the first one's."""
    path = tmp_path / "data.jsonl"
    with path.open("w") as file:
        for number in range(5_000):
            file.write(json.dumps({"input_ids": list(range(number % 10))}) + "\n")
        file.write(json.dumps({"input_ids": [1] * 700}) + "\n")
    found = read_lengths(path)
    assert (len(found), max(found), found[-1]) == (5_001, 700, 700)
