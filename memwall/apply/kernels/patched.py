"""Fused kernels in a model as it is: forwards of single modules are replaced, each one checked, and put back by `undo`.

    patched = patch_kernels(model)
    print(patched.table())

Classes stay as they are, and so do parameter names and the state dict; copies and pickles have no kernels. With the
recompute handles of `memwall.triton_kernels` around a step, what these kernels return is not kept for backward either.
Label: *equivalent*.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Self

from msgspec import Struct
from torch import nn

from memwall.apply.kernels.deferred_product import LossCounts
from memwall.apply.kernels.head import HEAD_KERNEL, head_candidate, head_disagreement, head_of
from memwall.apply.kernels.match import KernelMatch, candidates, disagreement, obstacle
from memwall.errors import ApplyError
from memwall.patches import undo_all
from memwall.trace.attached import wrap_forward

_log = logging.getLogger(__name__)


class KernelRow(Struct, frozen=True, kw_only=True):
    """Holds what became of one module that looked like a kernel's."""

    path: str
    module: str
    """Its class."""
    kernel: str
    is_replaced: bool
    reason: str = ""
    """Why not."""


class _Kernel:
    """Runs a kernel in a module's place, and counts its calls."""

    def __init__(self, path: str, module: nn.Module, candidate: KernelMatch) -> None:
        self.path, self.module = path, module
        self.num_calls = 0
        self._candidate = candidate
        self._unwrap = wrap_forward(module, self._run, path)

    def _run(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.num_calls += 1
        return self._candidate.forward(*args, **kwargs)

    def undo(self) -> None:
        """Gives the module its own forward again."""
        self._unwrap()


def objection(module: nn.Module, candidate: KernelMatch) -> str | None:
    """Returns why a candidate is not to stand in for a module's forward; None where it may."""
    reason = obstacle(module)
    if reason is not None:
        return reason
    if candidate.kernel == HEAD_KERNEL:
        assert isinstance(module, nn.Linear)
        return head_disagreement(module)
    return disagreement(module, candidate)


class PatchedKernels:
    """Holds a model whose modules run fused kernels, until `undo`."""

    def __init__(
        self, model: nn.Module, rows: tuple[KernelRow, ...], replaced: list[_Kernel], counts: LossCounts
    ) -> None:
        self.model, self.rows = model, rows
        self.losses = counts
        """Counts losses of the head."""
        self._replaced = replaced

    @property
    def num_replaced(self) -> int:
        """Returns how many modules run a fused kernel now."""
        return len(self._replaced)

    @property
    def num_calls(self) -> dict[str, int]:
        """Returns how often each of them was called, by its path."""
        return {kernel.path: kernel.num_calls for kernel in self._replaced}

    def undo(self) -> None:
        """Gives every module its own forward again; what others have put over one since stays, and calls that."""
        replaced, self._replaced = self._replaced, []
        undo_all([kernel.undo for kernel in replaced])

    def table(self) -> str:
        """Returns one line for each kind of module and outcome."""
        return _table(self.rows) or "no module looks like one of the fused kernels"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.undo()


def _table(rows: Iterable[KernelRow]) -> str:
    groups: dict[tuple[str, ...], list[KernelRow]] = {}
    for row in rows:
        # By how much they differ differs from module to module.
        kind = "replaced" if row.is_replaced else row.reason.partition(" by ")[0]
        groups.setdefault((row.module, row.kernel, kind), []).append(row)
    return "\n".join(
        f"{len(alike):4d} x {alike[0].module} -> {alike[0].kernel}: "
        f"{'replaced' if alike[0].is_replaced else f'left alone: {alike[0].reason}'} "
        f"({alike[0].path}{', ...' if len(alike) > 1 else ''})"
        for alike in groups.values()
    )


def patch_kernels(
    model: nn.Module,
    *,
    chunk_rows: int = 0,
    paths: Collection[str] | None = None,
    objection: Callable[[nn.Module, KernelMatch], str | None] = objection,
    is_told: bool = True,
) -> PatchedKernels:
    """Replaces the forward of every norm and gated MLP of the model that a fused kernel can stand in for, and its head.

    Found by structure, not by the model's name. Each replacement has given the module's own results and gradients on a
    small input before; a module for which none does is left alone, with a row and a warning that say why. A model
    without any is left as it is, with a warning.

    Args:
        chunk_rows: rows of logits that the loss may hold at a time; 0 leaves the head alone.
        paths: of the norms and gated MLPs to look at; None for all.
        objection: what speaks against a candidate; None where nothing does.
        is_told: whether the user has asked for kernels, and is warned where one does not run.
    """
    counts = LossCounts()
    head = head_of(model) if chunk_rows else None
    rows: list[KernelRow] = []
    replaced: list[_Kernel] = []
    for path, module in model.named_modules():
        if head is not None and module is head[1]:
            proposed = [head_candidate(head[1], chunk_rows, counts)]
        else:
            proposed = list(candidates(module)) if paths is None or path in paths else []
        if not proposed:
            continue
        reason = None
        for candidate in proposed:
            reason = objection(module, candidate)
            if reason is None:
                replaced.append(_Kernel(path, module, candidate))
                break
        rows.append(
            KernelRow(
                path=path,
                module=type(module).__name__,
                kernel=candidate.kernel if reason is None else proposed[0].kernel,
                is_replaced=reason is None,
                reason=reason or "",
            )
        )
    patched = PatchedKernels(model, tuple(rows), replaced, counts)
    if not is_told:
        return patched
    if not replaced:
        _log.warning(
            "no module of %s runs a fused kernel, so allowing kernels changes nothing: %s",
            type(model).__name__,
            patched.table(),
        )
    elif left_alone := _table(row for row in rows if not row.is_replaced):
        _log.warning("some modules of %s run no fused kernel:\n%s", type(model).__name__, left_alone)
    return patched


def apply_kernels(model: nn.Module, paths: Sequence[str], chunk_rows: int) -> PatchedKernels:
    """Puts a plan's kernels into a model: all of them, or none.

    Args:
        paths: of the norms and gated MLPs. chunk_rows: see `patch_kernels`.

    Raises:
        ApplyError: one of them is not here, or no kernel does what it does.
    """
    patched = patch_kernels(model, chunk_rows=chunk_rows, paths=paths)
    reasons = {row.path: row.reason for row in patched.rows if not row.is_replaced}
    found = {row.path for row in patched.rows}
    missing = [(path, "no module of a kernel's structure is there") for path in paths if path not in found]
    if chunk_rows and not any(row.kernel == HEAD_KERNEL for row in patched.rows):
        missing.append(("the head", "the model names no linear layer as its output embeddings"))
    missing.extend(reasons.items())
    if missing:
        patched.undo()
        path, reason = missing[0]
        raise ApplyError(
            f"the plan has fused kernels for {len(paths) + bool(chunk_rows)} modules of {type(model).__name__}, and "
            f"{len(missing)} cannot have one, {path} among them: {reason}; make the plan without --allow kernels"
        )
    return patched
