"""Records a training step on fake tensors: shapes, dtypes and storages without a byte in them.

The step's own Python runs, so that control flow is real; the recorder is the live one. Tensors are fake on `cpu`, since
fake `cuda` tensors don't work in a CPU build of torch (2.13: "not linked with support for cuda devices" at the first
view); what a CUDA device does differently is put in afterwards.
"""

import copy
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Literal, NamedTuple

import torch
from msgspec import Struct
from torch import Tensor, nn

from memwall.errors import UsageError
from memwall.machine.collector import without_collector
from memwall.patches import Patches
from memwall.torch_internals.fake import (
    FakeCopyMode,
    FakeTensor,
    FakeTensorMode,
    quiet_fake_tensors,
    without_truncated_sampling,
)
from memwall.torch_internals.trees import tree_map
from memwall.trace.fakes.fake_results import biases_in_place
from memwall.trace.fakes.fake_values import KnownValues
from memwall.trace.op_work import OpWork
from memwall.trace.optimizers import leaves_foreach_to_torch
from memwall.trace.records import Trace
from memwall.trace.recurrent import flatten_weights
from memwall.trace.seeding import drawing_alike, evaluated_after, made_hearing
from memwall.trace.trace_builder import TraceBuilder, run_recorded
from memwall.trace.workload import Workload
from memwall.trace.workspaces import Workspaces

_WHY = "records a step on fake tensors"
# The second micro-batch finds the first one's gradients; all further ones are like it.
MOST_MICRO_BATCHES = 2
_NUM_STEPS = 2


class RecordedRun(Struct, frozen=True, kw_only=True):
    """Holds training steps, and the evaluation after them."""

    training: Trace
    evaluation: Trace | None
    """A trace of the evaluation of one batch; None where that failed, or was not asked for.

    Where the training step after it is not like the others, it is the trace's second step.
    """
    failure: str = ""
    """Why there is no evaluation; "" where there is one, or none was asked for."""


def record_fake_run(
    workload: Workload,
    eval_batch: Callable[[], Any] | None,
    *,
    num_micro_batches: int = 1,
    seconds_of: Callable[[OpWork], float] | None = None,
    mask_share: float | None = None,
    workspaces: Workspaces | None = None,
    choices: AbstractContextManager[object] | None = None,
) -> RecordedRun:
    """Records two training steps and an evaluation on fake tensors, for a CUDA device.

    Args:
        eval_batch: makes the batch that is evaluated; None evaluates nothing.
        num_micro_batches: forwards and backwards in a step; at most two are recorded, since further ones are alike.
        seconds_of, mask_share, workspaces, choices: as in `fake_run`.

    Raises:
        TraceError: the workload does not run a whole training step, or needs values that fake tensors don't have.
        UsageError: `mask_share` is no share.
    """
    with fake_run(
        workload,
        [workload.make_batch, *(() if eval_batch is None else (eval_batch,))],
        seconds_of=seconds_of,
        target="cuda",
        mask_share=mask_share,
        workspaces=workspaces,
        choices=choices,
    ) as run:
        batch, *evaluated = run.batches
        num_micro_batches = min(num_micro_batches, MOST_MICRO_BATCHES)
        trained = run.builder, workload, run.model, run.optimizer
        training = run_recorded(*trained, batch, num_steps=_NUM_STEPS, num_micro_batches=num_micro_batches)
        if not evaluated:
            return RecordedRun(training=training, evaluation=None)
        evaluation, failure = evaluated_after(
            *trained, batch, *evaluated, is_seeding=run.is_seeding[-1], num_micro_batches=num_micro_batches
        )
    return RecordedRun(training=training, evaluation=evaluation, failure=failure)


class FakeRun(NamedTuple):
    """Holds a workload on fake tensors, ready to be recorded."""

    builder: TraceBuilder
    model: nn.Module
    optimizer: torch.optim.Optimizer
    batches: tuple[Any, ...]
    is_seeding: tuple[bool, ...]
    """Whether making each of the batches has seeded the random generators of CUDA devices."""
    values: KnownValues
    """Those of the model's buffers and of the batches that are known, within."""


