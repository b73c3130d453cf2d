"""Where a session's optimizer state is, and how: in memory until a step or a plan moves it or puts it into 8 bits.

It is carried over between plans.
"""

import gc
import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from memwall.apply.memory.allocator import AllocatorHandler
from memwall.apply.optimizer_state.bucketed_state import OptimizerState
from memwall.apply.optimizer_state.cpu_step import CpuStep
from memwall.apply.optimizer_state.low_bit import LowBitMoments, LowBitOptimizerState
from memwall.apply.optimizer_state.open_on_disk import OpenOnDisk
from memwall.apply.optimizer_state.open_state import (
    device_of,
    open_cpu_step,
    open_optimizer_state,
)
from memwall.apply.optimizer_state.pinned import PinnedSpace
from memwall.apply.optimizer_state.room_for_state import lacks_room
from memwall.apply.optimizer_state.shares import expected_state_bytes
from memwall.errors import ApplyError, MemwallError, OffloadIOError, StoreError
from memwall.patches import undo_all
from memwall.planning.location import MOST_PLACED
from memwall.planning.techniques.optimizer_state import MIN_STATE_BYTES, OptimizerPlacement, bucket_choices
from memwall.store.buckets import DiskSpace
from memwall.trace.optimizers import counted, joint_name
from memwall.units import format_bytes

_log = logging.getLogger(__name__)

_KEPT = {"disk": DiskSpace.kept, "host": PinnedSpace.kept}


