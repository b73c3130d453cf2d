"""A technique is a pair of files: its record, a line in the plan's table, a handler, a test. No kind lacks one."""

from pathlib import Path

import msgspec
import pytest

from memwall.apply.technique import Handler, handler_of, registered
from memwall.planning.action import Action
from memwall.planning.technique import techniques
from memwall.planning.techniques.accumulate import Accumulate
from memwall.planning.techniques.allocator import AllocatorReuse
from memwall.planning.techniques.autocast import Autocast
from memwall.planning.techniques.compiled_graphs import CompiledGraphs
from memwall.planning.techniques.cpu_step import StepOnCpu
from memwall.planning.techniques.gradient_release import GradientRelease
from memwall.planning.techniques.kernels import FusedKernels
from memwall.planning.techniques.low_bit_state import LowBitState
from memwall.planning.techniques.offload import Offload
from memwall.planning.techniques.optimizer_state import OptimizerPlacement
from memwall.planning.techniques.parameters import ParameterPlacement
from memwall.planning.techniques.recompute import Recompute
from memwall.planning.techniques.reshard import Reshard
from memwall.report.plan_grids import action_grid

TESTS = Path(__file__).resolve().parents[1]

# One of each, as a person would read it in the plan's table: action, where, exactness.
EXAMPLES: dict[str, tuple[Action, tuple[str, str, str]]] = {
    "recompute": (Recompute(block="h.3"), ("recompute", "h.3", "bit-exact")),
    "offload": (
        Offload(block="h.3", scope="inputs", tier="disk", min_bytes=1, window_bytes=2),
        ("offload block inputs to disk", "h.3", "bit-exact"),
    ),
    "accumulate": (
        Accumulate(micro_batch=2, num_micro_batches=4),
        ("split the batch: 4 x 2", "every step", "equivalent"),
    ),
    "autocast": (Autocast(dtype="bfloat16"), ("autocast to bfloat16", "forward", "changes-numerics")),
    "kernels": (
        FusedKernels(modules=("h.0.norm", "h.0.mlp"), chunk_rows=2048),
        ("fused kernels, logits 2,048 rows at a time", "2 modules, loss", "equivalent"),
    ),
    "gradient-release": (
        GradientRelease(window_bytes=2, waiting=("h.0.weight", "h.1.weight")),
        ("step within backward, gradients released", "2 gradients stay", "bit-exact"),
    ),
    "compiled-graphs": (
        CompiledGraphs(ratio=0.25),
        ("compiled graphs save 25%", "compiled code", "equivalent"),
    ),
    "allocator": (AllocatorReuse(policy="tensor-heap"), ("allocator policy tensor-heap", "process", "bit-exact")),
    "optimizer-placement": (
        OptimizerPlacement(tier="disk", resident_bytes=0, bucket_bytes=2, min_bytes=1),
        ("optimizer state to disk", "between steps", "bit-exact"),
    ),
    "cpu-step": (
        StepOnCpu(bucket_bytes=2, min_bytes=1),
        ("optimizer state to host, stepped on the CPU", "between steps", "changes-numerics"),
    ),
    "low-bit-state": (
        LowBitState(),
        ("optimizer state in 8 bits, lossy", "between steps", "changes-numerics"),
    ),
    "reshard": (
        Reshard(units=("h.0", "h.1")),
        ("free gathered parameters after forward", "2 units, h.0 to h.1", "bit-exact"),
    ),
    "parameter-placement": (
        ParameterPlacement(tier="disk", blocks=("h.0", "h.1"), window_bytes=2, min_bytes=1, written_bytes=3),
        ("parameters and gradients to disk", "between uses", "bit-exact"),
    ),
}
PACKED = Offload(
    block="h.3", scope="saved", tier="disk", min_bytes=1, window_bytes=2, form="int8", exactness="changes-numerics"
)
KINDS = {technique.tag: technique.record for technique in techniques()}


def test_every_kind_is_a_frozen_record_with_what_it_frees_costs_and_changes() -> None:
    assert set(KINDS) == set(EXAMPLES)
    for name, record in KINDS.items():
        config = record.__struct_config__
        assert (config.tag_field, config.tag) == ("kind", name)
        assert config.frozen
        assert config.forbid_unknown_fields
        defaults = {field.name: field.default for field in msgspec.structs.fields(record)}
        assert defaults["saved_bytes"] is defaults["cost_seconds"] is None
        assert defaults["exactness"] in ("bit-exact", "equivalent", "changes-numerics")


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_kind_survives_the_plan_file(kind: str) -> None:
    action, _ = EXAMPLES[kind]
    assert type(action) is KINDS[kind]
    assert msgspec.json.decode(msgspec.json.encode(action), type=type(action)) == action


def test_what_leaves_with_fewer_digits_says_so() -> None:
    assert msgspec.json.decode(msgspec.json.encode(PACKED), type=Offload) == PACKED
    (row,) = action_grid((PACKED,)).rows
    assert (row[0], row[-1]) == ("offload saved tensors to disk as int8, lossy", "changes-numerics")
    text = msgspec.json.encode(PACKED).replace(b"changes-numerics", b"bit-exact")
    with pytest.raises(msgspec.ValidationError, match="form 'int8' comes back changes-numerics, not bit-exact"):
        msgspec.json.decode(text, type=Offload)
    text = msgspec.json.encode(PACKED).replace(b'saved"', b'inputs"', 1)
    with pytest.raises(msgspec.ValidationError, match="inputs leave as they are, not as int8"):
        msgspec.json.decode(text, type=Offload)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_kind_has_a_handler_and_no_handler_is_without_a_kind(kind: str) -> None:
    handler = handler_of(EXAMPLES[kind][0])
    assert type(handler).apply is not Handler.apply
    assert type(handler).effect is not Handler.effect, "what it does is not checked"
    assert set(registered()) == set(KINDS)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_kind_is_a_line_in_the_plans_table(kind: str) -> None:
    action, (what, where, exactness) = EXAMPLES[kind]
    (row,) = action_grid((action,)).rows
    assert (row[0], row[1], row[-1]) == (what, where, exactness)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_kind_is_tested_where_it_is_applied(kind: str) -> None:
    name = KINDS[kind].__name__
    mentions = [path.name for path in (TESTS / "apply").rglob("test_*.py") if name in path.read_text()]
    assert mentions, f"no test in tests/apply mentions {name}"
