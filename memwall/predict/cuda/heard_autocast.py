"""Has autocast of one device type cast on another, and hears in which precision."""

from collections.abc import Callable
from typing import Any, Literal

import torch

from memwall.patches import Patches


class HeardAutocast:
    """Has every autocast that a step enters for one device type run on the one that its tensors are on.

    Args:
        of: device type that the step was written for.
        on: device type of its tensors.
    """

    def __init__(self, *, of: str, on: str) -> None:
        self.precision: Literal["none", "bfloat16", "float16"] = "none"
        """Names that of the last autocast that was entered."""
        self._of, self._on = of, on

    def follow(self, patches: Patches) -> None:
        """Begins, until the patches are undone."""
        patches.wrap(torch.autocast, "__init__", self._begin)

    def _begin(
        self,
        init: Callable[..., None],
        autocast: Any,
        device_type: str,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
    ) -> None:
        if device_type == self._of:
            device_type, dtype = self._on, torch.get_autocast_dtype(self._of) if dtype is None else dtype
        init(autocast, device_type, dtype, enabled, cache_enabled)
        if enabled:
            self.precision = "float16" if autocast.fast_dtype == torch.float16 else "bfloat16"
