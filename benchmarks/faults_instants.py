"""Runs instants of harm, each once, and keeps what came of them; a part of benchmarks/faults.py.

What was found is kept line by line, so that a run that is interrupted, or given little time, goes on where it ended.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["GOOD", "Found", "Instant", "Kept", "counted", "table"]

GOOD = ("identical", "one clear error", "readable", "nothing committed", "over before", "flat", "goes on")


class Found(NamedTuple):
    """Says what came of one harm."""

    name: str
    """Names what was done to which run: the row of the table."""
    outcome: str
    said: str
    """The last of what the run has said."""


class Instant(NamedTuple):
    """One harm, or several that follow one another."""

    key: str
    """Tells it from the others of its part, today and in the next run."""
    names: tuple[str, ...]
    """The rows of what it yields."""
    run: Callable[[], Iterable[tuple[str, str]]]
    """Does it; returns outcome and what was said, of each name."""


class Kept:
    """Keeps in a file what was found, by instant.

    Args:
        path: of a file of JSON lines, or of none yet.
        state: of what is harmed; what was found of another state does not count.
    """

    def __init__(self, path: Path, state: str) -> None:
        self._path, self._state = path, state
        self._found: dict[str, list[Found]] = {}
        if path.exists():
            for line in path.read_text().splitlines():
                each = json.loads(line)
                if each["state"] == state:
                    self._found[each["key"]] = [Found(*found) for found in each["found"]]
        path.parent.mkdir(parents=True, exist_ok=True)

    def has(self, key: str) -> bool:
        """Tells whether an instant has run, and has ended well."""
        return key in self._found and all(found.outcome in GOOD for found in self._found[key])

    def of(self, instant: Instant) -> list[Found]:
        """Returns what was found of an instant; "not run" where it has not."""
        return self._found.get(instant.key) or [Found(name, "not run", "") for name in instant.names]

    def run(self, instant: Instant) -> list[Found]:
        """Runs an instant, and keeps what it finds."""
        outcomes = zip(instant.names, instant.run(), strict=True)
        found = [Found(name, outcome, said[-1500:]) for name, (outcome, said) in outcomes]
        self._found[instant.key] = found
        with self._path.open("a") as file:
            file.write(json.dumps({"state": self._state, "key": instant.key, "found": found}) + "\n")
        return found


def counted(found: Iterable[Found]) -> dict[str, Any]:
    """Returns how many of each row had which outcome, and what was worse than one clear error."""
    rows = list(found)
    counts = Counter((each.name, each.outcome) for each in rows)
    outcomes = {
        name: {f"num_{outcome.replace(' ', '_')}": counts[name, outcome] for of, outcome in counts if of == name}
        for name in dict.fromkeys(each.name for each in rows)
    }
    bad = [each._asdict() | {"said": each.said[-800:]} for each in rows if each.outcome not in (*GOOD, "not run")]
    num_run = sum(each.outcome != "not run" for each in rows)
    return {"outcomes": outcomes, "num_planned": len(rows), "num_run": num_run, "bad": bad}


def table(record: dict[str, Any], parts: Iterable[str]) -> Iterator[str]:
    """Yields the lines of the table of what was found."""
    yield from ("| harm | instants run, of all | outcomes |", "| --- | --- | --- |")
    for part in parts:
        found = record.get(part.replace("-", "_"))
        if found is None:
            continue
        if part == "soak":
            grown = found["grown"]
            yield (
                f"| soak, {found['minutes_of_60_seconds']:g} minutes | {found['num_steps']:,} steps | grown by "
                f"{grown['resident_bytes'] / 2**20:.1f} MiB, {grown['num_handles']} handles, {grown['num_threads']} "
                f"threads, {grown['disk_bytes'] / 2**20:.1f} MiB of disk |"
            )
            continue
        for name, outcomes in found["outcomes"].items():
            done = {each[4:].replace("_", " "): count for each, count in outcomes.items() if each != "num_not_run"}
            said = ", ".join(f"{count:,} {outcome}" for outcome, count in done.items()) or "-"
            yield f"| {part}: {name} | {sum(done.values()):,} of {sum(outcomes.values()):,} | {said} |"
