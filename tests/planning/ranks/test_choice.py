"""The choice among ways to divide a model: none that fits is passed over."""

from functools import cache
from unittest.mock import Mock

import pytest
import torch
from fake_steps import record_fake
from msgspec.structs import replace
from torch import nn

from memwall.machine.hardware import hardware_named
from memwall.machine.node_links import link_named
from memwall.planning.candidate import Candidate
from memwall.planning.location import IN_MEMORY
from memwall.planning.menu import WINDOW_BYTES
from memwall.planning.one_recording import search_at_location
from memwall.planning.one_recording.recording_search import RecordingSearch
from memwall.planning.one_recording.search_at_location import SearchAtLocation
from memwall.planning.one_recording.search_inputs import SearchInputs
from memwall.planning.ranks.curve import curve_over_ranks
from memwall.planning.ranks.kinds import KINDS
from memwall.planning.ranks.one_kind import OneKind
from memwall.planning.ranks.rank_bytes import rank_bytes
from memwall.planning.ranks.search import infeasible_ranks, plan_ranks
from memwall.planning.settings import Settings
from memwall.planning.techniques.accumulate import Accumulate
from memwall.predict import device
from memwall.predict.cuda.translate import recording_for, translated
from memwall.predict.curve import live_peak_bytes
from memwall.predict.roofline import Roofline
from memwall.predict.sharding import units
from memwall.predict.sharding.ddp import Ddp
from memwall.predict.sharding.fsdp2 import Fsdp2
from memwall.predict.sharding.network import network_of
from memwall.predict.sharding.units import TraceUnits
from memwall.predict.sharding.zero import DeepSpeedZero
from memwall.trace.records import Trace
from memwall.trace.steps import steady_step
from memwall.trace.workload import Workload
from memwall.units import format_bytes

pytestmark = pytest.mark.slow

A100 = hardware_named("a100-40gb")
GIB = 1 << 30


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4096, 8192), nn.Linear(8192, 4096)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = values + self.down(torch.relu(self.up(values)))
        return outputs


@cache
def traced(rows: int, dtype: torch.dtype = torch.float32, host_bytes: int = 0) -> Trace:
    workload = Workload(
        model=lambda: nn.Sequential(*(Block() for _ in range(4))).to(dtype),
        batch=lambda: torch.ones(rows, 4096, dtype=dtype),
        loss=lambda model, batch: model(batch).sum(),
        optimizer=lambda parameters: torch.optim.AdamW(parameters),
    )
    recording = recording_for(A100)
    trace = record_fake(workload, target="cuda", workspaces=recording.workspaces, choices=recording.choices())
    return translated(trace, A100, host_bytes=host_bytes)


def settings(budget_bytes: int, *, splits: bool = False) -> Settings:
    return Settings(budget_bytes=budget_bytes, hardware=A100, allow_accumulation=splits)


def test_micro_batches_fit_where_recomputing_every_block_does_not() -> None:
    made, _ = plan_ranks(traced(262_144), settings(16 * GIB, splits=True), num_ranks=8, num_ranks_per_node=8, link=None)
    assert made is not None
    assert made.forecast.fits
    assert any(isinstance(action, Accumulate) for action in made.actions)


def test_a_plan_says_what_it_saves_that_fsdp2_reduces_each_micro_batch() -> None:
    network = network_of(A100, num_ranks=8, num_ranks_per_node=8, link=None)
    one = OneKind(Fsdp2(), TraceUnits(traced(262_144)), settings(16 * GIB, splits=True), network)
    one.search()
    (price,) = (text for text in one.plan().forecast.binding if "sync_each_batch" in text)
    whole_bytes = 4 * (2 * 4096 * 8192 + 4096 + 8192) * 4
    assert f"a rank would hold {format_bytes(whole_bytes * 7 // 8)} more, and reduce for" in price


