"""Recorded steps as allocator events, their replay, and the search for settings."""

import random
from typing import Any

import msgspec
import pytest

from memwall.errors import TraceError, UsageError
from memwall.predict.cuda_allocator import settings_search
from memwall.predict.cuda_allocator.allocator_events import (
    ALLOC,
    COMPLETE,
    EMPTY_CACHE,
    FREE,
    FREE_LATER,
    Event,
    EventTrace,
    events_of_steps,
    live_peak_bytes,
)
from memwall.predict.cuda_allocator.allocator_settings import MIB, AllocatorSettings
from memwall.predict.cuda_allocator.event_replay import Figures, Playback, replay
from memwall.predict.cuda_allocator.rounding import MAX_REQUEST_BYTES
from memwall.predict.cuda_allocator.settings_search import search_settings
from memwall.predict.cuda_allocator.simulator import CudaAllocator
from memwall.predict.cuda_allocator.state import PeakExceeded
from memwall.predict.cuda_allocator.torch_releases import profile_for
from memwall.trace.records import Op, Phase, Step, Storage

PROFILE = profile_for("2.13.0")[0]
DEFAULT = AllocatorSettings()


def step(
    storages: list[tuple[int, int, int]],
    num_ops: int,
    *,
    device: str = "cuda:0",
    marks: tuple[tuple[str, int], ...] = (),
) -> Step:
    """A step of storages given as (MiB, birth, death)."""
    phase: Phase = "forward"
    return Step(
        kind="steady",
        ops=tuple(
            Op(name=0, module=0, phase=phase, seconds=0.0, flops=0, inputs=(), outputs=(), writes=())
            for _ in range(num_ops)
        ),
        storages=tuple(
            Storage(
                nbytes=mib * MIB,
                device=device,
                category="activation",
                birth=birth,
                dropped=death,
                death=death,
                module=0,
                phase=phase,
                batched=True,
            )
            for mib, birth, death in storages
        ),
        saved=(),
        calls=(),
        marks=marks,
        wall_seconds=0.0,
        process_peak_bytes=0,
    )


def shown(trace: EventTrace) -> list[str]:
    """Events as text: +block:MiB and -block."""
    return [
        f"+{block}:{nbytes // MIB}" if action == ALLOC else f"-{block}" for action, block, nbytes, _ in trace.events
    ]


# Events of steps


def test_before_each_operation_the_dead_are_freed_and_then_its_own_allocated() -> None:
    trace = events_of_steps([step([(8, -1, 3), (4, 0, 2), (5, 1, 2), (6, 2, 3)], 3)], num_repeats=1)
    assert shown(trace) == ["+1:8", "+2:4", "+3:5", "-2", "-3", "+4:6"]
    assert trace.steps == (1,)


def test_what_outlives_a_step_stands_before_the_next() -> None:
    # Parameters, a gradient of the last step that is freed early, and one that is born.
    repeated = step([(8, -1, 2), (4, -1, 1), (4, 1, 2)], 2)
    trace = events_of_steps([repeated], num_repeats=3)
    assert shown(trace) == ["+1:8", "+2:4", "-2", "+3:4", "-3", "+4:4", "-4", "+5:4"]
    assert trace.steps == (2, 4, 6)


def test_a_storage_that_stays_keeps_its_block_among_others_of_its_size() -> None:
    repeated = step([(4, -1, 1), (4, -1, 2), (4, 1, 2)], 2)
    trace = events_of_steps([repeated], num_repeats=2)
    assert shown(trace) == ["+1:4", "+2:4", "-1", "+3:4", "-3", "+4:4"]


def test_optimizer_state_of_the_first_step_is_that_of_the_second() -> None:
    first = step([(8, -1, 2), (16, 1, 2)], 2)
    steady = step([(16, -1, 2), (8, -1, 2), (3, 0, 1)], 2)
    assert shown(events_of_steps([first, steady], num_repeats=1)) == ["+1:8", "+2:16", "+3:3", "-3"]


def test_what_the_next_step_does_not_know_is_freed_and_what_it_misses_allocated() -> None:
    first, steady = step([(8, -1, 1)], 1), step([(9, -1, 1)], 1)
    assert shown(events_of_steps([first, steady], num_repeats=1)) == ["+1:8", "-1", "+2:9"]


