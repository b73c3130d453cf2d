"""Paths of modules for people: numbered ones drawn together, in the order in which a person counts."""

import re
from collections.abc import Sequence

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


def block_ranges(paths: Sequence[str]) -> str:
    """Returns paths with runs of numbers drawn together, h.2 before h.10.

    >>> block_ranges(["h.10", "h.0", "h.1", "h.2", "h.7", "head"])
    'h.0-2, h.7, h.10, head'
    >>> block_ranges(["f.10:13", "f.6:9"])
    'f.6:9, f.10:13'
    """
    runs: list[tuple[str, str, int, int]] = []
    for path in sorted(paths, key=_natural):
        numbers = list(_NUMBER.finditer(path))
        if not numbers:
            runs.append((path, "", -1, -1))
            continue
        before, after, number = path[: numbers[-1].start()], path[numbers[-1].end() :], int(numbers[-1].group())
        if runs and runs[-1][:2] == (before, after) and runs[-1][3] == number - 1:
            runs[-1] = (before, after, runs[-1][2], number)
        else:
            runs.append((before, after, number, number))
    return ", ".join(_run_text(*run) for run in runs)


def _run_text(before: str, after: str, first: int, last: int) -> str:
    if first < 0:
        return before or "whole model"
    return f"{before}{first}{after}" if first == last else f"{before}{first}-{last}{after}"


def _natural(path: str) -> tuple[tuple[int, int, str], ...]:
    # Of a run of layers, as "features.6:9", the first one counts.
    firsts = (part.partition(":")[0] for part in path.split("."))
    return tuple((0, int(part), "") if part.isdigit() else (1, 0, part) for part in firsts)