@pytest.mark.parametrize("splits", [False, True])
def test_whoever_follows_the_refusal_has_a_plan_that_fits(splits: bool) -> None:
    trace, asked = traced(64), settings(2 * GIB, splits=splits)
    made, ranks = plan_ranks(trace, asked, num_ranks=8, num_ranks_per_node=8, link=None)
    assert made is None
    told_bytes = infeasible_ranks(ranks, trace, asked).smallest_feasible_bytes
    assert told_bytes == min(one.process_bytes + one.margin_bytes for one in ranks.choices if one.process_bytes)
    made, _ = plan_ranks(trace, settings(told_bytes, splits=splits), num_ranks=8, num_ranks_per_node=8, link=None)
    assert made is not None
    assert made.forecast.fits


def test_no_step_is_put_to_the_allocator_twice_and_units_are_found_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN a budget that every way keeps to as it is THEN a way's step is simulated once, for whatever asks for it."""
    trace = traced(64)
    found, simulated = Mock(wraps=units.find_units), Mock(wraps=device.events_of_steps)
    monkeypatch.setattr(units, "find_units", found)
    monkeypatch.setattr(device, "events_of_steps", simulated)
    plan_ranks(trace, settings(36 * GIB), num_ranks=8, num_ranks_per_node=8, link=None)
    assert found.call_count == len({id(step) for step in (*trace.steps, steady_step(trace))})
    assert simulated.call_count <= 1 + len(KINDS)  # the one process's, for the curve


def test_whoever_raises_a_budget_without_margin_as_told_has_one() -> None:
    trace = traced(64)
    made, _ = plan_ranks(trace, settings(5 * GIB), num_ranks=8, num_ranks_per_node=8, link=None)
    assert made is not None
    assert not made.forecast.fits
    told_bytes = made.forecast.smallest_feasible_budget_bytes
    assert told_bytes is not None
    assert 5 * GIB < told_bytes < 6 * GIB
    made, _ = plan_ranks(trace, settings(told_bytes), num_ranks=8, num_ranks_per_node=8, link=None)
    assert made is not None
    assert made.forecast.fits


def test_what_changes_numerics_is_not_told_as_what_needs_least() -> None:
    """GIVEN that ZeRO would change numerics THEN the refusal counts the others alone."""
    trace, asked = replace(traced(64), autocast="bfloat16"), settings(GIB)
    _, ranks = plan_ranks(trace, asked, num_ranks=8, num_ranks_per_node=8, link=None)
    ranks = replace(ranks, choices=tuple(one for one in ranks.choices if one.by == "DeepSpeed" or one.words == "DDP"))
    needed_bytes = {one.words: one.process_bytes + one.margin_bytes for one in ranks.choices}
    assert 0 < needed_bytes["ZeRO-3"] < needed_bytes["DDP"]
    error = infeasible_ranks(ranks, trace, asked)
    assert error.smallest_feasible_bytes == needed_bytes["DDP"]
    assert "DDP needs least" in str(error)


def test_of_what_a_rank_holds_more_ranks_make_its_own_part_smaller_alone() -> None:
    """GIVEN a model that eight ranks divide THEN of sixteen each holds half as much of it, and gathers as much."""
    network = network_of(A100, num_ranks=8, num_ranks_per_node=16, link=None)
    one = OneKind(Fsdp2(), TraceUnits(traced(64)), settings(36 * GIB), network)
    one.search()
    of_eight, of_sixteen = rank_bytes(one, one.plan(), network)
    assert (of_eight.num_ranks, of_sixteen.num_ranks) == (8, 16)
    assert of_eight.tensor_bytes + of_eight.outside_bytes == one.plan().forecast.peak.process_bytes
    assert of_sixteen.standing_bytes == pytest.approx(of_eight.standing_bytes / 2, rel=0.01)
    assert of_sixteen.gathered_bytes == of_eight.gathered_bytes > 0
    assert len(rank_bytes(one, one.plan(), replace(network, num_ranks_per_node=8))) == 1


