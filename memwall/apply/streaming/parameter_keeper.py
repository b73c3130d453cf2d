"""Where a session's parameters are: in memory until a step or a plan moves them, and carried over between plans."""

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from memwall.apply.memory.allocator import AllocatorHandler
from memwall.apply.optimizer_state.open_on_disk import OpenOnDisk
from memwall.apply.streaming.building import Building, leaves_no_room
from memwall.apply.streaming.building_on_device import building_on_device
from memwall.apply.streaming.gradients import StandsFor
from memwall.apply.streaming.open_streaming import (
    hooked,
    open_disk_tier,
    open_parameter_streaming,
    why_not_streamed,
)
from memwall.apply.streaming.parameter_streaming import ParameterStreaming
from memwall.apply.streaming.parameter_tier import ParameterTier
from memwall.apply.streaming.places import HostPlace
from memwall.apply.streaming.room_in_memory import coming_bytes_of, give_back, lacks_room
from memwall.apply.streaming.stream_units import hooked_parameters
from memwall.errors import ApplyError, MemwallError, StoreError
from memwall.machine.limits import memory_limit_bytes
from memwall.machine.meter import CudaMeter, meter_of
from memwall.planning.techniques.parameters import MIN_PARAMETER_BYTES, ParameterPlacement, parameter_window_bytes
from memwall.trace.optimizers import Optimizers
from memwall.units import format_bytes

_log = logging.getLogger(__name__)


