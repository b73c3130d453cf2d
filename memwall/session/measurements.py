"""What a session measures while it runs, and what it counts between steps."""

import msgspec
import torch
from msgspec import Struct
from torch import Tensor, nn

from memwall.machine.meter import HostMeter, Meter
from memwall.torch_internals.storages import sparse_indices, sparse_values
from memwall.trace.optimizers import Optimizers, optimizers_of
from memwall.trace.records import Trace

__all__ = ["Measurements", "standing_bytes"]


class Measurements(Struct, kw_only=True):
    """What was measured while a session ran."""

    meter: Meter = msgspec.field(default_factory=HostMeter)
    """What "process bytes" are below: those of the device that the model is on."""
    first_step_peak_bytes: int = 0
    peak_bytes: int = 0
    """Highest process bytes of the steps under the plan."""
    overall_peak_bytes: int = 0
    judged_peak_bytes: int = 0
    """Highest process bytes of what has to keep to the budget: on a CPU of the whole run, on a CUDA device of what
    follows the recorded step, which has all optimizer state there by design."""
    base_bytes: int = 0
    step_seconds: list[float] = []
    num_steps: int = 0
    num_replans: int = 0
    not_recomputed: dict[str, str] = {}
    """Blocks that the plan recomputes and the run does not, and why."""
    oom_recoveries: int = 0
    """Failures to get memory after which a step was done again."""
    bytes_to_tier: int = 0
    first_step_bytes_to_tier: int = 0
    """Of these, what the recorded step moved under the safest plan."""
    bytes_from_tier: int = 0
    plan_seconds: float = 0.0
    has_plan: bool = False
    """Whether a plan was in effect already."""

    def note_peak(self, shown_bytes: int = 0) -> None:
        """To be called before every reset of the process's peak, and at the end.

        Args:
            shown_bytes: what of it the system has filled from a file to show parameters there, and can take back.
        """
        self.note(self.meter.peak_bytes() - shown_bytes)

    def note(self, peak_bytes: int) -> None:
        """The process has held so much."""
        self.overall_peak_bytes = max(self.overall_peak_bytes, peak_bytes)
        self.judged_peak_bytes = max(self.judged_peak_bytes, peak_bytes)

    def begin_plan(self, base_bytes: int | None) -> None:
        """A plan is in effect from now on, in a process that holds so much before each step; None for what it holds."""
        self.meter.reset_peak()
        if self.meter.device == "cuda" and not self.has_plan:
            self.judged_peak_bytes = 0
        self.has_plan = True
        self.base_bytes = self.meter.now_bytes() if base_bytes is None else base_bytes

    def forget_steps(self) -> None:
        """What was measured so far was another plan's."""
        self.peak_bytes, self.step_seconds = 0, []

    def note_first_step(self, peak_bytes: int) -> None:
        """A recorded step has ended; there are two where the first was not the last."""
        self.first_step_peak_bytes = max(self.first_step_peak_bytes, peak_bytes)
        self.note(peak_bytes)


def standing_bytes(model: nn.Module, optimizers: Optimizers, trace: Trace) -> int:
    """Bytes of tensors in the machine's memory that stand between steps: parameters, buffers, gradients, optimizer
    state, and the batch."""
    tensors: list[Tensor] = [*model.parameters(), *model.buffers()]
    tensors += [p.grad for p in model.parameters() if p.grad is not None]
    for optimizer in optimizers_of(optimizers):
        for state in optimizer.state.values():
            tensors += [value for value in state.values() if isinstance(value, Tensor)]
    dense = [part for tensor in tensors for part in _dense_parts(tensor)]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in dense if t.device.type == "cpu"}
    batch = sum(s.nbytes for s in trace.steps[0].storages if s.category == "input" and s.device == "cpu")
    return sum(storages.values()) + batch


def _dense_parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """What holds a tensor's bytes; a sparse one has no storage of its own."""
    if tensor.layout is torch.strided:
        return (tensor,)
    return (sparse_indices(tensor), sparse_values(tensor)) if tensor.layout is torch.sparse_coo else ()
