"""Describes one recorded step by frozen records, the contract between recording and everything after it.

Time in a trace is counted in operations: operation `k` is the k-th tensor operation of the step. A storage is live
while operation `k` runs when `birth <= k < death`. Indices point into the tuples of the same record; -1 means none.
"""

from typing import Literal

from msgspec import Struct

from memwall.machine.tiers import Machine

COMPILED_CODE = "inductor_compiled_code"
"""The name of the operation that a call of compiled code is: of a whole graph, forward or backward."""

Category = Literal["parameter", "gradient", "optimizer_state", "activation", "temporary", "input", "buffer"]
Phase = Literal["forward", "loss", "backward", "optimizer", "eval", "other"]


class Op(Struct, frozen=True, array_like=True):
    """One tensor operation below autograd (an ATen overload), in the order it ran."""

    name: int
    """Index into `Trace.names`, e.g. of `aten.addmm.default`."""
    module: int
    """Module whose forward issued it (in backward: whose forward created the autograd node)."""
    phase: Phase
    seconds: float
    """Measured time of the operation alone, without recording; 0.0 on fake tensors."""
    flops: int
    inputs: tuple[int, ...]
    """Storages read, without repeats."""
    outputs: tuple[int, ...]
    """Storages of the returned tensors: new ones, and for views and in-place operations the old one."""
    writes: tuple[int, ...]
    """Storages modified in place."""


class Storage(Struct, frozen=True, array_like=True):
    """One block of memory, counted once however many tensors view it."""

    nbytes: int
    device: str
    category: Category
    birth: int
    """Operation that allocated it; -1 if it existed before the step."""
    dropped: int
    """Operation before which everything but autograd had let go of it (where known, else estimated)."""
    death: int
    """Operation before which it died in a plain step; the number of operations if it outlives the step. The one that
    allocated it, where that frees it before it asks for anything else."""
    module: int
    phase: Phase
    batched: bool
    """Whether its bytes grow with the micro-batch (estimated from shapes and data flow)."""
    line: int = -1
    """The user's line that made it, an index into `Trace.lines`; -1 if it existed before the step or is not known."""
    dtype: str = ""
    """Names that of the first tensor in it, e.g. `float32`; "" where none was seen."""
    copied: tuple[int, ...] = ()
    """Bytes of each tensor that it was put together from when the model came to the device, all there until then."""
    stream: int = 0
    """The stream that it was allocated for, numbered as they appear in the step; 0 is the device's default one."""
    held_over: int = -1
    """The storage of the step that this one is of the step before: its loop still holds it, or its graph; else -1."""
    unit: int = -1
    """The module that has gathered it, as a unit of FSDP2's `fully_shard`; -1 where none has."""
    is_kept: bool = False
    """Whether the loop still holds it when the next step begins, as it does what the model returned last."""

    @property
    def device_type(self) -> str:
        """Returns its device without a number: "cuda" of "cuda:0"."""
        return self.device.partition(":")[0]


class SavedTensor(Struct, frozen=True, array_like=True):
    """A tensor that autograd kept for backward."""

    storage: int
    module: int
    nbytes: int
    """Bytes of the tensor itself, which may view only a part of the storage."""
    packed: int
    """Operation after which it was saved: the number of operations issued so far."""
    unpacked: int
    """Operation before which backward first asked for it; the number of operations if never."""
    released: int
    """Operation before which backward let go of it; the number of operations if never."""


class ModuleCall(Struct, frozen=True, array_like=True):
    """One execution of a module's forward, and the backward that belongs to it."""

    module: int
    start: int
    end: int
    """Operations [start, end) of forward."""
    backward_start: int
    backward_end: int
    """Operations [backward_start, backward_end) of backward; both -1 if it had none."""
    inputs: tuple[int, ...]
    """Storages of the tensors it was called with."""
    outputs: tuple[int, ...]


class Module(Struct, frozen=True, array_like=True):
    """One node of the module tree; index 0 is the root."""

    path: str
    """Dotted name below the root, "" for the root."""
    class_name: str
    parent: int
    container: Literal["list", "sequential", "none"]
    """Says what kind of container its parent is; "list", too, of a sequence whose forward is not torch's."""
    is_leaf: bool
    has_batch_norm: bool
    """Whether it or a descendant keeps running statistics of its batches."""
    is_wrappable: bool
    """Whether its forward can be replaced (not so for scripted modules, and inside of compiled ones)."""
    parameter_bytes: int


