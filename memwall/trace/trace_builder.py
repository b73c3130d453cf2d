"""Records a workload: the Python entry `memwall.record(workload)`, and the assembly of a trace from step logs."""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import msgspec
import torch
from torch import Tensor, nn

from memwall.errors import TraceError
from memwall.machine.meter import meter_of, return_free_memory
from memwall.machine.tiers import Machine
from memwall.trace.modules import ModuleTable, fingerprint
from memwall.trace.op_work import OpWork
from memwall.trace.optimizers import Optimizers, joint_name, optimizers_of
from memwall.trace.records import Step, Trace
from memwall.trace.saved_tensors import Parking
from memwall.trace.source_lines import SourceLines
from memwall.trace.step_recorder import StepRecorder
from memwall.trace.steps import build_step
from memwall.trace.workload import Workload
from memwall.trace.workspaces import Workspaces

_TRAINING = (
    ("forward", "the model was not called with gradients on"),
    ("backward", "loss.backward() was not called, or in another thread than the model"),
    ("optimizer", "optimizer.step() was not called"),
)
_EVALUATION = (("eval", "the model was not called with gradients off"),)


class TraceBuilder:
    """Records the steps of one training run, one after the other, and puts them into a trace.

    Args:
        roots: the modules that are trained.
        parking: where saved tensors live meanwhile; None keeps them.
        seconds_of: given where the tensors are fake: what an operation would take. Then nothing is measured.
        workspaces: what operators are known to allocate for themselves.
    """

    def __init__(
        self,
        roots: Sequence[nn.Module],
        parking: Parking | None = None,
        *,
        seconds_of: Callable[[OpWork], float] | None = None,
        workspaces: Workspaces | None = None,
    ) -> None:
        self.roots = tuple(roots)
        self._parking = parking
        self._seconds_of = seconds_of
        self._is_fake = seconds_of is not None
        self._meter = meter_of(*self.roots)
        self._names: dict[str, int] = {}
        self._lines = SourceLines()
        self._steps: list[Step] = []
        self._recorder: StepRecorder | None = None
        self._base_bytes = 0
        self._micro_batch = 0
        self._input_shape: tuple[int, ...] = ()
        self.input_shapes: tuple[tuple[int, ...], ...] = ()
        """Those of all tensors that the model was called with first in the last step."""
        self._input_dtype = ""
        self._num_micro_batches = 1
        self._gradients_persist = False
        self._had_state = False
        self._stateful: set[int] = set()
        """Identities of what optimizers had state of when the step began."""
        self._begin = 0.0
        self._workspaces = workspaces or Workspaces(is_available=not self._is_fake)
        self.table = ModuleTable(roots)
        self.draws_in_python = False
        """Whether a forward of the last step took random numbers that no operation shows."""

    @property
    def is_recording(self) -> bool:
        """Returns whether a step is being recorded now."""
        return self._recorder is not None

    @property
    def is_changed_by_hand(self) -> bool:
        """Returns whether the loop itself has changed parameters after a backward of the step being recorded."""
        return self._recorder is not None and self._recorder.is_changed_by_hand

    @property
    def is_dry_run(self) -> bool:
        """Returns whether the step being recorded has run forwards alone, of which nothing is left."""
        return self._recorder is not None and self._recorder.is_dry_run

    def start_step(
        self,
        optimizers: Optimizers,
        *,
        running_root: nn.Module | None = None,
        begins_step: Callable[[nn.Module], bool] | None = None,
        find_optimizers: Callable[[], Optimizers] | None = None,
    ) -> None:
        """Begins to record a step.

        Args:
            running_root: the root whose forward is about to begin, if one is.
            begins_step, find_optimizers: see `StepRecorder`.
        """
        states = [optimizer.state for optimizer in optimizers_of(optimizers)]
        self._had_state = bool(states) and all(states)
        self._stateful = {id(parameter) for state in states for parameter in state}
        self._gradients_persist = any(p.grad is not None for root in self.roots for p in root.parameters())
        recorder = StepRecorder(
            self.roots,
            self._parking,
            self._workspaces,
            self._seconds_of,
            self._lines,
            begins_step,
            find_optimizers,
        )
        is_first = not self._steps and not self._is_fake
        if is_first:  # once: the pages returned cost the step that needs them again
            # Cycles that have grown old before the run are part of what it begins with.
            return_free_memory(generation=1)
            self._base_bytes = self._meter.base_bytes(0)  # on a CPU with tensors, which are known only then
        if not self._is_fake:
            self._meter.reset_peak()
        recorder.start(optimizers, running_root)
        if is_first and self._meter.device == "cpu":
            self._base_bytes -= sum(s.nbytes for s in recorder.log.storages if s.birth < 0 and s.device == "cpu")
        self._recorder = recorder
        self._begin = time.perf_counter()

    def unseen(self) -> AbstractContextManager[None]:
        """Leaves out of the step that is recorded, if one is, what runs meanwhile."""
        return nullcontext() if self._recorder is None else self._recorder.unseen()

    @property
    def num_optimizer_steps(self) -> int:
        """Returns how many optimizer steps ended in the step being recorded."""
        return self._recorder.num_optimizer_steps if self._recorder is not None else 0

    @property
    def place(self) -> str:
        """Returns what runs in the step being recorded, as "forward of blocks.3 (Block)"; "" outside a step."""
        return self._recorder.place if self._recorder is not None else ""

    def stands_for(self, tensor: Tensor, original: Tensor) -> None:
        """Says that a tensor holds from now on what another one of the step held, which has no memory any more."""
        if self._recorder is not None:
            self._recorder.log.stands_for(tensor, original)

    def cancel_step(self) -> None:
        """Takes the recording away without a result."""
        if self._recorder is not None:
            self._recorder.stop()
            self._recorder.log.forget()
            self._recorder = None

    def finish_step(self, optimizers: Optimizers, *, is_evaluation: bool = False) -> Step:
        """Ends the recording of a step and returns it.

        Args:
            is_evaluation: the step evaluated a batch and trained nothing.

        Raises:
            TraceError: the step had no forward, backward or optimizer step, or no evaluation if it was to be one.
        """
        if self._recorder is None:
            raise TraceError("no step is being recorded")
        wall_seconds = 0.0 if self._is_fake else time.perf_counter() - self._begin
        peak_bytes = 0 if self._is_fake else self._meter.peak_bytes()
        recorder, self._recorder = self._recorder, None
        self.draws_in_python = recorder.draws_in_python
        log = recorder.finish(optimizers)
        made = (parameter for each in optimizers_of(optimizers) for parameter in each.state)
        for phase, hint in _EVALUATION if is_evaluation else _TRAINING:
            if not log.has_mark(phase):
                whole = "evaluation" if is_evaluation else "training step"
                raise TraceError(f"the recorded step has no {phase} phase: {hint}; record one whole {whole}")
        if not self._steps and not self._is_fake and self._meter.device == "cpu":
            # Inputs show themselves only when they are read; they were resident before the step all the same.
            self._base_bytes -= sum(s.nbytes for s in log.storages if s.birth < 0 and s.category is None)
        self._micro_batch = log.micro_batch
        self._input_shape, self._input_dtype = log.input_shape, log.input_dtype
        self.input_shapes = recorder.input_shapes
        self._num_micro_batches = 1 + sum(name == "accumulation" for name, _ in log.marks)
        self._gradients_persist = any(p.grad is not None for root in self.roots for p in root.parameters())
        step = build_step(
            log,
            recorder.table,
            self._names,
            kind="steady" if self._had_state and self._stateful.issuperset(map(id, made)) else "first",
            wall_seconds=wall_seconds,
            process_peak_bytes=peak_bytes,
            gradient_use=recorder.gradient_use,
        )
        self._steps.append(step)
        log.forget()
        return step

    def trace(
        self,
        optimizers: Optimizers,
        *,
        machine: Machine | None = None,
        autocast: Literal["none", "bfloat16", "float16"] = "none",
    ) -> Trace:
        """Returns the trace of all steps recorded so far.

        Args:
            machine: what is known of the machine's speeds.
            autocast: the precision the forward ran in.
        """
        device = next((p.device.type for root in self.roots for p in root.parameters()), "cpu")
        return Trace(
            schema="memwall.trace/2",
            source="fake" if self._is_fake else "recorded",
            device=device,
            torch_version=str(torch.__version__),
            num_threads=torch.get_num_threads(),
            model_fingerprint=fingerprint(self.roots),
            optimizer=joint_name(optimizers_of(optimizers)),
            micro_batch=self._micro_batch,
            gradients_persist=self._gradients_persist,
            num_micro_batches=self._num_micro_batches,
            autocast=autocast,
            is_parked=self._parking is not None,
            base_bytes=self._base_bytes,
            workspace_bytes=0,
            machine=machine or Machine(),
            names=tuple(self._names),
            modules=self.table.records,
            steps=tuple(self._steps),
            input_shape=self._input_shape,
            input_dtype=self._input_dtype,
            lines=tuple(self._lines.texts),
        )


