"""An optimizer's step on the CPU, for parameters on CUDA: its state never is on the device.

Gradients and parameters come down through pinned memory a bucket at a time, torch's fused kernel steps them there,
beside their state, and the parameters go up again. While one bucket is stepped, the next one comes down and the one
before goes up. It happens between the step's pre-hooks and its post-hooks, after the global norm is known.

Parameters come down in every step, though the host has seen them in the last one: whoever writes `parameter.data`
meanwhile leaves no trace of it.
"""

import logging
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from memwall.apply.optimizer_state.cpu_step_checks import check_optimizer, check_room, check_state
from memwall.apply.optimizer_state.partial_step import Arguments, inner_step_of, step_some
from memwall.apply.optimizer_state.taken_step import TakenStep
from memwall.errors import MemwallError, StoreError
from memwall.predict.cpu_step_pipeline import NUM_STAGES
from memwall.store.backend import round_up
from memwall.store.pinned_arena import PinnedArena
from memwall.torch_internals.operators import foreach_div_

_log = logging.getLogger(__name__)
_CPU = torch.device("cpu")
_ALIGNMENT_BYTES = 64
_SCALER_TENSORS = ("grad_scale", "found_inf")


class _Stage:
    """Holds pinned memory for the gradients and parameters of one bucket."""

    def __init__(self, memory: Tensor) -> None:
        self._memory = memory
        self._used_bytes = 0
        self.up: torch.cuda.Event | None = None
        """Is the last copy from here to the device."""

    def clear(self) -> None:
        """Forgets what was laid out here: it is no longer used."""
        self._used_bytes = 0

    def like(self, tensor: Tensor) -> Tensor:
        """Returns memory for a tensor, as it lies on the device."""
        start = (int(self._memory.storage_offset()) + self._used_bytes) // tensor.element_size()
        self._used_bytes += round_up(tensor.numel() * tensor.element_size(), _ALIGNMENT_BYTES)
        empty = torch.empty(0, dtype=tensor.dtype, device=_CPU)
        return empty.set_(self._memory.untyped_storage(), start, tensor.size(), tensor.stride())


class _Down:
    """Holds a bucket on its way down: parameters by group, and what stands for each of them on the CPU."""

    def __init__(self, stage: _Stage, members: Sequence[tuple[int, Tensor]]) -> None:
        self.stage, self.members = stage, members
        self.twins: list[Tensor] = []
        self.done: torch.cuda.Event | None = None


