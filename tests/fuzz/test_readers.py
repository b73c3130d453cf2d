"""Whatever a stranger's file holds, its reader refuses it in one clear error, and does nothing else.

`make fuzz` looks for files that break this under the guidance of coverage.
"""

import contextlib
import random
from pathlib import Path

import pytest
from fuzz.corpus import keep, kept
from fuzz.readers import READERS, check
from fuzz.seeds import seeds
from fuzz.structured import mutated

pytestmark = pytest.mark.slow

_NUM_MUTANTS = 8
_NOT_KEPT = ("deepspeed", "diffusers", "dlrover", "next_budget", "checkpoint")
"""Readers of which the archive has no files yet."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[bytes]]:
    with contextlib.chdir(tmp_path_factory.mktemp("made")):
        return seeds(Path.cwd())


def _changed_bytes(data: bytes, draw: random.Random) -> bytes:
    """Cuts a file short, or has one byte of it another value."""
    if not data or draw.random() < 0.3:
        return data[: draw.randrange(len(data) + 1)]
    place = draw.randrange(len(data))
    return data[:place] + bytes([draw.randrange(256)]) + data[place + 1 :]


@pytest.mark.parametrize("name", READERS)
def test_files_with_other_values_are_refused_or_read(
    name: str, whole: dict[str, list[bytes]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "in"
    folder.mkdir()
    for seed in whole[name]:
        check(name, seed, folder)
        for number in range(_NUM_MUTANTS):
            draw = random.Random(number)
            check(name, mutated(seed, draw, lambda data, draw=draw: _changed_bytes(data, draw)), folder)


@pytest.mark.parametrize("name", READERS)
def test_what_fuzzing_has_found_is_refused_or_read(
    name: str, whole: dict[str, list[bytes]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GIVEN the files by which fuzzing reached each part of a reader THEN none does what a reader may not do."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "in"
    folder.mkdir()
    found = kept(name)
    assert found or name in _NOT_KEPT
    for content in found or whole[name]:
        check(name, content, folder)


def test_what_is_kept_is_read_again(tmp_path: Path) -> None:
    """GIVEN an archive WHEN one reader's files are found anew THEN the other's stay, and the same files are the same
    archive."""
    archive = tmp_path / "corpus.tar.xz"
    keep({"plan": [b"b", b"a"], "run": [b"r"]}, ("plan", "run"), archive)
    keep({"plan": [b"c"]}, ("plan", "run"), archive)
    assert (kept("plan", archive), kept("run", archive)) == ([b"c"], [b"r"])
    before = archive.read_bytes()
    keep({"plan": [b"c"]}, ("plan", "run"), archive)
    assert archive.read_bytes() == before


def test_what_a_reader_may_not_do_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN readers that fail, print an escape, or write beside their folder THEN each is told apart."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "in"
    folder.mkdir()
    for broken, expected in (
        (lambda *_: {}["x"], KeyError),
        (lambda *_: print("\x1b[31m"), AssertionError),
        (lambda *_: (tmp_path / "out").write_text(""), AssertionError),
    ):
        monkeypatch.setitem(READERS, "broken", broken)
        with pytest.raises(expected):
            check("broken", b"", folder)
        (tmp_path / "out").unlink(missing_ok=True)
