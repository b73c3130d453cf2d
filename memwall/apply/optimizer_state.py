"""An optimizer's state on disk: step by step the same bits as in memory, a few parameters' worth of it in memory.

Parameters are put into buckets. A step reads one bucket's state, has the optimizer itself step the parameters of that
bucket, and writes the state back, while the next bucket is being read. It happens between the step's pre-hooks and its
post-hooks, which run once, as closures do; clipping has come before, schedulers come after.

Between steps `optimizer.state` has all its keys; large tensors in it are on the meta device, and raise when they are
read. `optimizer.state_dict()` reads everything back into tensors of its own; `load_state_dict` writes what it is given.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from memwall.apply.partial_step import Arguments, Part, inner_step_of, step_some, with_closure_called, without_closure
from memwall.errors import ApplyError, MemwallError, StoreError
from memwall.store.buckets import Bucket, BucketBuffer, Entry, can_move, padded_bytes
from memwall.store.location import check_directory, default_directory
from memwall.store.scratch import ScratchFile
from memwall.store.transfer import TransferPool
from memwall.units import format_bytes

__all__ = ["OptimizerState", "open_optimizer_state"]

_log = logging.getLogger(__name__)

# State per byte of parameter, where it does not exist yet: two moments, and in some variants a third buffer.
_USUAL_RATIO, _LARGER_RATIO = 2, 3


class _Share:
    """Parameters that are stepped together, and where their state is between steps."""

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket
        self.parameters: list[Tensor] = []
        self.state_bytes = 0

    @property
    def has_gradient(self) -> bool:
        """Whether a step would change anything."""
        return any(parameter.grad is not None for parameter in self.parameters)


class OptimizerState:
    """Keeps an optimizer's state on disk until `undo`.

    Args:
        optimizer: one of torch's own that steps each parameter alone, on CPU parameters.
        pool: the threads and the file; the caller closes it, after `undo`.
        resident_bytes: state that stays in memory, of the parameters that come first.
        bucket_bytes: state read at a time; two buckets are in memory during a step. A parameter with more is a bucket.
        min_bytes: smaller tensors of state stay in memory beside those.

    Raises:
        ApplyError: the optimizer cannot be stepped in parts; nothing has changed then.
        StoreError: no room on disk, or a transfer failed; the state is in memory as before then.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        pool: TransferPool,
        *,
        resident_bytes: int,
        bucket_bytes: int,
        min_bytes: int,
    ) -> None:
        self._inner_step = inner_step_of(optimizer)
        self._optimizer, self._pool = optimizer, pool
        self._bucket_bytes, self._min_bytes = bucket_bytes, min_bytes
        self._resident_left_bytes = resident_bytes
        self._shares: list[_Share] = []
        self._share_of: dict[Tensor, _Share | None] = {}
        self._withheld: list[dict[str, Any]] | None = None
        self.failure: MemwallError | None = None
        """The first transfer that failed in a step."""
        self._adopt_parameters()
        pool.scratch.reserve(sum(padded_bytes([share.state_bytes]) for share in self._shares))
        with torch.no_grad():
            self._put_all_away()
        before = optimizer.register_step_pre_hook(self._before_step)
        after = optimizer.register_step_post_hook(self._after_step)
        _order(optimizer._optimizer_step_post_hooks).move_to_end(after.id, last=False)
        self._before_id = before.id
        self._handles: list[Any] = [
            before,
            after,
            optimizer.register_state_dict_post_hook(self._gathered, prepend=True),
            optimizer.register_load_state_dict_post_hook(self._after_load, prepend=True),
        ]

    @property
    def away_bytes(self) -> int:
        """Bytes that are on disk between steps, padding included."""
        return sum(share.bucket.num_bytes for share in self._shares)

    @property
    def bytes_written(self) -> int:
        """Bytes given to the disk so far."""
        return self._pool.bytes_written

    @property
    def bytes_read(self) -> int:
        """Bytes fetched from the disk so far."""
        return self._pool.bytes_read

    @torch.no_grad()
    def undo(self) -> None:
        """Brings all state back into memory and takes the hooks away.

        Raises:
            StoreError: state cannot be read back; it stays on the meta device, so that nothing computes without it.
        """
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._give_groups_back()
        self._bring_all_back()

    # -- the step --------------------------------------------------------------------------------------------------

    def _before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Does the step, bucket by bucket; what is left for the optimizer is a step without parameters."""
        self._give_groups_back()
        if next(reversed(_order(optimizer._optimizer_step_pre_hooks))) != self._before_id:
            raise ApplyError(
                f"a step pre-hook was registered on the {type(optimizer).__name__} after memwall put its state on "
                "disk, and would run after the update that it belongs before; register it before the session starts"
            )
        args, kwargs = with_closure_called(args, kwargs)
        try:
            with torch.no_grad():
                self._adopt_parameters()
                self._step_all(without_closure(args, kwargs))
        except MemwallError as error:
            self.failure = self.failure or error.without_frames()
            raise
        self._withheld, optimizer.param_groups = optimizer.param_groups, []
        return args, kwargs

    def _after_step(self, *_: Any) -> None:
        self._give_groups_back()
        # Pre-hooks registered meanwhile come before the next step.
        _order(self._optimizer._optimizer_step_pre_hooks).move_to_end(self._before_id)

    def _give_groups_back(self) -> None:
        if self._withheld is not None:
            self._optimizer.param_groups, self._withheld = self._withheld, None

    def _step_all(self, arguments: Arguments) -> None:
        parts = self._parts()
        moving = [share for share in self._shares if share.has_gradient and share in parts]
        num_bytes = max((share.bucket.num_bytes for share in moving), default=0)
        buffers = [BucketBuffer(num_bytes) if num_bytes and n < len(moving) else None for n in range(2)]
        try:
            self._read_ahead(moving, 0, buffers)
            step_some(self._optimizer, self._inner_step, parts.get(None), arguments)
            for number, share in enumerate(moving):
                self._read_ahead(moving, number + 1, buffers)
                buffer = buffers[number % 2]
                share.bucket.finish_read(buffer)
                try:
                    step_some(self._optimizer, self._inner_step, parts[share], arguments)
                finally:
                    share.bucket.put_away(self._entries(share), buffer)
        finally:
            for share in moving:
                share.bucket.wait_for_write()

    @staticmethod
    def _read_ahead(moving: Sequence[_Share], number: int, buffers: Sequence[BucketBuffer | None]) -> None:
        """Begins to read a bucket, into the buffer from which the one before the one in use is still written."""
        buffer = buffers[number % 2]
        if number < len(moving) and buffer is not None:
            moving[number].bucket.begin_read(buffer, after=moving[number - 2].bucket.write if number >= 2 else None)

    def _parts(self) -> dict[_Share | None, Part]:
        """Per share, which parameters of which of the optimizer's groups it steps, in their order."""
        parts: dict[_Share | None, dict[int, list[Tensor]]] = {}
        for number, group in enumerate(self._optimizer.param_groups):
            for parameter in group["params"]:
                parts.setdefault(self._share_of[parameter], {}).setdefault(number, []).append(parameter)
        return {share: tuple(groups.items()) for share, groups in parts.items()}

    # -- which parameter's state is where --------------------------------------------------------------------------

    def _adopt_parameters(self) -> None:
        """Gives every parameter that has no place yet one, in the optimizer's order."""
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                if parameter not in self._share_of:
                    self._share_of[parameter] = self._place_of(parameter, self._expected_bytes(parameter, group))

    def _place_of(self, parameter: Tensor, num_bytes: int) -> _Share | None:
        """The share that takes a parameter; None where its state stays in memory."""
        if num_bytes <= self._resident_left_bytes:
            self._resident_left_bytes -= num_bytes
            return None
        if not self._shares or self._shares[-1].state_bytes + num_bytes > self._bucket_bytes:
            label = f"bucket {len(self._shares)} of the {type(self._optimizer).__name__}'s state"
            self._shares.append(_Share(Bucket(self._pool, label)))
        self._shares[-1].parameters.append(parameter)
        self._shares[-1].state_bytes += num_bytes
        return self._shares[-1]

    def _expected_bytes(self, parameter: Tensor, group: dict[str, Any]) -> int:
        """State of a parameter that may leave memory: what there is, or what such optimizers usually make."""
        if self._optimizer.state.get(parameter):
            entries = self._entries_of(parameter)
            return padded_bytes(holder[key].numel() * holder[key].element_size() for holder, key in entries)
        num_bytes = parameter.numel() * parameter.element_size()
        if num_bytes < self._min_bytes:
            return 0
        return num_bytes * (_LARGER_RATIO if group.get("amsgrad") or group.get("centered") else _USUAL_RATIO)

    def _entries(self, share: _Share) -> list[Entry]:
        return [entry for parameter in share.parameters for entry in self._entries_of(parameter)]

    def _entries_of(self, parameter: Tensor) -> list[Entry]:
        """Where the state of a parameter holds tensors that may leave memory."""
        state = self._optimizer.state.get(parameter)
        if not isinstance(state, dict):
            return []
        kept = {tensor.data_ptr() for tensor in (parameter, parameter.grad) if tensor is not None}
        found: list[Entry] = []
        for key, value in state.items():
            if can_move(value, self._min_bytes) and value.data_ptr() not in kept:
                kept.add(value.data_ptr())  # held under a second key, it stays there
                found.append((state, key))
        return found

    def _put_all_away(self) -> None:
        """Writes what is in memory; all of it stays there until all of it is written."""
        shares = [(share.bucket, self._entries(share)) for share in self._shares]
        present = [(holder, key, holder[key]) for _, entries in shares for holder, key in entries]
        try:
            for bucket, entries in shares:
                bucket.put_away(entries, None)
        except BaseException:
            for holder, key, tensor in present:
                holder[key] = tensor
            for bucket, _ in shares:
                bucket.forget()
            raise

    def _bring_all_back(self) -> None:
        for share in self._shares:
            share.bucket.bring_back()

    # -- saving and loading ----------------------------------------------------------------------------------------

    @torch.no_grad()
    def _gathered(self, _: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """The state dict with everything that is on disk, all of it in tensors that later steps do not change."""
        copies: dict[int, Tensor] = {}
        for share in self._shares:
            copies.update(share.bucket.copies())

        def copied(value: Any) -> Any:
            if isinstance(value, dict):
                return {key: copied(item) for key, item in value.items()}
            if not isinstance(value, Tensor):
                return value
            # What is in memory is copied too: a step later it would belong to another state than the rest.
            return copies[id(value)] if id(value) in copies else value.clone()

        return {**state_dict, "state": copied(state_dict["state"])}

    @torch.no_grad()
    def _after_load(self, _: torch.optim.Optimizer) -> None:
        """Writes what was loaded in place of what was on disk."""
        for share in self._shares:
            share.bucket.forget()
        self._put_all_away()


def open_optimizer_state(
    optimizer: torch.optim.Optimizer,
    *,
    disk: str | None,
    capacity_bytes: int | None,
    resident_bytes: int,
    bucket_bytes: int,
    min_bytes: int,
) -> tuple[OptimizerState, Callable[[], None]]:
    """Puts an optimizer's state on disk.

    Returns:
        Its keeper, and what brings the state back and closes files and threads.

    Raises:
        ApplyError: the optimizer cannot be stepped in parts.
        StoreError: the directory is missing, read-only, full, or a RAM disk.
    """
    inner_step_of(optimizer)
    directory = disk if disk is not None else default_directory()
    check_directory(directory)
    pool = TransferPool(ScratchFile(directory, capacity_bytes=capacity_bytes))
    try:
        state = OptimizerState(
            optimizer, pool, resident_bytes=resident_bytes, bucket_bytes=bucket_bytes, min_bytes=min_bytes
        )
    except BaseException:
        pool.close()
        raise
    _log.info("%s of optimizer state are on disk in %s", format_bytes(state.away_bytes), directory)

    def close() -> None:
        try:
            state.undo()
        except StoreError as error:
            if state.failure is None:
                raise
            # The run has ended with the same error already.
            _log.error("the optimizer's state could not be brought back into memory: %s", error)
        finally:
            pool.close()

    return state, close


def _order(hooks: Any) -> "OrderedDict[int, Any]":
    """Step hooks by number, in the order in which they run (torch.optim.Optimizer.__init__)."""
    return cast("OrderedDict[int, Any]", hooks)
