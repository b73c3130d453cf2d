"""What a command says beside its result: memwall's log with its prefix, and nobody else's."""

import json
import logging
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from memwall.cli.app import app, main

NO_LEVEL = "memwall: MEMWALL_LOG=loud is no level; expected one of debug, info, warning, error; warnings are shown"


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A factory that logs at every level, as memwall's own code does, and warns as other libraries do."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    path = tmp_path / "noisy.py"
    path.write_text(
        "import logging, warnings, torch, memwall\n"
        "def small():\n"
        "    for level in ('debug', 'info', 'warning'):\n"
        "        getattr(logging.getLogger('memwall.trace'), level)('%s of a log', level)\n"
        "    logging.getLogger('transformers').warning('chatter')\n"
        "    warnings.warn('chatter')\n"
        "    return memwall.Workload(model=lambda: torch.nn.Linear(4, 4), batch=lambda: torch.ones(2, 4),\n"
        "        loss=lambda model, batch: model(batch).sum(),\n"
        "        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1))\n"
    )
    yield f"{path}:small"
    logging.getLogger("transformers").setLevel(logging.NOTSET)


@pytest.mark.parametrize(
    ("asked", "variable", "expected"),
    [
        ((), None, ["warning"]),
        (("-v",), None, ["info", "warning"]),
        (("--verbose",), None, ["info", "warning"]),
        (("-vv",), None, ["debug", "info", "warning"]),
        ((), "info", ["info", "warning"]),
        ((), "ERROR", []),
        (("-v",), "debug", ["debug", "info", "warning"]),
        ((), "loud", ["warning"]),
    ],
)
def test_the_log_is_shown_with_a_prefix_as_far_as_asked_for(
    asked: tuple[str, ...],
    variable: str | None,
    expected: list[str],
    spec: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """GIVEN -v or MEMWALL_LOG THEN that much of memwall's log is on standard error, and no other library's."""
    if variable is not None:
        monkeypatch.setenv("MEMWALL_LOG", variable)
    assert main(["estimate", spec, "--device", "l4", "--json", *asked]) == 0
    shown = capsys.readouterr()
    json.loads(shown.out)
    assert shown.err.splitlines() == [f"memwall: {level} of a log" for level in expected]


def test_a_command_leaves_loggers_as_it_found_them(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    own, root = logging.getLogger("memwall"), logging.getLogger()
    before = own.level, own.propagate, list(own.handlers), list(root.handlers), list(warnings.filters)
    main(["estimate", spec, "--device", "l4", "--json", "-vv"])
    assert (own.level, own.propagate, own.handlers, root.handlers, warnings.filters) == before
    assert "TRANSFORMERS_VERBOSITY" not in os.environ


@pytest.mark.parametrize(("asked", "expected"), [("-v", ["info", "warning"]), ("-vv", ["debug", "info", "warning"])])
def test_it_may_stand_before_the_command(
    asked: str, expected: list[str], spec: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([asked, "estimate", spec, "--device", "l4", "--json"]) == 0
    assert capsys.readouterr().err.splitlines() == [f"memwall: {level} of a log" for level in expected]


def test_every_command_takes_it() -> None:
    group = typer.main.get_command(app)
    for command in group.commands.values():
        (option,) = (parameter for parameter in command.params if "-v" in parameter.opts)
        assert set(option.opts) == {"-v", "--verbose"}


@pytest.mark.parametrize(
    ("variable", "said"),
    [
        ("info", ["memwall: told"]),
        ("warning", []),
        (
            "loud",
            ["memwall: MEMWALL_LOG=loud is no level; expected one of debug, info, warning, error; warnings are shown"],
        ),
    ],
)
def test_the_variable_shows_the_log_of_the_library(variable: str, said: list[str]) -> None:
    """GIVEN MEMWALL_LOG WHEN a script imports memwall and sets up its own log THEN each line comes once."""
    code = (
        "import logging, memwall; logging.basicConfig()\n"
        "logging.getLogger('memwall.apply').info('told')\n"
        "assert len(logging.getLogger().handlers) == 1"
    )
    environment = {**os.environ, "MEMWALL_LOG": variable}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True, env=environment
    )
    assert done.stderr.splitlines() == said
