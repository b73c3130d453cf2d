"""What a plan can do: one record per technique, a tagged union in the plan file.

A technique is five pieces: its record here, its legality in `planning.legality`, its cost in the menu or the search,
its handler in `apply`, and its test. `tests/planning/test_actions.py` enumerates them.
"""

from typing import Literal

from msgspec import UNSET, Struct, UnsetType

__all__ = [
    "Accumulate",
    "Action",
    "AllocatorReuse",
    "Autocast",
    "Exactness",
    "FusedKernels",
    "LeavingForm",
    "LowBitState",
    "Offload",
    "OptimizerPlacement",
    "ParameterPlacement",
    "Rebuild",
    "Recompute",
    "kinds",
]

Exactness = Literal["bit-exact", "equivalent", "changes-numerics"]
LeavingForm = Literal["exact", "int8", "fp8"]
"""How saved tensors leave: as they are, or floating-point ones in a byte an element (`triton_kernels.pack`)."""


class Recompute(Struct, frozen=True, kw_only=True, tag_field="kind", tag="recompute", forbid_unknown_fields=True):
    """Runs a block's forward again in backward instead of keeping what it saves."""

    block: str
    """Path of the module."""
    kept_ops: tuple[int, ...] = ()
    """Operations whose results are kept, numbered within the block as selective checkpointing counts; () = none."""
    kept_names: tuple[str, ...] = ()
    """Their names. Where another operation runs in such a place, that call keeps nothing from there on."""
    num_ops: int = 0
    """Operations the block was seen to run."""
    saved_bytes: int | None = None
    cost_seconds: float | None = None
    exactness: Exactness = "bit-exact"

    def __post_init__(self) -> None:
        if self.kept_names and len(self.kept_names) != len(self.kept_ops):
            raise ValueError(f"kept_names names {len(self.kept_names)} of {len(self.kept_ops)} kept_ops")


class Rebuild(Struct, frozen=True, kw_only=True, tag_field="kind", tag="rebuild", forbid_unknown_fields=True):
    """Rebuilds for backward what fused kernels return in a block, from what they keep anyway, instead of keeping it."""

    block: str
    """Path of the module; its kernels are those of a `FusedKernels`, or the model's own."""
    saved_bytes: int | None = None
    cost_seconds: float | None = None
    exactness: Exactness = "bit-exact"


class Offload(Struct, frozen=True, kw_only=True, tag_field="kind", tag="offload", forbid_unknown_fields=True):
    """Moves a block's saved tensors to the next tier between forward and backward."""

    block: str
    scope: Literal["saved", "inputs"]
    """saved: everything autograd saves in the block; inputs: what a recomputed block was called with."""
    tier: Literal["disk", "host"]
    min_bytes: int
    window_bytes: int
    form: LeavingForm = "exact"
    saved_bytes: int | None = None
    cost_seconds: float | None = None
    exactness: Exactness = "bit-exact"

    def __post_init__(self) -> None:
        expected = "bit-exact" if self.form == "exact" else "changes-numerics"
        if self.exactness != expected:
            raise ValueError(f"what leaves in the form '{self.form}' comes back {expected}, not {self.exactness}")
        if self.form != "exact" and self.scope == "inputs":
            raise ValueError(
                f"inputs leave as they are, not as {self.form}: run again from them, a block must do the same"
            )


class Accumulate(Struct, frozen=True, kw_only=True, tag_field="kind", tag="accumulate", forbid_unknown_fields=True):
    """Splits the batch of a step into micro-batches whose gradients add up; the global batch stays."""

    micro_batch: int
    num_micro_batches: int
    saved_bytes: int | None = None
    cost_seconds: float | None = None
    exactness: Exactness = "equivalent"


class Autocast(Struct, frozen=True, kw_only=True, tag_field="kind", tag="autocast", forbid_unknown_fields=True):
    """Runs forward in a lower precision where torch's autocast lists allow it."""

    dtype: Literal["bfloat16", "float16"]
    saved_bytes: int | None = None
    cost_seconds: float | None = None
    exactness: Exactness = "changes-numerics"


class FusedKernels(Struct, frozen=True, kw_only=True, tag_field="kind", tag="kernels", forbid_unknown_fields=True):
    """Runs fused kernels in place of modules' own forwards, and the loss of a language model without its logits."""

    modules: tuple[str, ...]
    """Paths of the norms and gated MLPs whose forward is replaced."""
    chunk_rows: int = 0
    """Rows of logits that the loss holds at a time; 0 where it is left as it is."""
    saved_bytes: int | None = None
    cost_seconds: float | None = None
    exactness: Exactness = "equivalent"


