"""An optimizer's state elsewhere, on disk or in the host's memory: the same bits, a few parameters' worth of it here.

Parameters are put into buckets. A step reads one bucket's state, has the optimizer itself step the parameters of that
bucket, and writes the state back, while the next bucket is being read. It happens between the step's pre-hooks and its
post-hooks, which run once, as closures do; clipping has come before, schedulers come after.

Between steps `optimizer.state` has all its keys; large tensors in it are on the meta device, and raise when they are
read. `optimizer.state_dict()` reads everything back into tensors of its own; `load_state_dict` writes what it is given.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from memwall.apply.memory.exhaustion import forget_frames, is_exhaustion
from memwall.apply.optimizer_state.partial_step import Arguments, inner_step_of, step_some
from memwall.apply.optimizer_state.recorded import RecordedState, emptiable
from memwall.apply.optimizer_state.ring import in_order, step_through
from memwall.apply.optimizer_state.shares import Shares, StateShare, StateSpace
from memwall.apply.optimizer_state.state_proof import StateProof
from memwall.apply.optimizer_state.taken_step import TakenStep
from memwall.errors import MemwallError
from memwall.store.buckets import BucketBuffer, DiskBucket, Entry, padded_bytes
from memwall.torch_internals.dispatch import without_dispatch_modes
from memwall.units import format_bytes

_log = logging.getLogger(__name__)
_CPU = torch.device("cpu")


class OptimizerState:
    """Keeps an optimizer's state in another space until `undo`.

    Args:
        optimizer: one of torch's own that steps each parameter alone, on parameters of the space's device.
        space: where the state is between steps; the caller closes it, after `undo`.
        resident_bytes: state that stays in memory, of the parameters that come first.
        bucket_bytes: state read at a time; `NUM_BUFFERS` buckets are in memory during a step. A parameter with more is
            a bucket by itself, and then alone in memory.
        min_bytes: smaller tensors of state stay in memory beside those.
        is_recorded: the steps until `end_recording` are recorded, and are to look like plain ones.
        around_step: wraps the step of a few parameters, as `ParameterStreaming.around_step` does to bring them in.

    Raises:
        ApplyError: the optimizer cannot be stepped in parts; nothing has changed then.
        StoreError: no room there, or a transfer failed; the state is in memory as before then.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        space: StateSpace,
        *,
        resident_bytes: int,
        bucket_bytes: int,
        min_bytes: int,
        is_recorded: bool = False,
        around_step: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda inner: inner,
    ) -> None:
        self._inner_step = around_step(inner_step_of(optimizer, kept=space.kept, device=space.device))
        self.optimizer, self._space = optimizer, space
        self._min_bytes = min_bytes
        self._recorded = RecordedState() if is_recorded else None
        self.proof = StateProof()
        """Compares what leaves with what comes back, while it is on."""
        self._ring_bytes = padded_bytes([bucket_bytes])
        self._shares = self._new_shares(resident_bytes, bucket_bytes)
        space.reserve(sum(padded_bytes([share.state_bytes]) for share in self._shares.every))
        with without_dispatch_modes(), torch.no_grad():
            self._put_all_away()
        self.on_return: Callable[[Sequence[Tensor]], None] = lambda _: None
        """Is called by `undo` for parameters whose state is in memory again, before the next ones' is."""
        self._taken = TakenStep(
            optimizer,
            done_to_state=f"put its state {space.kept}",
            step=self._step_all,
            copier=self._copier,
            saver=self._saver,
            after_load=self._after_load,
        )

    @property
    def failure(self) -> MemwallError | None:
        """Is the first transfer that failed in a step."""
        return self._taken.failure

    is_on_disk = True

    @property
    def buckets(self) -> list[DiskBucket]:
        """Lists what is on disk between steps."""
        return [s.bucket for s in self._shares.every if isinstance(s.bucket, DiskBucket) and s.bucket.num_bytes]

    @property
    def kept(self) -> str:
        """Says where the state is between steps, as in "on disk"."""
        return self._space.kept

    def pass_resident_bytes_on(self) -> int:
        """Returns the bytes that may stay and that no parameter's state takes, which another optimizer's takes now."""
        left_bytes, self._shares.resident_left_bytes = self._shares.resident_left_bytes, 0
        return left_bytes

    @property
    def away_bytes(self) -> int:
        """Counts the bytes that are away between steps, padding included."""
        return sum(share.bucket.num_bytes for share in self._shares.every)

    @property
    def bytes_written(self) -> int:
        """Counts the bytes that have left so far."""
        return self._space.bytes_written

    @property
    def bytes_read(self) -> int:
        """Counts the bytes that have come back so far."""
        return self._space.bytes_read

    @torch.no_grad()
    def undo(self) -> None:
        """Brings all state back into memory and takes the hooks away.

        What a device has no room for comes into the host's memory: a state dict finds it there, a step does not.

        Raises:
            StoreError: some state cannot be read back; that stays on the meta device, so that nothing computes without
                it.
        """
        self._taken.give_back()
        first: Exception | None = None
        for share in self._shares.every:
            try:
                self._return(share)
            except RuntimeError as error:
                if not is_exhaustion(error):
                    raise
                forget_frames(error)  # and the buffers in them: another share may need less
                first = first or error
        if first is not None:
            raise first

    def _return(self, share: StateShare) -> None:
        try:
            share.bucket.bring_back()
        except torch.OutOfMemoryError:
            num_bytes = share.bucket.num_bytes
            share.bucket.bring_back(_CPU)
            _log.warning(
                "%s has no room for %s of the optimizer's state, which are CPU tensors now: state_dict() is whole, "
                "but before another step the state must be loaded again, with more memory free",
                self._space.device,
                format_bytes(num_bytes),
            )
        share.bucket.release()
        self.on_return(share.parameters)

    @torch.no_grad()
    def settle(self, *, resident_bytes: int, bucket_bytes: int) -> None:
        """Goes over to other sizes, with no more of the state in memory at a time than the buckets concerned.

        To be called between steps.

        Raises:
            StoreError: no room on disk, or a transfer failed.
        """
        self._ring_bytes = padded_bytes([bucket_bytes])
        before, after = self._shares, self._new_shares(resident_bytes, bucket_bytes)
        as_before = {share.key: share for share in before.every}
        waiting = []
        for share in after.every:
            if share.key in as_before:
                share.bucket = as_before.pop(share.key).bucket
            else:
                waiting.append(share)
        leaving = list(as_before.values())
        self._shares = after
        after.every.extend(leaving)  # until they are back, so that `undo` finds them
        absent = {parameter for share in leaving for parameter in share.parameters}
        for back in (None, *leaving):
            if back is not None:
                back.bucket.bring_back()
                back.bucket.release()
                after.every.remove(back)
                absent.difference_update(back.parameters)
            for whole in [one for one in waiting if absent.isdisjoint(one.parameters)]:
                whole.bucket.put_away(after.entries(whole), None)
                waiting.remove(whole)
        self._space.trim()

    def rest(self, holder: object) -> None:
        """Gives up host memory that it passes through: others step instead.

        Args:
            holder: lasts as long as this, and so as the optimizer.
        """
        self._holder = holder
        self._space.trim()

    def taken_bytes(self, tier: str) -> int:
        """Counts what is taken of a tier, the disk or the host's memory below a device."""
        return self._space.taken_bytes(tier)

    def keeps_low_bits(self, _: Tensor) -> bool:
        """Returns False: none is in 8 bits."""
        return False

    @torch.no_grad()
    def fill(self, load: Callable[[Sequence[Tensor]], None]) -> None:
        """Takes over the state of another process, with no more of it in memory at a time than a bucket.

        To be called before the first step, when there is none yet.

        Args:
            load: puts the state of some parameters into the optimizer.

        Raises:
            StoreError: no room on disk, or a transfer failed.
        """
        passing = self._passing_buffer()
        for share in self._shares.every:
            load(share.parameters)
            if self._recorded is None:
                share.bucket.put_away(self._shares.entries(share), None, passing)
        del passing
        self._space.trim()

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Has every tensor of the state in its place while a recorder looks, though it holds nothing."""
        with self._recorded.shown() if self._recorded is not None else nullcontext():
            yield

    def end_recording(self) -> None:
        """Says that nobody looks on from now on."""
        self._recorded = None

    def _new_shares(self, resident_bytes: int, bucket_bytes: int) -> Shares:
        shares = Shares(
            self.optimizer,
            self._space,
            resident_bytes=resident_bytes,
            bucket_bytes=bucket_bytes,
            min_bytes=self._min_bytes,
        )
        shares.adopt()
        return shares

    def _step_all(self, arguments: Arguments) -> None:
        """Steps all parameters, bucket by bucket."""
        self._shares.adopt()
        self.proof.before_step()
        parts = self._shares.parts()
        step_some(self.optimizer, self._inner_step, parts.get(None), arguments)
        shares = in_order(self._shares.every, ring_bytes=self._ring_bytes)
        moving = [share for share in shares if share.has_gradient and share in parts]

        def step(share: StateShare) -> None:
            self.proof.returned(share.parameters, self.optimizer.state)
            step_some(self.optimizer, self._inner_step, parts[share], arguments)

        if self._recorded is None:
            step_through(moving, step, self._leaving, ring_bytes=self._ring_bytes)
            return
        for share in moving:
            self._recorded.bring(share.bucket)
            try:
                step(share)
            finally:
                self._recorded.put_away(share.bucket, self._shares.entries(share))

    def _leaving(self, share: StateShare) -> list[Entry]:
        return self.proof.leaving(self._shares.entries(share))

    def _put_all_away(self) -> None:
        """Writes what is in memory; all of it stays there until all of it is written."""
        shares = [(share.bucket, self._shares.entries(share)) for share in self._shares.every]
        if self._recorded is not None:
            shares = [(bucket, emptiable(entries)) for bucket, entries in shares]
        present = [(holder, key, holder[key]) for _, entries in shares for holder, key in entries]
        passing = self._passing_buffer() if present else None
        try:
            for bucket, entries in shares:
                bucket.put_away(entries, None, passing)
        except BaseException:
            for holder, key, tensor in present:
                holder[key] = tensor
            for bucket, _ in shares:
                bucket.forget()
            raise
        finally:
            del passing
            self._space.trim()
        if self._recorded is not None:
            tensors = iter([tensor for _, _, tensor in present])
            for bucket, entries in shares:
                self._recorded.empty(bucket, [next(tensors) for _ in entries])

    def _passing_buffer(self) -> BucketBuffer | None:
        """Returns what the state of any share passes on its way to disk; None where there is no such way."""
        shares = self._shares.every
        if not shares or not isinstance(shares[0].bucket, DiskBucket):
            return None
        return shares[0].bucket.passing_buffer(max(padded_bytes([share.state_bytes]) for share in shares))

    def _saver(self) -> Callable[[Tensor], Tensor]:
        """Copies for a state dict: in the host's memory, since the device's may have no room for all of them.

        `load_state_dict` brings them to the parameters' device.
        """
        return self._copier(_CPU)

    def _copier(self, device: torch.device | None = None) -> Callable[[Tensor], Tensor]:
        """Returns what copies all that is away, and what is in memory: a step later that would be another state.

        Args:
            device: where what is away is to be copied to; by default where it is used.
        """
        copies: dict[int, Tensor] = {}
        for share in self._shares.every:
            copies.update(share.bucket.copies(device))
        return lambda value: copies[id(value)] if id(value) in copies else value.clone()

    def _after_load(self) -> None:
        """Writes what was loaded in place of what was away."""
        self.proof.forget()
        for share in self._shares.every:
            share.bucket.forget()
        self._recorded = None if self._recorded is None else RecordedState()
        self._put_all_away()
