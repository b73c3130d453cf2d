"""Work that keeps a device busy for a known time."""

from typing import Any

from memwall.torch_internals.names import find

_sleep: Any = find("torch.cuda._sleep", "timing the operations of a CUDA device apart from the host that issues them")


def keep_busy(num_cycles: int) -> None:
    """Queues work on the current stream that takes so many cycles; without torch's function the device goes on idle."""
    if _sleep is not None:
        _sleep(num_cycles)
