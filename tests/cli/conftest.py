import inspect
import json
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cuda_history import MIB, History, frame
from forecasts import LLAMA, Run

from memwall.cli.app import main

PLAIN = str(Path(__file__).parents[1] / "scripts" / "train_plain.py")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a command that must fail; returns the message, which is all there is on standard error at the end."""

    def run(*arguments: str | Path, status: int = 2) -> str:
        capsys.readouterr()
        assert main([str(argument) for argument in arguments]) == status
        head, found, message = capsys.readouterr().err.rpartition("memwall: ")
        assert found, f"no message: {head}"
        return message.removesuffix("\n")

    return run


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder, to be read only, with trace, plan and run report of a script, and snapshots of 8, 10 and 12 MiB."""
    folder = tmp_path_factory.mktemp("made")
    assert main(["profile", "-o", f"{folder}/t.trace", PLAIN]) == 0
    assert main(["plan", f"{folder}/t.trace", "--budget", "8GiB", "-o", f"{folder}/plan.json"]) == 0
    assert main(["run", "--plan", f"{folder}/plan.json", "--report", f"{folder}/run.json", PLAIN]) in (0, 4)
    for num_mib in (8, 10, 12):
        history = History()
        history.segment(0, 20 * MIB)
        history.alloc(0, num_mib * MIB, num_mib * MIB, [frame("/home/me/train.py", 3, "step")])
        (folder / f"s{num_mib}.pickle").write_bytes(pickle.dumps(history.snapshot()))
    return folder


@pytest.fixture(scope="session")
def recordings() -> dict[str, Any]:
    """What `_recorded_once` has recorded so far."""
    return {}


@pytest.fixture(autouse=True)
def _recorded_once(monkeypatch: pytest.MonkeyPatch, recordings: dict[str, Any]) -> None:
    """Records a configuration's step once for all commands that ask for it alike; nobody changes a trace."""
    from memwall.integrations import estimate, spec_trace
    from memwall.integrations.hugging_face.hf_config import config_path

    record = spec_trace.device_run_of_spec

    def recorded(spec: Any, hardware: Any, **options: Any) -> Any:
        path = config_path(spec) if isinstance(spec, str) else None
        if path is None or not path.is_file() or options.get("changed") is not None:
            return record(spec, hardware, **options)
        whole = inspect.signature(record).bind(spec, hardware, **options)
        whole.apply_defaults()
        asked = repr((path.read_text(), *list(whole.arguments.items())[1:]))
        if asked not in recordings:
            recordings[asked] = record(spec, hardware, **options)
        return recordings[asked]

    monkeypatch.setattr(spec_trace, "device_run_of_spec", recorded)
    monkeypatch.setattr(estimate, "device_run_of_spec", recorded)


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    return str(path)


@pytest.fixture
def deep_config(tmp_path: Path) -> str:
    """The same with twice as many layers, where a plan has a choice."""
    path = tmp_path / "deep.json"
    path.write_text(json.dumps({**LLAMA, "num_hidden_layers": 6}))
    return str(path)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command with --json; returns its status and the one object it prints."""

    def of(*arguments: str) -> tuple[int, dict[str, Any]]:
        status = main([*arguments, "--json"])
        return status, json.loads(capsys.readouterr().out)

    return of
