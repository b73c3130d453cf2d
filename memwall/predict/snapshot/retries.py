"""The times a device ran out and the allocator began again with an empty cache: who asked, why, how long it took."""

from msgspec import Struct

from memwall.predict.snapshot.device_history import DeviceHistory, releases_of
from memwall.predict.snapshot.timeline import Timeline
from memwall.predict.snapshot.user_line import line_of
from memwall.trace.snapshot.records import Snapshot


class Retry(Struct, frozen=True, kw_only=True):
    """Describes how cached segments were given back for a request that the device had no room for."""

    position: int
    """Events before it."""
    line: str
    """Whose request it was."""
    requested_bytes: int
    stranded_bytes: int
    """Bytes free at that moment, but between blocks in use."""
    returned_bytes: int
    """Bytes given back to the device."""
    seconds: float | None
    """Time from the first segment given back to the answer of the device, without waiting for its streams; None where
    torch noted no times."""

    @property
    def is_fragmentation(self) -> bool:
        """Tells whether what lay free between blocks would have been enough in one piece."""
        return self.stranded_bytes >= self.requested_bytes


def retries_of(snapshot: Snapshot, recording: DeviceHistory, timeline: Timeline) -> tuple[Retry, ...]:
    """Returns every retry of a recording, in order."""
    events = recording.events
    found = []
    for release in releases_of(recording):
        if not release.is_retry:
            continue
        answers = (event for event in events[release.last + 1 :] if event.action in ("alloc", "oom"))
        request = next(answers, None)
        begin_us, end_us = (events[index].time_us for index in (release.first, release.last + 1))
        found.append(
            Retry(
                position=release.first,
                line=line_of(snapshot.stacks[request.stack] if request is not None else ()),
                requested_bytes=0 if request is None else request.num_bytes,
                stranded_bytes=timeline.fragmentation(release.first).stranded_bytes,
                returned_bytes=sum(event.num_bytes for event in events[release.first : release.last + 1]),
                seconds=max(0, end_us - begin_us) / 1e6 if begin_us and end_us else None,
            )
        )
    return tuple(found)


def retry_note(retries: tuple[Retry, ...]) -> str:
    """Says what the retries cost and whether pieces were the reason; "" for none."""
    if not retries:
        return ""
    seconds = [retry.seconds for retry in retries if retry.seconds is not None]
    took = f", {sum(seconds) * 1e3:.1f} ms and what waiting for all streams took" if seconds else ""
    in_pieces = sum(retry.is_fragmentation for retry in retries)
    why = "the device was full"
    if in_pieces:
        whose = "the request" if len(retries) == 1 else f"{in_pieces} of the requests"
        why = f"enough for {whose} lay free, but in pieces between blocks in use"
    return f"the device ran out (retries: {len(retries)}{took}): cached segments were given back to get new ones; {why}"
