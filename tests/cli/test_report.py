"""`memwall report` and `memwall explain` on every kind of file, and on files that are none."""

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cuda_history import MIB
from faulty_disk import fill_disk

from memwall.cli.app import main

pytestmark = pytest.mark.usefixtures("folder")

PLAIN = str(Path(__file__).parents[1] / "scripts" / "train_plain.py")
EXPECTED = (
    "a trace written by memwall profile, a plan written by memwall plan, or a report written by memwall run --report"
)
Refused = Callable[..., str]
needs_extra = pytest.mark.requires("plotly", "jinja2")


class Exploit:
    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (self.command,)


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Refused:
    """Runs a command that must fail with status 2; returns the message, which is all there is."""

    def run(*arguments: str | Path) -> str:
        capsys.readouterr()
        assert main([str(argument) for argument in arguments]) == 2
        shown = capsys.readouterr()
        assert shown.out == ""
        assert shown.err.startswith("memwall: ")
        return shown.err.removeprefix("memwall: ").removesuffix("\n")

    return run


def written(made: Path, source: str, name: str, *options: str) -> bytes:
    assert main(["report", f"{made}/{source}", "-o", name, *options]) == 0
    assert [path.name for path in Path().iterdir()] == [name]
    return Path(name).read_bytes()


# -- every kind of file ------------------------------------------------------------------------------------------------


@needs_extra
@pytest.mark.parametrize(
    ("source", "title"),
    [
        ("t.trace", "memwall trace: t.trace"),
        ("plan.json", "memwall plan: plan.json"),
        ("run.json", "memwall run: train_plain.py"),
    ],
)
def test_html(source: str, title: str, made: Path) -> None:
    page = written(made, source, "page.html").decode()
    assert f"<h1>{title}</h1>" in page
    assert page.endswith("</html>")


