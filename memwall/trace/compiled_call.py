"""Stands before the call of a module that was compiled in place: what is attached there the compiler does not see.

`nn.Module` calls what `module.compile()` made in place of everything else, so that the compiler traces the module's
hooks and its forward with it.
"""

import itertools
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, Self

from torch import nn

from memwall.patches import Patch, Patches
from memwall.torch_internals.compiler import COMPILED_CALL, compiled_call_of


class _Hook(NamedTuple):
    run: Callable[..., Any]
    with_kwargs: bool
    always_call: bool


class CompiledCall:
    """Calls hooks as `nn.Module` does, around the compiled call and what was put around that.

    It takes the call's place with the first hook or layer, and leaves it with the last.
    """

    HOOKS: ClassVar = ("register_forward_pre_hook", "register_forward_hook")

    def __init__(self, module: nn.Module, original: Callable[..., Any]) -> None:
        self._module, self.original = module, original
        self.run = original
        """The compiled call with its layers."""
        self._hooks: dict[str, dict[int, _Hook]] = {name: {} for name in self.HOOKS}
        self._numbers = itertools.count()
        self._patches = Patches("hooks a compiled module")

    @classmethod
    def before(cls, module: nn.Module) -> Self:
        """Returns what stands before a module's compiled call, put there now if it is not."""
        present = compiled_call_of(module)
        if not isinstance(present, cls):
            assert present is not None
            made = cls(module, present)
            made._patches.replace(module, COMPILED_CALL, made)
            return made
        return present

    @staticmethod
    def run_of(module: nn.Module) -> Callable[..., Any]:
        """Returns a module's compiled call, with the layers that lie around it."""
        present = compiled_call_of(module)
        assert present is not None
        return present.run if isinstance(present, CompiledCall) else present

    def hook(
        self,
        kind: str,
        run: Callable[..., Any],
        *,
        why: str,
        prepend: bool = False,
        with_kwargs: bool = False,
        always_call: bool = False,
    ) -> Patch:
        """Adds a hook, with the options of the method of `nn.Module` that `kind` names."""
        hooks, number = self._hooks[kind], next(self._numbers)
        added = {number: _Hook(run, with_kwargs, always_call)}
        self._hooks[kind] = {**added, **hooks} if prepend else {**hooks, **added}

        def undo() -> None:
            self._hooks[kind].pop(number, None)
            self._leave()

        where = f"{type(self._module).__name__}.{kind}"
        return Patch("hook", where, why=why, undo=undo, owner=self._module)

    def wrap(self, run: Callable[..., Any], *, why: str) -> Callable[[], None]:
        """Puts a layer around the call: `run(original, *args, **kwargs)`. Returns what takes it away."""
        inner = self.run
        is_over = False

        def layer(*args: Any, **kwargs: Any) -> Any:
            return inner(*args, **kwargs) if is_over else run(inner, *args, **kwargs)

        def undo() -> None:
            nonlocal is_over
            is_over = True
            if self.run is layer:
                self.run = inner
            self._leave()

        self.run = layer
        return Patch("call", type(self._module).__name__, why=why, undo=undo, owner=self._module).undo

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._module
        for hook in list(self._hooks["register_forward_pre_hook"].values()):
            changed = hook.run(module, args, kwargs) if hook.with_kwargs else hook.run(module, args)
            if changed is None:
                continue
            if hook.with_kwargs:
                args, kwargs = changed
            else:
                args = changed if isinstance(changed, tuple) else (changed,)
        try:
            out = self.run(*args, **kwargs)
        except BaseException:
            for hook in list(self._hooks["register_forward_hook"].values()):
                if hook.always_call:
                    hook.run(module, args, *((kwargs,) if hook.with_kwargs else ()), None)
            raise
        for hook in list(self._hooks["register_forward_hook"].values()):
            changed = hook.run(module, args, *((kwargs,) if hook.with_kwargs else ()), out)
            out = out if changed is None else changed
        return out

    def _leave(self) -> None:
        if not any(self._hooks.values()) and self.run is self.original:
            self._patches.undo()
