"""What a person who mistypes is told, and the exit status that goes with it."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import typer

import memwall
from memwall.cli import options
from memwall.cli.app import app, main
from memwall.errors import InfeasibleError, MemwallError, UsageError

SIZES = "expected a number with a unit, such as 10GiB, 800MiB, 24GB, plain bytes, or a percentage such as 50%"
OPTIONS = {
    "checkpoint": {"--to", "--output", "--json"},
    "demo": {"--budget", "--out", "--json"},
    "diff": {"--fail-over", "--json"},
    "doctor": {"--disk", "--json"},
    "explain": {"--json"},
    "export": {"--to", "--output", "--world-size", "--disk", "--json"}
    | {"--job", "--image", "--script", "--ranks-per-node"},
    "estimate": {"--device", "--batch", "--seq", "--optimizer", "--dtype", "--budget", "--mask-share", "--json"}
    | {"--accumulate", "--eval-batch", "--autocast", "--checkpointing", "--lora", "--torch", "--route"},
    "plan": {
        "--route",
        "--budget",
        "--device",
        "--host",
        "--disk",
        "--no-disk",
        "--allow",
        "--mode",
        "--global-batch",
        "--output",
    }
    | {"--json"}
    | {"--batch", "--seq", "--optimizer", "--dtype", "--mask-share"}
    | {"--autocast", "--checkpointing", "--lora", "--eval-batch", "--curve", "--report"}
    | {"--ranks", "--ranks-per-node", "--link", "--explain"},
    "profile": {"--output", "--steps", "--json"},
    "report": {"--output", "--format", "--json"},
    "run": {"--budget", "--plan", "--host", "--disk", "--no-disk", "--allow", "--report", "--json"}
    | {
        "--mode",
        "--checkpoint",
        "--checkpoint-every",
        "--resume",
        "--nproc",
        "--metrics",
    },
    "top": {"--once", "--every", "--json"},
    "verify": {"--json"},
}
OPTIONS = {name: {*options, "--verbose"} for name, options in OPTIONS.items()}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder with one script in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "train.py").write_text("print('trained')\n")
    return tmp_path


def test_commands_and_options_are_pinned() -> None:
    group = typer.main.get_command(app)
    found = {
        name: {option for parameter in command.params for option in parameter.opts if option.startswith("--")}
        for name, command in group.commands.items()
    }
    assert found == {name: {*options, "--verbose"} for name, options in OPTIONS.items()}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("run train.py", "run: expected either --budget SIZE or --plan plan.json, found neither"),
        (
            "run --budget 1GiB --plan p.json train.py",
            "run: expected either --budget SIZE or --plan plan.json, found both",
        ),
        (
            "run --budget 1GiB --resume train.py",
            "run: --resume needs --checkpoint DIR, the folder that the run was committed into",
        ),
        (
            "run --plan train.py --no-disk train.py",
            "run: --no-disk is for a plan that is made in the run; this one is given: --plan",
        ),
        (
            "run --budget 1GiB --no-disk --checkpoint {cwd} --resume train.py",
            "run: --checkpoint writes each step that it commits to the disk; leave out --no-disk",
        ),
        ("run --budget lots train.py", f"--budget: 'lots' is not a size; {SIZES}"),
        ("run --budget 3Gob train.py", f"--budget: '3Gob' is not a size; {SIZES}"),
        ("run --budget 0 train.py", "--budget: '0' is zero bytes; a size must be positive"),
        ("run --budget 1GiB --host some train.py", f"--host: 'some' is not a size; {SIZES}"),
        ("run --budget 1GiB nope.py", "there is no script nope.py in {cwd}; expected a Python file"),
        ("run --budget 1GiB pkg.train", "there is no script pkg.train in {cwd}; for a module write -m pkg.train"),
        ("run --budget 1GiB {cwd}", "{cwd} is a folder; expected a Python script, or -m MODULE"),
        ("run --budget 1GiB -m", "-m needs the name of a module, as in: -m package.train"),
        ("run --budget 1GiB -m nope", "-m nope: there is no such module in {cwd} or installed"),
        (
            "run --bugdet 1GiB train.py",
            "run: no such option --bugdet, did you mean --budget; the script's own options go after SCRIPT",
        ),
        (
            "run --plan p.json train.py",
            "there is no file p.json; expected a plan written by memwall plan -o plan.json",
        ),
        (
            "run --budget 1GiB --report no/run.json train.py",
            "--report: there is no folder {cwd}/no to write run.json in; create it first",
        ),
        (
            "run --budget 1GiB --allow precision,magic train.py",
            "--allow: 'magic' is not known; expected one or more of gradient-release, cpu-optimizer-step, "
            "low-bit-optimizer, precision, kernels, graphs, low-bit-offload, gradient-compression, or a mode: "
            "exact, balanced, smallest",
        ),
        (
            "run --budget 1GiB --mode small train.py",
            "--mode: 'small' is not known; expected one of exact, balanced, smallest",
        ),
        (
            "run --budget 1GiB --mode exact --allow kernels train.py",
            "--allow: the mode exact rules out kernels, which is allowed beside it; leave one of them out, or take "
            "balanced",
        ),
        (
            "run --budget 1GiB --allow cpu-optimizer-step train.py",
            "cpu-optimizer-step is allowed to a run whose model is on 'cpu', and a step is taken to the CPU from CUDA "
            "only: leave it out of what is allowed, or move the model to CUDA first; for a device that is not here "
            "make the plan with `memwall plan SPEC --device NAME --host SIZE --allow cpu-optimizer-step`",
        ),
        (
            "run --budget 1GiB --disk no/such train.py",
            "--disk no/such: this directory does not exist; create it (mkdir -p no/such) or give another one",
        ),
        ("run --budget 1GiB --disk {cwd}:5Gob train.py", f"--disk: '5Gob' is not a size; {SIZES}"),
        ("profile nope.py", "there is no script nope.py in {cwd}; expected a Python file"),
        ("profile -o {cwd} train.py", "--output: {cwd} is a folder; expected a file name in it"),
        (
            "plan no.trace --budget 1GiB",
            "there is no file no.trace; expected a trace written by memwall profile, or package.module:factory, "
            "or path/file.py:factory",
        ),
        (
            "plan gone.py:tiny --budget 1GiB",
            "'gone.py:tiny': there is no file gone.py; expected package.module:factory or path/file.py:factory, "
            "a function that returns a memwall.Workload",
        ),
        (
            "plan train.py --budget 10% --device tpu",
            "'tpu' is no device that memwall has figures for; known are h100-80gb, h100-pcie-80gb, h200, b200, "
            "a100-40gb, a100-80gb, l4, l40s, t4, v100-16gb, v100-32gb, rtx-3090, rtx-4090, rtx-5090, mi300x",
        ),
        (
            "verify p.json r.json",
            "there is no file p.json; expected a plan written by memwall plan -o plan.json",
        ),
        (
            "verify train.py r.json",
            "there is no file r.json; expected a report written by memwall run --report run.json",
        ),
        (
            "explain no.trace",
            "there is no file no.trace; expected a trace written by memwall profile, a snapshot written by "
            "torch.cuda.memory._dump_snapshot(), or a plan written by memwall plan",
        ),
        ("demo --budget half", f"--budget: 'half' is not a size; {SIZES}"),
        (
            "doctor --disk no/such",
            "--disk no/such: this directory does not exist; create it (mkdir -p no/such) or give another one",
        ),
    ],
)
def test_bad_input_is_one_message_and_status_2(
    arguments: str, message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = main(arguments.replace("{cwd}", str(folder)).split())
    shown = capsys.readouterr()
    assert shown.err == f"memwall: {message.replace('{cwd}', str(folder))}\n"
    assert shown.out == ""
    assert status == 2


@pytest.mark.parametrize("arguments", ["nope", "plan x.trace", "plan", "run", "doctor --dsik x", "verify only.json"])
def test_wrong_command_line_shows_usage_and_status_2(arguments: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments.split()) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith("Usage: memwall")
    assert shown.out == ""


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"memwall {memwall.__version__}\n"


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (MemwallError("any"), 2),
        (InfeasibleError("needs 3 GiB", budget_bytes=1, smallest_feasible_bytes=3), 3),
    ],
)
def test_error_of_any_command_gives_its_message_and_status(
    error: MemwallError, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(directory: Path | None) -> None:
        raise error

    monkeypatch.setattr("memwall.observe.doctor.inspect_machine", fail)
    assert main(["doctor"]) == status
    assert capsys.readouterr().err == f"memwall: {error}\n"


def test_status_of_the_command_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(directory: Path | None) -> None:
        raise typer.Exit(5)

    monkeypatch.setattr("memwall.observe.doctor.inspect_machine", stop)
    assert main(["doctor"]) == 5


def parsed(line: str, monkeypatch: pytest.MonkeyPatch) -> options.Script:
    """What `memwall run` makes of the end of its command line."""
    seen: list[options.Script] = []

    def note(command: list[str], ctx: typer.Context) -> options.Script:
        seen.append(options.parse_command(command, ctx))
        raise UsageError("far enough")

    monkeypatch.setattr("memwall.cli.run.parse_command", note)
    assert main(["run", *line.split()]) == 2
    return seen[0]


def test_everything_after_the_script_is_the_script_s(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parsed("--budget 1GiB train.py --lr 3 --json -o x --budget 5 -m y", monkeypatch) == options.Script(
        name="train.py", is_module=False, arguments=("--lr", "3", "--json", "-o", "x", "--budget", "5", "-m", "y")
    )


def test_everything_after_the_module_is_the_module_s(monkeypatch: pytest.MonkeyPatch) -> None:
    script = parsed("--budget 1GiB -m train --lr 3 --json", monkeypatch)
    assert script == options.Script(name="train", is_module=True, arguments=("--lr", "3", "--json"))
    assert script.target == "-m train"


def test_percentage_of_a_cpu_is_of_the_memory_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memwall.machine.limits.memory_limit_bytes", lambda *, root=None: 8000)
    assert options.parse_budget("25%", device="cpu") == 2000
    assert options.parse_host("50%") == 4000


def test_percentage_of_a_run_is_of_its_rank_s_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)

    def properties(device: torch.device | int) -> SimpleNamespace:
        return SimpleNamespace(total_memory=(4000, 8000)[device if isinstance(device, int) else device.index])

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    assert options.parse_budget("25%") == 2000


def test_disk_with_and_without_a_size(folder: Path) -> None:
    (folder / "a:5").mkdir()
    assert options.parse_disk(None) is None
    assert options.parse_disk(str(folder)) == options.DiskChoice(directory=folder, limit_bytes=None)
    assert options.parse_disk(f"{folder}:1MiB") == options.DiskChoice(directory=folder, limit_bytes=1 << 20)
    assert options.parse_disk(f"{folder}/a:5") == options.DiskChoice(directory=folder / "a:5", limit_bytes=None)


def test_allow_is_in_a_fixed_order() -> None:
    assert options.parse_allow(None) == ()
    assert options.parse_allow("low-bit-optimizer, precision,precision") == ("low-bit-optimizer", "precision")


def test_a_mode_is_one_word_for_several() -> None:
    balanced = ("balanced", "kernels", "graphs")
    everything = (
        "smallest", "cpu-optimizer-step", "low-bit-optimizer", "precision", "kernels", "graphs", "low-bit-offload",
        "gradient-compression",
    )  # fmt: skip
    assert options.parse_allow(None, "exact") == ("exact",)
    assert options.parse_allow("kernels", "balanced") == options.parse_allow("balanced") == balanced
    assert options.parse_allow("precision", "smallest") == everything
    assert options.parse_allow("gradient-release", "exact") == ("exact", "gradient-release")


@pytest.mark.parametrize("command", ["run", "plan"])
def test_what_can_be_allowed_is_listed_without_a_script(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """GIVEN nothing to run WHEN the kinds are asked for THEN they are listed, and the modes."""
    assert main([command, "--allow", "help"]) == 0
    assert [line.partition(":")[0] for line in capsys.readouterr().out.splitlines()][-5:] == [
        "low-bit-offload", "gradient-compression", "exact", "balanced", "smallest",
    ]  # fmt: skip


@pytest.mark.parametrize("command", [["--help"], ["doctor", __file__]])
def test_what_needs_no_torch_does_not_wait_for_it(command: list[str]) -> None:
    code = (
        f"import sys\nfrom memwall.cli.app import main\nstatus = main({command})\n"
        "print(status, sorted({'torch', 'numpy', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "0 []"


def test_python_dash_m_memwall() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "memwall", "explain", "no.trace"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("memwall: there is no file no.trace; ")