def record(workload: Workload, *, num_steps: int = 2, num_micro_batches: int = 1) -> Trace:
    """Runs and records the first steps of a workload: the first one, and steady ones after it.

    Args:
        num_micro_batches: forwards and backwards in each step, all of the same batch.

    Example:
        >>> import torch
        >>> from memwall.trace.workload import Workload
        >>> workload = Workload(
        ...     model=lambda: torch.nn.Linear(4, 2),
        ...     batch=lambda: torch.zeros(3, 4),
        ...     loss=lambda model, batch: model(batch).sum(),
        ...     optimizer=lambda parameters: torch.optim.AdamW(parameters),
        ... )
        >>> [step.kind for step in record(workload).steps]
        ['first', 'steady']

    Raises:
        TraceError: the workload does not run a whole training step.
    """
    model = workload.make_model()
    optimizer = workload.make_optimizer(model)
    batch = workload.make_batch()
    return run_recorded(
        TraceBuilder([model]),
        workload,
        model,
        optimizer,
        batch,
        num_steps=num_steps,
        num_micro_batches=num_micro_batches,
    )


def run_recorded(
    builder: TraceBuilder,
    workload: Workload,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Any,
    *,
    num_steps: int,
    num_micro_batches: int = 1,
) -> Trace:
    """Returns the trace of so many training steps, run with what a workload's factories made.

    Args:
        num_micro_batches: forwards and backwards in each step, whose gradients accumulate; all of the same batch.

    Raises:
        TraceError: the workload does not run a whole training step.
    """
    for _ in range(num_steps):
        builder.start_step(optimizer)
        try:
            for _ in range(num_micro_batches):
                loss = workload.loss(model, batch)
                loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            del loss  # until here, as in most loops: a mean of squares has as many bytes as what it is the mean of
            builder.finish_step(optimizer)
        finally:
            builder.cancel_step()
    return builder.trace(optimizer)


def run_evaluated(
    builder: TraceBuilder, workload: Workload, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any
) -> Trace:
    """Returns the trace of one evaluation: the loss of a batch, without gradients, beside the optimizer's state.

    What the model returns is let go once its loss is there, as the Trainer of transformers does where it computes no
    metrics (trainer.py, `prediction_step` with `prediction_loss_only`).

    Args:
        builder: has recorded the training steps before.

    Raises:
        TraceError: the workload's loss does not call the model.
    """
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    builder.start_step(optimizer)
    try:
        with torch.no_grad():
            workload.loss(model, batch)
        step = builder.finish_step(optimizer, is_evaluation=True)
    finally:
        builder.cancel_step()
        for module, is_training in modes:
            module.training = is_training
    return msgspec.structs.replace(builder.trace(optimizer), steps=(step,))