class StateKeeper:
    """Holds the state of the optimizers that step a model, or nothing.

    Args:
        disk: directory; None for the default one.
        capacity_bytes: what a plan may use of it.
        around_step: wraps the step of a few parameters, to bring them in.
    """

    def __init__(
        self,
        disk: str | None,
        capacity_bytes: int | None,
        around_step: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda inner: inner,
    ) -> None:
        self._disk, self._capacity_bytes, self._around_step = disk, capacity_bytes, around_step
        self._every = [OpenOnDisk[OptimizerState | CpuStep]()]
        """Has one for each optimizer whose state is away; the first may hold nothing."""
        self._rests: list[weakref.ref[OpenOnDisk[OptimizerState | CpuStep]]] = []
        self._counted_bytes = (0, 0)
        self._low_bit: LowBitOptimizerState | None = None

    @property
    def _opened(self) -> OpenOnDisk[OptimizerState | CpuStep]:
        """Is that of the first optimizer, or of the only one."""
        return self._every[0]

    @property
    def _held(self) -> list[OptimizerState | CpuStep]:
        return [opened.held for opened in self._every if opened.held is not None]

    @property
    def _states(self) -> list[OptimizerState]:
        return [held for held in self._held if isinstance(held, OptimizerState)]

    @property
    def _resting(self) -> list[OpenOnDisk[OptimizerState | CpuStep]]:
        """Lists the state of optimizers that others have replaced, and that somebody holds: the others' is gone."""
        return [opened for one in self._rests if (opened := one()) is not None]

    def resting_bytes(self, tier: str) -> int:
        """Counts what the state of optimizers that others have replaced takes of a tier."""
        return sum(one.held.taken_bytes(tier) for one in self._resting if one.held is not None)

    @property
    def failure(self) -> MemwallError | None:
        """Is the first transfer that failed in a step."""
        held = self._held
        if not held and self._low_bit is None and not self._rests:
            return None  # as where a plan does nothing
        every = (*held, self._low_bit, *(one.held for one in self._resting))
        return next((kept.failure for kept in every if kept and kept.failure), None)

    @property
    def is_away(self) -> bool:
        """Says whether state is on disk, or would be if there were any."""
        return bool(self._held)

    @property
    def away_bytes(self) -> int:
        """Counts the state that is on disk now of the optimizers that step."""
        return sum(held.away_bytes for held in self._held)

    @property
    def num_low_bit(self) -> int:
        """Counts the tensors of state that are in 8 bits now."""
        return 0 if self._low_bit is None else self._low_bit.moments.num_closed

    def close_moments(self, optimizer: torch.optim.Optimizer) -> None:
        """Has the optimizer's moments in 8 bits; from disk they come a bucket at a time.

        Raises:
            ApplyError: it is not known how, or torchao is missing.
            StoreError: state cannot be read back.
        """
        if self._low_bit is not None:
            return
        if not self._states:  # it is with the CPU, or nowhere else
            self._opened.close()
        moments = LowBitMoments(optimizer)
        for state in self._states:
            state.on_return = moments.close
        undo_all([opened.close for opened in self._every])
        self._low_bit = LowBitOptimizerState(moments)

    def place(
        self, optimizers: Sequence[torch.optim.Optimizer], action: OptimizerPlacement, *, host_limit_bytes: int = 0
    ) -> None:
        """Puts the state where a plan has it, from wherever it is.

        Args:
            optimizers: those whose state it is; what may stay is of the first ones.
            host_limit_bytes: the most host memory to take, for parameters on CUDA.

        Raises:
            ApplyError: an optimizer cannot be stepped in parts, or its parameters are not on the plan's device.
            StoreError: the directory is missing, read-only, full, or a RAM disk; or the host has no room.
        """
        self._open_moments()
        if len(optimizers) > MOST_PLACED:
            raise ApplyError(
                f"{len(optimizers)} optimizers step the model ({counted(joint_name(optimizers))}), and the plan keeps "
                f"their state {_KEPT[action.tier]}, which can be had for {MOST_PLACED} at most: give a larger budget, "
                "or fewer optimizers"
            )
        resident_bytes = action.resident_bytes
        for number, optimizer in enumerate(optimizers):
            state = self._place(optimizer, action, resident_bytes, host_limit_bytes)
            if number + 1 < len(optimizers):
                resident_bytes = state.pass_resident_bytes_on()

    def _place(
        self, optimizer: torch.optim.Optimizer, action: OptimizerPlacement, resident_bytes: int, host_limit_bytes: int
    ) -> OptimizerState:
        opened = self._opened_for(optimizer)
        if opened.held is not None and opened.held.kept != _KEPT[action.tier]:
            opened.close()
        if isinstance(opened.held, OptimizerState):
            opened.held.end_recording()
            opened.held.settle(resident_bytes=resident_bytes, bucket_bytes=action.bucket_bytes)
            return opened.held
        with self._beside_resting():
            state, close = open_optimizer_state(
                optimizer,
                tier=action.tier,
                disk=self._disk,
                capacity_bytes=self._left_bytes(),
                host_limit_bytes=self._left_host_bytes(host_limit_bytes),
                resident_bytes=resident_bytes,
                bucket_bytes=action.bucket_bytes,
                min_bytes=action.min_bytes,
                around_step=self._around_step,
            )
        opened.hold((state, close))
        return state

    def _opened_for(self, optimizer: torch.optim.Optimizer) -> OpenOnDisk[OptimizerState | CpuStep]:
        """Returns what holds this optimizer's state, or will hold it."""
        every = (*self._every, *self._resting)
        its_own = [one for one in every if one.held is not None and one.held.optimizer is optimizer]
        if its_own and its_own[0] not in self._every:  # it steps again beside the one that had taken its place
            self._rests = [one for one in self._rests if one() is not its_own[0]]
            self._every.append(its_own[0])
        free = [one for one in self._every if one.held is None]
        if not its_own and not free:
            self._every += (free := [OpenOnDisk()])
        return (its_own or free)[0]

    def step_on_cpu(self, optimizer: torch.optim.Optimizer, *, bucket_bytes: int, host_limit_bytes: int) -> None:
        """Has the CPU step a device's parameters, beside their state in host memory; it comes from wherever it is.

        Args:
            bucket_bytes: of parameters that pass by at a time.
            host_limit_bytes: the most host memory to take.

        Raises:
            ApplyError: the CPU cannot step this optimizer, or its parameters are there already.
            StoreError: the host has no room.
        """
        self._open_moments()
        if isinstance(self._opened.held, CpuStep):
            # All of it is there already, and the device may have no room for it to pass through.
            self._opened.held.bucket_bytes = bucket_bytes
            return
        self._opened.close()
        limit_bytes = self._left_host_bytes(host_limit_bytes)
        with self._beside_resting():
            self._opened.hold(open_cpu_step(optimizer, bucket_bytes=bucket_bytes, limit_bytes=limit_bytes))

    def spill_recorded(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        allocator: AllocatorHandler,
        *,
        budget_bytes: int,
        coming_bytes: int = 0,
        used_bytes: int = 0,
        host_limit_bytes: int = 0,
        must: bool = False,
    ) -> bool:
        """Has a step that is being recorded keep its state on the tier below, if the budget has no room for it.

        Args:
            optimizers: those that are known by now; the state of all of them leaves, or of none.
            must: whatever room there is.
            coming_bytes: what the step makes before its optimizer runs.
            used_bytes: what else of the step is on the disk.
            host_limit_bytes: the most host memory to take, for parameters on CUDA.

        Returns:
            Whether the state is, or will be, there.
        """
        waiting = [optimizer for optimizer in optimizers if self._opened_for(optimizer).held is None]
        is_begun = len(waiting) < len(optimizers)
        if not must and not is_begun and not lacks_room(optimizers, allocator, budget_bytes - coming_bytes):
            return False
        sizes = [
            num_bytes
            for optimizer in optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
            if (num_bytes := expected_state_bytes(optimizer, parameter, group, MIN_STATE_BYTES, parameter.device))
        ]
        try:
            for optimizer in waiting:
                self._opened_for(optimizer).hold(
                    open_optimizer_state(
                        optimizer,
                        tier="disk" if device_of(optimizer).type == "cpu" else "host",
                        disk=self._disk,
                        capacity_bytes=self._left_bytes(used_bytes),
                        host_limit_bytes=self._left_host_bytes(host_limit_bytes),
                        resident_bytes=0,
                        bucket_bytes=bucket_choices(sizes)[0],
                        min_bytes=MIN_STATE_BYTES,
                        is_recorded=True,
                        around_step=self._around_step,
                    )
                )
        except (ApplyError, StoreError) as reason:
            _log.info("the first step keeps the optimizer's state in memory: %s", reason)
            self.bring_back()
            return False
        return True

    def turn_to(self, optimizer: torch.optim.Optimizer) -> None:
        """Leaves the state that is away where it is, and goes on with that of the optimizer that takes its own's place.

        Whoever steps one that was replaced finds its state, as it was, until `close`. What nobody holds is given up,
        with its place.
        """
        self.lay_to_rest()
        self.take_up([optimizer])
        if self._opened.held is None:
            gc.collect()  # an optimizer and what took its step over hold each other

    def lay_to_rest(self) -> None:
        """Leaves the state that is away where it is, for as long as somebody else holds its optimizer."""
        self._counted_bytes = self.moved_bytes()
        self._rests = [*map(weakref.ref, self._resting)]
        for opened in self._every:
            if opened.held is not None:
                opened.held.rest(opened)
                self._rests.append(weakref.ref(opened))
        self._every = [OpenOnDisk()]

    def take_up(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Goes on with the state of these, as far as it was laid to rest."""
        found = [one for one in self._resting if one.held is not None and one.held.optimizer in optimizers]
        self._every = found or [OpenOnDisk()]
        self._rests = [one for one in self._rests if one() not in found]

    def _left_bytes(self, used_bytes: int = 0) -> int | None:
        """Returns what may be taken of the disk beside that and what others hold there; None for no limit."""
        if self._capacity_bytes is None:
            return None
        return max(0, self._capacity_bytes - used_bytes - self._taken_bytes("disk"))

    def _left_host_bytes(self, limit_bytes: int) -> int:
        return max(0, limit_bytes - self._taken_bytes("host"))

    def _taken_bytes(self, tier: str) -> int:
        return self.resting_bytes(tier) + sum(held.taken_bytes(tier) for held in self._held)

    @contextmanager
    def _beside_resting(self) -> Iterator[None]:
        """Says of a lack of room what else is there."""
        try:
            yield
        except StoreError as error:
            held_bytes = self.resting_bytes("disk") + self.resting_bytes("host")
            if isinstance(error, OffloadIOError):
                raise
            others_bytes = sum(held.taken_bytes("disk") + held.taken_bytes("host") for held in self._held)
            if others_bytes and not held_bytes:
                raise StoreError(
                    f"{error}; {format_bytes(others_bytes)} are taken by the state of the other optimizers: give a "
                    "larger limit"
                ) from error
            if not held_bytes:
                raise
            raise StoreError(
                f"{error}; {format_bytes(held_bytes)} are taken by the state of optimizers that this one "
                "has replaced and the script still holds: delete what refers to them, or give a larger limit"
            ) from error

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Has state in its place while a recorder looks at it."""
        with ExitStack() as stack:
            for state in self._states:
                stack.enter_context(state.shown())
            yield

    def set_proving(self, is_proving: bool) -> None:
        """Has state that leaves from now on compared with what comes back, or no longer."""
        for state in self._states:
            state.proof.is_on = is_proving

    def bring_back(self) -> None:
        """Brings all state into memory again, as torch has it; nothing stays on disk.

        Raises:
            StoreError: state cannot be read back, and no step has failed for that reason before.
        """
        self._open_moments()
        undo_all([opened.close for opened in self._every])

    def close(self) -> None:
        """Brings the state back, and that of optimizers that others have replaced.

        Raises:
            StoreError: some of it cannot be read back.
        """
        if self._rests:
            gc.collect()  # what nobody holds is not to be brought back
        undo_all([self.bring_back, *(one.close for one in self._resting)])

    def _open_moments(self) -> None:
        low_bit, self._low_bit = self._low_bit, None
        if low_bit is not None:
            low_bit.undo()

    def moved_bytes(self) -> tuple[int, int]:
        """Returns the bytes written to disk and read from it since this was asked last."""
        moved = [one.moved_bytes() for one in (*self._every, *self._resting)]
        moved.append(self._counted_bytes)
        self._counted_bytes = 0, 0
        return sum(out for out, _ in moved), sum(back for _, back in moved)