def test_a_loss_that_its_loop_holds_serves_no_batch_of_the_next_step() -> None:
    """GIVEN a loss that is alive when its step ends WHEN the next begins with a batch as large THEN that is new."""
    plain = step([(8, 0, 1)], 1)
    loss = msgspec.structs.replace(plain.storages[0], category="temporary", phase="loss")
    trained = msgspec.structs.replace(plain, storages=(loss,))
    assert shown(events_of_steps([trained, step([(8, -1, 1)], 1)], num_repeats=1)) == ["+1:8", "-1", "+2:8"]


def test_a_trace_of_another_device_is_an_error() -> None:
    with pytest.raises(TraceError) as caught:
        events_of_steps([step([(8, 0, 1)], 1, device="cpu")])
    assert str(caught.value) == "no storage of the trace is on 'cuda'; its storages are on cpu"
    with pytest.raises(TraceError, match="there is no step to replay"):
        events_of_steps([])


# Replay


def events(*items: Event, steps: tuple[int, ...] = (0,)) -> EventTrace:
    return EventTrace(events=items, steps=steps)


def alloc(block: int, mib: float, stream: int = 0) -> Event:
    return (ALLOC, block, int(mib * MIB), stream)


def free(block: int) -> Event:
    return (FREE, block, 0, 0)


def test_figures_of_a_replay() -> None:
    trace = events(alloc(1, 11), free(1), alloc(2, 25), free(2), alloc(3, 11), steps=(0, 2))
    figures = replay(trace, DEFAULT, PROFILE)
    assert (figures.reserved_peak_bytes, figures.allocated_peak_bytes) == (38 * MIB, 26 * MIB)
    assert (figures.num_steady_device_calls, figures.is_out_of_memory) == (1, False)
    assert replay(trace, DEFAULT, PROFILE) == figures


def test_what_happens_in_the_first_step_is_not_counted_as_steady() -> None:
    trace = events(alloc(1, 60), free(1), alloc(2, 80), free(2), alloc(3, 80), steps=(0, 4))
    figures = replay(trace, DEFAULT, PROFILE)
    assert (figures.reserved_peak_bytes, figures.num_steady_device_calls) == (140 * MIB, 0)


def test_the_figures_end_where_memory_does() -> None:
    trace = events(alloc(1, 30), alloc(2, MAX_REQUEST_BYTES / MIB), alloc(3, 1))
    figures = replay(trace, DEFAULT, PROFILE)
    assert (figures.is_out_of_memory, figures.allocated_peak_bytes) == (True, 30 * MIB)


def test_a_replay_of_no_interest_is_broken_off() -> None:
    trace = events(alloc(1, 30), alloc(2, 90))
    with pytest.raises(PeakExceeded):
        replay(trace, DEFAULT, PROFILE, abort_above_bytes=100 * MIB)
    assert replay(trace, DEFAULT, PROFILE, abort_above_bytes=120 * MIB).reserved_peak_bytes == 120 * MIB


def test_a_block_that_another_stream_uses_is_free_when_that_is_done() -> None:
    device = CudaAllocator(DEFAULT, PROFILE)
    playback = Playback(device)
    assert playback.run([alloc(1, 30), (FREE_LATER, 1, 0, 0), alloc(2, 30)])
    assert (device.allocated_bytes, device.reserved_bytes) == (30 * MIB, 60 * MIB)
    assert playback.run([(COMPLETE, 1, 0, 0), alloc(3, 30), (EMPTY_CACHE, 0, 0, 0)])
    assert device.reserved_bytes == 60 * MIB
    assert sorted(playback.live) == [2, 3]


def test_a_wait_that_ended_because_memory_was_out_is_not_ended_again() -> None:
    device = CudaAllocator(DEFAULT, PROFILE, capacity_bytes=50 * MIB)
    assert Playback(device).run([alloc(1, 30), (FREE_LATER, 1, 0, 0), alloc(2, 40), (COMPLETE, 1, 0, 0)])
    assert (device.num_alloc_retries, device.reserved_bytes, device.allocated_bytes) == (1, 40 * MIB, 40 * MIB)


