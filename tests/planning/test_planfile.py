"""The plan file: equal inputs give equal bytes, and what cannot be read is refused with the path inside it."""

import dataclasses
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from zoo import MODELS, trained_parameters

import memwall
from memwall.errors import PlanError
from memwall.machine.tiers import Machine, Tier
from memwall.planning.action import Action
from memwall.planning.forecast import Forecast, PeakBytes
from memwall.planning.planfile import Plan
from memwall.planning.techniques.accumulate import Accumulate
from memwall.planning.techniques.allocator import AllocatorReuse
from memwall.planning.techniques.autocast import Autocast
from memwall.planning.techniques.offload import Offload
from memwall.planning.techniques.recompute import Recompute
from memwall.trace.file import load_trace, save_trace
from memwall.trace.trace_builder import TraceBuilder

ACTIONS: tuple[Action, ...] = (
    Autocast(dtype="bfloat16"),
    Accumulate(micro_batch=2, num_micro_batches=4),
    Recompute(block="h.0", kept_ops=(1, 7), kept_names=("aten.mm.default", "aten.bmm.default"), num_ops=9),
    Offload(block="h.1", scope="saved", tier="disk", min_bytes=1 << 20, window_bytes=32 << 20, cost_seconds=0.25),
    AllocatorReuse(policy="tensor-heap", limit_bytes=9),
)


