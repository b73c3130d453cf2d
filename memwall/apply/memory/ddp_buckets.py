"""The buckets that DistributedDataParallel makes anew after its first step, in the order of that step's gradients.

New ones take the place of the old in a forward, once, after the hooks before it: in a plan both are what the process
held already. But malloc keeps what it had of the old ones, up to 32 MiB in one piece, unless it is told to return that.
"""

from collections.abc import Callable

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from memwall.torch_internals.modules import waits_for_new_buckets


def when_rebuilt(model: nn.Module, do: Callable[[], None]) -> tuple[RemovableHandle, ...]:
    """Does something once, as soon as buckets were made anew, before the forward that follows inside.

    Returns:
        Hooks that can be removed at any time; none where no part of the model has such buckets.
    """
    return tuple(
        _hook(part, do)
        for part in model.modules()
        if isinstance(part, DistributedDataParallel) and waits_for_new_buckets(part)
    )


def _hook(parallel: DistributedDataParallel, do: Callable[[], None]) -> RemovableHandle:
    def before_forward(*_: object) -> None:
        if not waits_for_new_buckets(parallel):
            handle.remove()
            do()

    handle: RemovableHandle = parallel.module.register_forward_pre_hook(before_forward)
    return handle
