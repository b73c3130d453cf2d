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


def commands_of(page: str) -> list[str]:
    """Returns what the page's first block has typed in the folder of the script, without its comments."""
    block = page.split("```")[1]
    typed = [line.partition("#")[0].strip() for line in block.splitlines()]
    return [line for line in typed if line.startswith("memwall ")]


def run(folder: Path, command: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PATH": os.pathsep.join([str(folder / "venv/bin"), os.environ["PATH"]])}
    return subprocess.run(command, shell=True, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_a_refusal_names_the_budget_under_which_the_same_script_ends_well(folder: Path) -> None:
    """GIVEN the commands of the page, with the number that this machine's refusal names in the place of its own."""
    begin = time.monotonic()
    plain = run(folder, "python train.py")
    too_little, enough, reported = commands_of(PAGE)
    refused = run(folder, too_little)
    assert refused.returncode == 3, refused.stderr
    (told,) = re.findall(r"the smallest feasible one is ([\d.,]+) MiB", refused.stderr)
    (shown,) = set(re.findall(r"--budget (\S+)", f"{enough} {reported}"))

    for command in (enough, reported):
        held = run(folder, command.replace(shown, f"{told.replace(',', '')}MiB"))
        assert held.returncode == 0, held.stderr
        assert held.stdout.startswith(plain.stdout)

    assert "Prediction and measurement" in (folder / "run.html").read_text()
    assert time.monotonic() - begin < 300


def test_the_page_shows_what_the_commands_say(folder: Path) -> None:
    """Numbers differ from machine to machine; words do not."""
    refused = run(folder, commands_of(PAGE)[0]).stderr
    (shown,) = (block for block in PAGE.split("```")[1::2] if "cannot be met" in block)
    for line in shown.strip().splitlines():
        assert re.sub(r"[\d.]+", "N", line) in re.sub(r"[\d.]+", "N", refused)