@pytest.mark.parametrize(
    ("event", "message"),
    [(free(9), "names block 9, which is not allocated"), ((99, 0, 0, 0), "has the unknown action 99")],
)
def test_events_that_make_no_sense_are_errors(event: Event, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        replay(events(event), DEFAULT, PROFILE)


def test_the_lower_bound_is_the_most_that_lives_at_once() -> None:
    trace = events((ALLOC, 1, 1, 0), alloc(2, 4), free(2), alloc(3, 3), free(1), alloc(4, 1))
    assert live_peak_bytes(trace) == 4 * MIB + 512


# Search


def varying_steps(num_steps: int = 6) -> EventTrace:
    """Steps of eight layers whose sizes vary by 30 %, each freed in reverse; parameters stand before."""
    draw = random.Random(5)
    items: list[Event] = [alloc(1, 64)]
    starts = []
    block = 1
    for _ in range(num_steps):
        starts.append(len(items))
        scale = draw.uniform(0.7, 1.3)
        kept = []
        for _ in range(8):
            for mib in (24, 48, 12, 96):
                block += 1
                items.append(alloc(block, mib * scale))
                kept.append(block)
            items.append(free(kept.pop(-2)))
        items.extend(free(number) for number in reversed(kept))
    return events(*items, steps=tuple(starts))


def test_where_sizes_vary_expandable_segments_come_close_to_the_bound() -> None:
    trace = varying_steps()
    choice = search_settings(trace, "2.13.0")
    assert choice.settings.expandable_segments
    assert not choice.figures.is_out_of_memory
    assert choice.default_figures.reserved_peak_bytes > 1.3 * choice.lower_bound_bytes
    assert choice.figures.reserved_peak_bytes < 1.02 * choice.lower_bound_bytes
    assert choice.reserved_spread_bytes == (choice.figures.reserved_peak_bytes,) * 2
    assert replay(trace, choice.settings, PROFILE) == choice.figures


def test_without_them_other_settings_are_searched_and_the_reason_is_kept() -> None:
    """GIVEN a small block that is cut off a large cached one WHEN the large one is asked for again THEN limits help."""
    one = [alloc(1, 200), free(1), alloc(2, 40), alloc(3, 200), free(2), free(3)]
    trace = events(*one, *one, *one, steps=(0, 6, 12))
    choice = search_settings(trace, "2.13.0", no_expandable_because="tensors are shared over CUDA IPC")
    assert not choice.settings.expandable_segments
    assert choice.settings.max_split_bytes is not None
    assert choice.figures.reserved_peak_bytes == 240 * MIB < choice.default_figures.reserved_peak_bytes
    assert choice.notes[0] == "expandable segments were not tried: tensors are shared over CUDA IPC"
    varying = search_settings(varying_steps(), "2.13.0", no_expandable_because="not wanted")
    assert any("above the most bytes live at once" in note for note in varying.notes)


def test_nothing_is_changed_where_the_default_is_as_good() -> None:
    trace = events(*[item for block in range(9) for item in (alloc(block, 40), free(block))], steps=(0, 2, 4))
    choice = search_settings(trace, "2.13.0")
    assert choice.settings == DEFAULT
    assert choice.figures == choice.default_figures


def test_a_candidate_is_broken_off_once_it_is_worse_than_the_best_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound is never above the peak of what was found before; it saves replays, and changes nothing."""
    bounds: list[int | None] = []
    broken_off: list[int] = []

    def watched(*args: Any, abort_above_bytes: int | None = None, **options: Any) -> Figures:
        bounds.append(abort_above_bytes)
        try:
            return replay(*args, abort_above_bytes=abort_above_bytes, **options)
        except PeakExceeded:
            assert abort_above_bytes is not None
            broken_off.append(abort_above_bytes)
            raise

    untouched = search_settings(varying_steps(), "2.13.0")
    monkeypatch.setattr(settings_search, "replay", watched)
    assert search_settings(varying_steps(), "2.13.0") == untouched
    tried = [bound for bound in bounds if bound is not None]
    assert tried == sorted(tried, reverse=True)
    assert len(broken_off) >= 5
    assert broken_off[-1] == untouched.figures.reserved_peak_bytes


def test_the_dangerous_pair_is_never_chosen() -> None:
    for reason in ("", "not wanted"):
        choice = search_settings(varying_steps(), "2.13.0", no_expandable_because=reason)
        settings = choice.settings
        assert not (settings.expandable_segments and settings.max_split_bytes is not None)


def test_where_addresses_decide_ties_the_spread_over_guesses_is_given() -> None:
    choice = search_settings(varying_steps(), "2.11.0", no_expandable_because="not wanted")
    least, most = choice.reserved_spread_bytes
    assert least <= choice.figures.reserved_peak_bytes <= most
    assert "torch 2.11 decides ties by address: where the device puts segments is guessed, three ways" in choice.notes


def test_the_same_trace_gives_the_same_choice() -> None:
    assert search_settings(varying_steps(), "2.11.0") == search_settings(varying_steps(), "2.11.0")