@contextmanager
def fake_run(
    workload: Workload,
    batches: Sequence[Callable[[], Any]],
    *,
    seconds_of: Callable[[OpWork], float] | None = None,
    target: Literal["cpu", "cuda"] = "cpu",
    mask_share: float | None = None,
    workspaces: Workspaces | None = None,
    choices: AbstractContextManager[object] | None = None,
    values_kind: type[KnownValues] = KnownValues,
) -> Iterator[FakeRun]:
    """Runs a workload on fake tensors: within, nothing that torch makes has bytes.

    Args:
        batches: what makes each of the batches that the run is fed with.
        seconds_of: seconds of an operation on the target; None leaves every time at 0.
        target: device type that torch's Python is to decide for: on CUDA optimizers default to foreach.
        mask_share: share of a mask's elements taken to be true where the step selects rows by one whose values hang
            on weights, as a mixture of experts does; None makes that an error.
        workspaces: what operators allocate for themselves on the target.
        choices: what the step is run in, as by a target whose functions choose otherwise.
        values_kind: what follows values, where tensors may be asked for on other devices than the CPU.

    Raises:
        UsageError: `mask_share` is no share.
    """
    if mask_share is not None and not 0 <= mask_share <= 1:
        raise UsageError(f"mask_share is {mask_share}; expected a share between 0 and 1")
    place = _Place()
    with ExitStack() as contexts:
        contexts.enter_context(without_collector())
        contexts.enter_context(drawing_alike())
        contexts.enter_context(quiet_fake_tensors())
        # Without fallback: it would run kernels for real, on as many zeros as the tensors pretend to have.
        fake_mode = contexts.enter_context(FakeTensorMode(allow_non_fake_inputs=True, allow_fallback_kernels=False))
        values = contexts.enter_context(values_kind(place.now, mask_share))
        contexts.enter_context(_copied_as_fake())
        contexts.enter_context(_converted_in_place())
        contexts.enter_context(biases_in_place())
        with without_truncated_sampling():
            model = _made_fake(workload.make_model(), fake_mode)
        contexts.enter_context(_seen_as_eager())  # now that the model has imported its libraries
        if target == "cuda":
            flatten_weights(model)
        values.forget(model.parameters())
        builder = TraceBuilder([model], seconds_of=seconds_of or (lambda _: 0.0), workspaces=workspaces)
        place.builder = builder
        place.outside = "making the optimizer"
        optimizer = workload.make_optimizer(model)
        if target == "cuda":
            _choose_foreach(optimizer)
        place.outside = "making the batch"
        made = [made_hearing(make) for make in batches]
        fakes = [tree_map(lambda value: _with_values(value, fake_mode, values), batch) for batch, _ in made]
        if choices is not None:
            contexts.enter_context(choices)
        yield FakeRun(builder, model, optimizer, tuple(fakes), tuple(seeds for _, seeds in made), values)


class _Place:
    """Tells what runs now, for messages: known only when something fails."""

    def __init__(self) -> None:
        self.builder: TraceBuilder | None = None
        self.outside = "making the model"

    def now(self) -> str:
        place = self.builder.place if self.builder is not None else ""
        return place or self.outside


def _choose_foreach(optimizer: torch.optim.Optimizer) -> None:
    """Chooses the implementation that torch picks on CUDA where the workload leaves it open.

    Source: torch/optim/optimizer.py, `_default_to_fused_or_foreach`, and its callers (2.13).
    """
    if not leaves_foreach_to_torch(optimizer):
        return
    for group in optimizer.param_groups:
        is_open = "foreach" in group and group["foreach"] is None and group.get("fused") is None
        has_tensor_rate = isinstance(group.get("lr"), Tensor) and not group.get("capturable")
        if is_open and not has_tensor_rate and not group.get("differentiable"):
            group["foreach"] = True


def _made_fake(model: nn.Module, fake_mode: FakeTensorMode) -> nn.Module:
    """Returns the model, or where it was made before, a copy of it without its bytes."""
    if all(isinstance(tensor, FakeTensor) for tensor in (*model.parameters(), *model.buffers())):
        return model
    with FakeCopyMode(fake_mode):
        return copy.deepcopy(model)


def _with_values(value: Any, fake_mode: FakeTensorMode, values: KnownValues) -> Any:
    """Returns a fake tensor for one of the batch, with its values if these are integers or a mask; else the value."""
    if not isinstance(value, Tensor):
        return value
    fake = value
    if not isinstance(value, FakeTensor):
        fake = fake_mode.from_tensor(value)
        values.know(fake, value)
    if fake.is_floating_point():
        values.forget([fake])
    return fake


@contextmanager
def _copied_as_fake() -> Iterator[None]:
    """Has `copy.deepcopy` clone fake tensors; torch's own would read as many bytes as they pretend to have.

    Source: torch/_tensor.py, `Tensor.__deepcopy__` (2.13), which takes a buffer made from a value for a real tensor.
    """

    def copied(tensor: FakeTensor, memo: dict[int, Any]) -> Tensor:
        if id(tensor) not in memo:
            with torch.no_grad():
                memo[id(tensor)] = clone = tensor.clone().requires_grad_(tensor.requires_grad)
            for name, value in vars(tensor).items():  # what a user, or nn.Parameter, has noted on it
                if name not in vars(clone):
                    setattr(clone, name, copy.deepcopy(value, memo))
        found: Tensor = memo[id(tensor)]
        return found

    with Patches(_WHY) as patches:
        patches.replace(FakeTensor, "__deepcopy__", copied)
        yield


@contextmanager
def _converted_in_place() -> Iterator[None]:
    """Has `model.to(dtype)` give fake parameters other memory, as real ones; torch would swap them, and cannot.

    Source: torch/nn/modules/module.py, `Module._apply` (2.13): fake parameters go through `torch.utils.swap_tensors`,
    which refuses those that anything refers to weakly, as the fake mode itself does.
    """

    def swapped(swap: Callable[[Tensor, Tensor], None], tensor: Tensor, other: Tensor) -> None:
        if isinstance(tensor, FakeTensor) and isinstance(other, FakeTensor):
            tensor.data = other.detach()
        else:
            swap(tensor, other)

    with Patches(_WHY) as patches:
        patches.wrap(torch.utils, "swap_tensors", swapped)
        yield


@contextmanager
def _seen_as_eager() -> Iterator[None]:
    """Has libraries take fake tensors for eager ones; for those of a compiler they take other branches.

    Transformers 5 (`utils/import_utils.py`, `is_tracing`) would build attention masks that an eager step leaves out.
    """
    module: Any = sys.modules.get("transformers.utils.import_utils")
    with Patches(_WHY) as patches:
        if hasattr(module, "is_fake_tensor"):
            patches.wrap(module, "is_fake_tensor", lambda _, value: False)
        yield