class AllocatorReuse(Struct, frozen=True, kw_only=True, tag_field="kind", tag="allocator", forbid_unknown_fields=True):
    """How freed memory is kept or returned: a heap for tensors or malloc thresholds on a CPU, a string on CUDA."""

    policy: str
    """"tensor-heap", or a malloc policy as `predict.malloc.policies` lists them."""
    limit_bytes: int = 0
    """Process bytes from which on the tensor heap returns free pages before it takes new ones; 0 for none."""
    outside_bytes: int = 0
    """Of these, what a step needs outside the heap and gives back: workspace, staging, small tensors."""
    cuda_setting: str = ""
    """Complete PYTORCH_ALLOC_CONF string; must be in the environment before CUDA starts."""
    saved_bytes: int | None = None
    cost_seconds: float | None = None
    exactness: Exactness = "bit-exact"


class OptimizerPlacement(
    Struct, frozen=True, kw_only=True, tag_field="kind", tag="optimizer-placement", forbid_unknown_fields=True
):
    """Keeps the optimizer's state on the next tier between steps; a step goes through it bucket by bucket.

    Or it is stepped where it is, by the CPU: then all of it is in host memory, and parameters pass by in its stead.
    """

    tier: Literal["disk", "host"]
    """"host" is pinned memory, for parameters on CUDA; "disk" is for parameters on a CPU."""
    resident_bytes: int
    """Of the state, what stays in memory all the time."""
    bucket_bytes: int
    """State of so many parameters is read, stepped and written as one; three buckets are in memory during a step.
    Where the CPU steps, so many bytes of parameters are, and none of them is on the device."""
    min_bytes: int
    """Smaller tensors of state stay in memory besides."""
    stepped_on: Literal["cpu"] | UnsetType = UNSET
    """"cpu" is for Adam and AdamW of parameters on CUDA. Unset, state is stepped where they are; a plan's file does not
    name it then, and an older memwall reads it."""
    engine: Literal["deepspeed"] | UnsetType = UNSET
    """Whose kernel the CPU steps with; unset for torch's fused one."""
    saved_bytes: int | None = None
    cost_seconds: float | None = None
    exactness: Exactness = "bit-exact"

    def __post_init__(self) -> None:
        where, expected = ("cpu", "changes-numerics") if self.stepped_on == "cpu" else ("device", "bit-exact")
        if self.exactness != expected:
            raise ValueError(f"a step on the {where} is {expected}, not {self.exactness}")
        if self.stepped_on == "cpu" and (self.tier != "host" or self.resident_bytes):
            raise ValueError("the CPU steps state that is in host memory, and all of it")
        if self.engine == "deepspeed" and self.stepped_on != "cpu":
            raise ValueError("DeepSpeed's kernel steps on the CPU, and the plan does not have the step there")


class LowBitState(Struct, frozen=True, kw_only=True, tag_field="kind", tag="low-bit-state", forbid_unknown_fields=True):
    """Keeps the moments of Adam and AdamW in 8 bits between steps; a step opens them slice by slice."""

    bits: Literal[8] = 8
    saved_bytes: int | None = None
    cost_seconds: float | None = None
    exactness: Exactness = "changes-numerics"


class ParameterPlacement(
    Struct, frozen=True, kw_only=True, tag_field="kind", tag="parameter-placement", forbid_unknown_fields=True
):
    """Keeps parameters and gradients on the next tier between their uses; goes with optimizer state there."""

    tier: Literal["disk"]
    blocks: tuple[str, ...]
    """Modules whose parameters are brought in as one; outside them each module with parameters is one by itself."""
    staying: tuple[str, ...] = ()
    """Of all these modules those whose parameters stay in memory: only their gradients leave."""
    window_bytes: int
    """Parameters stepped at a time, and what may wait to be written; one parameter may always."""
    min_bytes: int
    """Smaller parameters stay in memory, with their gradients."""
    written_bytes: int
    """What of parameters and gradients is written in a step."""
    read_bytes: int | None = None
    """What of them is read; None in files written before that was counted."""
    saved_bytes: int | None = None
    cost_seconds: float | None = None
    exactness: Exactness = "bit-exact"


Action = (
    Recompute
    | Rebuild
    | Offload
    | Accumulate
    | Autocast
    | FusedKernels
    | AllocatorReuse
    | OptimizerPlacement
    | LowBitState
    | ParameterPlacement
)


def kinds() -> dict[str, type[Struct]]:
    """Action records by the name they have in a plan file."""
    records: tuple[type[Struct], ...] = (
        *(Recompute, Rebuild, Offload, Accumulate, Autocast, FusedKernels),
        *(AllocatorReuse, OptimizerPlacement, LowBitState, ParameterPlacement),
    )
    return {str(record.__struct_config__.tag): record for record in records}
