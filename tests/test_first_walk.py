"""A newcomer's first walk: a new environment, the commands of docs/start.md, the script that it shows."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "start.md").read_text()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with the page's script and an environment that holds memwall and what it asks for, alone."""
    folder = tmp_path_factory.mktemp("walk")
    (script,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (folder / "train.py").write_text(script)
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
    install = [folder / "venv/bin/python", "-m", "pip", "install", "--quiet", "--constraint", ROOT / "constraints.txt"]
    if index := os.environ.get("TORCH_INDEX"):
        install += ["--extra-index-url", index]
    subprocess.run([*install, os.environ.get("TORCH", "torch"), f"{ROOT}[report]"], check=True)
    return folder


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [folder / "venv/bin/memwall", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_a_refusal_names_the_budget_under_which_the_same_script_ends_well(folder: Path) -> None:
    begin = time.monotonic()
    plain = subprocess.run(
        [folder / "venv/bin/python", "train.py"], cwd=folder, capture_output=True, text=True, check=True
    )
    refused = run(folder, "run", "--budget", "64MiB", "train.py")
    assert refused.returncode == 3, refused.stderr
    (told,) = re.findall(r"the smallest feasible one is ([\d.,]+ MiB)", refused.stderr)

    held = run(folder, "run", "--budget", told.replace(",", ""), "--report", "run.json", "train.py")

    assert held.returncode == 0, held.stderr
    assert held.stdout == plain.stdout
    assert run(folder, "report", "run.json", "-o", "run.html").returncode == 0
    assert "Prediction and measurement" in (folder / "run.html").read_text()
    assert time.monotonic() - begin < 300


def test_the_page_shows_what_the_commands_say(folder: Path) -> None:
    """Numbers differ from machine to machine; words do not."""
    refused = run(folder, "run", "--budget", "64MiB", "train.py").stderr
    (shown,) = (block for block in PAGE.split("```")[1::2] if "cannot be met" in block)
    for line in shown.strip().splitlines():
        assert re.sub(r"[\d.]+", "N", line) in re.sub(r"[\d.]+", "N", refused)
