"""How long the samples of a data set are, and which batch of them a forecast is for: known before a step is recorded.

The batches are those of a loader that reads the data in order and pads each batch to its longest sample. Memory grows
with that length, so the batch with the longest sample is the one that gives the peak.
"""

import importlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import msgspec
from msgspec import Meta, Struct

from memwall.errors import UsageError

__all__ = ["BATCH_RULES", "DATA_FORMATS", "BatchChoice", "BatchRule", "chosen_batch", "read_lengths"]

BatchRule = Literal["max-length", "dataset", "p99"]
BATCH_RULES: tuple[BatchRule, ...] = get_args(BatchRule)

DATA_FORMATS = (
    "a .jsonl file whose objects have 'input_ids' or 'length', a text file with one token count per line, or a folder "
    "written by save_to_disk of Hugging Face's datasets"
)
# torch's sizes are 64-bit; a sample of this many tokens has no device to run on.
_MOST_TOKENS = 1 << 31
_SHOWN_CHARACTERS = 40


class BatchChoice(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Holds the batch that a forecast is for, and how it was chosen."""

    rule: BatchRule
    num_samples: int
    """Samples per forward."""
    padded_length: int
    """Tokens of each, padding included."""
    data: str | None = None
    """File or folder whose lengths were read."""
    num_batches: int = 0
    """Batches in it; 0 where nothing was read."""
    num_longer_batches: int = 0
    """Those that are padded to more tokens than this one."""
    longest_length: int | None = None
    """Tokens of the longest sample."""
    longest_sample: int | None = None
    """Its number, counted from 1."""
    longest_step: int | None = None
    """The optimizer step it falls in when the data are read in order, counted from 1."""
    num_cut_samples: int = 0
    """Samples longer than allowed, taken as cut to that length."""

    @property
    def is_padded(self) -> bool:
        """Returns whether some of its samples are shorter than it: models attend by a mask only then."""
        return self.rule != "max-length" and self.num_samples > 1


class _Row(Struct):
    """Holds a line of a .jsonl file, as far as it is read."""

    input_ids: list[int] | None = None
    length: Annotated[int, Meta(ge=0, le=_MOST_TOKENS)] | None = None


def read_lengths(path: Path) -> Sequence[int]:
    """Returns the tokens of each sample of a data set, in its order.

    Args:
        path: see `DATA_FORMATS`.

    Raises:
        UsageError: there is no such file, or a line of it says no length; the message names the line.
    """
    if path.is_dir():
        found = array("q", _lengths_of_dataset(path))
    else:
        try:
            with path.open("rb") as file:
                found = array("q", _lengths_of_lines(path, file))
        except OSError as error:
            raise UsageError(f"cannot read {path}: {error.strerror or error}; expected {DATA_FORMATS}") from error
    if not any(found):
        raise UsageError(f"{path} holds no sample with a token; expected {DATA_FORMATS}")
    return found


def chosen_batch(
    rule: Literal["dataset", "p99"],
    lengths: Sequence[int],
    *,
    data: str,
    num_samples: int,
    most_tokens: int | None = None,
    num_micro_batches: int = 1,
) -> BatchChoice:
    """Returns the batch of a data set that a forecast is to be for.

    Args:
        rule: "dataset" for the batch with the longest sample, "p99" for the 99th percentile (nearest rank) of the
            lengths that batches are padded to.
        lengths: tokens of each sample, in the order in which they are read.
        num_samples: samples per forward.
        most_tokens: longer samples are cut to so many; None leaves them.
        num_micro_batches: forwards in one optimizer step.
    """
    allowed: Sequence[int] = lengths if most_tokens is None else [min(length, most_tokens) for length in lengths]
    padded = [max(allowed[start : start + num_samples]) for start in range(0, len(allowed), num_samples)]
    longest = max(range(len(allowed)), key=lambda number: allowed[number])
    percentile = sorted(padded)[-(-99 * len(padded) // 100) - 1]
    padded_length = allowed[longest] if rule == "dataset" else percentile
    return BatchChoice(
        rule=rule,
        num_samples=num_samples,
        padded_length=padded_length,
        data=data,
        num_batches=len(padded),
        num_longer_batches=sum(length > padded_length for length in padded),
        longest_length=allowed[longest],
        longest_sample=longest + 1,
        longest_step=longest // (num_samples * num_micro_batches) + 1,
        num_cut_samples=sum(length > most_tokens for length in lengths) if most_tokens is not None else 0,
    )


def _lengths_of_lines(path: Path, lines: Iterable[bytes]) -> Iterator[int]:
    """Reads a .jsonl file, or one with a number per line: the first line that is not empty decides."""
    is_json: bool | None = None
    decoder = msgspec.json.Decoder(_Row)
    for number, raw in enumerate(lines, start=1):
        line = raw.strip()
        if not line:
            continue
        if is_json is None:
            is_json = line.startswith(b"{")
        yield _length_of_row(path, number, decoder, line) if is_json else _length_of_number(path, number, line)


def _length_of_row(path: Path, number: int, decoder: "msgspec.json.Decoder[_Row]", line: bytes) -> int:
    expected = "an object with 'input_ids', a list of numbers, or 'length', a number"
    try:
        row = decoder.decode(line)
    except msgspec.DecodeError as error:
        raise UsageError(f"{path}, line {number}: expected {expected}: {error}") from error
    if row.input_ids is not None:
        return len(row.input_ids)
    if row.length is None:
        raise UsageError(f"{path}, line {number}: expected {expected}, found neither in {_shown(line)}")
    return row.length


def _length_of_number(path: Path, number: int, line: bytes) -> int:
    if not line.isdigit() or int(line[:20]) > _MOST_TOKENS:
        raise UsageError(f"{path}, line {number}: expected a number of tokens, found {_shown(line)}")
    return int(line)


def _shown(line: bytes) -> str:
    text = line.decode(errors="replace")
    return repr(text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "...")


def _lengths_of_dataset(path: Path) -> Iterator[int]:
    """Reads a folder that `Dataset.save_to_disk` wrote; of several splits in it, the one for training."""
    try:
        datasets: Any = importlib.import_module("datasets")
    except ImportError as error:
        raise UsageError(
            f"{path} is a folder; reading it as a Hugging Face data set needs the datasets library: pip install "
            f"datasets, or give {DATA_FORMATS.partition(', or a folder')[0]}"
        ) from error
    try:
        found = datasets.load_from_disk(str(path))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} is no data set that save_to_disk wrote: {' '.join(str(error).split())}") from error
    if isinstance(found, dict):
        if "train" not in found:
            raise UsageError(f"{path} has the splits {', '.join(found)}; give the folder of the one to train on")
        found = found["train"]
    column = next((name for name in ("input_ids", "length") if name in found.column_names), None)
    if column is None:
        raise UsageError(
            f"{path} has the columns {', '.join(found.column_names)}; expected 'input_ids' or 'length': save the data "
            "set after it was tokenised"
        )
    for rows in found.select_columns([column]).iter(batch_size=1000):
        yield from (value if column == "length" else len(value) for value in rows[column])
