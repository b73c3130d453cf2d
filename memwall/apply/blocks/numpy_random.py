"""numpy's global random state, taken and put back in little time.

Asking numpy for it takes 35 us, and a block may be called a thousand times in a step. Whether it is still the one that
was taken last is seen in its bytes.
"""

import ctypes
import sys
from typing import Any

# Of MT19937, as numpy's `state_address` documents it: 624 words and the place among them.
_MT_BYTES = 624 * 4 + 4

_last: tuple[bytes, Any] | None = None


def numpy_state() -> Any:
    """Returns what `set_numpy_state` takes, the same object for the same state; None if numpy is not in use."""
    global _last
    random = _random()
    if random is None:
        return None
    bits = random.get_bit_generator()
    if type(bits).__name__ != "MT19937":
        return random.get_state(legacy=False)
    now = ctypes.string_at(bits.ctypes.state_address, _MT_BYTES)
    # A normal number that is held back for the next call is not among these bytes.
    if _last is None or _last[0] != now or _last[1]["has_gauss"]:
        _last = (now, random.get_state(legacy=False))
    return _last[1]


def set_numpy_state(state: Any) -> None:
    """Puts a state back."""
    global _last
    _last = None
    _random().set_state(state)


def _random() -> Any:
    numpy = sys.modules.get("numpy")
    return None if numpy is None else getattr(numpy, "random", None)
