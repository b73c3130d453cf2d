"""Each mistake that a script brings from one way to train to the next is found on its line, and only there."""

import json
from pathlib import Path

import pytest

from memwall.cli.app import main
from memwall.errors import UsageError
from memwall.observe.script_mistakes import mistakes_in

WINDOW = """
for epoch in range(3):
    for index, batch in enumerate(loader):
        scaler.scale(loss_of(model, batch) / 4).backward()
{before}
        if (index + 1) % 4 == 0{last}:
{within}
            scaler.step(optimizer)
            optimizer.step()
            optimizer.zero_grad()
"""
CLIP, UNSCALE = "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)", "scaler.unscale_(optimizer)"
LAST = " or index + 1 == len(loader)"


def window(*, before: str = "", within: str = "", last: str = LAST) -> str:
    lines = WINDOW.format(
        before=f"        {before}" if before else "",
        within="\n".join(f"            {line}" for line in within.split("; ")),
        last=last,
    )
    return "scaler = torch.amp.GradScaler()\n" + "\n".join(line for line in lines.splitlines() if line.strip())


PLANTED: dict[str, tuple[str, int, str, str]] = {
    "the batch of a device taken for the global one": (
        "args = TrainingArguments(\n    out,\n    per_device_train_batch_size=global_batch,\n)",
        3,
        "per_device_train_batch_size is of one device",
        "args = TrainingArguments(out, per_device_train_batch_size=global_batch // n_gpus)",
    ),
    "the batch of a rank's loader taken for the global one": (
        "init_process_group()\nloader = DataLoader(data, batch_size=args.total_batch)",
        2,
        "batch_size is of one device",
        "loader = DataLoader(data, batch_size=args.total_batch)",
    ),
    "a mean of ranks' means over tokens": (
        "model = DDP(model)\nloss = F.cross_entropy(model(x), y, ignore_index=-100)",
        2,
        "those with few labels count too much",
        'model = DDP(model)\nloss = F.cross_entropy(model(x), y, ignore_index=-100, reduction="sum") / total',
    ),
    "a schedule of a pipeline that no plan can be made for": (
        "schedule = ScheduleZBVZeroBubble(stages, 4)",
        1,
        "ScheduleZBVZeroBubble runs backward twice",
        "schedule = ScheduleInterleaved1F1B(stages, 4)",
    ),
    "a pipeline that is evaluated with gradients": (
        "schedule = Schedule1F1B(stage, 4)\nmodel.eval()\nschedule.eval(x)",
        3,
        "schedule.eval keeps the graphs of all its micro-batches",
        "schedule = Schedule1F1B(stage, 4)\nmodel.eval()\nwith torch.no_grad():\n    schedule.eval(x)",
    ),
    "clipping before unscaling": (
        window(within=CLIP),
        6,
        "clipped while they are scaled",
        window(within=f"{UNSCALE}; {CLIP}"),
    ),
    "clipping each micro-batch": (
        window(before=f"{UNSCALE}; {CLIP}"),
        5,
        "after each micro-batch",
        window(within=f"{UNSCALE}; {CLIP}"),
    ),
    "the last window left out": (window(last=""), 5, "that fill no window", window()),
    "weights in 16 bits under mixed precision": (
        "args = TrainingArguments(out, bf16=True)\nmodel = Auto.from_pretrained(name, torch_dtype=torch.bfloat16)",
        2,
        "are in 16 bits, beside mixed precision",
        "args = TrainingArguments(out, bf16=True)\nmodel = Auto.from_pretrained(name, torch_dtype=torch.float32)",
    ),
    "processes of its own that train": (
        "def step(rank):\n    loss_of(rank).backward()\n\ndef run(rank, world):\n    step(rank)\n\n"
        "mp.spawn(run, (2,), nprocs=2)",
        7,
        "run trains in processes that the script starts: memwall is not in them",
        "def step(rank):\n    loss_of(rank).backward()\n\ndef prepare(rank, world):\n    write(rank)\n\n"
        "mp.spawn(prepare, (2,), nprocs=2)\nstep(int(os.environ['RANK']))",
    ),
    "processes that train one model": (
        "from train import train\n\nmodel.share_memory()\nfor rank in range(4):\n"
        "    process = mp.Process(target=train, args=(rank, model))\n    process.start()",
        5,
        "train trains in processes",
        "from train import train\n\ntrain(0, model)",
    ),
    "checkpointing twice": (
        "args = TrainingArguments(\n    out, gradient_checkpointing=True,\n"
        "    fsdp_config={'activation_checkpointing': True})",
        3,
        "turned on a second time",
        "args = TrainingArguments(out, gradient_checkpointing=True, fsdp_config={})",
    ),
    "ZeRO that nobody is given": (
        "config = {\n    'zero_optimization': {'stage': 3},\n}\ntrain(model)",
        2,
        "given to nobody: nothing is divided",
        "config = {'zero_optimization': {'stage': 3}}\nargs = TrainingArguments(out, deepspeed=config)",
    ),
    "DataParallel": ("model = nn.DataParallel(model)", 1, "copies the model", "model = DDP(model)"),
    "unused parameters behind reentrant checkpoints": (
        "model = DDP(model, find_unused_parameters=True)\nout = checkpoint(block, x, use_reentrant=True)",
        2,
        "hides parameters",
        "model = DDP(model, find_unused_parameters=True)\nout = checkpoint(block, x, use_reentrant=False)",
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_mistake_is_found_on_its_line(name: str, tmp_path: Path) -> None:
    planted, line, found, mended = PLANTED[name]
    script = tmp_path / "train.py"
    script.write_text(planted)
    (mistake,) = mistakes_in(script)
    assert (mistake.line, found in mistake.found, bool(mistake.advice)) == (line, True, True)
    script.write_text(mended)
    assert mistakes_in(script) == ()


CORRECT = {
    "a scheduler in a window, beside an optimizer that steps each time": f"""
for index, batch in enumerate(loader):
    loss_of(model, batch).backward()
    {CLIP}
    optimizer.step()
    if index % 10 == 0:
        scheduler.step()
""",
    "unscaling in a function below the one that clips": f"""
scaler = torch.amp.GradScaler()
def bounded(model):
    {CLIP}
def train(model):
    scaler.scale(loss).backward()
    {UNSCALE}
    bounded(model)
    scaler.step(optimizer)
""",
    "clipping without the scaler in another function": f"""
scaler = torch.amp.GradScaler()
def in_16_bits():
    scaler.scale(loss).backward()
    scaler.step(optimizer)
def in_32_bits():
    {CLIP}
    optimizer.step()
""",
    "a frozen base in 16 bits": """
model = Auto.from_pretrained(name, torch_dtype=torch.bfloat16)
trainer = SFTTrainer(model, args=SFTConfig(bf16=True), peft_config=LoraConfig(r=16))
""",
    "windows that come out even": """
for index in range(1000):
    loss_of(model).backward()
    if index % 4 == 3:
        optimizer.step()
""",
    "a generator that is trained with every fifth batch of its critic": """
for index, batch in enumerate(loader):
    critic_loss(batch).backward()
    critic_optimizer.step()
    if index % 5 == 0:
        generator_loss(batch).backward()
        generator_optimizer.step()
""",
    "one way to checkpoint, said twice": """
model.gradient_checkpointing_enable()
args = TrainingArguments(out, gradient_checkpointing=True)
""",
    "batches that Accelerate divides": """
accelerator = Accelerator(split_batches=True)
loader = DataLoader(data, batch_size=global_batch)
""",
}


@pytest.mark.parametrize("name", CORRECT)
def test_nothing_is_said_of_what_is_right(name: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(CORRECT[name])
    assert mistakes_in(script) == ()


def test_nothing_is_said_of_scripts_that_are_known_to_be_right() -> None:
    folder = Path(__file__).parents[1]
    scripts = [*(folder / "compat" / "scripts").glob("*.py"), *(folder / "scripts").glob("train_*.py")]
    assert len(scripts) > 30
    assert {script.name: found for script in scripts if (found := mistakes_in(script))} == {}


def test_a_script_has_no_disk_to_measure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    assert main(["doctor", str(script), "--disk", str(tmp_path)]) == 2
    assert "doctor: SCRIPT is read, and --disk is of the machine; give one of them" in capsys.readouterr().err


def test_the_command_says_where_and_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text("\nmodel = nn.DataParallel(model)\n")
    assert main(["doctor", str(script)]) == 0
    assert capsys.readouterr().out == (
        f"{script}:2: nn.DataParallel copies the model to each device in every step\n"
        "  -> start one process for each device (torchrun), and take DistributedDataParallel\n"
    )
    assert main(["doctor", str(script), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["schema"], shown["mistakes"][0]["line"]) == ("memwall.script-mistakes/1", 2)
    script.write_text("import torch\n")
    assert main(["doctor", str(script)]) == 0
    assert capsys.readouterr().out == f"{script}: nothing to mend\n"


def test_what_is_no_script_is_refused(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("def (")
    with pytest.raises(UsageError, match=r"train\.py cannot be read as a Python script: invalid syntax"):
        mistakes_in(script)
