"""Estimates one training step of popular architectures, and writes docs/architectures.md.

    python benchmarks/architectures.py [NAME ...]

Each is `memwall estimate` of a configuration of `architectures_list.py`, in a process of its own: AdamW on all weights,
one sample, of 512 tokens where the model reads text. Rows go to results/simulated/architectures.json as soon as they
are there. Seconds are those of the processor that the command took, start and imports included.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))
from architectures_list import ARCHITECTURES, Architecture  # noqa: E402
from revision import commit  # noqa: E402

OUTPUT = ROOT / "benchmarks" / "results" / "simulated" / "architectures.json"
PAGE = ROOT / "docs" / "architectures.md"
DEVICE, NUM_TOKENS = "h100-80gb", 512
WITHOUT_TOKENS = ("vit", "swin", "convnext", "whisper", "wav2vec2", "clip", "siglip", None)
"""Model types of other samples than tokens; diffusers' configurations have no type."""
GOAL_SECONDS = 20
_GIB = 1 << 30
_INTRODUCTION = """# Architectures

What one training step of popular architectures needs on an H100 of 80 GB, simulated by `memwall estimate` from their
configurations alone (`benchmarks/architectures.py`): AdamW on all weights, one sample, for text {num_tokens} tokens, in
the dtype of the configuration. Nothing is downloaded, and nothing here was measured on a GPU. Seconds are those of one
processor, from start to end of the command.

Parameters are those of the model that the configuration builds. The published number is no count of memwall's: it is
what a model card, a repository, an announcement or a paper says, rounded as it is there, and links to a page that says
so. Most do not say whether the head counts; the two numbers differ by at most 6 %.

Qwen's were read in copies of the cards linked to, SDXL's in a copy of the paper, Gemma's link leads to the announcement
by Hugging Face; the other texts are by those who made the model, but CLIP's and SigLIP's by OpenCLIP's. Mistral's is of
version 0.3, which knows a few more tokens.

Mamba's scan is recorded as one pass over all tokens, with the bytes of the loop that transformers runs without
mamba-ssm's kernels, and not its seconds. DeepSeek-V3 is without its module for further tokens. Of the diffusion models
only the network is trained, without text encoders.

{summary}

{table}
"""


def configuration(architecture: Architecture) -> dict[str, Any]:
    """Returns what stands in the model's config.json: what is listed, and all defaults of transformers' class."""
    from transformers import AutoConfig

    if "_class_name" in architecture.config:  # of diffusers
        return architecture.config
    given = dict(architecture.config)
    whole: dict[str, Any] = AutoConfig.for_model(given.pop("model_type"), **given).to_dict()
    return whole | architecture.config


def measured(architecture: Architecture) -> dict[str, Any]:
    """Returns a row: what the command said, and the processor's seconds that it took.

    Raises:
        RuntimeError: the command failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(configuration(architecture)))
        command = [sys.executable, "-m", "memwall", "estimate", str(path), "--device", DEVICE, "--json"]
        if architecture.config.get("model_type") not in WITHOUT_TOKENS:
            command += ["--seq", str(NUM_TOKENS)]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if not done.stdout.startswith("{"):
        raise RuntimeError(f"status {done.returncode}: {done.stderr.strip()}")
    estimate = json.loads(done.stdout)
    item_bytes = 2 if architecture.config.get("dtype") == "bfloat16" else 4
    return {
        "num_parameters": estimate["host"]["weights_bytes"] // item_bytes,
        "process_bytes": estimate["peak"]["process_bytes"],
        "margin_bytes": estimate["margin_bytes"],
        "fits": estimate["fits"],
        "step_seconds": estimate["step_seconds"],
        "dtype": architecture.config.get("dtype", "float32"),
        "processor_seconds": round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 1),
        "commit": commit(),
    }


def page(rows: dict[str, dict[str, Any]]) -> str:
    """Returns the text of docs/architectures.md."""
    lines = [
        "| architecture | parameters | published | dtype | peak + margin, GiB | fits | seconds |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    found = {name: rows[name] for name in ARCHITECTURES if name in rows}
    for name, row in found.items():
        published, source = ARCHITECTURES[name].published, ARCHITECTURES[name].source
        millions = row["num_parameters"] / 1e6
        number = f"{millions / 1e3:,.2f}B" if published.endswith("B") else f"{millions:,.0f}M"
        written = published if published.endswith("B") else f"{published}M"
        needed = f"{row['process_bytes'] / _GIB:,.1f} + {row['margin_bytes'] / _GIB:,.1f}"
        cells = (number, f"[{written}]({source})", row["dtype"], needed, "yes" if row["fits"] else "no")
        lines.append(f"| {name} | {' | '.join(cells)} | {row['processor_seconds']} |")
    slow = [
        f"{name} {row['processor_seconds']}" for name, row in found.items() if row["processor_seconds"] >= GOAL_SECONDS
    ]
    summary = f"Of {len(found)} architectures {len(found) - len(slow)} took less than {GOAL_SECONDS} s"
    if slow:
        summary += f" ({', '.join(slow)})"
    summary += f"; {sum(row['fits'] for row in found.values())} fit."
    missing = [name for name in ARCHITECTURES if name not in rows]
    if missing:
        summary += f" Not estimated yet: {', '.join(missing)}."
    return _INTRODUCTION.format(summary=summary, table="\n".join(lines), num_tokens=NUM_TOKENS)


def main() -> None:
    """Measures the architectures that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="those to estimate again; without it, all")
    names = parser.parse_args().names or list(ARCHITECTURES)
    for name in names:
        try:
            row = measured(ARCHITECTURES[name])
        except RuntimeError as error:
            print(f"{name}: {error}", file=sys.stderr, flush=True)
            continue
        rows = json.loads(OUTPUT.read_text())["rows"] if OUTPUT.exists() else {}  # another run may have added some
        rows[name] = row
        print(name, row, flush=True)
        OUTPUT.write_text(json.dumps({"tag": "simulated", "device": DEVICE, "rows": rows}, indent=1) + "\n")
        PAGE.write_text(page(rows))


if __name__ == "__main__":
    main()
