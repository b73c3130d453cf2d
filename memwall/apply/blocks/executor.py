"""Wraps the forwards of blocks with what techniques do to them, and takes that back.

Around a block's own forward lie layers, one for each technique that treats the block. A hook on the block's output
marks the beginning of its backward; there the block before it is read back, if its saved tensors left.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from itertools import pairwise
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from memwall.apply.blocks.counts import BlockCounts
from memwall.apply.blocks.sequences import DividedSequences
from memwall.errors import ApplyError
from memwall.planning.techniques.offload import LeavingForm
from memwall.torch_internals.autograd import current_node, execution_is_transformed
from memwall.trace.attached import forward_of, wrap_forward

Forward = Callable[..., Any]

_log = logging.getLogger(__name__)


class OffloadEngine(Protocol):
    """Says what blocks need of an offload engine: saved tensors grouped by block call, read back group by group."""

    def group(self, key: Any, counts: BlockCounts | None = None, form: LeavingForm = "exact") -> Any:
        """Returns a context under which saved tensors belong to `key`, are counted, and leave in a form."""

    def hooks(self) -> Any:
        """Returns a context under which saved tensors move away."""

    def pack(self, tensor: Tensor) -> Any:
        """Moves one away, or keeps it; what is to be stored in its place."""

    def unpack(self, packed: Any) -> Tensor:
        """Returns the tensor again."""

    def reread(self, packed: Any) -> Tensor:
        """Returns the tensor for a comparison, before backward asks for it: nothing more is read for it."""

    def prefetch(self, key: Any) -> None:
        """Begins to read a group back."""


class BlockCall:
    """Holds one call of a block that computes gradients."""

    def __init__(self, key: tuple[str, int], counts: BlockCounts) -> None:
        self.key, self.counts = key, counts
        self.engine: OffloadEngine | None = None
        """Where what the block saves goes; None where it stays. Written by the layer that sends it there."""


class BlockLayer:
    """Says what one technique does to a block; by default nothing."""

    depth: ClassVar[int]
    """Layers with a smaller one lie further inside, and a block has one of each."""
    wraps_next: ClassVar[bool] = False
    """Whether blocks that are called after it are wrapped too, so that their backward begins to read this one back."""

    def wrapped(self, module: nn.Module, forward: Forward, counts: BlockCounts) -> Forward:
        """Returns a forward in place of the module's; it is called where gradients are computed."""
        return forward

    def set_proving(self, is_proving: bool) -> None:
        """Has the layer compare what it gives with what is so without it, see `Handler.set_proving`."""

    def around(self, call: BlockCall) -> AbstractContextManager[Any]:
        """Returns what each such call is made in; torch calls the innermost saved-tensor hooks alone."""
        return nullcontext()


def resolve_blocks(roots: Sequence[nn.Module], names: Sequence[str]) -> dict[str, nn.Module]:
    """Returns modules by the paths a trace gives them: below the root, or below `<ClassName>` with several roots."""
    modules: dict[str, nn.Module] = {}
    for root, prefix in zip(roots, names, strict=True):
        for path, module in root.named_modules():
            full = ".".join(part for part in (prefix, path) if part) or type(root).__name__
            modules.setdefault(full, module)
    return modules


