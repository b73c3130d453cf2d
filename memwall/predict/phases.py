"""Peaks of a run on a device, its phases outside the training steps among them: build, evaluate, save, resume.

Read in transformers 5.23 (trainer.py), accelerate 1.15 (data_loader.py) and torch 2.13; a loop of one's own that does
the same needs the same. All of it is simulated.
"""

from collections.abc import Sequence

import msgspec
from msgspec import Struct

from memwall.predict.cuda_allocator.allocator_events import EventTrace, events_of_steps
from memwall.predict.cuda_allocator.allocator_settings import AllocatorSettings
from memwall.predict.cuda_allocator.step_peaks import NUM_STEADY, StepPeak, event_peaks, step_peaks
from memwall.predict.cuda_allocator.torch_releases import VersionProfile
from memwall.predict.host import batch_storages, host_bytes_of
from memwall.trace.records import Step, Storage


class PhasePeak(Struct, frozen=True, kw_only=True):
    """Holds the peaks of one phase. All simulated."""

    allocated_bytes: int
    """Blocks that the allocator has handed out at once."""
    reserved_bytes: int
    """Segments that the caching allocator holds, those of earlier phases among them."""
    host_bytes: int
    """Host memory of the process."""
    disk_bytes: int | None = None
    """Bytes that the phase writes to files."""


def with_waiting_batches(step: Step, num_batches: int) -> Step:
    """Returns the step of a Trainer that accumulates: batches of all its micro-batches are on the device throughout.

    Source: transformers/trainer.py, `_run_epoch` and `get_batch_samples`: before a step, `gradient_accumulation_steps`
    batches are fetched into a list that is kept until the next step's are there; accelerate/data_loader.py,
    `DataLoaderShard.__iter__`, has moved each to the device.
    """
    waiting = [
        msgspec.structs.replace(storage, birth=-1, dropped=len(step.ops), death=len(step.ops))
        for storage in batch_storages(step)
    ]
    return msgspec.structs.replace(step, storages=(*step.storages, *(waiting * (num_batches - 1))))


def waiting_bytes(step: Step, num_batches: int) -> int:
    """Returns the bytes that `with_waiting_batches` adds to a step."""
    return (num_batches - 1) * sum(storage.nbytes for storage in batch_storages(step))


def returned_bytes(evaluation: Step) -> int:
    """Returns the bytes of what the model returns when it evaluates a batch: the logits, mostly."""
    root = next((call for call in evaluation.calls if call.module == 0), None)
    outputs = () if root is None else root.outputs
    return sum(evaluation.storages[index].nbytes for index in outputs)


class Phases:
    """Holds the phases of a run as requests to the allocator, made once for all settings that they are simulated under.

    - build: the model alone.
    - first_step, steady_step: training, without anything in between.
    - eval: an evaluation between steady steps, and the one after it, which finds what it left cached.
    - save: what stands between steps; the state dicts refer to it (`torch.nn.Module.state_dict`,
      `torch.optim.Optimizer.state_dict`), copies are made on the host.
    - resume: model and optimizer state, before the first step. The weights are copied in place (`load_state_dict` of
      torch/nn/modules/module.py); the state comes to the device tensor by tensor, all of it before the first step
      (`_process_value_according_to_param_policy` of torch/optim/optimizer.py).

    Args:
        steps: a first and a steady one, translated.
        evaluation: translated; None leaves the phase out.
        after_evaluation: the training step that follows it, where that is not like the steady one.
        num_batches: micro-batches of a step, see `with_waiting_batches`.
        resumed: a steady step with all that stands after a model was built and a state dict was loaded; None for the
            steady one given.
    """

    def __init__(
        self,
        steps: tuple[Step, Step],
        evaluation: Step | None,
        *,
        after_evaluation: Step | None = None,
        num_batches: int = 1,
        resumed: Step | None = None,
    ) -> None:
        first, steady = (with_waiting_batches(step, num_batches) for step in steps)
        after = steady if after_evaluation is None else with_waiting_batches(after_evaluation, num_batches)
        loaded = steady if resumed is None else resumed
        self._host, self._loaded_host = host_bytes_of(steps[1]), host_bytes_of(loaded)
        self._evaluation_host = None if evaluation is None else host_bytes_of(evaluation)
        self.built = _events(_standing_alone(loaded, "parameter", "buffer"))
        self.resuming = _events(_standing_alone(loaded, "parameter", "buffer", "optimizer_state"))
        evaluated = (
            () if evaluation is None else (_between_steps(evaluation, steady), after, *([steady] * (NUM_STEADY - 1)))
        )
        self.run = _events(first, *([steady] * NUM_STEADY), *evaluated, _saved(steady, loaded))
        """Holds the steps of the run in order: a first and steady ones; evaluated, that and steady ones after it; and
        what stands between steps at the end."""

    def peaks(
        self, profile: VersionProfile, *, settings: AllocatorSettings | None = None, capacity_bytes: int | None = None
    ) -> dict[str, PhasePeak] | None:
        """Returns the peaks of each phase, in the order in which they come.

        Args:
            profile: release whose allocator is simulated.
            settings: of the allocator; None for torch's defaults.
            capacity_bytes: what the device can give to the allocator; None: without end.

        Returns:
            None if a request is out of memory even after the cache has been given back.
        """

        def simulated(events: EventTrace) -> tuple[StepPeak, ...] | None:
            return event_peaks(events, profile, settings=settings, capacity_bytes=capacity_bytes)

        host = self._host
        built, run, resuming = simulated(self.built), simulated(self.run), simulated(self.resuming)
        if built is None or run is None or resuming is None:
            return None
        (first, *steps), between = run[:-1], run[-1]
        found = {
            "build": _peak(built, host.build_peak_bytes),
            "first_step": _peak([first], host.step_peak_bytes),
            "steady_step": _peak(steps[:NUM_STEADY], host.step_peak_bytes),
        }
        if self._evaluation_host is not None:
            evaluated = steps[NUM_STEADY:]
            found["eval"] = PhasePeak(
                allocated_bytes=evaluated[0].allocated_bytes,
                reserved_bytes=max(peak.reserved_bytes for peak in evaluated),
                host_bytes=max(host.step_peak_bytes, self._evaluation_host.step_peak_bytes),
            )
        found["save"] = PhasePeak(
            allocated_bytes=between.allocated_bytes,
            reserved_bytes=between.reserved_bytes,
            host_bytes=host.save_peak_bytes,
            disk_bytes=host.weights_bytes + host.state_bytes,
        )
        found["resume"] = _peak(resuming, self._loaded_host.resume_peak_bytes)
        return found


