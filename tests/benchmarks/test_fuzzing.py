"""benchmarks/fuzzing.py writes down how long each reader was fuzzed, from libFuzzer's own last lines."""

import subprocess
from pathlib import Path
from types import SimpleNamespace

import fuzzing
import pytest
from fuzz.readers import READERS

SHOWN = """#17244	DONE   cov: 34 ft: 73 corp: 21/271b lim: 65536 exec/s: 2874 rss: 374Mb
Done 17244 runs in 301 second(s)
stat::number_of_executed_units: 17244
"""


def test_files_are_counted_by_libfuzzer() -> None:
    assert fuzzing.num_files(SHOWN) == 17244
    assert fuzzing.num_files("Uncaught Python exception") == 0


def test_calls_add_up_and_begin_anew_with_a_failure_and_with_its_mend() -> None:
    record = fuzzing.with_found({}, "trace", {"seconds": 301, "num_files": 10, "num_failed": 0})
    record = fuzzing.with_found(record, "trace", {"seconds": 60, "num_files": 5, "num_failed": 0})
    assert record["readers"]["trace"] == {"seconds": 361, "num_files": 15, "num_failed": 0}
    failed = fuzzing.with_found(record, "trace", {"seconds": 2, "num_files": 1, "num_failed": 1})
    assert failed["readers"]["trace"]["num_failed"] == 1
    mended = fuzzing.with_found(failed, "trace", {"seconds": 60, "num_files": 5, "num_failed": 0})
    assert mended["readers"]["trace"]["seconds"] == 60


@pytest.mark.parametrize(
    ("num_failed", "said"), [(0, "each read well, or refused in one clear error"), (1, "a failure")]
)
def test_the_page_says_what_was_fuzzed_and_what_was_not(num_failed: int, said: str) -> None:
    found = {"seconds": 1301, "num_files": 17244, "num_failed": num_failed}
    rows = fuzzing.table_of(fuzzing.with_found({}, "trace", found)).splitlines()
    assert rows[2] == f"| `trace` | 1,301 | 17,244 | {said} |"
    assert rows[3:] == [f"| `{name}` | - | - | not fuzzed |" for name in fuzzing.READERS[1:]]


def test_every_reader_is_fuzzed() -> None:
    assert set(READERS) == set(fuzzing.READERS)


def test_the_folder_is_meant_from_where_the_call_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program that fuzzes goes to a folder of its own."""
    given: list[str] = []

    def called(command: list[str], **_: object) -> SimpleNamespace:
        given.extend(command)
        return SimpleNamespace(returncode=0, stdout=SHOWN)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(subprocess, "run", called)
    found = fuzzing.fuzzed("plan", Path("kept"), 300)
    assert (found["num_files"], found["num_failed"]) == (17244, 0)
    assert str(tmp_path / "kept") in given
