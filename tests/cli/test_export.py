"""`memwall export`: each target gets what it can hold, and is told what it cannot."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from plans import a_plan

from memwall.cli.app import main
from memwall.planning.action import Action
from memwall.planning.planfile import Plan
from memwall.planning.techniques.accumulate import Accumulate
from memwall.planning.techniques.allocator import AllocatorReuse
from memwall.planning.techniques.autocast import Autocast
from memwall.planning.techniques.offload import Offload
from memwall.planning.techniques.optimizer_state import OptimizerPlacement
from memwall.planning.techniques.recompute import Recompute

ACTIONS: tuple[Action, ...] = (
    OptimizerPlacement(tier="disk", resident_bytes=0, bucket_bytes=32 << 20, min_bytes=1 << 20),
    Autocast(dtype="bfloat16"),
    Accumulate(micro_batch=2, num_micro_batches=4),
    Recompute(block="h.0"),
    Recompute(block="h.1"),
    Offload(block="h.2", scope="saved", tier="disk", min_bytes=1 << 20, window_bytes=32 << 20),
    AllocatorReuse(policy="tensor-heap", limit_bytes=9),
)
KEPT = ["recompute", "recompute", "offload", "allocator"]
Export = Callable[..., dict[str, Any]]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    a_plan(*ACTIONS).save("plan.json")
    return tmp_path


@pytest.fixture
def export(capsys: pytest.CaptureFixture[str]) -> Export:
    """Runs the command; returns its JSON object, in which `kinds` are those of the actions that stay memwall's."""

    def run(target: str, output: str, *options: str) -> dict[str, Any]:
        assert main(["export", "plan.json", "--to", target, "-o", output, "--json", *options]) == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found | {"kinds": [action["kind"] for action in found["kept_by_memwall"]]}

    return run


def read(path: str) -> Any:
    return json.loads(Path(path).read_text())


def test_deepspeed_gets_numbers(export: Export, folder: Path) -> None:
    found = export("deepspeed", "ds.json", "--world-size", "2", "--disk", str(folder))
    config = read("ds.json")
    assert (found["files"], found["kinds"]) == (["ds.json"], KEPT)
    assert config["train_batch_size"] == 16
    assert config["zero_optimization"]["stage"] == 3
    assert config["zero_optimization"]["offload_optimizer"]["nvme_path"].startswith(f"{folder}/memwall-deepspeed-")
    assert any("load_checkpoint loses the moments" in remark for remark in found["remarks"])


def test_the_trainer_gets_arguments_that_its_parser_reads(export: Export) -> None:
    parser = pytest.importorskip("transformers").HfArgumentParser
    found = export("trainer", "arguments.json")
    assert read("arguments.json") == {
        "bf16": True,
        "gradient_accumulation_steps": 4,
        "per_device_train_batch_size": 2,
        "use_cpu": True,
    }
    assert found["kinds"] == ["optimizer-placement", *KEPT]
    from transformers import TrainingArguments

    (args,) = parser(TrainingArguments).parse_json_file("arguments.json")
    assert (args.bf16, args.gradient_accumulation_steps, args.per_device_train_batch_size) == (True, 4, 2)


def test_the_trainer_on_several_ranks_gets_deepspeed_within_its_arguments(export: Export, folder: Path) -> None:
    found = export("trainer", "arguments.json", "--world-size", "2", "--disk", str(folder))
    config = read("arguments.json")["deepspeed"]
    assert config["train_micro_batch_size_per_gpu"] == config["bf16"]["enabled"] == "auto"
    assert config["zero_optimization"]["offload_optimizer"]["device"] == "nvme"
    assert found["kinds"] == KEPT


@pytest.mark.requires("accelerate")
@pytest.mark.parametrize(("name", "reader"), [("launch.json", "from_json_file"), ("launch.yaml", "from_yaml_file")])
def test_accelerates_own_reader_takes_the_launch_file(name: str, reader: str, export: Export) -> None:
    from accelerate.commands.config.config_args import ClusterConfig

    found = export("accelerate", name)
    config = getattr(ClusterConfig, reader)(name)
    assert (config.mixed_precision, config.num_processes, config.use_cpu) == ("bf16", 1, True)
    assert config.distributed_type.value == "NO"
    assert found["kinds"] == ["optimizer-placement", *KEPT]
    assert any("Accelerator(**plan.accelerate_kwargs())" in remark for remark in found["remarks"])


@pytest.mark.requires("accelerate")
def test_accelerate_on_several_ranks_gets_a_deepspeed_file_beside_its_own(export: Export, folder: Path) -> None:
    from accelerate.commands.config.config_args import ClusterConfig

    found = export("accelerate", "launch.yaml", "--world-size", "2", "--disk", str(folder))
    beside = str(folder / "launch.deepspeed.json")
    config = ClusterConfig.from_yaml_file("launch.yaml")
    assert found["files"] == ["launch.yaml", beside]
    assert config.distributed_type.value == "DEEPSPEED"
    assert config.deepspeed_config == {"deepspeed_config_file": beside, "zero3_init_flag": True}
    assert config.mixed_precision is None  # refused by Accelerate beside a DeepSpeed file
    assert read(beside)["gradient_accumulation_steps"] == "auto"


