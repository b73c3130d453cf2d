"""Recompute handler: a block's forward runs again in backward, fully or but for chosen results, to the same bits.

The executor is torch's non-reentrant checkpoint, which restores torch's random numbers and autocast state. Added here:
state that it does not know of (`hidden_state`), arguments by keyword, selective keeping by operation number, running
statistics that are updated once, key-value caches that are not extended twice, and a proof of each block's first call.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    checkpoint,
    create_selective_checkpoint_contexts,
    get_device_states,
    set_device_states,
)

from memwall.apply.blocks.added_gradients import AddedGradients
from memwall.apply.blocks.call_arguments import CallArguments
from memwall.apply.blocks.counts import BlockCounts
from memwall.apply.blocks.digests import Digest, Digesting, Place, difference, digest_of, written
from memwall.apply.blocks.held_values import MAX_CLONED_BYTES
from memwall.apply.blocks.hidden_state import HiddenState
from memwall.apply.blocks.kept_operations import KeptOperations
from memwall.apply.blocks.kv_caches import OwnCaches
from memwall.apply.blocks.outer_variables import variables_of_code
from memwall.apply.memory.exhaustion import is_exhaustion
from memwall.errors import ApplyError, MemwallError
from memwall.planning.techniques.recompute import Recompute
from memwall.torch_internals.autograd import version_of
from memwall.torch_internals.dispatch import TorchDispatchMode, without_dispatch
from memwall.torch_internals.modules import is_running_norm, own_buffers
from memwall.units import format_bytes

Forward = Callable[..., Any]

_log = logging.getLogger(__name__)

_ADDS = "its forward adds to gradients itself, by a backward of its own say, which a second run does again"
_LEFT_ALONE = "give a budget whose plan does not recompute it, or, of a plan file, take it out of the actions"


class RecomputedBlock:
    """Has a forward, `run`, that keeps its inputs and the results of kept operations alone, and runs again in backward.

    Its first call is proven: the forward runs a second time at once, and where it saves other bits than the first time,
    nothing of the block is recomputed from then on, and the log says so. What the second run is given is all that the
    one in backward has; that one is compared with the first too, and alone where there is no room for a second run, or
    for what the first one saves, which is there until the second has ended.

    Args:
        module: whose forward it is; its BatchNorm layers update their running statistics in the first run only.
        action: which operations to keep. Without names they are kept by number alone.
        counts: where the runs are counted, and where it is said why the block is not recomputed.
        room_bytes: returns what tensors may still take; None where nothing limits them, or where several ranks train
            and must run blocks equally often: then the second run is always made.
    """

    def __init__(
        self,
        module: nn.Module,
        forward: Forward,
        action: Recompute,
        counts: BlockCounts | None = None,
        room_bytes: Callable[[], int | None] = lambda: None,
    ) -> None:
        counts = counts or BlockCounts()
        self.modules = tuple(module.named_modules())
        self.norms = [child for _, child in self.modules if is_running_norm(child)]
        self.is_recurrent = any(isinstance(child, nn.RNNBase) for _, child in self.modules)
        self.shared = variables_of_code([child for _, child in self.modules])
        self.path = action.block
        names = action.kept_names or ("",) * len(action.kept_ops)
        self.kept = dict(zip(action.kept_ops, names, strict=True))
        self._module, self._plain, self._counts = module, forward, counts
        self._freed_bytes = action.saved_bytes or 0
        self._forward = counts.counting(forward)
        self._caches = OwnCaches(module)
        self._room_bytes = room_bytes
        self._is_proven = False

    def prove_again(self) -> None:
        """Has the next call proven as the first one was."""
        self._is_proven = False

    def run(self, *args: Any, **kwargs: Any) -> Any:
        if self._counts.dropped:
            return self._forward(*args, **kwargs)
        forward, args, kwargs = self._caches.emptied(self._forward, args, kwargs)
        call = _Call(self, forward, args, kwargs)
        tensors = self._tensors_of(call)
        if any(tensor.is_inference() for tensor in tensors):
            self._drop("it is called with a tensor of inference mode, which autograd keeps for no second run")
            return forward(*args, **kwargs)
        if self._is_proven:
            return call.begin(tensors)
        if call.hidden.one_way:
            self._drop(f"{call.hidden.one_way} is an iterator, which a second run of its forward would move on")
            return forward(*args, **kwargs)
        out = self._prove(call, tensors)
        if any(tensor.is_cuda for tensor in tensors):
            # Two runs have filled segments that one does not need: what follows is not to lie among their pieces.
            torch.cuda.empty_cache()
        return out

    def _tensors_of(self, call: "_Call") -> list[Tensor]:
        """Returns the call's tensors, and where none says so, one for the device whose random numbers are drawn."""
        tensors, call.arguments.tensors = call.arguments.tensors, []
        if all(tensor.device.type == "cpu" for tensor in tensors):
            weight = next(nn.Module.parameters(self._module), None)
            if weight is not None and weight.device.type != "cpu":
                tensors.append(weight.new_empty(0))
        return tensors

    def _prove(self, call: "_Call", tensors: list[Tensor]) -> Any:
        first = Digesting(self.norms, keeps=True, room_bytes=self._room_bytes, skips_workspaces=self.is_recurrent)
        first.need(self._freed_bytes)
        second = Digesting(self.norms, repeats=first, skips_workspaces=self.is_recurrent)
        call.digesting = first
        if self.kept:
            call.kept = KeptOperations(self.kept, is_proving=True)
        random = _TorchRandom(tensors)
        versions = list(map(version_of, tensors))
        with self.seeing_added(tensors) as added:
            out = call.begin(tensors)
        self._is_proven = True
        saved, before = list(first.taken), list(map(digest_of, _tensors_in(out)))
        first.need_second_run(0 if call.kept is None else call.kept.held_bytes)
        if first.lacked_bytes:
            _log.debug("'%s' has no room for a second run, and is proven by the one in backward", self.path)
            call.expected, call.places, call.lacked_bytes = saved, first.places, first.lacked_bytes
        if versions != list(map(version_of, tensors)):
            self._drop("it writes into a tensor that it is called with, which a second run would do again")
            return out
        if added.are_there:
            if first.lacked_bytes:  # what it saved has gone, and its own backward may have run it again already
                raise self.adds()
            self._drop(_ADDS)
            return out
        if call.kept is not None and call.kept.overwritten:
            self._drop(call.kept.overwritten)
            return out
        if first.lacked_bytes:
            return out
        try:
            with call.hidden.recalled(), random.recalled(), _spared(self.norms), _alone(is_watched=bool(self.kept)):
                after = list(map(digest_of, _tensors_in(self._again(call, tensors, second))))
            found = difference(saved, second.taken) or difference(before, after)
        except Exception as error:
            if is_exhaustion(error) or isinstance(error, MemwallError):
                raise
            found = f"the second run ends in {type(error).__name__}: {error}"
        if not found:
            first.release()
            call.expected, call.places = saved, first.places
            return out
        self._drop(f"a second run of its forward differs: {found}; {self.cause(call.hidden)}")
        return out  # its backward has what the first run saved

    def seeing_added(self, tensors: Sequence[Tensor] = ()) -> AddedGradients:
        """Returns what sees that a run within it adds to gradients, of the block or of these tensors."""
        return AddedGradients((*tensors, *nn.Module.parameters(self._module)))

    def adds(self) -> ApplyError:
        """Returns the error of a block that adds to gradients in a run that repeats another."""
        return ApplyError(f"'{self.path}' is recomputed in backward, and {_ADDS}: {_LEFT_ALONE}")

    def _drop(self, reason: str) -> None:
        self._counts.dropped = reason
        _log.warning("'%s' keeps what it saves and is not recomputed: %s", self.path, reason)

    def cause(self, hidden: HiddenState) -> str:
        """Returns what can make two runs of the block differ, as far as it is known."""
        if hidden.unrestorable:
            return f"it writes into {hidden.unrestorable}, and only up to {format_bytes(MAX_CLONED_BYTES)} are put back"
        return (
            "it depends on something outside of the module, such as a global variable, an object that it shares or the "
            "time, or on an operation that is not deterministic"
        )

    def _again(self, call: "_Call", tensors: list[Tensor], digesting: Digesting) -> Any:
        """Returns a second run as the one in backward would be, at once; of what it saves nothing is kept."""
        # Hooks that forward puts on what it is called with must not be there twice.
        inputs = [t if t.grad_fn is None else t.detach().requires_grad_() for t in tensors]
        forward, args, kwargs = self._caches.emptied(self._plain, *call.arguments.filled(inputs))
        again = _Call(self, forward, args, kwargs, is_full=True)
        again.digesting, again.arguments.tensors = digesting, []
        return again.begin(inputs)