@needs_extra
def test_the_script_s_own_lines_are_in_the_peak(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = written(made, "t.trace", "page.html").decode()
    capsys.readouterr()
    assert main(["explain", f"{made}/t.trace", "--json"]) == 0
    step = json.loads(capsys.readouterr().out)["steps"][1]
    assert sum(share["num_bytes"] for share in step["by_line"]) == step["peak_live_bytes"]
    widest = "return x + self.down(F.gelu(self.up(self.norm_mlp(x))))"
    number = 1 + [line.strip() for line in Path(PLAIN).read_text().splitlines()].index(widest)
    (share,) = [share for share in step["by_line"] if share["name"].endswith(f"train_plain.py:{number} forward")]
    # Of four blocks: two results of 256 features for each of 4 x 64 bytes, saved around the activation.
    assert share["num_bytes"] >= 4 * 2 * 256 * 4 * 64 * 4
    assert "activation" in share["categories"]
    assert f"train_plain.py:{number} forward</td>" in page


def test_perfetto(made: Path) -> None:
    found = json.loads(written(made, "t.trace", "out.json", "--format", "perfetto"))
    assert {event["ph"] for event in found["traceEvents"]} >= {"M", "C"}


def test_memory_viz(made: Path) -> None:
    found = pickle.loads(written(made, "t.trace", "out.bin", "--format", "memory_viz"))
    assert len(found["segments"]) == 1
    assert found["device_traces"][0]


@pytest.mark.parametrize(
    ("source", "schema"),
    [
        ("t.trace", "memwall.trace-summary/1"),
        ("plan.json", "memwall.forecast/1"),
        ("run.json", "memwall.run/1"),
    ],
)
def test_json(source: str, schema: str, made: Path) -> None:
    assert json.loads(written(made, source, "out.json"))["schema"] == schema


def test_a_run_as_json_is_the_run_report(made: Path) -> None:
    assert written(made, "run.json", "out.json") == (made / "run.json").read_bytes()


@pytest.mark.parametrize(
    ("name", "kind"), [("x.perfetto.json", "perfetto"), ("x.json", "json"), ("x.PICKLE", "memory_viz")]
)
def test_the_name_of_the_file_says_the_format(
    name: str, kind: str, made: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    size = len(written(made, "t.trace", name, "--json"))
    assert json.loads(capsys.readouterr().out) == {
        "schema": "memwall.written/1",
        "source": f"{made}/t.trace",
        "source_kind": "trace",
        "format": kind,
        "file": name,
        "num_bytes": size,
    }


def test_what_was_written_is_said(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written(made, "t.trace", "x.json")
    assert capsys.readouterr().out == f"wrote x.json (json, {Path('x.json').stat().st_size / 1024:.1f} KiB)\n"


def test_a_file_that_is_there_is_replaced(made: Path, folder: Path) -> None:
    (folder / "x.json").write_text("old")
    assert json.loads(written(made, "t.trace", "x.json"))


# -- explain -----------------------------------------------------------------------------------------------------------


def test_a_snapshot_is_explained(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", f"{made}/s8.pickle"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("· peak 8.0 MiB in use on GPU 0, after event 2 of 2; 20.0 MiB held")
    assert "me/train.py:3 step   8.0 MiB   100.0%" in shown


def test_a_snapshot_is_explained_to_scripts(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", f"{made}/s8.pickle", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["schema"] == "memwall.snapshot-summary/3"
    (device,) = found["devices"]
    assert device["by_line"] == [{"name": "me/train.py:3 step", "num_bytes": 8 * MIB}]
    assert device["peak"]["fragmentation"]["split_free_bytes"] == 12 * MIB


def test_a_hostile_snapshot_does_nothing(refused: Refused, folder: Path) -> None:
    (folder / "x.pickle").write_bytes(pickle.dumps({"segments": [], "device_traces": [Exploit("touch canary")]}))
    assert refused("explain", "x.pickle").startswith(
        "x.pickle is no memory snapshot: the pickle instruction STACK_GLOBAL at byte "
    )
    assert [path.name for path in folder.iterdir()] == ["x.pickle"]


# -- what cannot be ----------------------------------------------------------------------------------------------------


def test_a_source_that_is_missing(refused: Refused) -> None:
    assert refused("report", "no.trace", "-o", "x.html") == f"there is no file no.trace; expected {EXPECTED}"


def test_a_folder_that_is_missing(refused: Refused, made: Path, folder: Path) -> None:
    assert refused("report", made / "t.trace", "-o", "no/x.html") == (
        f"--output: there is no folder {folder}/no to write x.html in; create it first"
    )


def test_the_source_itself_is_not_overwritten(refused: Refused, made: Path) -> None:
    before = (made / "plan.json").read_bytes()
    assert refused("report", made / "plan.json", "-o", made / "plan.json") == (
        f"--output: {made}/plan.json is the file that is read; choose another name"
    )
    assert (made / "plan.json").read_bytes() == before


def test_a_format_that_is_unknown(refused: Refused, made: Path) -> None:
    assert refused("report", made / "t.trace", "-o", "x", "--format", "pdf") == (
        "--format: 'pdf' is not known; expected html, perfetto, memory_viz, json"
    )


@pytest.mark.parametrize(
    ("source", "kind", "chosen", "possible"),
    [
        ("plan.json", "plan", "perfetto", "html, json"),
        ("run.json", "run", "memory_viz", "html, json"),
    ],
)
def test_a_format_that_a_source_cannot_have(
    source: str, kind: str, chosen: str, possible: str, refused: Refused, made: Path, folder: Path
) -> None:
    assert refused("report", made / source, "-o", "x", "--format", chosen) == (
        f"--format {chosen}: a {kind} cannot be shown so; {made}/{source} can be written as {possible}"
    )
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"PK\x03\x04", f"x is nothing that memwall can report on; expected {EXPECTED}"),
        (b"", f"x is nothing that memwall can report on; expected {EXPECTED}"),
        (b'{"schema": "memwall.pl', "x is cut short or no JSON ("),
        (b'{"schema": "\xff"}', "x is cut short or no JSON ("),
        (b'{"schema": "other/1"}', "x is neither a plan nor a run report: at $.schema found 'other/1'; expected a"),
        (b'{"schema": "memwall.plan/9"}', "x is a plan of version 9, this memwall reads version 2; upgrade torch-me"),
        (b'{"schema": "memwall.run/1", "x": 1}', "x is not a valid run report: Object"),
        (b"memwall.trace/2\n\x00", "x is cut short or damaged ("),
        (b"\x80\x04\x95", "x is a CUDA memory snapshot, which `memwall explain` shows, and pytorch.org/memory_viz as "),
    ],
)
def test_a_file_that_is_no_source(content: bytes, message: str, refused: Refused, folder: Path) -> None:
    (folder / "x").write_bytes(content)
    assert refused("report", "x", "-o", "y.html").startswith(message)
    assert [path.name for path in folder.iterdir()] == ["x"]


def test_a_disk_that_is_full(refused: Refused, made: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill_disk(monkeypatch)
    message = refused("report", made / "t.trace", "-o", "x.json")
    assert message == "cannot write the report to x.json: No space left on device"
    assert list(folder.iterdir()) == []
