"""Parked ranges on their way back: which are, and which follow, within a window of memory."""

from memwall.apply.offload.entry import Entry


class Loads:
    """Holds the loads of an engine's entries.

    Args:
        window_bytes: the most memory for what comes back ahead of its use.
    """

    def __init__(self, window_bytes: int) -> None:
        self._window_bytes = window_bytes
        self._loaded: dict[Entry, None] = {}
        self.num_bytes = 0
        """Counts the bytes that they hold."""
        self.restored_bytes = 0
        """Counts the bytes asked back so far, as they left."""

    @property
    def is_full(self) -> bool:
        """Tells whether they hold more than the window."""
        return self.num_bytes > self._window_bytes

    def begin(self, entry: Entry, *, is_urgent: bool) -> None:
        """Begins to bring an entry's bytes back."""
        entry.load = entry.tier.load(entry.parked, is_urgent=is_urgent)
        self._loaded[entry] = None
        self.num_bytes += entry.num_bytes
        self.restored_bytes += entry.parked.num_bytes

    def drop(self, entry: Entry, *, is_collected: bool) -> None:
        """Lets go of a load, which somebody has collected, or nobody will."""
        if not is_collected:
            entry.tier.discard(entry.load)
        entry.load = None
        del self._loaded[entry]
        self.num_bytes -= entry.num_bytes

    def read_ahead(self, entry: Entry) -> None:
        """Begins loads of what was saved before `entry`, newest first, up to the window, without `entry` itself."""
        older = entry.older
        while older is not None:
            if older.load is None and older.num_unread > 0 and older.device == entry.device:
                if not self._make_room(older.num_bytes, entry):
                    return
                self.begin(older, is_urgent=False)
            older = older.older

    def _make_room(self, num_bytes: int, current: Entry) -> bool:
        """Returns whether `num_bytes` more fit the window, if loads are dropped that backward has passed by."""
        room_bytes = self._window_bytes + (current.num_bytes if current.load is not None else 0) - num_bytes
        if self.num_bytes > room_bytes:
            for passed in [entry for entry in self._loaded if entry.number > current.number]:
                self.drop(passed, is_collected=False)
        return self.num_bytes <= room_bytes
