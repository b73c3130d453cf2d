"""Batches shorter than the recorded one, with blocks left alone that they have room for, beside the whole plan.

    python benchmarks/short_batches.py            # five minutes of a core
    python benchmarks/short_batches.py --tiny     # a small model; nothing is written

The budget is 60 % of the plain peak of a BERT at its longest length, at which the step is recorded. Then steps of
lengths from 32 to 512 run in turns as memwall runs them and under the whole plan. Their seconds are weighed with the
chance of each length: of `uniform` ones, or of `skewed` ones, whose logarithms are normally distributed about that of
128 (a law that was made up); of batches `sorted` by length, or `unsorted` ones, which eight sentences, padded to the
longest, make up. Seconds are medians, of the process's one thread. Writes results/cpu/short_batches.json.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from itertools import pairwise
from math import log
from operator import mul
from pathlib import Path
from statistics import NormalDist
from typing import Any
from unittest.mock import patch

import torch
from knob_report import provenance
from torch import nn
from transformers import BertConfig, BertForSequenceClassification

import memwall
from memwall.machine.meter import process_peak_bytes
from memwall.session.loop.short_batches import ShortBatches

OUTPUT = Path(__file__).parent / "results" / "cpu" / "short_batches.json"
SHARE, SHORTEST, LONGEST, MEDIAN, SPREAD = 0.60, 32, 512, 128, 0.6
LAYERS, WIDTH, BATCH, NUM_LENGTHS, REPEATS = 6, 256, 8, 12, 3
TINY = {"LAYERS": 2, "WIDTH": 64, "BATCH": 2, "NUM_LENGTHS": 3, "REPEATS": 1, "SHARE": 0.97}
_TIMEOUT_S = 1800.0


def edges() -> list[int]:
    """Returns the ends of equal parts of all lengths."""
    return [round(SHORTEST + (LONGEST - SHORTEST) * i / NUM_LENGTHS) for i in range(NUM_LENGTHS + 1)]


def uniform(length: int) -> float:
    """Returns the chance that a sentence is at most so long, where each length is as likely."""
    return (length - SHORTEST) / (LONGEST - SHORTEST)


def skewed(length: int) -> float:
    """Returns the chance that a sentence is at most so long, where few are long."""
    law = NormalDist(log(MEDIAN), SPREAD)
    least, most = law.cdf(log(SHORTEST)), law.cdf(log(LONGEST))
    return (law.cdf(log(length)) - least) / (most - least)


def chances(at_most: Callable[[int], float], sentences: int) -> list[float]:
    """Returns of each part the chance that the longest of so many sentences lies in it."""
    ends = [at_most(edge) ** sentences for edge in edges()]
    return [after - before for before, after in pairwise(ends)]


class Training:
    """A model, its optimizer and made-up batches of any length."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        self.model: nn.Module = BertForSequenceClassification(
            BertConfig(
                vocab_size=2000, hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=4,
                intermediate_size=4 * WIDTH, max_position_embeddings=LONGEST,
            )
        )  # fmt: skip
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=5e-5)

    def step(self, length: int) -> float:
        """Trains on a batch; returns the seconds that the process computed."""
        tokens = torch.randint(8, 2000, (BATCH, length))
        begin = time.process_time()
        loss = self.model(input_ids=tokens, attention_mask=torch.ones_like(tokens), labels=tokens[:, 0] % 2).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.process_time() - begin


def run_child(budget_bytes: int, *, no_disk: bool) -> dict[str, Any]:
    """Trains in this process; where a budget is given, on batches of all lengths, with the whole plan and without."""
    training = Training()
    if not budget_bytes:
        for _ in range(3):
            training.step(LONGEST)
        return {"peak_bytes": process_peak_bytes()}
    lengths = [(before + after) // 2 for before, after in pairwise(edges())]
    seconds: dict[tuple[int, bool], list[float]] = {}
    with memwall.fit(training.model, training.optimizer, budget=budget_bytes, no_disk=no_disk) as session:
        for _ in range(3):  # recorded, proven, and watched for effects
            training.step(LONGEST)
        for repeat in range(REPEATS):
            for length in lengths:
                for is_whole in (True, False) if repeat % 2 else (False, True):
                    nothing = patch.object(ShortBatches, "spared", lambda *_: frozenset())
                    with nothing if is_whole else nullcontext():
                        seconds.setdefault((length, is_whole), []).append(training.step(length))
        assert session.plan is not None
        kinds = [type(action).__name__ for action in session.plan.actions]
        foreseen_bytes = session.plan.forecast.steady_process_bytes
    whole, short = ([statistics.median(seconds[n, is_whole]) for n in lengths] for is_whole in (True, False))
    ratios = {
        f"{law.__name__}_{name}_ratio": sum(map(mul, chances(law, sentences), whole))
        / sum(map(mul, chances(law, sentences), short))
        for law in (uniform, skewed)
        for name, sentences in (("sorted", 1), ("unsorted", BATCH))
    }
    return {
        "no_disk": no_disk,
        "actions": {f"num_{kind}": kinds.count(kind) for kind in sorted(set(kinds))},
        "foreseen_bytes": foreseen_bytes,
        "peak_bytes": session.measured.peak_bytes,
        "num_tokens": lengths,
        "whole_plan_seconds": whole,
        "seconds": short,
        "times_as_long": ratios,
    }


def in_a_process(*arguments: str) -> dict[str, Any]:
    """Returns what a child prints last."""
    command = [sys.executable, __file__, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    if done.returncode:
        raise RuntimeError(f"{arguments}: {done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Measures plain's peak, then steps of all lengths under the budget, without the disk and with it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--child", type=int)
    parser.add_argument("--no-disk", action="store_true")
    given = parser.parse_args()
    if given.tiny:
        globals().update(TINY)
    if given.child is not None:
        print(json.dumps(run_child(given.child, no_disk=given.no_disk)))
        return
    more = ["--tiny"] * given.tiny
    plain_bytes = in_a_process("--child", "0", *more)["peak_bytes"]
    rows = []
    for ways in (["--no-disk"], []):
        row = in_a_process("--child", str(int(SHARE * plain_bytes)), *ways, *more)
        print(
            *ways, row["actions"], {name: round(ratio, 3) for name, ratio in row["times_as_long"].items()}, flush=True
        )
        rows.append(row)
    if not given.tiny:
        found = provenance() | {"plain_bytes": plain_bytes, "budget_bytes": int(SHARE * plain_bytes), "rows": rows}
        OUTPUT.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
