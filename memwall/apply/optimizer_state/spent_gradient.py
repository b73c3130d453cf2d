"""Stands for a gradient that the optimizer has used within backward, until its step: whoever looks at it is told."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from memwall.errors import NotExactError
from memwall.torch_internals.dispatch import disabled_torch_function, make_wrapper

_WAY_OUT = (
    "Some parameters have been stepped already, so the run ends: begin again, or from its last checkpoint, without "
    "--allow gradient-release, or so that the first step does what later ones do"
)


def not_exact(found: str) -> NotExactError:
    """Returns the error of a loop that does otherwise than in the step that was recorded."""
    return NotExactError(
        action="stepping within backward",
        found=found,
        effect="is for loops whose steps are all alike, and this one does otherwise than in its recorded step",
        way_out=_WAY_OUT,
    )


class SpentGradient(Tensor):
    """Has the shape of a gradient, and no elements."""

    __torch_function__ = disabled_torch_function

    @staticmethod
    def __new__(cls, like: Tensor) -> "SpentGradient":
        made: SpentGradient = make_wrapper(
            cls, like.size(), strides=like.stride(), dtype=like.dtype, device=like.device, storage_size=0
        )
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"SpentGradient(size={tuple(self.size())}, dtype={self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Refuses whatever wants its elements.

        Raises:
            NotExactError: always.
        """
        raise not_exact(
            f"the gradient of a parameter {list(_first(args).size())} is looked at or added to after the optimizer has "
            "used it, which no step did when it was recorded"
        )


def _first(args: Sequence[Any]) -> Tensor:
    for value in args:
        if isinstance(value, SpentGradient):
            return value
        if isinstance(value, (list, tuple)) and any(isinstance(one, SpentGradient) for one in value):
            return next(one for one in value if isinstance(one, SpentGradient))
    raise AssertionError(args)