def test_gradients_are_averaged_in_bfloat16_where_that_is_allowed_and_the_link_is_slow() -> None:
    """GIVEN a step that waits for the link between nodes THEN its bytes are halved only on request, and not for nothing
    where links within a node hide all but the last bucket."""
    compressed = Ddp(are_views=True, is_compressed=True)
    of = {}
    for allow in ((), ("gradient-compression",)):
        asked = replace(settings(36 * GIB), allow=allow)
        made, ranks = plan_ranks(traced(64), asked, num_ranks=4, num_ranks_per_node=1, link=link_named("ethernet-25g"))
        assert made is not None
        of[allow] = (made.forecast.step_seconds or 0.0, ranks)
    (plain_seconds, plain), (seconds, ranks) = of.values()
    assert ranks.chosen == compressed
    assert seconds < 0.55 * plain_seconds
    against = next(one for one in plain.choices if one.sharding == compressed)
    assert against.reason.endswith("before they are averaged; --allow gradient-compression")
    _, near = plan_ranks(
        traced(262_144),
        replace(settings(1000 * GIB), allow=("gradient-compression",)),
        num_ranks=8,
        num_ranks_per_node=8,
        link=None,
    )
    assert near.chosen != compressed


def test_units_that_the_budget_has_room_for_stay_gathered_where_the_link_is_slow() -> None:
    """GIVEN a budget between those of all units gathered again and of all kept THEN the last ones are kept, which makes
    a step a tenth shorter; of a link that hides gathers none are."""
    trace, link = traced(64), link_named("ethernet-25g")
    network = network_of(A100, num_ranks=8, num_ranks_per_node=1, link=link)
    two = OneKind(Fsdp2(num_kept=2), TraceUnits(trace), settings(GIB), network)
    asked = settings(two.process.budget_for(two.plain_bytes))
    made, ranks = plan_ranks(trace, asked, num_ranks=8, num_ranks_per_node=1, link=link)
    assert made is not None
    assert made.forecast.fits
    assert isinstance(ranks.chosen, Fsdp2)
    assert 2 <= ranks.chosen.num_kept < 4
    none, every = (
        next(one for one in ranks.choices if one.sharding == kind) for kind in (Fsdp2(), Fsdp2(reshard="no"))
    )
    assert not every.fits
    assert (made.forecast.step_seconds or 0.0) < 0.9 * (none.step_seconds or 0.0)
    assert none.reason.endswith(f"more a step than FSDP2, last {ranks.chosen.num_kept} units kept gathered")
    _, near = plan_ranks(traced(262_144), asked, num_ranks=8, num_ranks_per_node=8, link=None)
    assert not any(getattr(one.sharding, "num_kept", 0) for one in near.choices)


class Narrow(nn.Module):
    """Computes much by few parameters, which a block of `Block`'s kind that follows has many of."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4096, 256), nn.Linear(256, 4096)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        for _ in range(32):
            values = values + self.down(torch.relu(self.up(values)))
        return values


def test_units_are_gathered_further_ahead_where_they_are_unlike() -> None:
    """GIVEN blocks of much computation for few parameters, and others in turns with them
    THEN gathers hide behind more than one unit, which makes a step a twentieth shorter."""
    workload = Workload(
        model=lambda: nn.Sequential(*(kind() for kind in 3 * (Narrow, Block))),
        batch=lambda: torch.ones(4096, 4096),
        loss=lambda model, batch: model(batch).sum(),
        optimizer=lambda parameters: torch.optim.AdamW(parameters),
    )
    recording = recording_for(A100)
    recorded = record_fake(
        workload,
        target="cuda",
        seconds_of=Roofline(A100),
        workspaces=recording.workspaces,
        choices=recording.choices(),
    )
    trace = translated(recorded, A100)
    asked, link = settings(37 * GIB), link_named("ethernet-25g")
    made, ranks = plan_ranks(trace, asked, num_ranks=8, num_ranks_per_node=1, link=link)
    assert made is not None
    assert ranks.chosen == Fsdp2(reshard="no", num_ahead=2)
    others = (one.step_seconds for one in ranks.choices if getattr(one.sharding, "num_ahead", 1) == 1)
    assert (made.forecast.step_seconds or 0.0) < 0.97 * min(seconds for seconds in others if seconds)
    one_ahead = next(one for one in ranks.choices if one.sharding == Fsdp2(reshard="no"))
    assert (made.forecast.step_seconds or 0.0) < 0.95 * (one_ahead.step_seconds or 0.0)


def test_a_kind_that_is_never_chosen_is_planned_in_outline(monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN that ZeRO would change numerics THEN its plans are shown, but no integer program is solved for them."""
    trace = replace(traced(65_536), autocast="bfloat16")
    asked: list[tuple[bool, bool]] = []
    best = RecordingSearch.best

    def seen(search: RecordingSearch) -> Candidate | None:
        asked.append((search.is_outline, any(search is one._search for one in zeros)))
        return best(search)

    monkeypatch.setattr(RecordingSearch, "best", seen)
    found = TraceUnits(trace)
    network = network_of(A100, num_ranks=8, num_ranks_per_node=8, link=None)
    zeros = [OneKind(DeepSpeedZero(stage=3), found, settings(16 * GIB), network)]
    for one in (*zeros, OneKind(Fsdp2(), found, settings(16 * GIB), network)):
        one.search()
    assert asked == [(True, True), (False, False)]


