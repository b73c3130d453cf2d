"""A script that fits anyway pays little for `memwall run`, in processes of its own: they begin as a person's do."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow(seconds=8)

SCRIPT = """
import json, sys, time
import torch
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(4):
    model(torch.ones(16, 64)).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
resident = int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]) * 1024
print(json.dumps({"bytes": resident, "seconds": time.process_time(), "modules": list(sys.modules)}))
"""

PARTS = {"memwall.apply", "memwall.checkpoint", "memwall.observe", "memwall.planning", "memwall.predict"}
PARTS |= {"memwall.report", "memwall.session", "memwall.store", "memwall.integrations.launcher"}
LIBRARIES = {"highspy", "jinja2", "plotly", "psutil", "pydantic", "rich", "zstandard"}


def found(*command: str, folder: Path) -> tuple[dict[str, Any], str]:
    done = subprocess.run([sys.executable, *command], cwd=folder, capture_output=True, text=True, check=True)
    return json.loads(done.stdout), done.stderr


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any], str]:
    """Returns what the script says of itself alone and under memwall, and what memwall says."""
    folder = tmp_path_factory.mktemp("small")
    (folder / "train.py").write_text(SCRIPT)
    plain, _ = found("train.py", folder=folder)
    under, said = found("-m", "memwall", "run", "--budget", "4GiB", "train.py", folder=folder)
    return plain, under, said


def test_it_takes_at_most_10_mib_and_a_second_more(both: tuple[dict[str, Any], dict[str, Any], str]) -> None:
    plain, under, _ = both
    assert under["bytes"] - plain["bytes"] <= 10 << 20
    assert under["seconds"] - plain["seconds"] <= 1.0


def test_nothing_is_loaded_that_records_plans_or_reports(both: tuple[dict[str, Any], dict[str, Any], str]) -> None:
    plain, under, _ = both
    more = set(under["modules"]) - set(plain["modules"])
    assert {name for name in more if name.partition(".")[0] in LIBRARIES} == set()
    assert {name for name in more if ".".join(name.split(".")[:2]) in PARTS or name in PARTS} == set()


def test_memwall_says_one_line(both: tuple[dict[str, Any], dict[str, Any], str]) -> None:
    _, _, said = both
    (line,) = said.splitlines()
    assert line.startswith("memwall: fits: ")
    assert line.endswith(" MiB held of a budget of 4.00 GiB; nothing is done, or loaded, below 1.00 GiB")
