"""The phantom's route without a phantom: what is said where there is none, and what becomes of its process."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from warm_python import warm_python

from memwall import Workload
from memwall.cli.app import main
from memwall.errors import TraceError, UsageError
from memwall.integrations.phantom import route
from memwall.integrations.phantom.messages import Answer
from memwall.integrations.phantom.route import phantom_environment
from memwall.integrations.spec_trace import device_run_of_spec
from memwall.machine.hardware import hardware_named

H100 = hardware_named("h100-80gb")
SPEC = "training.py:small"


@pytest.fixture
def no_clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed memwall: no phantom/ lies beside the package."""
    monkeypatch.delenv("PHANTOM_ENV", raising=False)
    here = tmp_path.joinpath("site-packages", *Path(route.__file__).parts[-4:])
    monkeypatch.setattr(route, "__file__", str(here))
    return tmp_path


@pytest.fixture
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An environment as one is built; what its device does, each test writes."""
    folder = tmp_path / "environment"
    runner = folder / "lib" / "python3.11" / "site-packages" / "phantom" / "run"
    for path in (folder / "device" / "libphantom.so", runner):
        path.parent.mkdir(parents=True)
        path.touch()
    runner.chmod(0o755)
    monkeypatch.setenv("PHANTOM_ENV", str(folder))
    return runner


def recorded() -> None:
    device_run_of_spec(SPEC, H100, route="phantom")


def test_an_installed_memwall_says_what_to_build(no_clone: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """GIVEN no environment THEN one message says what was asked, what was found and what to do, with status 2."""
    assert main(["estimate", SPEC, "--device", "h100-80gb", "--route", "phantom"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert "this memwall is installed without phantom/, and PHANTOM_ENV is not set" in said.err
    assert "phantom/environment.py FOLDER`, and set PHANTOM_ENV=FOLDER" in said.err
    built = "no CUDA build" if torch.version.cuda is None else f"a build for CUDA {torch.version.cuda}"
    assert f"torch {torch.__version__} here is {built}" in said.err


def test_a_clone_names_its_own_command(no_clone: Path) -> None:
    sources = no_clone / "site-packages" / "phantom" / "environment.py"
    sources.parent.mkdir(parents=True)
    sources.touch()
    with pytest.raises(UsageError, match=r"\.venv/phantom was not built.*run `make phantom` in .*site-packages "):
        phantom_environment()


def test_a_folder_that_is_no_environment_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder, found in ((tmp_path, "where that was not built"), (tmp_path / "none", "which is no folder")):
        monkeypatch.setenv("PHANTOM_ENV", str(folder))
        with pytest.raises(UsageError, match=rf"PHANTOM_ENV names {folder}, {found}"):
            phantom_environment()


def test_an_environment_is_found_by_its_name(built: Path) -> None:
    assert phantom_environment() == Path(os.environ["PHANTOM_ENV"])


def test_a_card_that_is_not_nvidias_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", SPEC, "--route", "phantom", "--device", "mi300x"]) == 2
    assert "mi300x is not NVIDIA's" in capsys.readouterr().err


def test_a_plan_from_a_trace_has_its_route_already(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", str(tmp_path / "step.trace"), "--budget", "1GiB", "--route", "phantom"]
    assert main(command) == 2
    assert "--route: only together with --device NAME" in capsys.readouterr().err


def test_kernels_are_refused_before_anything_is_recorded(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", SPEC, "--device", "h100-80gb", "--route", "phantom", "--budget", "4GiB", "--allow", "kernels"]
    assert main(command) == 2
    assert "--allow kernels: the step is not recorded with kernels on the phantom device" in capsys.readouterr().err


def test_a_workload_of_this_process_cannot_be_made_in_another() -> None:
    workload = Workload(
        model=lambda: torch.nn.Linear(2, 2),
        batch=lambda: torch.zeros(1, 2),
        loss=lambda model, batch: model(batch).sum(),
        optimizer=torch.optim.SGD,
    )
    with pytest.raises(UsageError, match=r"give package\.module:factory or path/file\.py:factory"):
        device_run_of_spec(workload, H100, route="phantom")


@pytest.mark.parametrize(("is_usage", "kind"), [(True, UsageError), (False, TraceError)])
def test_what_the_process_answers_is_the_message(built: Path, is_usage: bool, kind: type[Exception]) -> None:
    answer = msgspec.json.encode(Answer(error="'training.py:small': there is no file", is_usage=is_usage)).decode()
    built.write_text(f"#!/bin/sh\necho noise\ncat > $4/answer.json <<'END'\n{answer}\nEND\n")
    with pytest.raises(kind, match=r"^'training.py:small': there is no file$"):
        recorded()


def test_a_process_that_crashes_is_quoted(built: Path) -> None:
    built.write_text("#!/bin/sh\necho libcudnn.so.9: cannot open\nexit 139\n")
    with pytest.raises(
        TraceError, match=r"ended with status 139 and without an answer; it said: libcudnn.so.9: cannot"
    ):
        recorded()


def test_the_process_is_asked_for_the_card_and_nothing_of_a_phantom_around_it(
    built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PHANTOM_NUMBERS", "1")
    monkeypatch.setenv("LD_PRELOAD", "")
    built.write_text(f"#!/bin/sh\nenv > {tmp_path}/environment.txt\ncp $4/request.json {tmp_path}\n")
    with pytest.raises(TraceError):
        recorded()
    lines = (tmp_path / "environment.txt").read_text().splitlines()
    assert {"PHANTOM_CARD=h100-80gb", "PHANTOM_CUDNN=real"} <= set(lines)
    assert not any(line.startswith(("PHANTOM_NUMBERS", "LD_PRELOAD")) for line in lines)
    assert msgspec.json.decode((tmp_path / "request.json").read_bytes())["spec"] == SPEC


def hangs(built: Path, tmp_path: Path) -> Path:
    """Has the process start another one, and both hang; returns the file with that one's number."""
    number = tmp_path / "number"
    built.write_text(f"#!/bin/sh\nsleep 60 &\necho $! > {number}.new && mv {number}.new {number}\nwait\n")
    return number


