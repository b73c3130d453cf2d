"""Fresh processes that prepare while others measure, and a time budget that parts of a benchmark share.

A child imports and predicts on its own, touches no device, and waits for a line on its standard input. Then it is alone
on the device, and answers with one JSON object. So each case has a context of its own, and starting up costs no time.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

__all__ = ["Budget", "CaseFailed", "CaseHung", "Child", "prepared"]

Key = TypeVar("Key")
_MOST_SAID = 2000
_WIDTH = max(1, min(6, (os.cpu_count() or 2) // 2))
_THREADS = max(1, (os.cpu_count() or 2) // (_WIDTH + 1))


class CaseFailed(RuntimeError):
    """A child ended with an error; the message ends with what it said."""


class CaseHung(CaseFailed):
    """A child took too long and was ended."""


class Child:
    """A script of this folder in a process of its own.

    Args:
        arguments: the script's name and its arguments.
        settings: of torch's allocator; those of this process do not reach it.
    """

    def __init__(self, arguments: Sequence[str], settings: str = "") -> None:
        self._name = " ".join(arguments)
        self._said = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - closed in `end`
        script, *others = arguments
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).parent / script), *others],
            # torch reads settings when it is loaded, and some releases only one of the two. Children that each took all
            # cores while they predict would get in each other's way.
            env={
                "OMP_NUM_THREADS": str(_THREADS),
                **os.environ,
                "PYTORCH_CUDA_ALLOC_CONF": settings,
                "PYTORCH_ALLOC_CONF": settings,
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
        )

    def answer(self, order: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """Lets it measure, and waits for what it found.

        Raises:
            CaseFailed: it ended with an error.
            CaseHung: it had no answer in time.
        """
        try:
            found, _ = self._process.communicate(json.dumps(order) + "\n", timeout=timeout_s)
            if self._process.returncode:
                self._said.seek(0)
                said = self._said.read()[-_MOST_SAID:].strip()
                raise CaseFailed(f"{self._name} ended with status {self._process.returncode}:\n{said}")
            answer: dict[str, Any] = json.loads(found)
            return answer
        except subprocess.TimeoutExpired:
            raise CaseHung(f"{self._name} had no answer after {timeout_s:.0f} s and was ended") from None
        finally:
            self.end()

    def end(self) -> None:
        """Ends it, whatever it is doing; done already is fine."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._said):
            if pipe is not None:
                pipe.close()


def prepared(
    cases: Iterable[Key], start: Callable[[Key], Child], *, width: int = _WIDTH
) -> Generator[tuple[Key, Child], None, None]:
    """Cases in turn, each with a child; the next few start meanwhile, and are ended if nobody asks for them."""
    waiting: deque[tuple[Key, Child]] = deque()
    try:
        for case in cases:
            waiting.append((case, start(case)))
            if len(waiting) > width:
                yield waiting.popleft()
        while waiting:
            yield waiting.popleft()
    finally:
        for _, child in waiting:
            child.end()


class Budget:
    """Seconds for several parts one after the other; what a part leaves over goes to those after it.

    Args:
        shares: of the time, by part, in order.
    """

    def __init__(
        self, seconds: float, shares: Mapping[str, float], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._end = clock() + seconds
        self._shares = dict(shares)
        self._deadline = self._end

    def begin(self, part: str) -> None:
        """From now on the time is this part's."""
        left = self._end - self._clock()
        share = self._shares[part] / sum(self._shares.values())
        del self._shares[part]
        self._deadline = self._clock() + max(left, 0.0) * share

    @property
    def seconds(self) -> float:
        """What the part has left; 0 when it is over."""
        return max(0.0, self._deadline - self._clock())
