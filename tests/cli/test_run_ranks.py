"""`memwall run` on several ranks: one plan, one report, one status; and the orders that cannot work, in words."""

from pathlib import Path

import msgspec
import pytest
from warm_python import warm_python

from memwall.cli.app import main
from memwall.observe.rank_spread import spread_over
from memwall.observe.run_report import RunReport

SCRIPTS = Path(__file__).parents[1] / "scripts"


@pytest.mark.slow
def test_two_processes_show_one_plan_and_one_report(tmp_path: Path) -> None:
    """GIVEN the short form of torchrun, and a script that closes its group at its end THEN rank 0 alone reports."""
    command = ("-m", "memwall", "run", "--nproc", "2", "--budget", "8GiB", "--report", "run.json")
    result = warm_python().run(*command, SCRIPTS / "train_ddp.py", folder=tmp_path, timeout_s=110)
    assert result.returncode == 0, result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]
    report = RunReport.load(tmp_path / "run.json")
    assert report.ranks is not None
    assert report.ranks.num_ranks == 2
    assert report.ranks.without_report == report.ranks.over_budget == ()
    assert 0 < report.ranks.least_peak_bytes <= report.ranks.most_peak_bytes == report.judged_peak_bytes
    assert result.stderr.count("within the budget") == result.stderr.count("ranks  2; peak from") == 1


@pytest.fixture
def report(made: Path) -> RunReport:
    return RunReport.load(made / "run.json")


def with_peak(report: RunReport, peak_bytes: int) -> RunReport:
    peak = msgspec.structs.replace(report.measured.peak, process_bytes=peak_bytes)
    measured = msgspec.structs.replace(report.measured, peak=peak, first_step_peak_bytes=1, steady_peak_bytes=1)
    return msgspec.structs.replace(report, measured=measured, budget_bytes=25, within_budget=peak_bytes <= 25)


@pytest.mark.slow
def test_the_report_of_all_is_that_of_the_rank_that_binds(report: RunReport) -> None:
    """GIVEN one rank over the budget, and one that has not reported THEN both are named."""
    joint = spread_over({0: with_peak(report, 20), 1: with_peak(report, 30), 3: with_peak(report, 10)}, 4)
    assert joint.ranks is not None
    assert joint.judged_peak_bytes == joint.ranks.most_peak_bytes == 30
    assert (joint.ranks.least_rank, joint.ranks.most_rank, joint.ranks.median_peak_bytes) == (3, 1, 20)
    assert (joint.ranks.over_budget, joint.ranks.without_report) == ((1,), (2,))
    assert not joint.within_budget
    assert RunReport.from_json(msgspec.json.encode(joint)) == joint


@pytest.mark.parametrize(
    ("command", "order"),
    [
        (["-m", "torch.distributed.run", "train.py"], "torchrun --nproc-per-node N -m memwall run"),
        (["torchrun", "--nproc-per-node", "2", "train.py"], "torchrun --nproc-per-node N -m memwall run"),
        (["-m", "accelerate.commands.launch", "train.py"], "accelerate launch --num_processes N -m memwall run"),
        (["/usr/bin/deepspeed", "train.py"], "deepspeed --num_gpus N --module memwall run"),
    ],
)
def test_a_launcher_comes_first(command: list[str], order: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--budget", "1GiB", *command]) == 2
    message = capsys.readouterr().err
    assert "starts processes of its own, in which memwall would not be; the launcher comes first: " + order in message


def test_the_first_argument_of_deepspeeds_launcher_is_the_scripts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").write_text("import sys\nprint(sys.argv[1:])\n")
    main(["--local_rank=1", "run", "--budget", "8GiB", str(tmp_path / "train.py"), "--epochs", "3"])
    assert "['--local_rank=1', '--epochs', '3']" in capsys.readouterr().out


def test_processes_are_started_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").touch()
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert main(["run", "--nproc", "2", "--budget", "1GiB", str(tmp_path / "train.py")]) == 2
    assert "--nproc starts processes, and this is one of 2 that a launcher has started" in capsys.readouterr().err


SPAWNS = """
from pathlib import Path
import torch

def prepare(rank):
    Path("{folder}", f"prepared {{rank}}").touch()

def train(rank):
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    Path("{folder}", f"trained {{rank}}").touch()

if __name__ == "__main__":
    torch.multiprocessing.spawn(prepare)
    train("in the script")
    torch.multiprocessing.spawn(train)
"""


@pytest.mark.slow
def test_a_script_may_start_processes_that_do_not_train(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """GIVEN processes that prepare data and others that train THEN the former run, and the latter are refused."""
    script = tmp_path / "spawns.py"
    script.write_text(SPAWNS.format(folder=tmp_path))
    assert main(["run", "--budget", "1GiB", str(script)]) == 2
    assert (tmp_path / "prepared 0").exists()
    assert (tmp_path / "trained in the script").exists()
    assert not (tmp_path / "trained 0").exists()
    shown = capfd.readouterr()
    assert "starts 1 processes by torch.multiprocessing that train, and memwall is not in them" in shown.err
    assert "memwall run --nproc 1 --budget SIZE" in shown.err


STARTS = (
    SPAWNS.replace("    torch.multiprocessing.spawn(prepare)\n", "")
    .replace("torch.multiprocessing.spawn(train)", "[started(train, rank) for rank in {ranks}]")
    .replace(
        "def prepare",
        """def started(run, rank):
    process = torch.multiprocessing.get_context("{method}").Process(target=run, args=(rank,))
    process.start()
    process.join()

def prepare""",
    )
)


@pytest.mark.slow
@pytest.mark.parametrize(("method", "ranks"), [("fork", [0, 1]), ("spawn", [0])], ids=["fork", "spawn"])
def test_a_process_that_trains_is_told_of_once_and_goes_on(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], method: str, ranks: list[int]
) -> None:
    """The script may wait for what such a process returns."""
    script = tmp_path / "starts.py"
    script.write_text(STARTS.format(folder=tmp_path, method=method, ranks=ranks))
    assert main(["run", "--budget", "4GiB", str(script)]) == 0
    trained = {path.name for path in tmp_path.glob("trained *")}
    assert trained == {"trained in the script", *(f"trained {rank}" for rank in ranks)}
    shown = capfd.readouterr()
    assert shown.err.count("starts.py trains in a process of its own") == 1
    assert "memwall run --nproc N --budget SIZE" in shown.err
