"""How many events per second the simulated CUDA allocator takes, and how long a search over 64 settings.

    python benchmarks/allocator_speed.py [--events 100000] [--processes 2] [--output FILE]

The first trace is a transformer's step with sequence lengths that vary. The second is the hard case: blocks of random
size and life, so that thousands of free ones lie between them. Rates are of processor time, which other work on the
machine hardly changes; so is what the search needs, and beside it stands the time by the clock with the load it met.
Without --output the result goes to `results/cpu/allocator_speed.json` and its table into the README.
"""

import argparse
import json
import multiprocessing
import os
import random
import re
import resource
import sys
import time
from pathlib import Path
from typing import Any

from knob_report import provenance

from memwall.predict.cuda_allocator.allocator_events import ALLOC, FREE, Event, EventTrace
from memwall.predict.cuda_allocator.allocator_settings import MIB, AllocatorSettings
from memwall.predict.cuda_allocator.event_replay import replay
from memwall.predict.cuda_allocator.torch_releases import profile_for

FOLDER = Path(__file__).parent
RESULT = FOLDER / "results" / "cpu" / "allocator_speed.json"
README = FOLDER / "README.md"
BEGIN, END = "<!-- allocator-speed: begin -->", "<!-- allocator-speed: end -->"

LEAST_EVENTS_PER_SECOND = 300_000
MOST_SEARCH_SECONDS = 30.0

_PROFILE = profile_for("2.13.0")[0]
_KINDS = {
    "default": AllocatorSettings(),
    "expandable": AllocatorSettings(expandable_segments=True),
    "max_split": AllocatorSettings(max_split_bytes=64 * MIB),
}


def transformer_events(num_events: int, seed: int = 0) -> EventTrace:
    """Steps of a transformer of 24 layers, width 1024, whose sequence length varies by 30 % from step to step."""
    draw = random.Random(seed)
    events: list[Event] = []
    steps: list[int] = []
    num_blocks = 0

    def alloc(nbytes: int) -> int:
        nonlocal num_blocks
        num_blocks += 1
        events.append((ALLOC, num_blocks, max(nbytes, 1), 0))
        return num_blocks

    def free(block: int) -> None:
        events.append((FREE, block, 0, 0))

    for _ in range(24 * 12):
        alloc(draw.choice((4096, 4 * MIB, 16 * MIB)))
    while len(events) < num_events:
        steps.append(len(events))
        tokens = int(4096 * draw.uniform(0.7, 1.3))
        hidden = tokens * 1024 * 2
        saved: list[list[int]] = []
        for _ in range(24):
            kept = [alloc(hidden * times) for times in (1, 3, 1, 1, 4, 4, 1)] + [alloc(tokens * 16 * 4), alloc(8)]
            for times in (1, 4, 1):
                free(alloc(hidden * times))
            saved.append(kept)
        gradient = alloc(hidden)
        for kept in reversed(saved):
            for block in reversed(kept):
                passing = alloc(hidden)
                free(block)
                free(gradient)
                gradient = passing
        free(gradient)
    return EventTrace(events=tuple(events), steps=tuple(steps))


def scattered_events(num_events: int, seed: int = 0) -> EventTrace:
    """Blocks of 1 KiB to 32 MiB that live for a random while, some 4,000 at once."""
    draw = random.Random(seed)
    events: list[Event] = []
    live: list[int] = []
    for number in range(num_events):
        if len(live) < 4000 or draw.random() < 0.5:
            events.append((ALLOC, number, int(1024 * 2 ** draw.uniform(0, 15)), 0))
            live.append(number)
        else:
            place = draw.randrange(len(live))
            live[place], live[-1] = live[-1], live[place]
            events.append((FREE, live.pop(), 0, 0))
    return EventTrace(events=tuple(events), steps=(0,))


def settings_to_try(count: int) -> list[AllocatorSettings]:
    """A mixture such as a search would try."""
    expandable = [
        AllocatorSettings(expandable_segments=True, large_segment_bytes=mib * MIB) for mib in (12, 20, 64, 128)
    ]
    split = [AllocatorSettings(max_split_bytes=mib * MIB) for mib in (20, 32, 48, 64, 128)]
    divided = [AllocatorSettings(roundup_power2_divisions=(number,) * 16) for number in (0, 2, 4, 8)]
    kinds = [*expandable, *split, *divided]
    return [kinds[index % len(kinds)] for index in range(count)]


