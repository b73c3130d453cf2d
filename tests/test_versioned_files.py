"""memwall's own files: written whole or not at all, and refused with the reason and the way out."""

import json
import os
import resource
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from faulty_disk import fill_disk
from msgspec import Struct

from memwall import versioned_files
from memwall.errors import PlanError, StoreError, UsageError
from memwall.versioned_files import FileKind, json_bytes, whole_file


class Recipe(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Stands for any record that is kept as a file."""

    schema: str = "kitchen.recipe/3"
    grams: dict[str, int]


KIND = FileKind(noun="recipe", schema="kitchen.recipe", version=3, error=PlanError, way_out="cook again")


def refusal(path: Path, content: str | bytes) -> str:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(PlanError) as error:
        KIND.read_json(path, lambda found: msgspec.convert(found, Recipe))
    return str(error.value).replace(str(path), "FILE")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "recipe.json"


def test_a_record_comes_back_equal(path: Path) -> None:
    path.write_bytes(json_bytes(Recipe(grams={"salt": 3, "flour": 500})))
    assert KIND.read_json(path, lambda found: msgspec.convert(found, Recipe)) == Recipe(grams={"flour": 500, "salt": 3})


def test_equal_records_are_equal_bytes() -> None:
    assert json_bytes(Recipe(grams={"salt": 3, "flour": 5})) == json_bytes(Recipe(grams={"flour": 5, "salt": 3}))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", r"FILE is cut short or no JSON (Input data was truncated); cook again"),
        ("[" * 100_000, "FILE is cut short or no JSON ("),
        (b'{"schema": "\xff"}', "FILE is cut short or no JSON ("),
        ("[]", "FILE is not a memwall recipe: at $.schema expected 'kitchen.recipe/3', found None"),
        (
            '{"schema": "kitchen.menu/3"}',
            "FILE is not a memwall recipe: at $.schema expected 'kitchen.recipe/3', found 'kitchen.menu/3'",
        ),
        ('{"schema": "kitchen.recipe/new"}', "FILE is not a memwall recipe: at $.schema expected 'kitchen.recipe/3'"),
        (
            '{"schema": "kitchen.recipe/' + "9" * 5000 + '"}',
            "FILE is not a memwall recipe: at $.schema expected 'kitchen.recipe/3'",
        ),
        (
            '{"schema": "kitchen.recipe/2", "ounces": {}}',
            "FILE is a recipe of version 2, written by an earlier memwall; this one reads version 3: cook again",
        ),
        (
            '{"schema": "kitchen.recipe/4", "moles": {}}',
            "FILE is a recipe of version 4, this memwall reads version 3; upgrade torch-memwall, or cook again",
        ),
        (
            '{"schema": "kitchen.recipe/3", "grams": {}, "gram": 1}',
            "FILE is not a valid recipe: Object contains unknown field `gram`",
        ),
        (
            '{"schema": "kitchen.recipe/3", "grams": {"salt": "much"}}',
            "FILE is not a valid recipe: Expected `int`, got `str` - at `$.grams[...]`",
        ),
    ],
)
def test_what_is_refused_and_why(path: Path, content: str | bytes, message: str) -> None:
    assert refusal(path, content).startswith(message)


def test_a_file_that_is_not_there(path: Path) -> None:
    with pytest.raises(PlanError) as error:
        KIND.read_json(path, lambda found: msgspec.convert(found, Recipe))
    assert str(error.value) == f"cannot read the recipe {path}: No such file or directory"


def test_a_file_too_large_to_be_ours_is_not_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versioned_files, "_LARGEST_BYTES", 1000)
    monkeypatch.setattr(FileKind, "read_bytes", lambda *_: pytest.fail("it was read"))
    assert refusal(path, json.dumps({"schema": "kitchen.recipe/3", "grams": {"x" * 1100: 1}})) == (
        "FILE is no recipe: it holds 1.1 KiB, more than any that memwall writes; cook again"
    )


@contextmanager
def no_file_above(num_bytes: int) -> Iterator[None]:
    """Has the system refuse to let any file of this process grow further, as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_disk_that_fills_up_leaves_the_older_file_whole(path: Path) -> None:
    path.write_text("before")
    with (
        no_file_above(1 << 20),
        pytest.raises(StoreError) as error,
        whole_file(path, noun="recipe", error=StoreError, way_out="tidy up") as file,
    ):
        file.write(bytes(2 << 20))
    assert str(error.value) == f"cannot write the recipe to {path}: File too large; tidy up"
    assert path.read_text() == "before"
    assert [entry.name for entry in path.parent.iterdir()] == ["recipe.json"]


def test_a_disk_that_turns_out_full_at_its_sync_leaves_the_older_file_whole(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path.write_text("before")
    fill_disk(monkeypatch)
    with pytest.raises(UsageError) as error, whole_file(path) as file:
        file.write(b"after")
    assert str(error.value) == f"cannot write the report to {path}: No space left on device"
    assert path.read_text() == "before"
    assert [entry.name for entry in path.parent.iterdir()] == ["recipe.json"]


def test_a_file_has_its_name_when_it_is_on_disk_and_its_name_is_next(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[bool, bool]] = []

    def sync(fd: int) -> None:
        seen.append((stat.S_ISDIR(os.fstat(fd).st_mode), path.exists()))

    monkeypatch.setattr(os, "fsync", sync)
    with whole_file(path) as file:
        file.write(b"after")
    assert seen == [(False, False), (True, True)]


def test_nothing_is_written_through_a_link_that_somebody_left(path: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text("theirs")
    path.with_name("recipe.json.part").symlink_to(other)
    with whole_file(path) as file:
        file.write(b"after")
    assert (path.read_text(), path.is_symlink(), other.read_text()) == ("after", False, "theirs")


def test_what_ends_in_an_error_leaves_the_older_file_whole(path: Path) -> None:
    path.write_text("before")

    def fails_halfway() -> None:
        with whole_file(path) as file:
            file.write(b"after")
            raise UsageError("burnt")

    with pytest.raises(UsageError, match="burnt"):
        fails_halfway()
    assert path.read_text() == "before"
    assert [entry.name for entry in path.parent.iterdir()] == ["recipe.json"]