class CpuStep:
    """Has an Adam or AdamW step on the CPU, with its state there, until `undo`.

    Args:
        optimizer: its parameters are dense, in float32 or bfloat16 and on `device`.
        bucket_bytes: parameters that are stepped at a time. A larger one is a bucket by itself.
        limit_bytes: the most to take of host memory, for state and what passes through.

    Raises:
        ApplyError: it cannot be stepped so; nothing has changed then.
        StoreError: host memory has no room for the state and what passes through; nothing has changed then.
    """

    kept = "in host memory, where it is stepped"

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        *,
        bucket_bytes: int,
        limit_bytes: int,
    ) -> None:
        self._torch_step = inner_step_of(optimizer, kept=self.kept, device=device)
        self.optimizer, self._device, self.bucket_bytes = optimizer, device, bucket_bytes
        check_optimizer(optimizer, device)
        check_room(optimizer, device, bucket_bytes=bucket_bytes, limit_bytes=limit_bytes)
        self._outward, self._inward = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._arena = PinnedArena(limit_bytes, chunk_bytes=0, device=self._device)
        self._stages: list[_Stage] = []
        self._stage_bytes = 0
        self.bytes_written = self.bytes_read = 0
        self._to_host()
        self._taken = TakenStep(
            optimizer,
            done_to_state="took its step to the CPU",
            step=self._step_all,
            copier=lambda: torch.clone,
            after_load=self._to_host,
        )

    @property
    def failure(self) -> MemwallError | None:
        """Is the first error of a step."""
        return self._taken.failure

    @property
    def away_bytes(self) -> int:
        """Counts the state that is in host memory."""
        return sum(value.nbytes for _, _, value in self._state() if value.ndim > 0)

    def rest(self, holder: object) -> None:
        """Unpins what parameters pass through: others step instead.

        Args:
            holder: lasts as long as this, and so as the optimizer.
        """
        self._holder = holder
        self._unpin()

    def taken_bytes(self, tier: str) -> int:
        """Counts what is taken of a tier: of the host's memory."""
        return self.away_bytes + self._arena.pinned_bytes if tier == "host" else 0

    @torch.no_grad()
    def undo(self) -> None:
        """Brings the state to the device, as far as that has room, and takes the hooks away."""
        self._taken.give_back()
        self._unpin()
        fused = {p for group in self.optimizer.param_groups if group.get("fused") for p in group["params"]}
        try:
            for parameter, key, value in self._state():
                if value.ndim > 0 or parameter in fused:
                    self.optimizer.state[parameter][key] = value.to(parameter.device)
        except torch.OutOfMemoryError:
            _log.warning(
                "%s has no room for all of the optimizer's state, some of which are CPU tensors now: state_dict() is "
                "whole, but before another step the state must be loaded again, with more memory free",
                self._device,
            )

    def _step_all(self, arguments: Arguments) -> None:
        if torch.cuda.is_current_stream_capturing():
            raise StoreError(
                "an optimizer's step is being captured into a CUDA graph, and the plan has it on the CPU; leave "
                "optimizer.step() out of the graph, or plan without --allow cpu-optimizer-step"
            )
        # Groups may have been added, gradients become sparse, and tensors been moved.
        check_optimizer(self.optimizer, self._device)
        check_state(self.optimizer)
        buckets = self._buckets()
        if not buckets:
            return
        self._make_stages(max(map(_staged_bytes, buckets)))
        compute = torch.cuda.current_stream(self._device)
        self._outward.wait_stream(compute)
        self._inward.wait_stream(compute)
        try:
            coming = self._begin_down(self._stages[0], buckets[0])
            for number in range(len(buckets)):
                here = coming
                if number + 1 < len(buckets):
                    coming = self._begin_down(self._stages[(number + 1) % NUM_STAGES], buckets[number + 1])
                assert here.done is not None
                here.done.synchronize()
                self._step(here, arguments)
                self._begin_up(here)
            self._unscale([parameter for members in buckets for _, parameter in members])
        finally:
            compute.wait_stream(self._outward)
            compute.wait_stream(self._inward)

    @torch.no_grad()
    def _unscale(self, parameters: Sequence[Tensor]) -> None:
        """Does to gradients that a scaler left to a fused step what that does: on the device, they are down by now."""
        scale, found_inf = (vars(self.optimizer).get(name) for name in _SCALER_TENSORS)
        if scale is None:
            return
        divisor = scale if found_inf is None else torch.where(found_inf == 1, 1.0, scale)
        foreach_div_([p.grad for p in parameters if p.grad is not None], divisor.to(self._device))

    def _begin_down(self, stage: _Stage, members: Sequence[tuple[int, Tensor]]) -> _Down:
        down = _Down(stage, members)
        if stage.up is not None:
            self._outward.wait_event(stage.up)
        stage.clear()
        for _, parameter in members:
            assert parameter.grad is not None
            twin, gradient = stage.like(parameter), stage.like(parameter)
            with torch.cuda.stream(self._outward):
                twin.copy_(parameter, non_blocking=True)
                gradient.copy_(parameter.grad, non_blocking=True)
            twin.grad = gradient
            down.twins.append(twin)
            self.bytes_written += twin.nbytes + gradient.nbytes
        down.done = self._outward.record_event()
        return down

    def _begin_up(self, down: _Down) -> None:
        for (_, parameter), twin in zip(down.members, down.twins, strict=True):
            with torch.cuda.stream(self._inward):
                parameter.copy_(twin, non_blocking=True)
            self.bytes_read += twin.nbytes
        down.stage.up = self._inward.record_event()

    def _step(self, down: _Down, arguments: Arguments) -> None:
        """Does the optimizer's own step, of what stands for its parameters here."""
        part: dict[int, list[Tensor]] = {}
        for (number, _), twin in zip(down.members, down.twins, strict=True):
            part.setdefault(number, []).append(twin)
        optimizer = self.optimizer
        whole = optimizer.state
        pairs = [(parameter, twin) for (_, parameter), twin in zip(down.members, down.twins, strict=True)]
        for parameter, _ in pairs:
            _lay_alike(parameter, whole[parameter])
        optimizer.state = defaultdict(dict, {twin: whole[parameter] for parameter, twin in pairs})
        try:
            with _as_fused_on_cpu(optimizer):
                step_some(optimizer, self._torch_step, tuple(part.items()), arguments)
        finally:
            optimizer.state = whole

    def _buckets(self) -> list[list[tuple[int, Tensor]]]:
        """Lists parameters with a gradient, in the optimizer's order, each with the number of its group."""
        buckets: list[list[tuple[int, Tensor]]] = []
        filled_bytes = 0
        for number, group in enumerate(self.optimizer.param_groups):
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if not buckets or filled_bytes + parameter.nbytes > self.bucket_bytes:
                    buckets.append([])
                    filled_bytes = 0
                buckets[-1].append((number, parameter))
                filled_bytes += parameter.nbytes
        return buckets

    def _make_stages(self, num_bytes: int) -> None:
        num_bytes = max(num_bytes, _ALIGNMENT_BYTES)  # parameters may be empty, all of them
        if num_bytes <= self._stage_bytes:
            return
        self._unpin()
        self._stages = [_Stage(self._arena.allocate(num_bytes).memory) for _ in range(NUM_STAGES)]
        self._stage_bytes = num_bytes

    def _unpin(self) -> None:
        self._outward.synchronize()
        self._inward.synchronize()
        self._stages, self._stage_bytes = [], 0
        self._arena.close()

    @torch.no_grad()
    def _to_host(self) -> None:
        for parameter, key, value in self._state():
            # A copy even of what is there: a step writes into it, and it may be the caller's.
            self.optimizer.state[parameter][key] = value.to(_CPU, copy=True)

    def _state(self) -> list[tuple[Tensor, Any, Tensor]]:
        return [
            (parameter, key, value)
            for parameter, state in self.optimizer.state.items()
            for key, value in state.items()
            if isinstance(value, Tensor)
        ]