def test_a_kind_that_stands_above_the_budget_is_not_solved_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN parameters, gradients and state beyond the budget WHEN plans are looked for THEN no menu is made."""
    network = network_of(A100, num_ranks=8, num_ranks_per_node=8, link=None)
    one = OneKind(Fsdp2(reshard="no"), TraceUnits(traced(4096)), settings(3 * GIB), network)
    monkeypatch.setattr(search_at_location, "build_menus", Mock(side_effect=AssertionError))
    one.search()
    assert one.found is None


@pytest.mark.parametrize("gibibytes", [2, 3, 5, 8])
def test_the_curve_is_what_looking_at_every_kind_finds(gibibytes: int) -> None:
    trace, asked = traced(16_384), settings(gibibytes * GIB)
    found_units = TraceUnits(trace)
    process = device.DeviceModel(trace, A100)
    plain_bytes = process.reserved_bytes(process.untreated(found_units.steady).process_bytes)
    share = plain_bytes / live_peak_bytes(found_units.steady, "cuda")
    points = curve_over_ranks(found_units, asked, num_ranks_per_node=8, link=None)
    assert [point.num_ranks for point in points] == [1, 2, 4, 8]
    for point in points:
        network = network_of(A100, num_ranks=point.num_ranks, num_ranks_per_node=8, link=None)
        every = [OneKind(kind, found_units, asked, network) for kind in KINDS]
        outlined = []
        for one in every:
            if not one.why_not and not one.changes_numerics:
                treated, added = one.recomputed()
                for step, seconds in ((one.cost.step, 0.0), (treated, added)):
                    nbytes = one.outlined_bytes(step, share)
                    outlined.append((one.fits_in_budget(nbytes), one.least_seconds + seconds, nbytes, one.kind.words))
        fitting = [each for each in outlined if each[0]]
        if fitting:
            assert point.step_seconds == pytest.approx(min(each[1] for each in fitting))
            assert point.words in [each[3] for each in fitting if each[1] == pytest.approx(point.step_seconds)]
        else:
            assert (point.words, point.process_bytes) == ("", min(each[2] for each in outlined))


def test_what_is_told_of_a_kind_is_the_least_of_all_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN a search that replays only what may be less WHEN each way is replayed on its own THEN none is less."""
    network = network_of(A100, num_ranks=8, num_ranks_per_node=8, link=None)
    asked = replace(settings(3 * GIB), tier_capacity_bytes=64 * GIB)
    one = OneKind(Fsdp2(), TraceUnits(traced(65_536, host_bytes=64 * GIB)), asked, network)
    search = SearchAtLocation(SearchInputs(one.trace, asked, one.process), IN_MEMORY)
    batches = list(search._batches())
    alone = [search._smallest_for(b, search._instance(b, size), None) for b in batches for size in (0, WINDOW_BYTES)]
    assert search.smallest_bytes() == min(alone)
    monkeypatch.setattr(search, "_resident", Mock(side_effect=AssertionError))
    assert search._smallest_for(batches[0], search._instance(batches[0], 0), 1) == 1
