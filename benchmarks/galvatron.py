"""Galvatron's published profile and plan of Llama-2-7B, beside what memwall foresees and plans for the same training.

    python benchmarks/galvatron.py    # a minute on one core

Eight devices with 36 GiB each, a global batch of 16 with 2048 tokens, ZeRO-3. `galvatron_llama2_7b.json` has what is
read of Galvatron's files; `--memory`, `--computation` and `--plan` name others, as Galvatron writes them. Nothing is
measured here: Galvatron's figures are theirs, memwall's are forecasts for an A100 of 40 GB. Writes
results/simulated/galvatron.json and the section of docs/ranks.md.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from galvatron_table import LayerTable, TheirPlan, read_plan, read_table, reserved_mib
from knob_report import provenance

from memwall.integrations.spec_trace import device_run_of_spec
from memwall.machine.hardware import hardware_named
from memwall.planning.action import Action
from memwall.planning.blocks import find_blocks
from memwall.planning.ranks.one_kind import OneKind
from memwall.planning.settings import Settings
from memwall.planning.technique import technique_of
from memwall.planning.techniques.recompute import Recompute
from memwall.predict.call_rules import Treatment
from memwall.predict.curve import step_seconds
from memwall.predict.sharding.fsdp2 import Fsdp2
from memwall.predict.sharding.network import network_of
from memwall.predict.sharding.units import TraceUnits
from memwall.predict.treatment import StepModel
from memwall.trace.records import Step, Trace
from memwall.trace.steps import steady_step

HERE = Path(__file__).parent
NUMBERS = HERE / "galvatron_llama2_7b.json"
OUT = HERE / "results" / "simulated" / "galvatron.json"
PAGE = HERE.parent / "docs" / "ranks.md"
BEGIN, END = "<!-- galvatron: begin -->", "<!-- galvatron: end -->"
MIB = 1 << 20
BUDGET_MIB, NUM_DEVICES, LENGTH = 36 * 1024, 8, 2048
DEVICE = "a100-40gb"
HIDDEN, WIDE = 4096, 11008
LLAMA_2_7B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": WIDE,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "num_hidden_layers": 32,
    "max_position_embeddings": 4096,
    "vocab_size": 32000,
    "tie_word_embeddings": False,
}


def trace_of(num_layers: int, batch: int, *, is_mixed: bool) -> Trace:
    """Returns a step of the model with so many layers: weights in float32 under autocast, or all in bfloat16."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(LLAMA_2_7B | {"num_hidden_layers": num_layers}))
        return device_run_of_spec(
            folder,
            hardware_named(DEVICE),
            autocast="bfloat16" if is_mixed else None,
            dtype="float32" if is_mixed else "bfloat16",
            batch=batch,
            sequence=LENGTH,
            optimizer="adamw",
        ).training


def layer_bytes(*, is_mixed: bool) -> dict[str, int]:
    """Returns what a sample more makes a layer hold when the loss begins, kept and recomputed."""
    found: dict[str, list[int]] = {"kept_bytes": [], "recomputed_bytes": []}
    for batch in (1, 2):
        trace = trace_of(2, batch, is_mixed=is_mixed)
        step = steady_step(trace)
        model = StepModel(step, trace.names, find_blocks(trace, step))
        recomputed = model.treated({block.path: Treatment(recompute=True) for block in model.blocks})
        for name, each in zip(found, (step, recomputed), strict=True):
            found[name].append(_held_bytes(trace, each))
    return {name: more - one for name, (one, more) in found.items()}


def _held_bytes(trace: Trace, step: Step) -> int:
    """Returns what the second of two layers has made and still holds when the loss begins."""
    loss = dict(step.marks)["loss"]
    return sum(
        storage.nbytes
        for storage in step.storages
        if 0 <= storage.birth < loss < storage.death and trace.modules[storage.module].path.startswith("model.layers.1")
    )