class _Call:
    """Holds one call of a block: what its later runs need."""

    def __init__(
        self,
        block: RecomputedBlock,
        forward: Forward,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        is_full: bool = False,
    ) -> None:
        self.arguments = CallArguments(args, kwargs)
        self.hidden = HiddenState(block.modules, shared=block.shared)
        self.digesting: Digesting | None = None
        """Takes digests in the first run."""
        self.kept: KeptOperations | None = None if is_full or not block.kept else KeptOperations(block.kept)
        """Says which operations keep their results; None where none does."""
        self.expected: list[Digest] | None = None
        """Holds what the first run saved, where later runs are compared with it."""
        self.places: list[tuple[Digest, Place]] = []
        """Says where that lay."""
        self.lacked_bytes = 0
        """Says what there was too little room for a second run in forward; 0 where it was made."""
        self._block, self._forward = block, forward
        self._given: tuple[tuple[Any, ...], dict[str, Any]] | None = (args, kwargs)
        self._is_begun = self._is_read_at_once = False
        """Says whether the first run goes on, and whether what it saves was asked for before its end."""
        self._failure: BaseException | None = None
        """Holds the error of the first run until torch has taken its hooks back, which 2.11 does where none passes."""

    def begin(self, tensors: Sequence[Tensor]) -> Any:
        """Runs the forward for the first time."""
        kept = self.kept
        settings: dict[str, Any] = {}
        if kept is not None:
            settings["context_fn"] = lambda: _contexts_of(kept)
        out = checkpoint(self._run, *tensors, use_reentrant=False, **settings)
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        return out

    def _run(self, *tensors: Tensor) -> Any:
        if self._given is not None:
            (args, kwargs), self._given = self._given, None
            # Hooks that hold torch's own, which hold this: neither would go before the garbage collector comes.
            digesting, self.digesting = self.digesting, None
            self._is_begun = True
            try:
                with digesting or nullcontext():
                    return self._forward(*args, **kwargs)
            except BaseException as error:
                self._failure = error
                return None
            finally:
                self._is_begun = False
                self.hidden.settle()
        self._is_read_at_once |= self._is_begun
        if self.expected is not None and any(tensor.is_cuda for tensor in tensors):
            torch.cuda.empty_cache()  # as after the proof in forward
        args, kwargs = self.arguments.filled(tensors)
        with self.hidden.recalled(), _spared(self._block.norms), self._compared(), self._adding_nothing():
            return self._forward(*args, **kwargs)

    @contextmanager
    def _adding_nothing(self) -> Iterator[None]:
        """Sees that a run adds to no gradients, where the first one has gone through its own graph: it may have."""
        if not self._is_read_at_once:
            yield
            return
        added = self._block.seeing_added()
        try:
            with added:
                yield
        finally:  # torch ends the run with the last tensor
            if added.are_there:
                raise self._block.adds()

    @contextmanager
    def _compared(self) -> Iterator[None]:
        if self.expected is None:
            yield
            return
        digesting = Digesting(self._block.norms, skips_workspaces=self._block.is_recurrent)
        try:
            with digesting:
                yield
        finally:
            # torch ends the run with the last tensor; one that ended before has an error of its own to tell.
            found = len(digesting.taken) >= len(self.expected) and difference(self.expected, digesting.taken)
            if not found and (other := written(self.places)):
                raise ApplyError(
                    f"'{self._block.path}' is recomputed in backward, and a tensor that it saved was written past "
                    f"autograd in between, by .data or through numpy: {other}; backward would read what was written "
                    f"without a plan: write into a clone(), or {_LEFT_ALONE}"
                )
            if found:
                raise ApplyError(
                    f"'{self._block.path}' is recomputed in backward, and what it saves differs from what it saved in "
                    f"forward: {found}; {self._block.cause(self.hidden)}. {self._remedy()}"
                )

    def _remedy(self) -> str:
        repeatable = "hand it to the block as an argument or keep it in an attribute of the block"
        if self.lacked_bytes:
            lacked = format_bytes(self.lacked_bytes, rounding="up")
            return (
                f"The budget lacked {lacked} for a second run in forward, after which such a block is not recomputed: "
                f"give at least that much more, or {repeatable}, or {_LEFT_ALONE}"
            )
        return f"It changed in between: {repeatable}, change it after backward only, or {_LEFT_ALONE}"