def _events(*steps: Step) -> EventTrace:
    return events_of_steps(steps, num_repeats=1)


def evaluation_bytes(evaluation: Step, steady: Step, profile: VersionProfile) -> int:
    """Returns what the allocator reserves for an evaluation beside what stands between steps, with nothing cached.

    Args:
        evaluation, steady: translated.
    """
    peaks = step_peaks((_between_steps(evaluation, steady),), profile)
    assert peaks is not None, "memory without end"
    return max(peak.reserved_bytes for peak in peaks)


def _peak(peaks: Sequence[StepPeak], host_bytes: int) -> PhasePeak:
    return PhasePeak(
        allocated_bytes=max(peak.allocated_bytes for peak in peaks),
        reserved_bytes=max(peak.reserved_bytes for peak in peaks),
        host_bytes=host_bytes,
    )


def _standing_alone(steady: Step, *categories: str) -> Step:
    """Returns a step in which nothing happens, with what stands of these categories; of all if none is given."""
    storages = tuple(
        msgspec.structs.replace(storage, birth=-1, dropped=1, death=1)
        for storage in _outliving(steady)
        if not categories or storage.category in categories
    )
    return msgspec.structs.replace(steady, ops=steady.ops[:1], storages=storages, saved=(), calls=(), marks=())


def _saved(steady: Step, loaded: Step) -> Step:
    """Returns what stands between steps while the model's state dict is held: all parameters are there for it."""
    between = _standing_alone(steady)
    others = (storage for storage in between.storages if storage.category != "parameter")
    parameters = _standing_alone(loaded, "parameter").storages
    return msgspec.structs.replace(between, storages=(*others, *parameters))


def _between_steps(evaluation: Step, steady: Step) -> Step:
    """Adds to the evaluation what training leaves standing beside the model: workspaces, state, and the last batches.

    An evaluation does not show where the optimizer's state is.
    """
    num_ops = len(evaluation.ops)
    own = tuple(
        storage
        for storage in evaluation.storages
        if not (storage.death >= num_ops and _is_workspace(storage)) and storage.category != "optimizer_state"
    )
    left = tuple(
        msgspec.structs.replace(storage, birth=-1, dropped=num_ops, death=num_ops)
        for storage in _outliving(steady)
        if storage.category in ("input", "optimizer_state") or _is_workspace(storage)
    )
    return msgspec.structs.replace(evaluation, storages=(*own, *left))


def _is_workspace(storage: Storage) -> bool:
    """Tells whether it is a library's own, as those of cuBLAS, when it outlives a step: no operation made it."""
    return storage.category == "temporary" and storage.module < 0 and storage.phase == "other"


def _outliving(step: Step) -> list[Storage]:
    """Returns what stands on the device after a steady step: what stood before it, or has taken the place of such.

    What dies after the last operation, as gradients do, dies at the same number as what lives on.
    """
    num_ops = len(step.ops)
    last = [storage for storage in step.storages if storage.death >= num_ops and storage.device_type == "cuda"]
    found = [storage for storage in last if storage.birth < 0 or storage.category == "optimizer_state"]
    replaced = {(s.nbytes, s.dtype) for s in step.storages if s.birth < 0 and s.death < num_ops and _is_raw(s)}
    made_anew = (s for s in last if s.birth >= 0 and _is_raw(s) and (s.nbytes, s.dtype) in replaced)
    return [*found, *(msgspec.structs.replace(storage, category="input") for storage in made_anew)]


def _is_raw(storage: Storage) -> bool:
    """Tells whether it may be a random state, which a step finds or makes anew."""
    return storage.dtype == "uint8" and storage.category in ("input", "temporary", "activation")
