"""Fused kernels in a model as it is: forwards of single modules are replaced, each one checked, and put back by `undo`.

    patched = patch_kernels(model)
    print(patched.table())

Classes stay as they are, and so do parameter names, the state dict and pickling. With the recompute handles of
`memwall.triton_kernels` around a step, what these kernels return is not kept for backward either. Label: *equivalent*.
"""

import logging
from typing import Self

from msgspec import Struct
from torch import nn

from memwall.apply.kernels_match import candidates, disagreement, obstacle
from memwall.errors import ApplyError

__all__ = ["KernelRow", "PatchedKernels", "patch_kernels"]

_log = logging.getLogger(__name__)


class KernelRow(Struct, frozen=True, kw_only=True):
    """What became of one module that looked like a kernel's."""

    path: str
    module: str
    """Its class."""
    kernel: str
    is_replaced: bool
    reason: str = ""
    """Why not."""


class PatchedKernels:
    """A model whose modules run fused kernels, until `undo`."""

    def __init__(self, model: nn.Module, rows: tuple[KernelRow, ...], replaced: list[nn.Module]) -> None:
        self.model, self.rows = model, rows
        self._replaced = replaced

    @property
    def num_replaced(self) -> int:
        """Modules that run a fused kernel now."""
        return len(self._replaced)

    def undo(self) -> None:
        """Every module runs its own forward again.

        Raises:
            ApplyError: somebody replaced one in between; all others are restored.
        """
        foreign = []
        for module in self._replaced:
            if getattr(module.__dict__.get("forward"), "memwall_kernel", None):
                del module.__dict__["forward"]
            else:
                foreign.append(type(module).__name__)
        self._replaced = []
        if foreign:
            raise ApplyError(
                f"{len(foreign)} forwards ({', '.join(sorted(set(foreign)))}) were replaced by others after memwall; "
                "undo what came later first"
            )

    def table(self) -> str:
        """One line for each kind of module and outcome."""
        groups: dict[tuple[str, str, str], list[str]] = {}
        for row in self.rows:
            outcome = "replaced" if row.is_replaced else f"left alone: {row.reason}"
            groups.setdefault((row.module, row.kernel, outcome), []).append(row.path)
        if not groups:
            return "no module looks like one of the fused kernels"
        return "\n".join(
            f"{len(paths):4d} x {module} -> {kernel}: {outcome} ({paths[0]}{', ...' if len(paths) > 1 else ''})"
            for (module, kernel, outcome), paths in groups.items()
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.undo()


def patch_kernels(model: nn.Module) -> PatchedKernels:
    """Replaces the forward of every norm and gated MLP of the model that a fused kernel can stand in for.

    Found by structure, not by the model's name. Each replacement has given the module's own results and gradients on a
    small input before; a module for which none does is left alone, with a row that says why. A model without any is
    left as it is, with a warning.
    """
    rows: list[KernelRow] = []
    replaced: list[nn.Module] = []
    for path, module in model.named_modules():
        proposed = list(candidates(module))
        if not proposed:
            continue
        reason = obstacle(module)
        for candidate in proposed if reason is None else ():
            reason = disagreement(module, candidate)
            if reason is None:
                candidate.forward.memwall_kernel = candidate.kernel  # type: ignore[attr-defined]
                module.forward = candidate.forward
                replaced.append(module)
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
    patched = PatchedKernels(model, tuple(rows), replaced)
    if not replaced:
        _log.warning("memwall: no module of %s runs a fused kernel: %s", type(model).__name__, patched.table())
    return patched
