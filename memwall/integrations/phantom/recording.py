"""Records a step on a phantom CUDA device, within a process of its environment: torch's own CUDA build runs.

The device's memory is address space: model and batches are made as fake tensors, and get room on the device without a
byte in host memory, so that a model larger than this machine is recorded, too.
"""

from collections.abc import Callable
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from memwall.integrations.phantom.values import DeviceValues, PhantomValues
from memwall.machine.hardware import Hardware
from memwall.patches import Patches
from memwall.predict.cuda.autocast_lists import HeardAutocast
from memwall.predict.cuda.live_cuda import as_plain
from memwall.predict.cuda.own_blocks import OwnBlocks, with_own_blocks
from memwall.predict.roofline import Roofline
from memwall.torch_internals.modules import own_buffers, own_parameters
from memwall.torch_internals.trees import tree_flatten, tree_map
from memwall.trace.fake import MOST_MICRO_BATCHES, RecordedRun, fake_run
from memwall.trace.fakes.fake_results import biases_in_place
from memwall.trace.records import Trace
from memwall.trace.seeding import evaluated_after
from memwall.trace.trace_builder import TraceBuilder, run_recorded
from memwall.trace.workload import Workload

_NUM_STEPS = 2


def record_on_phantom(
    workload: Workload,
    eval_batch: Callable[[], Any],
    hardware: Hardware,
    *,
    num_micro_batches: int = 1,
    mask_share: float | None = None,
) -> RecordedRun:
    """Records two training steps and an evaluation on the phantom device that this process has.

    Args:
        eval_batch: makes the batch that is evaluated.
        num_micro_batches: forwards and backwards in a step; at most two are recorded, since further ones are alike.
        mask_share: share of a mask's elements taken to be true where the step selects rows by one that is not known.

    Raises:
        TraceError: the workload does not run a whole training step, or hangs on values that are not known.
    """
    with fake_run(workload, [workload.make_batch, eval_batch], values_kind=DeviceValues) as run:
        fakes, model = run.batches, run.model
        followed = [*model.buffers(), *(leaf for leaf in tree_flatten(fakes)[0] if isinstance(leaf, Tensor))]
        is_seeding = run.is_seeding[-1]
        known = {id(fake): run.values.value_of(fake) for fake in followed}
    device = torch.device("cuda", 0)
    place = _Place()
    values = PhantomValues(place.now, mask_share)
    move = _Mover(device, values, known)
    move.model(model)
    batch, evaluated = (tree_map(move.tensor, fake) for fake in fakes)
    autocast = HeardAutocast(of="cpu", on="cuda")
    with Patches("records a step on the phantom device") as patches, values, biases_in_place():
        autocast.follow(patches)
        optimizer = workload.make_optimizer(model)
        blocks = OwnBlocks(device)
        place.builder = builder = TraceBuilder([model], seconds_of=Roofline(hardware), workspaces=blocks)
        trained = builder, workload, model, optimizer
        num_micro_batches = min(num_micro_batches, MOST_MICRO_BATCHES)
        training = run_recorded(*trained, batch, num_steps=_NUM_STEPS, num_micro_batches=num_micro_batches)
        evaluation, failure = evaluated_after(
            *trained,
            batch,
            evaluated,
            is_seeding=is_seeding,
            num_micro_batches=num_micro_batches,
            seed=lambda: torch.cuda.manual_seed_all(0),
        )
    steps = training.steps if evaluation is None else (*training.steps, *evaluation.steps)
    whole = with_own_blocks(steps, blocks.take(), device)

    def finished(trace: Trace, begin: int) -> Trace:
        mine = whole[begin : begin + len(trace.steps)]
        return as_plain(msgspec.structs.replace(trace, steps=mine, is_phantom=True, autocast=autocast.precision))

    return RecordedRun(
        training=finished(training, 0),
        evaluation=None if evaluation is None else finished(evaluation, len(training.steps)),
        failure=failure,
    )


class _Place:
    """Tells what runs now, for messages."""

    builder: TraceBuilder | None = None

    def now(self) -> str:
        place = self.builder.place if self.builder is not None else ""
        return place or "making the optimizer"


class _Mover:
    """Gives fake tensors room on a device; one that is met twice, as tied weights are, gets it once."""

    def __init__(self, device: torch.device, values: PhantomValues, known: dict[int, Tensor | None]) -> None:
        self._device, self._values, self._known = device, values, known
        self._moved: dict[int, Tensor] = {}
        self._fakes: list[Tensor] = []
        """Keeps them alive, so that no other takes the place of one."""

    def model(self, model: nn.Module) -> None:
        for module in model.modules():
            for table in (own_parameters(module), own_buffers(module)):
                for name, fake in table.items():
                    if fake is not None:
                        table[name] = self.tensor(fake)
        model.to(self._device)  # recurrent layers lay their weights in one buffer

    def tensor(self, fake: Any) -> Any:
        """Returns a tensor of the same layout on the device; what is no tensor stays."""
        if not isinstance(fake, Tensor):
            return fake
        if id(fake) not in self._moved:
            self._fakes.append(fake)
            place = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device=self._device)
            if isinstance(fake, nn.Parameter):
                noted = vars(fake)
                place = nn.Parameter(place, requires_grad=fake.requires_grad)
                vars(place).update({name: value for name, value in noted.items() if name not in vars(place)})
            self._moved[id(fake)] = place
            real = self._known.get(id(fake))
            if real is not None:
                self._values.know(place, real)
        return self._moved[id(fake)]