def _staged_bytes(members: Sequence[tuple[int, Tensor]]) -> int:
    return sum(2 * round_up(parameter.nbytes, _ALIGNMENT_BYTES) for _, parameter in members)


@contextmanager
def _as_fused_on_cpu(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Has the optimizer step as the fused one of the CPU, with a gradient scaler's tensors where that finds them."""
    ways = [(group, group.get("fused"), group.get("foreach")) for group in optimizer.param_groups]
    scaler = {name: vars(optimizer)[name] for name in _SCALER_TENSORS if vars(optimizer).get(name) is not None}
    try:
        for group, _, _ in ways:
            group.update(fused=True, foreach=False)
        for name, value in scaler.items():
            setattr(optimizer, name, value.to(_CPU))
        yield
    finally:
        for group, fused, foreach in ways:
            group.update(fused=fused, foreach=foreach)
        for name, value in scaler.items():
            setattr(optimizer, name, value)


def _lay_alike(parameter: Tensor, state: dict[Any, Any]) -> None:
    """Lays state in memory as its parameter lies: torch's fused kernel walks through all of them alike."""
    for key, value in state.items():
        if isinstance(value, Tensor) and value.size() == parameter.size() and value.stride() != parameter.stride():
            state[key] = torch.empty_strided(value.size(), parameter.stride(), dtype=value.dtype).copy_(value)