class ParameterKeeper:
    """Holds the parameters of one model, or nothing.

    Args:
        disk: directory; None for the default one.
        capacity_bytes: what a plan may use of it.
    """

    def __init__(self, disk: str | None, capacity_bytes: int | None) -> None:
        self._disk, self._capacity_bytes = disk, capacity_bytes
        self._opened = OpenOnDisk[ParameterStreaming]()
        self._building: Building | None = None
        self.watched = ""
        """Names the kind of device whose models are built by a script that is watched: no budget has to have room for
        that."""
        self._was_built_there = False
        self.built_from_bytes = 0
        """Says from which budget on models that were built on disk are built in memory; 0 where they were."""
        self.stays_from_bytes = 0
        """Says from which budget on the step that was to be recorded keeps parameters and gradients in memory."""

    @property
    def _streaming(self) -> ParameterStreaming | None:
        return self._opened.held

    @property
    def is_open(self) -> bool:
        """Says whether parameters have a place on disk, or may be shown from there."""
        return self._opened.held is not None

    @property
    def failure(self) -> MemwallError | None:
        """Is the first error in a backward."""
        return self._streaming.failure if self._streaming is not None else None

    @property
    def away_bytes(self) -> int:
        """Counts the bytes of parameters that have their place on disk."""
        return self._streaming.away_bytes if self._streaming is not None else 0

    @property
    def absent_bytes(self) -> int:
        """Counts those of these that are not in memory now."""
        streaming = self._streaming
        return 0 if streaming is None else streaming.away_bytes - streaming.resident_bytes

    @property
    def why_given_up(self) -> str:
        """Returns why all of them stay in memory by now; "" where they do not, or nothing is known of it."""
        return "" if self._streaming is None else self._streaming.why_given_up

    @property
    def others_absent_bytes(self) -> int:
        """Counts the bytes of other models' parameters that were built on disk and are not in memory now."""
        return 0 if self._streaming is None else self._streaming.others_absent_bytes

    @property
    def num_spilled(self) -> int:
        """Says how many gradients have left memory, or terms of them."""
        return 0 if self._streaming is None else self._streaming.tier.num_spilled

    def watch_building(
        self, budget_bytes: int, allocator: AllocatorHandler, host_limit: Callable[[], int] | None = None
    ) -> None:
        """Has parameters that would not fit leave as they are made, until the model is called.

        Args:
            host_limit: says how much host memory may be taken, of a run on CUDA; None where the disk takes them.
        """
        window_bytes = parameter_window_bytes(budget_bytes)
        self.watched = "cpu" if host_limit is None else "cuda"
        if host_limit is not None:
            self._building = building_on_device(budget_bytes, window_bytes, host_limit)
            return

        def opened() -> ParameterTier:
            _log.info("parameters go to disk as they are made: %s have no room for them", format_bytes(budget_bytes))
            allocator.apply_tight(budget_bytes)
            return open_disk_tier(
                disk=self._disk,
                capacity_bytes=self._capacity_bytes,
                window_bytes=window_bytes,
                min_bytes=MIN_PARAMETER_BYTES,
            )

        self._building = Building(leaves_no_room(budget_bytes, window_bytes), opened)

    def end_building(self) -> None:
        """Lets parameters that are made from now on stay where they are made."""
        if self._building is not None:
            self._building.end()

    def end_showing(self) -> None:
        """Lets go of what is shown, between two steps (`ParameterTier.end_showing`)."""
        if self._streaming is not None:
            self._streaming.end_showing()

    @property
    def shown_bytes(self) -> int:
        """Counts what the system has in memory now to show what is on disk, and can take back."""
        return 0 if self._streaming is None else self._streaming.tier.shown_bytes

    def await_writes(self) -> None:
        """Returns once what is on its way to the disk takes no memory any more.

        Raises:
            StoreError: a transfer failed.
        """
        if self._streaming is not None:
            self._streaming.tier.writes.drain()

    def around_step(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        """Returns an optimizer's step below its hooks that brings in the parameters it steps while they are away."""

        def step(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
            streaming = self._streaming
            (inner if streaming is None else streaming.around_step(inner))(optimizer, *args, **kwargs)

        return step

    def place(self, model: nn.Module, action: ParameterPlacement, *, host_limit_bytes: int = 0) -> None:
        """Puts parameters where a plan has them, from wherever they are.

        Args:
            host_limit_bytes: the most host memory to take, for parameters on CUDA.

        Raises:
            ApplyError: this model cannot have its parameters there.
            StoreError: the directory is missing, read-only, full, or a RAM disk.
        """
        if self._streaming is None:
            reason = self._why_not_streamed(model, None) or _elsewhere(model, action)
            if reason is not None:
                raise ApplyError(
                    f"the plan keeps parameters on the {action.tier}, which cannot be done here: {reason}; make a plan "
                    "without that, for a larger budget"
                )
            self._open(model, action.blocks, action.window_bytes, action.min_bytes, host_limit_bytes=host_limit_bytes)
        if self._streaming is not None:
            self._streaming.let_stay(action.staying)

    def spill_recorded(
        self,
        model: nn.Module,
        optimizers: Optimizers,
        allocator: AllocatorHandler,
        *,
        budget_bytes: int,
        host_limit_bytes: int = 0,
    ) -> bool:
        """Has a step that is to be recorded keep its parameters away, if the budget has no room for gradients.

        Args:
            host_limit_bytes: the most host memory to take, for parameters on CUDA.

        Returns:
            Whether they are away.
        """
        if self._streaming is not None:  # a step that is recorded once more
            return True
        coming_bytes = coming_bytes_of(model, self.built_bytes)
        lacks = lacks_room(model, allocator, budget_bytes, coming_bytes)
        self.stays_from_bytes = meter_of(model).now_bytes() + coming_bytes
        if not lacks:
            self.bring_back()
            return False
        reason = self._why_not_streamed(model, optimizers)
        try:
            if reason is None:
                whole_bytes = sum(parameter.nbytes for parameter in model.parameters())
                window_bytes = parameter_window_bytes(whole_bytes)
                self._open(model, None, window_bytes, MIN_PARAMETER_BYTES, host_limit_bytes=host_limit_bytes)
                give_back(model, allocator)
                if not self.away_bytes:
                    reason = "all of them share it with other tensors, or are small"
        except (ApplyError, StoreError) as error:
            reason = str(error)
        if reason is not None:
            self.bring_back_within(model, budget_bytes, reason)
            _log.info("the first step keeps parameters and gradients in memory: %s", reason)
        return reason is None

    def follow(self, stands_for: StandsFor | None) -> None:
        """Says whom to tell what stands for a gradient that has left, while a step is recorded."""
        if self._streaming is not None:
            self._streaming.tier.stands_for = stands_for

    def set_proving(self, is_proving: bool) -> None:
        """Has parameters and gradients that leave from now on compared with what comes back, or no longer."""
        if self._streaming is not None:
            self._streaming.tier.place.set_proving(is_proving)

    def bring_back(self) -> None:
        """Brings all parameters and gradients into memory again; nothing stays on disk.

        Raises:
            StoreError: some cannot be read back, and no step has failed for that reason before.
        """
        self._opened.close()
        tier = self._take_built()
        if tier is not None:
            tier.close()

    def bring_back_within(self, model: nn.Module, budget_bytes: int, reason: str) -> None:
        """Does what `bring_back` does, where parameters cannot stay on disk for a reason.

        Above the budget, too: the step is recorded there, and the refusal after it names a budget that would do.

        Raises:
            ApplyError: the machine has no room for those that were built there.
            StoreError: see `bring_back`.
        """
        coming_bytes = self.built_bytes
        if not coming_bytes and self._was_built_there:
            coming_bytes = self.absent_bytes + self.others_absent_bytes
        meter = meter_of(model)
        needed_bytes = meter.now_bytes() + coming_bytes
        there_are_bytes = meter.total_bytes if isinstance(meter, CudaMeter) else memory_limit_bytes()
        if coming_bytes and needed_bytes > max(budget_bytes, there_are_bytes):
            where = "host memory" if meter.device == "cuda" else "disk"
            raise ApplyError(
                f"parameters went to {where} while the script built them, since {format_bytes(budget_bytes)} have no "
                f"room for them, and cannot stay there: {reason}; give a budget above "
                f"{format_bytes(needed_bytes, rounding='up')}"
            )
        self.bring_back()

    def moved_bytes(self) -> tuple[int, int]:
        """Returns the bytes written to disk and read from it since this was asked last."""
        return self._opened.moved_bytes()

    def _open(
        self,
        model: nn.Module,
        blocks: tuple[str, ...] | None,
        window_bytes: int,
        min_bytes: int,
        *,
        host_limit_bytes: int = 0,
    ) -> None:
        self._opened.hold(
            open_parameter_streaming(
                model,
                disk=self._disk,
                capacity_bytes=self._capacity_bytes,
                host_limit_bytes=host_limit_bytes,
                window_bytes=window_bytes,
                min_bytes=min_bytes,
                blocks=blocks,
                has_root=False,  # the session comes in when the model is being called
                built=self._take_built(),
            )
        )

    @property
    def pinned_bytes(self) -> int:
        """Counts the host memory that is pinned for parameters of a device, and their gradients."""
        building = None if self._building is None else self._building.tier
        tier = building if self._streaming is None else self._streaming.tier
        return tier.place.pinned_bytes if tier is not None and isinstance(tier.place, HostPlace) else 0

    @property
    def built_bytes(self) -> int:
        """Counts the bytes of parameters that left while they were built and are not in memory now."""
        tier = None if self._building is None else self._building.tier
        return 0 if tier is None else tier.num_bytes - tier.resident_bytes

    def _take_built(self) -> ParameterTier | None:
        """Returns what has parameters that were built on disk; the building is over then."""
        building, self._building = self._building, None
        if building is None:
            return None
        self.built_from_bytes = building.stays_from_bytes
        building.end()
        self._was_built_there = building.tier is not None
        return building.tier

    def _why_not_streamed(self, model: nn.Module, optimizers: Optimizers) -> str | None:
        """Returns why not, before anything of this keeper hooks parameters itself."""
        return why_not_streamed(model, optimizers) or hooked(name for name, _ in hooked_parameters(model))


def _elsewhere(model: nn.Module, action: ParameterPlacement) -> str | None:
    """Returns None if a model's parameters are above the tier of the plan, else what they are on."""
    devices = {parameter.device.type for parameter in model.parameters()}
    above = "cuda" if action.tier == "host" else "cpu"
    return None if devices <= {above} else f"its parameters are on {', '.join(sorted(devices))}, not on {above}"