def _events_per_second(trace: EventTrace, settings: AllocatorSettings) -> dict[str, int]:
    rates = []
    for _ in range(5):
        start = time.process_time()
        replay(trace, settings, _PROFILE)
        rates.append(len(trace.events) / (time.process_time() - start))
    rates.sort()
    return {"lower_quartile": int(rates[1]), "median": int(rates[2]), "upper_quartile": int(rates[3])}


_shared: list[EventTrace] = []


def _share(trace: EventTrace) -> None:
    _shared.append(trace)


def _peak_bytes(settings: AllocatorSettings) -> int:
    figures = replay(_shared[0], settings, _PROFILE)
    return figures.reserved_peak_bytes if figures is not None else 0


def _child_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _search(trace: EventTrace, num_settings: int, num_processes: int) -> dict[str, float]:
    """Seconds by the clock, starting the processes included, and of all processes together."""
    begin, used = time.perf_counter(), _child_seconds()
    with multiprocessing.get_context("spawn").Pool(num_processes, initializer=_share, initargs=(trace,)) as pool:
        pool.map(_peak_bytes, settings_to_try(num_settings), chunksize=4)
        pool.close()
        pool.join()
    return {
        "seconds": round(time.perf_counter() - begin, 2),
        "processor_seconds": round(_child_seconds() - used, 2),
    }


def measure(num_events: int, num_settings: int, num_processes: int) -> dict[str, Any]:
    load_before = os.getloadavg()[0]
    rows = []
    for name, events_of in (("transformer", transformer_events), ("scattered", scattered_events)):
        trace = events_of(num_events)
        rows.append(
            {
                "trace": name,
                "num_events": len(trace.events),
                "events_per_second": {kind: _events_per_second(trace, kept) for kind, kept in _KINDS.items()},
                "search": _search(trace, num_settings, num_processes),
            }
        )
    return {
        **provenance(),
        "schema": "memwall.benchmarks.allocator-speed/1",
        "num_settings": num_settings,
        "num_processes": num_processes,
        "load_average": {"before": round(load_before, 2), "after": round(os.getloadavg()[0], 2)},
        "rows": rows,
    }


def failures(result: dict[str, Any]) -> list[str]:
    """What misses the required speed; none for a pass."""
    found = []
    for row in result["rows"]:
        for kind, rate in row["events_per_second"].items():
            if rate["median"] < LEAST_EVENTS_PER_SECOND:
                found.append(f"{row['trace']}, {kind}: {rate['median']:,} events/s, {LEAST_EVENTS_PER_SECOND:,} wanted")
        seconds = row["search"]["processor_seconds"] / result["num_processes"]
        if seconds > MOST_SEARCH_SECONDS:
            found.append(f"{row['trace']}: the search needs {seconds:.1f} s, {MOST_SEARCH_SECONDS:.0f} wanted")
    return found


def section(result: dict[str, Any]) -> str:
    """The README's table of a result."""
    load, num_processes = result["load_average"], result["num_processes"]
    lines = [
        f"Required: {LEAST_EVENTS_PER_SECOND:,} events/s, and {result['num_settings']} settings in "
        f"{MOST_SEARCH_SECONDS:.0f} s on {num_processes} cores. Missed: {'; '.join(failures(result)) or 'nothing'}. "
        f"{result['cpu']}, Python {result['python']}; load average {load['before']} before and {load['after']} after, "
        f"of which the search is {num_processes}.",
        "",
        "| trace | events | default, events/s (quartiles) | expandable | max_split "
        f"| search, on {num_processes} free cores | by the clock under that load |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in result["rows"]:
        rates = [
            f"{rate['median']:,} ({rate['lower_quartile']:,}-{rate['upper_quartile']:,})"
            for rate in row["events_per_second"].values()
        ]
        search = row["search"]
        free = f"{search['processor_seconds'] / num_processes:.1f} s"
        cells = (row["trace"], f"{row['num_events']:,}", *rates, free, f"{search['seconds']} s")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def with_section(readme: str, text: str) -> str:
    """The README with its table replaced."""
    return re.sub(f"{BEGIN}.*?{END}", lambda _: f"{BEGIN}\n{text}\n{END}", readme, flags=re.DOTALL)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, default=100_000)
    parser.add_argument("--settings", type=int, default=64)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--output", type=Path, default=RESULT)
    arguments = parser.parse_args()
    result = measure(arguments.events, arguments.settings, arguments.processes)
    arguments.output.write_text(json.dumps(result, indent=1) + "\n")
    if arguments.output == RESULT:
        README.write_text(with_section(README.read_text(), section(result)))
    print(section(result))
    return 1 if failures(result) else 0


if __name__ == "__main__":
    sys.exit(main())
