"""Random calls on torch's own allocator: each is chosen by what it answered before, so no simulator takes part."""

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from types import TracebackType
from typing import Any, NoReturn

from benchmarks.allocator_oracle.libraries import Oracle
from benchmarks.allocator_oracle.recording import RecordedRun
from memwall.predict.cuda_allocator.allocator_settings import MIB, NUM_DIVISIONS, AllocatorSettings, format_settings

__all__ = ["TorchAllocator", "record"]

_SIZES = (1, 600, 70_000, MIB, MIB + 1, 3 * MIB, 9 * MIB, 10 * MIB, 11 * MIB, 33 * MIB, 70 * MIB)
_TOTAL_BYTES = 1024 * MIB
_ENDLESS_BYTES = 1 << 62
_STREAMS = (0, 1000)
_SIDE_STREAM = 2000
_NUM_STATISTICS = 22
"""Words of an answer before the places of new segments."""


class TorchAllocator:
    """A process with the allocator, and what it has answered so far."""

    def __init__(self, oracle: Oracle, variables: dict[str, str]) -> None:
        self.calls: list[str] = []
        self.results: list[int | str] = []
        self.statistics: dict[int, list[int]] = {}
        self.segments: list[int] = []
        self._errors = tempfile.TemporaryFile(mode="w+")  # noqa: SIM115 - closed in __exit__
        self._process = subprocess.Popen(
            [oracle.driver],
            env={**os.environ, **variables, "LD_LIBRARY_PATH": oracle.library_path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )

    def call(self, text: str) -> int | str:
        """The address of an allocation, "oom", or the call's letter."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        # A process that has ended takes nothing; that it answers nothing either is what counts.
        with suppress(BrokenPipeError):
            self._process.stdin.write(f"{text}\n")
            self._process.stdin.flush()
        words = self._process.stdout.readline().split()
        if not words:
            self._fail(text)
        self.statistics[len(self.calls)] = [int(word) for word in words[1:_NUM_STATISTICS]]
        self.segments += [int(word) for word in words[_NUM_STATISTICS:]]
        self.calls.append(text)
        self.results.append(int(words[0]) if words[0].isdecimal() else words[0])
        return self.results[-1]

    def history(self) -> dict[str, Any]:
        """What it did since the history was begun, and its statistics: see the comment at the top of driver.cpp."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("S\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            self._fail("S")
        found: dict[str, Any] = json.loads(line)
        return found

    def __enter__(self) -> "TorchAllocator":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._process.communicate()
        self._errors.close()

    def _fail(self, text: str) -> NoReturn:
        status = self._process.wait()
        where = f"torch's allocator ended with status {status} at call {len(self.calls)}, '{text}'"
        if status == -signal.SIGSEGV:
            raise _Crash(where)
        self._errors.seek(0)
        raise SystemExit(f"{where}:\n{self._errors.read().strip()}")


class _Crash(Exception):
    """Torch's allocator crashed: nothing is wrong with the simulator, and the case ends there."""


def record(oracle: Oracle, seed: int, *, num_calls: int) -> RecordedRun:
    """Records one process that allocates and frees at random."""
    draw = random.Random(seed)
    settings = _settings(draw)
    capacity_bytes = draw.choice((None, 400 * MIB))
    fraction = draw.choice((None, 0.29296875))
    is_descending = draw.random() < 0.5
    text = format_settings(settings)
    variables = {
        "PYTORCH_CUDA_ALLOC_CONF": text,
        "STUB_TOTAL_BYTES": str(_TOTAL_BYTES),
        "STUB_CAPACITY_BYTES": str(capacity_bytes or _ENDLESS_BYTES),
        "STUB_IS_DESCENDING": str(int(is_descending)),
    }
    with TorchAllocator(oracle, variables) as torch:
        if fraction is not None:
            torch.call(f"m {fraction}")
        try:
            _call_at_random(torch, draw, num_calls=num_calls)
        except _Crash as crash:
            print(f"seed {seed} is compared up to here: {crash}", file=sys.stderr)
    return RecordedRun(
        settings=text,
        total_bytes=_TOTAL_BYTES,
        capacity_bytes=capacity_bytes,
        segments=torch.segments,
        calls=torch.calls,
        results=torch.results,
        statistics=torch.statistics,
    )


def _call_at_random(torch: TorchAllocator, draw: random.Random, *, num_calls: int) -> None:
    live: list[int] = []
    num_blocks = 0
    for _ in range(num_calls):
        choice = draw.random()
        if choice < 0.55:
            num_blocks += 1
            nbytes = draw.choice(_SIZES) + draw.randrange(5000)
            if torch.call(f"a {num_blocks} {nbytes} {draw.choice(_STREAMS)}") != "oom":
                live.append(num_blocks)
                if draw.random() < 0.05:
                    torch.call(f"r {num_blocks} {_SIDE_STREAM}")
        elif choice < 0.95 and live:
            block = draw.choice(live)
            live.remove(block)
            torch.call(f"f {block}")
        elif choice < 0.98:
            torch.call(f"d {_SIDE_STREAM}")
        elif choice >= 0.99:
            torch.call("e")


def _settings(draw: random.Random) -> AllocatorSettings:
    is_expandable = draw.random() < 0.5
    large_mib = draw.choice((20, 12, 48))
    split_mib = draw.choice((None, 64, 48))
    divisions = draw.choice((0, 4))
    threshold = draw.choice((0, 0.6))
    slack_mib = draw.choice((None, 64))
    if is_expandable:
        split_mib = None
    return AllocatorSettings(
        expandable_segments=is_expandable,
        large_segment_bytes=large_mib * MIB,
        max_split_bytes=None if split_mib is None else split_mib * MIB,
        max_non_split_rounding_bytes=None if slack_mib is None or split_mib is None else slack_mib * MIB,
        roundup_power2_divisions=(divisions,) * NUM_DIVISIONS,
        garbage_collection_threshold=threshold,
    )
