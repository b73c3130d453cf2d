"""How many events per second the simulated CUDA allocator takes, and how long a search over 64 settings.

    python benchmarks/allocator_speed.py [--events 100000] [--processes 2]

Prints one JSON object. The first trace is a transformer's step with sequence lengths that vary. The figures
depend on the machine and on what else runs there. The second trace is the hard case: blocks of random size and life,
so that thousands of free ones lie between them.
"""

import argparse
import json
import multiprocessing
import platform
import random
import time

from memwall.predict.cuda_allocator.events import ALLOC, FREE, Event, EventTrace
from memwall.predict.cuda_allocator.replay import replay
from memwall.predict.cuda_allocator.settings import MIB, AllocatorSettings
from memwall.predict.cuda_allocator.versions import profile_for

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
        start = time.perf_counter()
        replay(trace, settings, _PROFILE)
        rates.append(len(trace.events) / (time.perf_counter() - start))
    rates.sort()
    return {"lower_quartile": int(rates[1]), "median": int(rates[2]), "upper_quartile": int(rates[3])}


_shared: list[EventTrace] = []


def _share(trace: EventTrace) -> None:
    _shared.append(trace)


def _peak_bytes(settings: AllocatorSettings) -> int:
    figures = replay(_shared[0], settings, _PROFILE)
    return figures.reserved_peak_bytes if figures is not None else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, default=100_000)
    parser.add_argument("--settings", type=int, default=64)
    parser.add_argument("--processes", type=int, default=2)
    arguments = parser.parse_args()
    traces = {"transformer": transformer_events(arguments.events), "scattered": scattered_events(arguments.events)}
    speeds: dict[str, dict[str, dict[str, int]]] = {}
    search_seconds: dict[str, float] = {}
    for trace_name, trace in traces.items():
        speeds[trace_name] = {name: _events_per_second(trace, settings) for name, settings in _KINDS.items()}
        context = multiprocessing.get_context("spawn")
        start = time.perf_counter()
        with context.Pool(arguments.processes, initializer=_share, initargs=(trace,)) as pool:
            pool.map(_peak_bytes, settings_to_try(arguments.settings), chunksize=4)
        search_seconds[trace_name] = round(time.perf_counter() - start, 2)
    print(
        json.dumps(
            {
                "provenance": "cpu-measured",
                "python": platform.python_version(),
                "machine": platform.machine(),
                "num_events": {name: len(trace.events) for name, trace in traces.items()},
                "events_per_second": speeds,
                "num_settings": arguments.settings,
                "num_processes": arguments.processes,
                "search_seconds": search_seconds,
            },
            indent=2,
        )
    )


if __name__ == "__main__":
    main()
