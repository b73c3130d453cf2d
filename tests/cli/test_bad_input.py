"""Every way to ask for what cannot be: one message that says what to do, and the right exit status."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from memwall.cli.app import main

Refused = Callable[..., str]
pytestmark = pytest.mark.usefixtures("folder")

SCRIPTS = Path(__file__).parents[1] / "scripts"
PLAIN = str(SCRIPTS / "train_plain.py")
WITHOUT_CUDA = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")

# -- scripts -----------------------------------------------------------------------------------------------------------


def test_a_budget_that_does_not_parse(refused: Refused) -> None:
    assert refused("run", "--budget", "8Gob", PLAIN).startswith("--budget: '8Gob' is not a size; expected a number")


def test_a_script_that_does_not_exist(refused: Refused, folder: Path) -> None:
    assert refused("run", "--budget", "8GiB", "gone.py") == (
        f"there is no script gone.py in {folder}; expected a Python file"
    )


def test_a_script_that_raises_ends_with_its_own_traceback_and_status(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--budget", "8GiB", str(SCRIPTS / "raises.py")]) == 1
    shown = capsys.readouterr().err
    assert shown.startswith(f'Traceback (most recent call last):\n  File "{SCRIPTS}/raises.py", line 15, in <module>\n')
    assert "RuntimeError: the data is gone\n" in shown
    assert "runpy" not in shown
    assert shown.endswith("raises.py ended with status 1 before a step under a plan; there is nothing to report\n")


@pytest.mark.slow
def test_a_script_s_own_status_is_passed_on(folder: Path) -> None:
    assert main(["run", "--budget", "8GiB", "--report", "run.json", str(SCRIPTS / "exits_3.py")]) == 3
    assert (folder / "run.json").exists()


@pytest.mark.parametrize("command", [("run", "--budget", "8GiB"), ("profile",)])
def test_a_script_that_never_steps(refused: Refused, command: tuple[str, ...]) -> None:
    assert refused(*command, SCRIPTS / "never_steps.py") == (
        f"{SCRIPTS}/never_steps.py finished without a whole training step (forward of a module with gradients on, "
        "backward, step of a torch optimizer); there is nothing to plan"
    )


COMPILED_LOSS = """
import torch
model = torch.nn.Linear(4, 2)
loss = torch.compile(lambda batch: model(batch).sum(), backend="eager")
loss(torch.ones(3, 4)).backward()  # no optimizer: the compiler would hold it until the process ends
"""


@pytest.mark.slow
def test_a_script_whose_model_is_called_in_compiled_code_alone(refused: Refused, folder: Path) -> None:
    (folder / "compiled.py").write_text(COMPILED_LOSS)
    said = refused("run", "--budget", "8GiB", "compiled.py")
    assert said.startswith("compiled.py finished without a whole training step")
    assert said.endswith(
        "there is nothing to plan. If torch.compile was given the function that calls the model, give it the model: "
        "memwall plans what calls it"
    )


HOGWILD = """
import torch
import torch.multiprocessing as mp
def train(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(200):
        model(torch.ones(64, 256)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
model = torch.nn.Linear(256, 256).share_memory()
processes = [mp.Process(target=train, args=(model,)) for _ in range(2)]
for process in processes:
    process.start()
for process in processes:
    process.join()
    assert process.exitcode == 0
"""


@pytest.mark.slow
@pytest.mark.parametrize("budget", ["8GiB", "100GiB"], ids=["planned", "ample"])
def test_a_script_that_trains_in_processes_of_its_own(refused: Refused, folder: Path, budget: str) -> None:
    (folder / "hogwild.py").write_text(HOGWILD)
    assert refused("run", "--budget", budget, "hogwild.py").endswith(
        "there is nothing to plan. Training in processes that the script starts itself, as by multiprocessing.Process, "
        "is not seen: call what they run in the script's own process, and for several take RANK and WORLD_SIZE from "
        "the environment and start it by memwall run --nproc N --budget SIZE hogwild.py"
    )


BESIDE_HOOKS = """
import torch
class Layer(torch.nn.Linear):
    def train_on(self, batch):
        torch.nn.functional.linear(batch, self.weight, self.bias).sum().backward()  # past every hook
        OPTIMIZER.step()
layer = Layer(4, 2)
OPTIMIZER = torch.optim.SGD(layer.parameters(), lr=0.1)
layer.train_on(torch.ones(3, 4))
"""


@pytest.mark.parametrize(
    ("budget", "is_launched", "status"), [("8GiB", False, 0), ("32MiB", False, 5), ("32MiB", True, 0)]
)
def test_a_script_that_trains_past_memwall_is_told_so_and_judged_by_its_budget(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    budget: str,
    is_launched: bool,
    status: int,
) -> None:
    (folder / "beside.py").write_text(BESIDE_HOOKS)
    if is_launched:
        for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}.items():
            monkeypatch.setenv(name, value)
    assert main(["run", "--budget", budget, "--report", "run.json", "--json", "beside.py"]) == status
    said = capsys.readouterr().err
    assert "beside.py trained in a way that memwall has no part in, and ran as it is without it: " in said
    side = "within" if budget == "8GiB" else "over"
    assert f"{side} the budget of {budget.replace('GiB', '.00 GiB').replace('MiB', '.0 MiB')}" in said
    assert f"without a step under a plan no {folder / 'run.json'} and no JSON is written" in said
    assert not (folder / "run.json").exists()
    assert ("memwall: rank 1 of 2 exceeded its budget; the exit status is 0 all the same" in said) == is_launched


TWO_OPTIMIZERS = """
import torch
model, other = torch.nn.Linear(4, 2), torch.nn.Linear(2, 2)
optimizers = [torch.optim.SGD([p], lr=0.1) for p in PARAMETERS]
for _ in range(2):
    model(torch.ones(3, 4)).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
"""


LATER_MODEL = """
import torch
for model in (torch.nn.Linear(4, 2), torch.nn.Linear(2, 2)):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.ones(3, model.in_features)).sum().backward()
        optimizer.step()
"""


def test_steps_of_several_optimizers_are_not_committed_where_no_iteration_is_told(
    refused: Refused, folder: Path
) -> None:
    (folder / "both.py").write_text(TWO_OPTIMIZERS.replace("PARAMETERS", "model.parameters()"))
    assert refused("run", "--budget", "8GiB", "--checkpoint", "kept", "both.py") == (
        f"--checkpoint {Path('kept').absolute()}: SGD + SGD step this model, and nothing says where an iteration of "
        "all of them begins; loop over `for step in memwall.steps(NUM_STEPS)`"
    )


def test_steps_of_a_model_that_comes_later_are_not_committed(refused: Refused, folder: Path) -> None:
    (folder / "later.py").write_text(LATER_MODEL)
    said = refused("run", "--budget", "8GiB", "--checkpoint", "kept", "later.py").splitlines()[-1]
    assert said == (
        f"--checkpoint {Path('kept').absolute()} commits what is trained from the first step on, and this "
        "script goes on to train Linear; run it without --checkpoint, and save in the script"
    )


def test_an_interpreter_in_front_of_the_script_is_left_out(refused: Refused) -> None:
    assert refused("run", "--budget", "8GiB", "python", "missing.py").startswith("there is no script missing.py in ")
    assert "without python3's option -O" in refused("run", "--budget", "8GiB", "python3", "-O", "train.py")


# -- budgets -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_budget_below_the_floor_of_a_small_script_names_the_floor_and_advises_to_leave_memwall(
    refused: Refused,
) -> None:
    lines = refused("run", "--budget", "20MiB", PLAIN, status=3).splitlines()
    assert re.fullmatch(
        r"the budget of 20\.0 MiB cannot be met: the smallest feasible one is \d+\.\d MiB, \d+\.\d MiB more", lines[0]
    )
    assert any("too small for a plan to pay, run it without memwall" in line for line in lines)
    assert not any(line.startswith("  - ") for line in lines)


@pytest.mark.slow
def test_a_plan_for_a_budget_below_the_floor(refused: Refused, made: Path) -> None:
    message = refused("plan", made / "t.trace", "--budget", "20MiB", status=3)
    assert message.startswith("the budget of 20.0 MiB cannot be met: the smallest feasible one is ")


@pytest.mark.slow
def test_a_script_that_swallows_errors_still_ends_with_what_memwall_found(
    refused: Refused, capsys: pytest.CaptureFixture[str]
) -> None:
    message = refused("run", "--budget", "20MiB", SCRIPTS / "swallows.py", status=3)
    assert message.startswith("the budget of 20.0 MiB cannot be met: ")


@pytest.mark.slow
def test_a_loop_that_swallows_the_error_does_not_train_on(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--budget", "20MiB", str(SCRIPTS / "swallows.py")]) == 3
    skipped = [f"step {step} skipped: InfeasibleError" for step in (1, 2, 3)]
    assert capsys.readouterr().out.splitlines() == [*skipped, "all is well"]


# -- files -------------------------------------------------------------------------------------------------------------


def damaged(source: Path, target: Path, how: str) -> Path:
    content = source.read_bytes()
    if how == "truncated":
        content = content[: len(content) // 2]
    elif how == "foreign":
        content = b"PK\x03\x04 something else"
    elif how == "newer":
        content = content.replace(b"memwall.trace/2\n", b"memwall.trace/9\n").replace(
            b"memwall.plan/2", b"memwall.plan/9"
        )
    elif how == "mistyped":
        content = content.replace(b'"fits": true', b'"fits": "yes"')
    assert content != source.read_bytes()
    target.write_bytes(content)
    return target


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("truncated", r"bad\.trace is cut short or damaged \(.*\); record it again"),
        ("foreign", r"bad\.trace is not a memwall trace; expected a file written by `memwall profile -o FILE`"),
        (
            "newer",
            r"bad\.trace is a trace of version 9, this memwall reads version 2; upgrade torch-memwall, or record .*",
        ),
    ],
)
def test_a_bad_trace_file(refused: Refused, made: Path, folder: Path, how: str, message: str) -> None:
    damaged(made / "t.trace", folder / "bad.trace", how)
    assert re.fullmatch(message, refused("plan", "bad.trace", "--budget", "8GiB"))


@pytest.mark.parametrize("how", ["truncated", "newer"])
def test_a_bad_trace_file_is_explained_by_no_one(refused: Refused, made: Path, folder: Path, how: str) -> None:
    damaged(made / "t.trace", folder / "bad.trace", how)
    assert refused("explain", "bad.trace") == refused("plan", "bad.trace", "--budget", "8GiB")


def test_a_foreign_file_is_explained_by_no_one(refused: Refused, made: Path, folder: Path) -> None:
    damaged(made / "t.trace", folder / "x.zip", "foreign")
    assert refused("explain", "x.zip") == (
        "x.zip is neither a trace nor a CUDA memory snapshot nor a plan; expected a file written by "
        "`memwall profile -o FILE`, torch.cuda.memory._dump_snapshot(FILE) or `memwall plan -o FILE`"
    )


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("truncated", r"bad\.json is cut short or no JSON \(.*\); make the plan again with `memwall plan`"),
        ("foreign", r"bad\.json is cut short or no JSON \(.*\); make the plan again with `memwall plan`"),
        ("newer", r"bad\.json is a plan of version 9, this memwall reads version 2; upgrade torch-memwall, or make .*"),
        ("mistyped", r"bad\.json is not a valid plan: Expected `bool \| null`, got `str` - at `\$\.forecast\.fits`"),
    ],
)
def test_a_bad_plan_file(refused: Refused, made: Path, folder: Path, how: str, message: str) -> None:
    damaged(made / "plan.json", folder / "bad.json", how)
    assert re.fullmatch(message, refused("run", "--plan", "bad.json", PLAIN))
    (folder / "run.json").write_text("{}")
    assert re.fullmatch(message, refused("verify", "bad.json", "run.json"))


def test_a_run_report_in_place_of_a_plan(refused: Refused, folder: Path) -> None:
    (folder / "run.json").write_text('{"schema": "memwall.run/1"}')
    assert refused("explain", "run.json") == (
        "run.json is not a memwall plan: at $.schema expected 'memwall.plan/2', found 'memwall.run/1'"
    )


def test_a_plan_for_another_model(refused: Refused, made: Path) -> None:
    message = refused("run", "--plan", made / "plan.json", PLAIN, "--width", "32")
    assert re.fullmatch(
        r"the plan was made for another model: it names [0-9a-f]{12}, this GPT is [0-9a-f]{12}; make a plan for this "
        r"model with `memwall plan`, or run with --budget",
        message,
    )


# -- CUDA where there is none ------------------------------------------------------------------------------------------


@WITHOUT_CUDA
def test_a_share_of_a_cuda_device(refused: Refused, made: Path) -> None:
    assert refused("plan", made / "t.trace", "--budget", "50%", "--device", "cuda") == (
        "'cuda': this machine has 0 CUDA devices; expected cpu, or cuda:N below that"
    )


def test_a_cpu_trace_for_a_cuda_device(refused: Refused, made: Path) -> None:
    assert refused("plan", made / "t.trace", "--budget", "8GiB", "--device", "cuda") == (
        "--device cuda: the trace was recorded on cpu; to plan for another device give its name, as in "
        "--device h100-80gb, or leave --device out"
    )


@WITHOUT_CUDA
def test_a_plan_for_a_cuda_device(refused: Refused, made: Path, folder: Path) -> None:
    plan = (made / "plan.json").read_text().replace('"device": "cpu"', '"device": "cuda"')
    (folder / "plan.json").write_text(plan)
    assert refused("run", "--plan", "plan.json", PLAIN) == (
        "the plan is for device cuda, and torch finds no CUDA device here; run it on a machine with one, or make a "
        "plan from a trace recorded on this machine with `memwall profile`"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("phase", "message"),
    [
        ("step", "in the forward of step 3: 1024.00 PiB could not be had while the process held"),
        ("evaluation", "in evaluation, after step 3: 1024.00 PiB could not be had while the process held"),
    ],
)
def test_a_script_that_runs_out_of_memory_shows_where(
    phase: str, message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """GIVEN a script that asks for too much WHEN it ends THEN its own traceback and the typed error are shown."""
    assert main(["run", "--budget", "8GiB", "--json", str(SCRIPTS / "runs_out.py"), phase, "2"]) == 3
    error = capfd.readouterr().err
    assert "torch.empty(1 << 60, dtype=torch.uint8)" in error
    assert f"memwall: out of memory {message}" in error
