"""The trace file: one line that says what it is, then zstandard-compressed MessagePack, decoded strictly."""

from pathlib import Path

import msgspec
import zstandard

from memwall.errors import TraceError
from memwall.trace.records import Trace
from memwall.trace.soundness import check_sound
from memwall.units import format_bytes
from memwall.versioned_files import FileKind, whole_file

__all__ = ["MAGIC", "load_trace", "save_trace"]

_KIND = FileKind(noun="trace", schema="memwall.trace", version=2, error=TraceError, way_out="record it again")
MAGIC = f"{_KIND.schema}/".encode()
# Traces shrink to a quarter, those of many equal layers further; a file made for it would grow 30,000-fold.
_LARGEST_RATIO = 200
_SMALL_BYTES = 64 << 20


def save_trace(trace: Trace, path: Path) -> None:
    """Writes a trace; a file half written never takes the place of a whole one.

    Raises:
        TraceError: the file cannot be written.
    """
    payload = zstandard.ZstdCompressor(level=6, write_checksum=True).compress(msgspec.msgpack.encode(trace))
    with whole_file(path, noun="trace", error=TraceError, way_out="choose another -o FILE") as file:
        file.write(MAGIC + f"{_KIND.version}\n".encode() + payload)


def load_trace(path: Path) -> Trace:
    """Reads a trace file.

    Raises:
        TraceError: no such file, not a trace, another version, cut short or damaged; the message says which.
    """
    content = _KIND.read_bytes(path)
    head, newline, payload = content[:64].partition(b"\n")
    if not content.startswith(MAGIC) or not newline or not head[len(MAGIC) :].isdigit():
        raise TraceError(f"{path} is not a memwall trace; expected a file written by `memwall profile -o FILE`")
    _KIND.require_version(path, int(head[len(MAGIC) :]))
    payload = content[len(head) + 1 :]
    try:
        size_bytes = zstandard.frame_content_size(payload)
        if size_bytes > max(_SMALL_BYTES, _LARGEST_RATIO * len(payload)):
            raise TraceError(
                f"{path} is cut short or damaged (it claims to hold {format_bytes(size_bytes)} in "
                f"{format_bytes(len(payload))}); record it again"
            )
        data = zstandard.ZstdDecompressor().decompress(payload, max_output_size=max(size_bytes, 1))
    except (zstandard.ZstdError, MemoryError) as error:  # its header may claim any size
        raise TraceError(
            f"{path} is cut short or damaged ({str(error) or 'it claims to be huge'}); record it again"
        ) from error
    try:
        trace = msgspec.msgpack.decode(data, type=Trace)
        check_sound(trace)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise TraceError(f"{path} is not a valid trace: {error}; record it again") from error
    return trace