def _tensors_in(value: Any) -> list[Tensor]:
    return CallArguments((value,), {}).tensors


class _TorchRandom:
    """Holds torch's global random states when this is made, of the CPU and of the tensors' devices."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._cpu = torch.get_rng_state()
        self._kind = next((t.device.type for t in tensors if t.device.type not in ("cpu", "meta")), "cuda")
        there = [t for t in tensors if t.device.type == self._kind]
        self._devices, self._states = get_device_states(*there) if there else ([], [])

    @contextmanager
    def recalled(self) -> Iterator[None]:
        """Puts the states back as they were; afterwards they are as they are now again."""
        with torch.random.fork_rng(devices=self._devices, device_type=self._kind):
            torch.set_rng_state(self._cpu)
            set_device_states(self._devices, self._states, device_type=self._kind)
            yield


@contextmanager
def _alone(*, is_watched: bool) -> Iterator[None]:
    """Keeps what is saved within from hooks around the block, such as an offload's.

    Args:
        is_watched: whether operations are to go by a mode, as they do where some are kept: torch chooses others then.
    """
    with ExitStack() as stack:
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor))
        if is_watched:
            stack.enter_context(_Watched())  # type: ignore[no-untyped-call]
        yield


def _contexts_of(kept: KeptOperations) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Returns torch's contexts of a first run and of later ones, of which only the first is given what was kept.

    torch lets go of a kept result as it hands it out, and refuses another backward of the same graph
    (`retain_graph=True`). That one runs all operations again.
    """
    first, again = create_selective_checkpoint_contexts(kept)
    return first, _Once(again)


class _Once(AbstractContextManager[None]):
    """Enters a context the first time, and later one that does nothing but to be a mode, as that is."""

    def __init__(self, context: AbstractContextManager[Any]) -> None:
        self._left: AbstractContextManager[Any] | None = context
        self._entered = ExitStack()

    def __enter__(self) -> None:
        context, self._left = self._left, None
        self._entered.enter_context(_Watched() if context is None else context)  # type: ignore[no-untyped-call]

    def __exit__(self, *raised: Any) -> None:
        self._entered.__exit__(*raised)


class _Watched(TorchDispatchMode):
    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return op(*args, **(kwargs or {}))


@contextmanager
def _spared(norms: Sequence[nn.Module]) -> Iterator[None]:
    """Has BatchNorm layers write to copies of their running statistics; a batch must be counted once."""
    originals = [dict(own_buffers(norm)) for norm in norms]
    with without_dispatch():
        for norm in norms:
            own_buffers(norm).update({name: None if b is None else b.clone() for name, b in own_buffers(norm).items()})
    try:
        yield
    finally:
        for norm, buffers in zip(norms, originals, strict=True):
            own_buffers(norm).update(buffers)