def composition(num_bytes: int) -> tuple[int, int]:
    """Returns the fewest wide tensors of the MLP, and hidden ones beside them, that add up in 16 bits, to a MiB."""
    wide, hidden = (2 * LENGTH * width // MIB for width in (WIDE, HIDDEN))
    whole = num_bytes // MIB
    return next((n, (whole - n * wide) // hidden) for n in range(whole) if (whole - n * wide) % hidden == 0)


class Foreseen:
    """Foresees a rank's step under FSDP2 with any actions: the same trace, device and allocator for all plans."""

    def __init__(self, batch: int) -> None:
        self.hardware = hardware_named(DEVICE)
        self.trace = trace_of(32, batch, is_mixed=True)
        self.network = network_of(self.hardware, num_ranks=NUM_DEVICES, num_ranks_per_node=NUM_DEVICES, link=None)

    def kind(self, budget_bytes: int) -> OneKind:
        """Returns FSDP2 in all ranks for a budget."""
        settings = Settings(budget_bytes=budget_bytes, hardware=self.hardware)
        return OneKind(Fsdp2(), TraceUnits(self.trace), settings, self.network)

    def under(self, one: OneKind, actions: tuple[Action, ...]) -> dict[str, float]:
        """Returns bytes and seconds of a step in which blocks are treated, the allocator steered where that helps."""
        step = one.cost.step
        treatments: dict[str, Treatment] = {}
        for action in actions:
            block = getattr(action, "block", None)
            if block is not None:
                treatments[block] = technique_of(action).treatment(action, treatments.get(block, Treatment()))
        treated = StepModel(step, self.trace.names, find_blocks(self.trace, step)).treated(treatments)
        return {
            "process_bytes": one.process.treated(treated, 0).process_bytes,
            "default_allocator_bytes": one.process.untreated(treated).process_bytes,
            "step_seconds": step_seconds(treated) + one.cost.exposed_seconds,
        }

    def planned(self, budget_bytes: int) -> dict[str, Any]:
        """Returns memwall's plan for a budget, as foreseen."""
        one = self.kind(budget_bytes)
        one.search()
        actions = one.plan().actions
        recomputed = [action for action in actions if isinstance(action, Recompute)]
        return self.under(one, actions) | {
            "num_recomputed": len(recomputed),
            "num_recomputed_in_part": sum(bool(action.kept_ops) for action in recomputed),
        }


def compare(table: LayerTable, theirs: TheirPlan, memory: dict[str, Any]) -> dict[str, Any]:
    """Returns both sides of everything."""
    foreseen = Foreseen(theirs.global_batch // NUM_DEVICES)
    one = foreseen.kind(BUDGET_MIB * MIB)
    margin_bytes = one.process.margin_bytes(BUDGET_MIB * MIB)
    blocks = [Recompute(block=f"model.layers.{n}") for n, is_one in enumerate(theirs.checkpointed) if is_one]
    reserved = reserved_mib(BUDGET_MIB)
    limits = {"a fifth": reserved, "memwall's margin": -(-margin_bytes // MIB), "nothing": 0}
    decisions = []
    for name, left_mib in limits.items():
        num = table.num_checkpointed(BUDGET_MIB - left_mib)
        assert num is not None
        decisions.append(
            {
                "left": name,
                "left_bytes": left_mib * MIB,
                "num_checkpointed": num,
                "needed_bytes": table.needed_mib(num) * MIB,
                "layer_seconds": table.seconds(num),
            }
        )
    kept = memory["layertype_0_sp"][str(LENGTH)]["tp_activation_per_bsz_dict"]
    layer = {
        "galvatron": {"kept_bytes": int(kept["1"] * MIB), "recomputed_bytes": int(kept["checkpoint"] * MIB)},
        "memwall, bfloat16": layer_bytes(is_mixed=False),
        "memwall, autocast": layer_bytes(is_mixed=True),
    }
    for figures in layer.values():
        figures["num_wide"], figures["num_hidden"] = composition(figures["kept_bytes"])
    plain = foreseen.under(one, ())
    their_limit_bytes = (BUDGET_MIB - reserved) * MIB
    return {
        "budget_bytes": BUDGET_MIB * MIB,
        "margin_bytes": margin_bytes,
        "num_published": sum(theirs.checkpointed),
        "decisions": decisions,
        "layer": layer,
        "plans": {
            "nothing recomputed": plain | {"num_recomputed": 0, "num_recomputed_in_part": 0},
            "Galvatron's": foreseen.under(one, tuple(blocks))
            | {"num_recomputed": len(blocks), "num_recomputed_in_part": 0},
            "memwall's": foreseen.planned(BUDGET_MIB * MIB),
            "memwall's, a fifth left": foreseen.planned(one.process.budget_for(their_limit_bytes)),
        },
    }


def section(result: dict[str, Any]) -> str:
    """Returns the tables of the page."""
    lines = [
        "| of 36 GiB is left | layers that are checkpointed | a rank needs | layers' seconds |",
        "|" + " --- |" * 4,
    ]
    for one in result["decisions"]:
        lines.append(
            f"| {one['left']}: {one['left_bytes'] // MIB:,} MiB | {one['num_checkpointed']} of 32 | "
            f"{one['needed_bytes'] // MIB:,} MiB | {one['layer_seconds'] * 1000:.0f} ms |"
        )
    lines += [
        "",
        "| a layer holds for a sample | kept | of wide and hidden tensors | checkpointed |",
        "|" + " --- |" * 4,
    ]
    theirs = result["layer"]["galvatron"]["kept_bytes"]
    for name, one in result["layer"].items():
        gap = "" if name == "galvatron" else f" ({one['kept_bytes'] / theirs - 1:+.1%})"
        lines.append(
            f"| {name} | {one['kept_bytes'] / MIB:.2f} MiB{gap} | {one['num_wide']} and {one['num_hidden']} | "
            f"{one['recomputed_bytes'] / MIB:.2f} MiB |"
        )
    lines += [
        "",
        "| plan, simulated | layers recomputed | a rank's process | with the default allocator | step |",
        "|" + " --- |" * 5,
    ]
    for name, one in result["plans"].items():
        part = f", {one['num_recomputed_in_part']} in part" if one["num_recomputed_in_part"] else ""
        lines.append(
            f"| {name} | {one['num_recomputed']}{part} | {one['process_bytes'] / 1024 / MIB:.2f} GiB | "
            f"{one['default_allocator_bytes'] / 1024 / MIB:.2f} GiB | {one['step_seconds'] * 1000:,.0f} ms |"
        )
    return "\n".join([BEGIN, *lines, END])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("memory", "computation", "plan"):
        parser.add_argument(f"--{name}", type=Path, help="a file of Galvatron's in place of the numbers that are here")
    arguments = vars(parser.parse_args())
    numbers = json.loads(NUMBERS.read_text())
    given = {name: json.loads(path.read_text()) for name, path in arguments.items() if path is not None}
    numbers |= given
    theirs = read_plan(numbers["plan"])
    table = read_table(numbers["memory"], numbers["computation"], theirs, num_devices=NUM_DEVICES, length=LENGTH)
    facts = provenance() | {"schema": "memwall.benchmarks.galvatron/1", "tag": "simulated"}
    result = facts | {"source": numbers.get("source", "files that were given")}
    result |= compare(table, theirs, numbers["memory"])
    print(section(result))
    if given:
        return
    OUT.write_text(json.dumps(result, indent=1) + "\n")
    before, rest = PAGE.read_text().split(BEGIN, 1)
    PAGE.write_text(before + section(result) + rest.split(END, 1)[1])


if __name__ == "__main__":
    main()