class BlockExecutor:
    """Wraps the forwards of blocks in layers; `undo` restores every module as it was.

    Args:
        modules: block path -> module, as `resolve_blocks` gives them.
        order: the path of each call of a block in forward order, those without a layer too: their backward triggers
            prefetch; () where only the plan is known, then those that have layers and their like beside them, as the
            model holds them.
    """

    def __init__(self, modules: Mapping[str, nn.Module], order: Sequence[str]) -> None:
        self._modules, self._order = dict(modules), tuple(order)
        self._sequences = DividedSequences(modules)
        self._layers: dict[str, dict[int, BlockLayer]] = {}
        self._unwrap: list[Callable[[], None]] = []
        self._called: list[BlockCall] = []
        """The step's calls so far."""
        self._num_calls = 0
        self._counts: dict[str, BlockCounts] = {}
        self._transformed: set[str] = set()
        self.spared: frozenset[str] = frozenset()
        """Paths of blocks that keep what they save in the present forward, as if they had no layers."""

    def add(self, path: str, layer: BlockLayer) -> None:
        """Has `apply` put a layer around a block."""
        self._layers.setdefault(path, {})[layer.depth] = layer

    def apply(self) -> None:
        """Wraps the blocks; all or nothing.

        Raises:
            ApplyError: a block is missing, or cannot be wrapped.
        """
        places = {path: place for place, path in enumerate(self._modules)}
        for path in (*self._order, *self._layers):
            run = self._sequences.run(path) if path not in self._modules else None
            if run is not None:
                self._modules[path] = run
                places[path] = places[path.partition(":")[0]]
        missing = sorted(set(self._layers) - set(self._modules))
        if missing:
            raise ApplyError(
                f"the plan treats the module '{missing[0]}', which this model does not have; "
                "make a plan for this model with `memwall plan` or run with --budget"
            )
        # An order made for another micro-batch may lack a block; each that has a layer must be wrapped.
        order = self._order or self._likely_order()
        calls = (*order, *sorted(self._layers.keys() - set(order), key=places.__getitem__))
        layers = {path: [layer for _, layer in sorted(self._layers.get(path, {}).items())] for path in calls}
        next_ones = {after for path, after in pairwise(calls) if any(layer.wraps_next for layer in layers[path])}
        try:
            for path in layers:
                if layers[path] or path in next_ones:
                    self._wrap(path, layers[path])
            self._unwrap += self._sequences.wrap()
        except BaseException:
            self.undo()
            raise

    def _likely_order(self) -> tuple[str, ...]:
        """Returns the blocks with layers, and modules of their class in the same parents, as the model holds them."""
        kinds = {(path.rpartition(".")[0], type(self._modules[path])) for path in self._layers}
        likes = ((path, (path.rpartition(".")[0], type(module))) for path, module in self._modules.items())
        return tuple(path for path, kind in likes if kind in kinds)

    @property
    def is_applied(self) -> bool:
        """Returns whether blocks are wrapped."""
        return bool(self._unwrap)

    def treats(self, module: nn.Module) -> bool:
        """Returns whether a module is one of the blocks that have layers."""
        is_block = any(self._modules[path] is module for path in self._layers)
        return is_block or self._sequences.holds(module)

    def wrapped(self, path: str) -> tuple[nn.Module, BlockCounts]:
        """Returns a block that was wrapped, and what its wrapper counts."""
        return self._modules[path], self._counts[path]

    def undo(self) -> None:
        """Gives every module its forward back. Graphs already built keep working."""
        for unwrap in reversed(self._unwrap):
            unwrap()
        self._unwrap = []
        self._called = []

    def begin_step(self) -> None:
        """Forgets the calls of the last step; to be called before each step's first forward."""
        self._called = []

    def _wrap(self, path: str, layers: Sequence[BlockLayer]) -> None:
        module = self._modules[path]
        counts = self._counts[path] = BlockCounts()
        inner = forward_of(module)
        for layer in layers:
            inner = layer.wrapped(module, inner, counts)

        def forward(original: Forward, *args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled() or path in self.spared:
                return original(*args, **kwargs)
            if execution_is_transformed():
                self._note_transformed(path)
                return original(*args, **kwargs)
            counts.num_calls += 1
            if current_node() is not None:
                counts.num_in_backward += 1
            self._num_calls += 1
            call = BlockCall((path, self._num_calls), counts)
            with ExitStack() as stack:
                for layer in reversed(layers):
                    stack.enter_context(layer.around(call))
                out = inner(*args, **kwargs)
            self._mark(call, out)
            return out

        self._unwrap.append(wrap_forward(module, forward, path))

    def _note_transformed(self, path: str) -> None:
        if path not in self._transformed:
            self._transformed.add(path)
            _log.warning(
                "'%s' keeps what it saves where torch.func computes its gradients, which allows no hooks", path
            )

    def _mark(self, call: BlockCall, out: Any) -> None:
        """Hooks the block's output: its gradient is the first thing of the block's backward."""
        before = self._called[-1] if self._called else None
        self._called.append(call)
        engine = None if before is None else before.engine
        tensor = None if engine is None else _first_differentiable(out)
        if tensor is None or engine is None or before is None:
            return
        key = before.key

        def begins(_: Tensor) -> None:
            engine.prefetch(key)

        tensor.register_hook(begins)


def _first_differentiable(value: Any) -> Tensor | None:
    if isinstance(value, Tensor):
        return value if value.requires_grad else None
    if isinstance(value, Mapping):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        value = vars(value).values() if hasattr(value, "__dict__") else ()
    for item in value:
        found = _first_differentiable(item) if isinstance(item, (Tensor, list, tuple, Mapping)) else None
        if found is not None:
            return found
    return None
