"""The Trainer's own distributed scripts on two gloo ranks: alone, and with memwall's callback in each Trainer.

    python benchmarks/ranks_trainer.py CHECKOUT                 # all; ten minutes on two cores
    python benchmarks/ranks_trainer.py CHECKOUT --cases training_parity.py

CHECKOUT is one of huggingface/transformers, of the release that is installed: its wheel does not have the tests. They
ask for several GPUs; the scripts that they start on those, in tests/trainer/distributed/scripts, start here by torchrun
on a CPU, with the arguments that the tests give. `train.py` gets a small Qwen2 made here in place of one from the hub;
two scripts that name what they take from there, loss_averaging.py and torchrun_env_check.py, are left out.
Each runs twice: as it is, and with `MemwallCallback` among the callbacks that every Trainer has, with a budget that is
never reached. A case is as without if both end with status 0, print the same lines on each rank, and leave the same
numbers and weights behind, to the bit. Writes results/cpu/ranks_trainer.json and the table of docs/ranks.md.
"""

import argparse
import hashlib
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from ranks_peers import compared, short
from revision import commit

ROOT = Path(__file__).resolve().parents[1]
RESULTS, PAGE = ROOT / "benchmarks" / "results" / "cpu" / "ranks_trainer.json", ROOT / "docs" / "ranks.md"
CHILD = Path(__file__).with_name("ranks_trainer_child.py")
FORMS = ("alone", "callback")
TIMEOUT_SECONDS = 120
OUTPUT = ["--output_dir", "out"]
_TRAINED = [
    *OUTPUT,
    "--use_cpu",
    "--per_device_train_batch_size",
    "4",
    "--learning_rate",
    "5e-5",
    "--model_name",
    "model",
]
_ONE_EPOCH = [*_TRAINED, "--num_train_epochs", "1", "--logging_steps", "1", "--save_strategy", "epoch"]
_ONE_EPOCH += ["--loss_output_file", "out/losses.json"]
_TWO_EPOCHS = [*_TRAINED, "--num_train_epochs", "2", "--logging_steps", "2", "--save_steps", "2", "--bf16"]
CASES: dict[str, list[list[str]]] = {
    # Of each case the runs, one after the other in one folder.
    "batch_rebalance_ddp.py": [OUTPUT],
    "dispatch_batches.py": [OUTPUT],
    "eval_ddp.py": [OUTPUT],
    "moe_aux_loss.py": [[*OUTPUT, "--use_cpu"]],
    "training_parity.py": [OUTPUT],
    "worker_seed.py": [OUTPUT],
    "train.py": [[*_ONE_EPOCH, "--model_dtype", "fp32"]],
    "train.py, bf16 weights": [[*_ONE_EPOCH, "--model_dtype", "bf16"]],
    "train.py, bf16 autocast": [[*_ONE_EPOCH, "--model_dtype", "fp32", "--bf16"]],
    "train.py, accumulation": [[*_ONE_EPOCH, "--bf16", "--gradient_accumulation_steps", "2"]],
    "train.py, evaluation": [[*_ONE_EPOCH, "--do_train", "--do_eval", "--eval_output_file", "out/eval.json"]],
    "train.py, resumed": [_TWO_EPOCHS, [*_TWO_EPOCHS, "--resume_from_checkpoint", "out/checkpoint-2"]],
}
# Seconds and speeds, which no two runs share, and the figures that memwall adds to a log.
_VARIES = re.compile(r"""['"](\w*(runtime|per_second)|memwall/\w+)['"]: '?[\d.e+-]+'?(, )?""")
# Gloo's threads ask for the interpreter: a process that ends may abort, or wait for one of them for good, while torch
# takes its reducer down (2.13). What was needed is in the results.
MOST_TRIES = 3