def test_the_environment_gets_what_variables_can_set(export: Export) -> None:
    cuda = AllocatorReuse(policy="cuda", cuda_setting="expandable_segments:True")
    a_plan(Autocast(dtype="float16"), cuda, Recompute(block="h.0")).save("plan.json")
    found = export("env", "run.env")
    assert Path("run.env").read_text() == (
        "ACCELERATE_MIXED_PRECISION=fp16\nPYTORCH_ALLOC_CONF=expandable_segments:True\n"
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True\n"
    )
    assert found["kinds"] == ["recompute"]


@pytest.mark.parametrize("divisions", ["4", "[256:1,512:2,1024:4,2048:8]"])
def test_a_shell_reads_from_the_environment_s_file_what_the_plan_says(divisions: str, export: Export) -> None:
    """Neither `docker run --env-file` nor systemd would take quotes as a shell does, so there are none."""
    setting = f"expandable_segments:False,garbage_collection_threshold:0.8,roundup_power2_divisions:{divisions}"
    a_plan(AllocatorReuse(policy="cuda", cuda_setting=setting)).save("plan.json")
    export("env", "run.env")
    assert Path("run.env").read_text().splitlines()[0] == f"PYTORCH_ALLOC_CONF={setting}"
    found = subprocess.run(
        ["sh", "-c", 'set -a; . ./run.env; env | grep "^PYTORCH"'], capture_output=True, text=True, check=True
    )
    assert sorted(found.stdout.splitlines()) == [f"PYTORCH_ALLOC_CONF={setting}", f"PYTORCH_CUDA_ALLOC_CONF={setting}"]


def test_a_setting_that_a_shell_reads_otherwise_is_not_exported(capsys: pytest.CaptureFixture[str]) -> None:
    a_plan(AllocatorReuse(policy="cuda", cuda_setting="roundup_power2_divisions:[256:1,>:8]")).save("plan.json")
    assert main(["export", "plan.json", "--to", "env", "-o", "run.env"]) == 2
    assert "the plan's allocator setting 'roundup_power2_divisions:[256:1,>:8]' has a '>'" in capsys.readouterr().err
    assert not Path("run.env").exists()


@pytest.mark.parametrize(
    "setting",
    [
        "expandable_segments:True\nLD_PRELOAD=/tmp/evil.so",
        "expandable_segments:True\n",
        "expandable_segments:True;touch planted",
        "pinned_num_register_threads:$(touch planted)",
        "pinned_num_register_threads:`touch planted`",
        "expandable_segments:True,\x1b[2J",
        "expandable_segments : True",
        "expandable_segments",
        "expandable_segments:True,",
    ],
)
def test_a_plan_whose_setting_is_more_than_a_setting_is_refused(
    setting: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """GIVEN a plan of somebody else WHEN it is exported THEN nothing of it can become a variable or a command."""
    a_plan(AllocatorReuse(policy="cuda", cuda_setting="expandable_segments:True")).save("plan.json")
    fields = read("plan.json")
    fields["forecast"]["actions"][0]["cuda_setting"] = setting
    Path("plan.json").write_text(json.dumps(fields))
    assert main(["export", "plan.json", "--to", "env", "-o", "run.env"]) == 2
    message = capsys.readouterr().err
    assert message.startswith(
        f"memwall: plan.json is not a valid plan: cuda_setting {setting!r} is no allocator setting"
    )
    assert message.endswith(" - at `$.forecast.actions[0]`\n")
    assert len(message.splitlines()) == 1
    assert not Path("run.env").exists()


def test_people_read_what_memwall_must_still_do(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    assert main(["export", "plan.json", "--to", "trainer", "-o", "arguments.json"]) == 0
    shown = capsys.readouterr().out
    assert "wrote arguments.json" in shown
    assert "not in it, memwall must still apply:" in shown
    assert "h.0-1" in shown
    a_plan(*ACTIONS[1:3]).save("plan.json")
    assert main(["export", "plan.json", "--to", "trainer", "-o", "arguments.json"]) == 0
    assert "the whole plan is in it" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (("horovod",), "--to: 'horovod' is not known; expected one of trainer, accelerate, deepspeed, env"),
        (("env", "--job", "job", "--image", "a"), "--to env has no place for --image, --job: of --to kubernetes alone"),
    ],
)
def test_other_targets_are_refused(target: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "plan.json", "-o", "out.json", "--to", *target]) == 2
    assert message in capsys.readouterr().err
    assert not Path("out.json").exists()


def test_a_plan_of_which_a_target_says_nothing_is_not_written_as_an_empty_file(
    capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    a_plan(Recompute(block="h.0"), Recompute(block="h.1")).save("plan.json")
    assert main(["export", "plan.json", "--to", "trainer", "-o", "arguments.json"]) == 2
    message = capsys.readouterr().err
    assert "nothing of plan.json can be written there" in message
    assert "recompute (h.0-1)" in message
    assert "memwall run --plan plan.json SCRIPT" in message
    assert not Path("arguments.json").exists()


def test_the_plan_is_not_overwritten(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "plan.json", "--to", "trainer", "-o", "plan.json"]) == 2
    assert "plan.json is the plan that is read; choose another name" in capsys.readouterr().err
    assert Plan.load("plan.json") == a_plan(*ACTIONS)
