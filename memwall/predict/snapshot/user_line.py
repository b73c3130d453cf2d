"""The user's line in a stack of a snapshot: what a block, a failure or a retry is named by."""

from collections.abc import Sequence

from memwall.trace.snapshot.records import Frame

NO_STACK = "(no stack recorded)"
# Frames of the machinery between a user's line and the allocator.
_FOREIGN_PATHS = (
    "/torch/",
    "/site-packages/",
    "/dist-packages/",
    "/lib/python3",
    "/<frozen",
    "/<string>",
    "/<built-in",
    "/nn.Module:",
    "/??",
    # memwall from a clone, whose hooks and modes lie between the two; its demo stands for a user's script.
    "/memwall/__main__.py",
    "/memwall/patches.py",
    *(f"/memwall/{name}/" for name in ("apply", "checkpoint", "cli", "integrations", "observe", "session", "store")),
    *(f"/memwall/{name}/" for name in ("torch_internals", "trace", "triton_kernels")),
)
_FOREIGN_SUFFIXES = (".cpp", ".h", ".cc", ".cu", ".cuh", ".c", ".so")


def line_of(stack: Sequence[Frame]) -> str:
    """Returns the user's line of a stack, as `models/gpt.py:42 forward`; the innermost frame where all are foreign."""
    if not stack:
        return NO_STACK
    frame = next((frame for frame in stack if _is_the_users(frame)), stack[0])
    if _is_nameless(frame):
        return frame.name
    path = "/".join(frame.filename.replace("\\", "/").split("/")[-2:])
    return f"{path}:{frame.line} {frame.name}"


def _is_nameless(frame: Frame) -> bool:
    # Snapshots made by torch's profiler (_memory_viz._profile_to_snapshot) have everything in the name.
    return frame.filename in ("", "none")


def _is_the_users(frame: Frame) -> bool:
    path = "/" + (frame.name if _is_nameless(frame) else frame.filename).replace("\\", "/")
    return not path.endswith(_FOREIGN_SUFFIXES) and not any(part in path for part in _FOREIGN_PATHS)
