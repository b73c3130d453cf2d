"""What to set the allocator to: one complete string, beside the default and the bound, and who may not use it."""

import random
from typing import Any

import pytest

from memwall.predict.cuda_allocator import settings_search
from memwall.predict.cuda_allocator.advice import EXPANDABLE_GUARDS, advise, setting_lines
from memwall.predict.cuda_allocator.allocator_events import ALLOC, FREE, Event, EventTrace, live_peak_bytes
from memwall.predict.cuda_allocator.allocator_settings import MIB, AllocatorSettings, parse_settings
from memwall.predict.cuda_allocator.event_replay import Figures, replay
from memwall.predict.cuda_allocator.torch_releases import profile_for

PROFILE, _ = profile_for("2.13.0")


def varying_steps() -> EventTrace:
    """Steps of eight layers whose sizes vary by 30 %, each freed in reverse; weights of 64 MiB stand before."""
    draw = random.Random(5)
    items: list[Event] = [(ALLOC, 1, 64 * MIB, 0)]
    starts, block = [], 1
    for _ in range(6):
        starts.append(len(items))
        scale, kept = draw.uniform(0.7, 1.3), []
        for mib in (24, 48, 12, 96) * 8:
            block += 1
            items.append((ALLOC, block, int(mib * scale * MIB), 0))
            kept.append(block)
        items.extend((FREE, number, 0, 0) for number in reversed(kept))
    return EventTrace(events=tuple(items), steps=tuple(starts))


def equal_steps() -> EventTrace:
    """The same 40 MiB again and again: nothing can be better than one segment of it."""
    items = [item for block in range(9) for item in ((ALLOC, block, 40 * MIB, 0), (FREE, block, 0, 0))]
    return EventTrace(events=tuple(items), steps=(0, 2, 4))


def replayed(trace: EventTrace, text: str) -> Figures:
    return replay(trace, parse_settings(text, PROFILE), PROFILE)


def test_the_string_is_complete_and_gives_the_figure_beside_the_default_and_the_bound() -> None:
    trace = varying_steps()
    advice = advise(trace, "2.13.0")
    assert advice.level == "L2 what-if"
    assert advice.settings.startswith("expandable_segments:True,large_segment_size_mb:")
    assert replayed(trace, advice.settings).reserved_peak_bytes == advice.reserved_bytes
    assert replayed(trace, "").reserved_peak_bytes == advice.default_reserved_bytes
    assert live_peak_bytes(trace) == advice.lower_bound_bytes <= advice.reserved_bytes
    assert advice.saved_bytes == advice.default_reserved_bytes - advice.reserved_bytes > 0


def test_runs_that_may_not_use_expandable_segments_are_listed_and_get_settings_of_their_own() -> None:
    trace = varying_steps()
    advice = advise(trace, "2.13.0")
    assert advice.guards == EXPANDABLE_GUARDS
    for word in ("CUDA IPC", "custom all-reduce", "NCCL", "gfx1201"):
        assert any(word in guard for guard in advice.guards)
    assert not parse_settings(advice.guarded_settings, PROFILE).expandable_segments
    assert replayed(trace, advice.guarded_settings).reserved_peak_bytes == advice.guarded_reserved_bytes
    assert advice.reserved_bytes < advice.guarded_reserved_bytes <= advice.default_reserved_bytes


def test_where_nothing_is_notably_better_the_default_stays() -> None:
    advice = advise(equal_steps(), "2.13.0")
    assert parse_settings(advice.settings, PROFILE) == AllocatorSettings()
    assert (advice.saved_bytes, advice.guards) == (0, ())
    assert advice.guarded_settings == advice.settings


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("2.13.0", "simulated for torch 2.13 and later, before 2.15; the string is read by 2.11 and later"),
        ("2.15.0", "simulated for torch 2.15 and later; the string is read by 2.11 and later"),
    ],
)
def test_it_says_for_which_releases(version: str, expected: str) -> None:
    assert advise(equal_steps(), version).torch_versions == expected


def test_both_variables_are_set() -> None:
    text = "expandable_segments:True"
    assert setting_lines(text) == f"PYTORCH_ALLOC_CONF={text} PYTORCH_CUDA_ALLOC_CONF={text}"


def test_default_settings_are_replayed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN a run that gains by segments which expand WHEN other runs are advised as well THEN both compare with it."""
    tried: list[AllocatorSettings] = []

    def counted(trace: EventTrace, settings: AllocatorSettings, *args: Any, **kwargs: Any) -> Figures:
        tried.append(settings)
        return replay(trace, settings, *args, **kwargs)

    monkeypatch.setattr(settings_search, "replay", counted)
    assert advise(varying_steps(), "2.13.0").guards
    assert tried.count(AllocatorSettings()) == 1