def is_alive(number: Path) -> bool:
    try:
        os.kill(int(number.read_text()), 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{int(number.read_text())}/stat").read_text().split()[2] != "Z"


def ends(number: Path) -> bool:
    """Returns whether the process is gone soon: a kernel with other work takes its time over a signal."""
    for _ in range(200):
        if not is_alive(number):
            return True
        time.sleep(0.05)
    return False


def test_a_process_that_takes_too_long_is_ended_with_all_that_it_started(
    built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = hangs(built, tmp_path)
    monkeypatch.setattr(route, "_MOST_SECONDS", 0.3)
    with pytest.raises(TraceError, match="was not recorded within 0 s, and its process was ended"):
        recorded()
    assert ends(number)


def test_an_interruption_ends_the_process_as_well(built: Path, tmp_path: Path) -> None:
    number = hangs(built, tmp_path)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # what runs behind a shell ignores it

    def interrupt() -> None:
        while not number.exists():
            time.sleep(0.01)
        signal.raise_signal(signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        recorded()
    thread.join()
    signal.signal(signal.SIGINT, before)
    assert ends(number)


@pytest.mark.slow
@pytest.mark.parametrize("ended_by", [signal.SIGTERM, signal.SIGKILL])
def test_the_process_ends_with_the_one_that_asked_and_leaves_no_folder(
    built: Path, tmp_path: Path, ended_by: signal.Signals
) -> None:
    """GIVEN a recording WHEN a signal ends the command THEN nothing of it goes on, and its folder is gone."""
    number, named = tmp_path / "number", tmp_path / "folder"
    shell = f"echo $$ > {number}.new && mv {number}.new {number}; exec sleep 60"
    model = f"import subprocess, time\nstarted = subprocess.Popen(['sh', '-c', '{shell}'])\ntime.sleep(60)\n"
    (tmp_path / "hanging.py").write_text(model)
    built.write_text(
        f'#!/bin/sh\necho "$4" > {named}\nexec {sys.executable} -m memwall.integrations.phantom.child "$4"\n'
    )
    asked = ["estimate", f"{tmp_path}/hanging.py:small", "--device", "h100-80gb", "--route", "phantom"]
    command = warm_python().start("-m", "memwall", *asked)
    wait_until(number.exists)
    folder = Path(named.read_text().strip())
    assert folder.is_dir()
    command.kill(ended_by)
    assert command.wait() == -ended_by
    wait_until(lambda: not is_alive(number))
    assert not folder.exists()


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 40
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.02)
