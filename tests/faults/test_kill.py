"""A script killed at any instant goes on from its last committed step, and ends with the same weights."""

import itertools
import json
import os
import random
import sys
import time
from pathlib import Path

import pytest
import torch
from plans import RESUMABLE, resumable_on_disk
from warm_python import warm_python

from memwall.cli.app import main

pytestmark = pytest.mark.slow(seconds=4)

ROOT = Path(__file__).parents[2]
GAN = ROOT / "tests" / "scripts" / "train_gan.py"
KILLED = ROOT / "tests" / "scripts" / "train_killed.py"
PLAIN = ROOT / "tests" / "scripts" / "train_plain.py"
NUM_STEPS = 40


def command(folder: Path, *options: str, num_steps: int = NUM_STEPS) -> list[str]:
    limit = () if "--plan" in options else ("--budget", "8GiB")
    memwall = ["-m", "memwall", "run", *limit, *options]
    script = () if str(GAN) in options else (str(RESUMABLE),)
    return [*memwall, *script, "--steps", str(num_steps), "--out", str(folder / "sha256.txt")]


def finish(folder: Path, *options: str, num_steps: int = NUM_STEPS) -> str:
    """Standard output of a run that is left alone."""
    done = warm_python().run(*command(folder, *options, num_steps=num_steps), folder=folder, timeout_s=100)
    assert done.returncode == 0, done.stderr
    return done.stdout


def first_step(printed: str) -> int:
    """Returns the step that a run printed first."""
    return int(printed.split()[1])


def kill_within(folder: Path, seconds: float, *options: str) -> None:
    """Starts a run and kills it some time after the third step of its own, in which it is under its plan."""
    reading, writing = os.pipe()
    process = warm_python().start(*command(folder, *options), folder=folder, out=writing)
    os.close(writing)
    with open(reading, "rb") as printed:
        for _ in range(3):
            printed.readline()
        time.sleep(seconds)
        process.kill()
    process.wait()


@pytest.fixture(scope="module")
def plain_sha256(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The weights of a run without memwall that nobody killed."""
    folder = tmp_path_factory.mktemp("plain")
    done = warm_python().run(RESUMABLE, "--steps", NUM_STEPS, "--out", folder / "plain.txt", PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stderr
    return (folder / "plain.txt").read_text()


@pytest.fixture(autouse=True)
def _same_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def test_a_command_killed_twice_ends_with_the_same_weights(tmp_path: Path, plain_sha256: str) -> None:
    draw = random.Random(2)
    options = ("--checkpoint", str(tmp_path / "run"), "--resume")
    for _ in range(2):
        kill_within(tmp_path, draw.uniform(0, 0.03), *options)
    assert first_step(finish(tmp_path, *options)) > 0
    assert (tmp_path / "sha256.txt").read_text() == plain_sha256


@pytest.mark.exhaustive
def test_a_command_killed_with_its_parameters_on_disk_ends_with_the_same_weights(
    tmp_path: Path, plain_sha256: str
) -> None:
    (tmp_path / "plan.json").write_bytes(resumable_on_disk().encode())
    options = ("--plan", str(tmp_path / "plan.json"), "--checkpoint", str(tmp_path / "run"), "--resume")
    options += ("--disk", str(tmp_path))
    kill_within(tmp_path, 0.02, *options)
    assert first_step(finish(tmp_path, *options)) > 0
    assert (tmp_path / "sha256.txt").read_text() == plain_sha256


@pytest.mark.exhaustive
def test_a_generator_and_its_critics_killed_twice_end_with_the_same_weights(tmp_path: Path) -> None:
    """GIVEN three optimizers, and two gradient scalers alike WHEN a run is killed THEN each has its own state again."""
    plain = warm_python().run(GAN, "--scaled", "--steps", NUM_STEPS, "--out", tmp_path / "plain.pt")
    assert plain.returncode == 0, plain.stderr
    options = ("--checkpoint", str(tmp_path / "run"), "--resume", str(GAN), "--scaled")
    draw = random.Random(3)
    for _ in range(2):
        kill_within(tmp_path, draw.uniform(0, 0.03), *options)
    assert first_step(finish(tmp_path, *options)) > 0
    found, wanted = (torch.load(tmp_path / name, weights_only=True) for name in ("sha256.txt", "plain.pt"))
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


_MANY = [pytest.mark.exhaustive, pytest.mark.timeout(900)]


@pytest.mark.parametrize(
    ("num_kills", "options"),
    [(4, ()), (3, ("--on-disk",)), pytest.param(50, (), marks=_MANY), pytest.param(50, ("--on-disk",), marks=_MANY)],
)
def test_kills_at_random_instants_change_nothing(tmp_path: Path, num_kills: int, options: tuple[str, ...]) -> None:
    search = os.pathsep.join(sys.path)
    done = warm_python().run(KILLED, tmp_path, "--kills", num_kills, *options, timeout_s=800, PYTHONPATH=search)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["killed"] == num_kills
    assert found["sha256"] == found["plain_sha256"]
    assert all(step >= before for before, step in itertools.pairwise(found["resumed_steps"]))
    assert found["resumed_steps"][-1] > 0


def test_the_command_line_continues_reports_and_loads_a_finished_run(tmp_path: Path, plain_sha256: str) -> None:
    options = ("--checkpoint", str(tmp_path / "run"), "--report", str(tmp_path / "report.json"))
    assert finish(tmp_path, *options, num_steps=4).count("step ") == 4
    short = (tmp_path / "sha256.txt").read_text()
    assert finish(tmp_path, *options, "--resume", num_steps=4).count("step ") == 0
    assert (tmp_path / "sha256.txt").read_text() == short  # the loop had nothing to do; the weights are there
    printed = finish(tmp_path, *options, "--resume")
    assert printed.startswith("step 4 loss")
    assert json.loads((tmp_path / "report.json").read_text())["within_budget"]
    assert (tmp_path / "sha256.txt").read_text() == plain_sha256


def test_a_script_that_does_not_ask_where_to_begin_is_refused_and_nothing_is_lost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    memwall = ["run", "--budget", "8GiB", "--checkpoint", str(tmp_path / "run")]
    for extra, status in (([], 0), (["--resume"], 2), ([], 2)):
        found = main([*memwall, *extra, str(PLAIN), "--steps", "2"])
        said = capsys.readouterr().err
        assert found == status, said
    assert f"--checkpoint {tmp_path / 'run'} holds step 2 of a run" in said