def make_model(folder: Path) -> None:
    """Leaves a small Qwen2 with a tokenizer of bytes in a folder, as `train.py` loads them."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    characters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: number for number, character in enumerate([*characters, "<end>"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(vocabulary),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)


def ended(script: Path, form: str, runs: list[list[str]]) -> dict[str, Any]:
    """Returns what a script said and left behind, at the first try that ends with status 0, else at the last one."""
    for num_tries in range(1, MOST_TRIES + 1):
        found = tried(script, form, runs) | {"num_tries": num_tries}
        if found["status"] == 0:
            break
    return found


def tried(script: Path, form: str, runs: list[list[str]]) -> dict[str, Any]:
    """Runs a script on two ranks, as often as there are arguments; returns what it said and left behind."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder / "model")
        found: dict[str, Any] = {"lines": [], "num_sessions": 0}
        for number, arguments in enumerate(runs):
            logs = folder / f"logs{number}"
            launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
            launch += ["--redirects", "3", "--log-dir", str(logs)]
            child = [str(CHILD), str(folder / "sessions")] if form == "callback" else []
            try:
                process = subprocess.run(
                    [*launch, *child, str(script), *arguments],
                    stdin=subprocess.DEVNULL,
                    capture_output=True,
                    cwd=folder,
                    env=os.environ | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "HF_HUB_OFFLINE": "1"},
                    timeout=TIMEOUT_SECONDS,
                )
            except subprocess.TimeoutExpired:
                return found | {"status": None, "error": f"does not end within {TIMEOUT_SECONDS} s"}
            for path in sorted(logs.rglob("*/[01]/stdout.log")):
                found["lines"].append(compared(_VARIES.sub("", path.read_text())))
            found["status"] = process.returncode
            if process.returncode:
                said = "".join(path.read_text() for path in sorted(logs.rglob("*/[01]/stderr.log")))
                errors = re.findall(r"^(?:\[rank\d\]: *)?((?:\w+\.)*\w*Error: .*|memwall: .*)$", said, re.MULTILINE)
                return found | {"error": (errors or said.splitlines()[-1:] or ["no message"])[0]}
        sessions = folder / "sessions"
        found["num_sessions"] = len(sessions.read_text().splitlines()) if sessions.exists() else 0
        return found | {"left": left_in(folder / "out")}


def left_in(folder: Path) -> dict[str, Any]:
    """Returns by file the numbers and the weights that a run left."""
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.name == "trainer_state.json":
            found[name] = [_VARIES.sub("", json.dumps(entry)) for entry in json.loads(path.read_text())["log_history"]]
        elif path.suffix == ".json" and path.parent == folder:
            found[name] = _VARIES.sub("", path.read_text())
        elif path.suffix == ".safetensors" or path.name in ("result.pt", "optimizer.pt", "scheduler.pt"):
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def of_case(name: str, scripts: Path) -> dict[str, Any]:
    script = scripts / name.partition(",")[0]
    row: dict[str, Any] = {"commit": commit()}
    if not script.exists():
        return row | {"alone_status": None, "verdict": "does not run here", "why": "the checkout does not have it"}
    alone = ended(script, "alone", CASES[name])
    row |= {"alone_status": alone["status"]}
    if alone["status"] != 0:
        return row | {"verdict": "does not run here", "why": alone["error"]}
    other = ended(script, "callback", CASES[name])
    row |= {"num_lines": sum(map(len, alone["lines"])), "num_files": len(alone["left"])}
    row |= {"num_sessions": other["num_sessions"], "num_tries": [alone["num_tries"], other["num_tries"]]}
    differing = [file for file, value in alone["left"].items() if other.get("left", {}).get(file) != value]
    if other["status"] != 0:
        return row | {"verdict": other["error"]}
    if other["lines"] != alone["lines"] or differing:
        return row | {"verdict": f"differs: {', '.join(differing) or 'lines'}"}
    return row | {"verdict": "as without"}


def table(about: dict[str, Any]) -> str:
    """Returns the rows of docs/ranks.md."""
    ran = {name: row for name, row in about["cases"].items() if row["alone_status"] == 0}
    others = {name: row for name, row in about["cases"].items() if row["alone_status"] != 0}
    lines = [
        f"With torch {about['torch']} and transformers {about['transformers']}:",
        "",
        "| script | lines and files compared | ranks x trainings under memwall | with the callback |",
        "| --- | --- | --- | --- |",
        *(
            f"| {name} | {row['num_lines']}, {row['num_files']} | {row['num_sessions']} | {row['verdict']} |"
            for name, row in ran.items()
        ),
    ]
    if others:
        lines += ["", "| script | why it does not run on two gloo ranks, without memwall |", "| --- | --- |"]
    lines += [f"| {name} | {short(row['why'])} |" for name, row in others.items()]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    chosen = parser.parse_args()
    scripts = chosen.checkout.resolve() / "tests" / "trainer" / "distributed" / "scripts"
    if not scripts.is_dir():
        parser.error(f"{scripts} is no folder: expected a checkout of huggingface/transformers")
    for name in chosen.cases:
        row = of_case(name, scripts)
        print(name, row["verdict"], row.get("why", ""), flush=True)
        known = json.loads(RESULTS.read_text())["cases"] if RESULTS.exists() else {}
        about = {"tag": "cpu-measured", "cases": known | {name: row}}
        about |= {package: importlib.metadata.version(package) for package in ("torch", "transformers")}
        RESULTS.write_text(json.dumps(about, indent=2, sort_keys=True) + "\n")
        before, _, rest = PAGE.read_text().partition("<!-- trainer: begin -->\n")
        _, _, after = rest.partition("<!-- trainer: end -->")
        PAGE.write_text(f"{before}<!-- trainer: begin -->\n{table(about)}\n<!-- trainer: end -->{after}")


if __name__ == "__main__":
    main()