def a_plan(actions: tuple[Action, ...] = ACTIONS) -> Plan:
    peak = PeakBytes(allocated_bytes=3 << 30, process_bytes=4 << 30)
    forecast = Forecast(
        device="cpu",
        source="recorded",
        fits=True,
        budget_bytes=5 << 30,
        margin_bytes=1 << 20,
        peak=peak,
        phases={"steady_step": peak, "first_step": peak},
        step_seconds=0.1,
        not_modelled=("evaluation",),
        actions=actions,
    )
    return Plan(
        model_fingerprint="ab" * 32, trace_hash="cd" * 32, micro_batch=8, num_micro_batches=1, forecast=forecast
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    target = tmp_path / "plan.json"
    a_plan().save(target)
    return target


def changed(path: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    fields = json.loads(path.read_bytes())
    change(fields)
    path.write_text(json.dumps(fields))
    return path


def refusal(path: Path) -> str:
    with pytest.raises(PlanError) as error:
        Plan.load(path)
    return str(error.value)


def test_a_plan_with_every_action_comes_back_equal(path: Path) -> None:
    assert Plan.load(path) == a_plan()
    assert Plan.load(str(path)).plan_hash == hashlib.sha256(path.read_bytes()).hexdigest() == a_plan().plan_hash
    assert [entry.name for entry in path.parent.iterdir()] == ["plan.json"]


def test_the_file_is_json_for_people_and_for_diff(path: Path) -> None:
    text = path.read_text()
    assert text.endswith("}\n")
    assert text.startswith('{\n  "forecast": {\n    "actions": [\n')

    def assert_sorted(value: Any) -> None:
        if isinstance(value, dict):
            assert list(value) == sorted(value)
        for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
            assert_sorted(inner)

    assert_sorted(json.loads(text))


def test_the_order_of_dictionaries_does_not_show() -> None:
    other = msgspec.structs.replace(
        a_plan(),
        forecast=msgspec.structs.replace(a_plan().forecast, phases=dict(reversed(a_plan().forecast.phases.items()))),
    )
    assert other.encode() == a_plan().encode()


@pytest.mark.slow
@pytest.mark.timeout(100)
def test_a_process_with_another_hash_seed_writes_the_same_bytes(tmp_path: Path) -> None:
    """GIVEN one trace file WHEN it is planned here and in another process THEN the bytes are equal."""
    trace_path = tmp_path / "a.mwtrace"
    case = MODELS["moe"]("tiny")
    optimizer = torch.optim.AdamW(trained_parameters(case.model))
    builder = TraceBuilder([case.model])
    builder.start_step(optimizer)
    case.loss(case.model, case.batch).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    builder.finish_step(optimizer)
    machine = Machine(
        tiers=(
            Tier(
                name="disk",
                directory=str(tmp_path),
                write_bytes_per_second=1e9,
                read_bytes_per_second=1e9,
                free_bytes=1 << 40,
            ),
        ),
        copy_seconds_per_byte=1e-10,
        fault_seconds_per_byte=1e-10,
    )
    trace = msgspec.structs.replace(builder.trace(optimizer, machine=machine), base_bytes=100 << 20)
    # Tensors as large as those worth an action.
    (step,) = trace.steps
    storages = tuple(msgspec.structs.replace(s, nbytes=s.nbytes * 200) for s in step.storages)
    saved = tuple(msgspec.structs.replace(s, nbytes=s.nbytes * 200) for s in step.saved)
    step = msgspec.structs.replace(step, storages=storages, saved=saved, process_peak_bytes=0)
    save_trace(msgspec.structs.replace(trace, steps=(step,)), trace_path)
    memwall.plan(load_trace(trace_path), budget="520MiB").save(tmp_path / "here.json")
    code = (
        "import sys; from pathlib import Path; from memwall.trace.file import load_trace; import memwall\n"
        "memwall.plan(load_trace(Path(sys.argv[1])), budget='520MiB').save(sys.argv[2])"
    )
    # The seed of this process is another one: a random number, unless somebody has set it.
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    done = subprocess.run(
        [sys.executable, "-c", code, str(trace_path), str(tmp_path / "there.json")],
        env=os.environ | {"PYTHONHASHSEED": seed},
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "here.json").read_bytes() == (tmp_path / "there.json").read_bytes()
    assert len(Plan.load(tmp_path / "here.json").actions) >= 2


def test_a_missing_file(tmp_path: Path) -> None:
    assert refusal(tmp_path / "none") == f"cannot read the plan {tmp_path / 'none'}: No such file or directory"


@pytest.mark.parametrize("share", [0.0, 0.3, 0.99])
def test_a_file_cut_short(path: Path, share: float) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    message = refusal(path)
    assert message.startswith(f"{path} is cut short or no JSON (")
    assert message.endswith("); make the plan again with `memwall plan`")


@pytest.mark.parametrize(
    ("content", "found"),
    [
        ("[]", "None"),
        ("{}", "None"),
        ('{"schema": "memwall.run/1"}', "'memwall.run/1'"),
        ('{"schema": 3}', "3"),
        ('"memwall.plan/2"', "None"),
    ],
)
def test_a_foreign_file(tmp_path: Path, content: str, found: str) -> None:
    target = tmp_path / "foreign.json"
    target.write_text(content)
    assert refusal(target) == (f"{target} is not a memwall plan: at $.schema expected 'memwall.plan/2', found {found}")


def test_a_newer_version(path: Path) -> None:
    changed(path, lambda plan: plan.update(schema="memwall.plan/3"))
    assert refusal(path) == (
        f"{path} is a plan of version 3, this memwall reads version 2; upgrade torch-memwall, or make the plan again "
        "with `memwall plan`"
    )


def test_an_older_version(path: Path) -> None:
    """GIVEN a plan from before a technique changed its record THEN the reason is its age, and not a field."""
    changed(path, lambda plan: plan.update(schema="memwall.plan/1", optimizer_placement={}))
    assert refusal(path) == (
        f"{path} is a plan of version 1, written by an earlier memwall; this one reads version 2: make the plan again "
        "with `memwall plan`"
    )


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda plan: plan.update(microbatch=3), "Object contains unknown field `microbatch`"),
        (
            lambda plan: plan["forecast"].update(margin=3),
            "Object contains unknown field `margin` - at `$.forecast`",
        ),
        (
            lambda plan: plan["forecast"]["actions"][2].update(keep_ops=[1]),
            "Object contains unknown field `keep_ops` - at `$.forecast.actions[2]`",
        ),
        (
            lambda plan: plan["forecast"]["actions"][4].update(trims={}),
            "Object contains unknown field `trims` - at `$.forecast.actions[4]`",
        ),
        (
            lambda plan: plan["forecast"]["phases"]["first_step"].update(rss=1),
            "Object contains unknown field `rss` - at `$.forecast.phases[...]`",
        ),
        (
            lambda plan: plan["forecast"]["actions"][0].update(kind="pruning"),
            "Invalid value 'pruning' - at `$.forecast.actions[0].kind`",
        ),
        (
            lambda plan: plan["forecast"]["actions"][0].update(dtype="int4"),
            "Invalid enum value 'int4' - at `$.forecast.actions[0].dtype`",
        ),
        (
            lambda plan: plan["forecast"]["peak"].update(process_bytes="4GiB"),
            "Expected `int`, got `str` - at `$.forecast.peak.process_bytes`",
        ),
        (
            lambda plan: plan["forecast"]["actions"][2].update(kept_names=["aten.mm.default"]),
            "kept_names names 1 of 2 kept_ops - at `$.forecast.actions[2]`",
        ),
        (lambda plan: plan.pop("trace_hash"), "Object missing required field `trace_hash`"),
    ],
)
def test_an_unknown_or_mistyped_field_is_named_with_its_path(
    path: Path, change: Callable[[dict[str, Any]], object], complaint: str
) -> None:
    changed(path, change)
    assert refusal(path) == f"{path} is not a valid plan: {complaint}"


def test_accelerate_is_told_precision_and_accumulation_where_the_plan_sets_them() -> None:
    assert a_plan().accelerate_kwargs() == {"mixed_precision": "bf16", "gradient_accumulation_steps": 4}
    assert a_plan((Autocast(dtype="float16"),)).accelerate_kwargs() == {"mixed_precision": "fp16"}
    assert a_plan(ACTIONS[2:]).accelerate_kwargs() == {}


def test_training_arguments_get_what_must_be_set_before_the_first_step_and_keep_the_rest() -> None:
    @dataclasses.dataclass(frozen=True)
    class Arguments:
        per_device_train_batch_size: int = 8
        gradient_accumulation_steps: int = 1
        bf16: bool = False
        fp16: bool = True
        learning_rate: float = 0.5

    given = Arguments()
    assert a_plan().training_arguments(given) == Arguments(
        per_device_train_batch_size=2, gradient_accumulation_steps=4, bf16=True, fp16=False
    )
    assert a_plan(ACTIONS[2:]).training_arguments(given) == given
