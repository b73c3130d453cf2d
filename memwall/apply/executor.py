"""Carries out a plan's block actions on live modules, and takes them back: the forward of each block is wrapped.

Per block the layers are, from inside: the original forward, recomputation or recompute handles, offload. A hook on the
block's output marks the beginning of its backward; there the executor prefetches the block before it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from memwall.apply.block_counts import BlockCounts
from memwall.apply.recompute import recomputed
from memwall.errors import ApplyError
from memwall.planning.actions import Action, LeavingForm, Offload, Rebuild, Recompute
from memwall.torch_internals.autograd import current_node
from memwall.trace.attached import wrap_forward
from memwall.triton_kernels import recompute_handles

__all__ = ["BlockExecutor", "OffloadEngine", "resolve_blocks"]


class OffloadEngine(Protocol):
    """What the executor needs of an offload engine: saved tensors grouped by block call, read back group by group."""

    def group(self, key: Any, counts: BlockCounts | None = None, form: LeavingForm = "exact") -> Any:
        """Context manager under which saved tensors belong to `key`, are counted, and leave in a form."""

    def hooks(self) -> Any:
        """Context manager under which saved tensors move away."""

    def pack(self, tensor: Tensor) -> Any:
        """Moves one away, or keeps it; what is to be stored in its place."""

    def unpack(self, packed: Any) -> Tensor:
        """The tensor again."""

    def prefetch(self, key: Any) -> None:
        """Begins to read a group back."""


def resolve_blocks(roots: Sequence[nn.Module], names: Sequence[str]) -> dict[str, nn.Module]:
    """Modules by the paths a trace gives them: below the root, or below `<ClassName>` with several roots."""
    modules: dict[str, nn.Module] = {}
    for root, prefix in zip(roots, names, strict=True):
        for path, module in root.named_modules():
            full = ".".join(part for part in (prefix, path) if part) or type(root).__name__
            modules.setdefault(full, module)
    return modules


class BlockExecutor:
    """Wraps the forward of blocks according to actions; `undo` restores every module as it was.

    Args:
        modules: block path -> module, as `resolve_blocks` gives them.
        order: paths of all blocks in forward order, those without an action too: their backward triggers prefetch;
            () where only the plan is known, then those it names in the order in which the model holds them.
        engine: needed when an action offloads.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        order: Sequence[str],
        engine: OffloadEngine | None = None,
    ) -> None:
        self._modules = modules
        self._order = tuple(order)
        self._engine = engine
        self._unwrap: list[Callable[[], None]] = []
        self._groups: list[tuple[str, int] | None] = []
        self._calls = 0
        self._counts: dict[str, BlockCounts] = {}

    def apply(self, actions: Sequence[Action]) -> None:
        """Wraps the blocks; all or nothing.

        Raises:
            ApplyError: a block is missing, cannot be wrapped, or needs an engine there is none of.
        """
        recompute = {a.block: a for a in actions if isinstance(a, Recompute)}
        rebuild = {a.block for a in actions if isinstance(a, Rebuild)}
        offload = {a.block: a for a in actions if isinstance(a, Offload)}
        named = {*recompute, *rebuild, *offload}
        # An order made for another micro-batch may lack a block; each that is named must be wrapped.
        order = tuple(dict.fromkeys((*self._order, *(path for path in self._modules if path in named))))
        missing = sorted(named - set(self._modules))
        if missing:
            raise ApplyError(
                f"the plan treats the module '{missing[0]}', which this model does not have; "
                "make a plan for this model with `memwall plan` or run with --budget"
            )
        if offload and self._engine is None:
            raise ApplyError("the plan offloads activations, but no scratch space was opened for them; pass --disk DIR")
        try:
            for place, path in enumerate(order):
                follows = place > 0 and order[place - 1] in offload
                if path in named or follows:
                    self._wrap(path, recompute.get(path), rebuilds=path in rebuild, offload=offload.get(path))
        except BaseException:
            self.undo()
            raise

    def wrapped(self, path: str) -> tuple[nn.Module, BlockCounts]:
        """A block that was wrapped, and what its wrapper counts."""
        return self._modules[path], self._counts[path]

    def undo(self) -> None:
        """Gives every module its forward back. Graphs already built keep working."""
        for unwrap in reversed(self._unwrap):
            unwrap()
        self._unwrap = []
        self._groups = []

    def begin_step(self) -> None:
        """Forgets the calls of the last step; to be called before each step's first forward."""
        self._groups = []

    def _wrap(self, path: str, recompute: Recompute | None, *, rebuilds: bool, offload: Offload | None) -> None:
        module = self._modules[path]
        original = module.forward
        counts = self._counts[path] = BlockCounts()
        inner = original if recompute is None else recomputed(module, counts.counting(original), recompute)
        engine, form = (None, "exact") if offload is None else (self._engine, offload.form)

        def forward(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return original(*args, **kwargs)
            counts.num_calls += 1
            if current_node() is not None:
                counts.num_in_backward += 1
            key = None
            if engine is not None:
                key = (path, self._calls)
                self._calls += 1
            with _saving(engine, key, counts, rebuilds=rebuilds, form=form):
                out = inner(*args, **kwargs)
            self._mark(key, out)
            return out

        self._unwrap.append(wrap_forward(module, forward, path))

    def _mark(self, key: tuple[str, int] | None, out: Any) -> None:
        """Hooks the block's output: its gradient is the first thing of the block's backward."""
        place = len(self._groups)
        self._groups.append(key)
        before = self._groups[place - 1] if place else None
        engine = self._engine
        tensor = None if before is None or engine is None else _first_differentiable(out)
        if tensor is None or engine is None:
            return

        def begins(_: Tensor) -> None:
            engine.prefetch(before)

        tensor.register_hook(begins)


@contextmanager
def _saving(
    engine: OffloadEngine | None,
    key: tuple[str, int] | None,
    counts: BlockCounts,
    *,
    rebuilds: bool,
    form: LeavingForm,
) -> Iterator[None]:
    """What takes the tensors that a block saves: torch calls the innermost hooks alone, so handles pass on to the
    engine what they do not rebuild."""
    with ExitStack() as stack:
        if engine is not None:
            stack.enter_context(engine.group(key, counts, form))
        if rebuilds:
            handles = stack.enter_context(recompute_handles(engine))
            stack.callback(lambda: counts.note_rebuilt(handles.num_replaced))
        elif engine is not None:
            stack.enter_context(engine.hooks())
        yield


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