class GradientUse(Struct, frozen=True, array_like=True):
    """Says what a step does with gradients once backward has made them."""

    reason: str
    """Why all of them have to be there when the optimizer begins; "" where it could use each at once."""
    waiting: tuple[tuple[str, int], ...]
    """Names of parameters that are read after their gradient is there, or whose gradient gets a further term then,
    with the bytes of these gradients: they have to wait for the optimizer."""


class Step(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything one optimizer step did to memory, as it would be in a plain step."""

    kind: Literal["first", "steady"]
    """Kind of the step: in the first one the optimizer's state appears; in a steady one it is there already."""
    ops: tuple[Op, ...]
    storages: tuple[Storage, ...]
    saved: tuple[SavedTensor, ...]
    calls: tuple[ModuleCall, ...]
    marks: tuple[tuple[str, int], ...]
    """Beginnings of phases, as (name, operation): forward, loss, backward, accumulation, optimizer, eval; and "math
    attention", where attention begins that has no operator of its own."""
    wall_seconds: float
    """Measured duration of the step, recording included."""
    process_peak_bytes: int
    """The process's own high-water mark over the recorded step; 0 where none can be read."""
    launch_seconds: float = 0.0
    """Seconds that the host takes to issue an operation of a device that works behind it; 0 where none does."""
    gradient_use: GradientUse | None = None
    """Says what becomes of gradients; None where that was not watched."""


class Trace(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A recorded training step with what is needed to plan from it alone."""

    schema: Literal["memwall.trace/2"]
    source: Literal["recorded", "fake"]
    device: str
    torch_version: str
    num_threads: int
    model_fingerprint: str
    """SHA-256 over module paths, classes, and parameter names, shapes and dtypes."""
    optimizer: str
    """Its class; of several that step the model all of them, as "Muon + AdamW"."""
    micro_batch: int
    """Samples in one forward; 0 if it could not be told."""
    gradients_persist: bool
    """Whether gradients of one step are still there when the next forward begins (zeroed late, or in place)."""
    num_micro_batches: int
    """Forward-backward passes in one optimizer step."""
    autocast: Literal["none", "bfloat16", "float16"]
    is_parked: bool
    """Whether saved tensors left the device while recording, so that `Storage.dropped` is measured."""
    base_bytes: int
    """Process bytes before the step that belong to no recorded storage: interpreter, libraries, data."""
    workspace_bytes: int
    """Measured peak beyond base, storages and malloc: library workspaces, graph nodes, Python objects."""
    machine: Machine
    names: tuple[str, ...]
    modules: tuple[Module, ...]
    steps: tuple[Step, ...]
    input_shape: tuple[int, ...] = ()
    """Holds that of the first tensor that the model is called with; () if it is called with none."""
    input_dtype: str = ""
    """The dtype of that tensor, e.g. `int64`."""
    lines: tuple[str, ...] = ()
    """Lines of the user's code, e.g. `models/gpt.py:42 forward`; none on other people's lines."""
    is_phantom: bool = False
    """Whether it ran on a phantom CUDA device: torch's own allocator and libraries chose, and nothing had values."""


Tag = Literal["simulated", "cpu-measured", "gpu-measured", "external"]
"""`external`: somebody else's measurement, as a snapshot that was handed in. A record in another has that one's tag."""

Route = Literal["translate", "phantom"]
"""Says how a step is recorded for a device that is not here: on tensors of this CPU, whose operations are translated,
or by torch's own CUDA build on a phantom device."""


def measured_tag(device: str) -> Tag:
    """Returns the tag of what a run on a device has shown."""
    return "cpu-measured" if device == "cpu" else "gpu-measured"


def trace_tag(trace: Trace) -> Tag:
    """Returns how the bytes of a trace were obtained."""
    return measured_tag(trace.device) if trace.source == "recorded" else "simulated"


def route_of(trace: Trace) -> Route:
    """Returns how the trace of a device that is not here was recorded."""
    return "phantom" if trace.is_phantom else "translate"
