"""How a run over its budget ends: with a status for a person and a script, without one for a launcher of many ranks."""

import json
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import msgspec
import pytest

from memwall.cli.app import main
from memwall.planning.planfile import Plan

PLAIN = str(Path(__file__).parents[1] / "scripts" / "train_plain.py")
LAUNCHED = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"}


@pytest.fixture
def over_budget(made: Path, folder: Path) -> list[str]:
    """The arguments of a run whose plan has a budget that no process keeps to."""
    plan = Plan.load(made / "plan.json")
    tight = msgspec.structs.replace(plan.forecast, budget_bytes=1 << 20)
    msgspec.structs.replace(plan, forecast=tight).save(folder / "plan.json")
    return ["run", "--plan", "plan.json", "--report", "run.json", PLAIN]


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LAUNCHED:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.slow
def test_a_process_of_its_own_ends_with_5(over_budget: list[str]) -> None:
    assert main(over_budget) == 5


@pytest.mark.slow
def test_a_rank_of_a_launcher_ends_with_0_and_says_why(
    over_budget: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """GIVEN a complete run under torchrun, which ends or restarts every rank when one has another status than 0
    AND a script whose processes know nothing of each other THEN each writes a report of its own.
    """
    for name, value in LAUNCHED.items():
        monkeypatch.setenv(name, value)
    assert main(over_budget) == 0
    message = capsys.readouterr().err
    assert "exceeded the budget of 1.0 MiB" in message
    assert "memwall: rank 1 of 2 exceeded its budget; the exit status is 0 all the same, and not 5" in message
    assert json.loads(Path("rank1-run.json").read_text())["within_budget"] is False


@pytest.mark.slow
def test_a_rank_that_cannot_fit_is_a_failure_under_a_launcher_too(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in LAUNCHED.items():
        monkeypatch.setenv(name, value)
    assert main(["run", "--budget", "1MiB", PLAIN]) == 3


@pytest.mark.slow
def test_paths_are_meant_from_where_the_command_was_given(folder: Path) -> None:
    """GIVEN a script that goes to another folder before it trains."""
    (folder / "inner").mkdir()
    (folder / "disk").mkdir()
    script = folder / "moves.py"
    script.write_text(f"import os\nos.chdir('inner')\n{Path(PLAIN).read_text()}")
    options = ["--disk", "disk", "--checkpoint", "kept", "--report", "run.json"]
    assert main(["run", "--budget", "8GiB", *options, str(script)]) == 0
    assert {path.name for path in folder.iterdir()} >= {"run.json", "kept"}
    assert list((folder / "inner").iterdir()) == []


@pytest.mark.slow
@pytest.mark.requires("plotly", "jinja2")
def test_a_report_with_a_pages_name_is_a_page(over_budget: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run.html" if word == "run.json" else word for word in over_budget]) == 5
    page = Path("run.html").read_text()
    assert f"<title>memwall run: {Path(PLAIN).name}</title>" in page
    assert "Prediction and measurement" in page
    assert "within_budget" not in capsys.readouterr().err


@pytest.mark.parametrize("missing", ["plotly", "jinja2"])
def test_a_page_that_cannot_be_written_is_refused_before_the_run(
    folder: Path, missing: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] in ("plotly", "jinja2")]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("plotly", "jinja2"):
        monkeypatch.setitem(sys.modules, name, None if name == missing else ModuleType(name))
        if name != missing:
            sys.modules[name].__spec__ = ModuleSpec(name, None)
    assert main(["run", "--budget", "8GiB", "--report", "run.html", PLAIN]) == 2
    assert f"the HTML report needs {missing}, which is not installed" in capsys.readouterr().err
    assert list(folder.iterdir()) == []
