"""What holds after every step of any sequence of calls, under any legal settings."""

import random
from collections.abc import Iterator
from itertools import pairwise

import msgspec
import pytest
from allocator_statistics import WatchedAllocator, recorded_addresses
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memwall.predict.cuda_allocator.addresses import placed_addresses
from memwall.predict.cuda_allocator.allocator_settings import MIB, AllocatorSettings
from memwall.predict.cuda_allocator.memory_blocks import FREE, PENDING, UNMAPPED, USED, Block, Pool
from memwall.predict.cuda_allocator.torch_releases import profile_for

GIB = 1 << 30
SIZES = (1, 600, 70_000, MIB, MIB + 1, 3 * MIB, 9 * MIB, 10 * MIB, 11 * MIB, 33 * MIB, 70 * MIB)


class World:
    """A device under drawn settings, what runs on it, and what is known of it from outside."""

    def __init__(
        self,
        draw: random.Random,
        *,
        is_bounded: bool = True,
        addresses: Iterator[int] | None = None,
        streams: tuple[int, int] = (0, 1),
    ) -> None:
        self.draw = draw
        self.streams = streams
        profile = msgspec.structs.replace(profile_for("2.13.0")[0], tie=draw.choice(("address", "block", "segment")))
        large = draw.choice((20, 12, 48))
        split = draw.choice((None, 64, 48))
        self.capacity_bytes = draw.choice((None, 400 * MIB)) if is_bounded else None
        self.device = WatchedAllocator(
            AllocatorSettings(
                expandable_segments=draw.random() < 0.5,
                max_split_bytes=None if split is None else split * MIB,
                large_segment_bytes=large * MIB,
                roundup_power2_divisions=(draw.choice((0, 4)),) * 16,
                garbage_collection_threshold=draw.choice((0.0, 0.6)),
            ),
            profile,
            capacity_bytes=self.capacity_bytes,
            total_bytes=GIB,
            addresses=addresses or placed_addresses(draw.choice(("ascending", "descending", "random"))),
        )
        if is_bounded and draw.random() < 0.5:
            self.device.set_memory_fraction(300 * MIB / GIB)
        self.statistics = self.device.statistics
        self.live: list[Block] = []

    def step(self) -> None:
        draw = self.draw.random()
        if draw < 0.55:
            block = self.device.malloc(
                self.draw.choice(SIZES) + self.draw.randrange(5000), stream=self.streams[self.draw.randrange(2)]
            )
            if block is not None:
                self.live.append(block)
        elif draw < 0.95 and self.live:
            block = self.live.pop(self.draw.randrange(len(self.live)))
            self.device.free(block, is_awaited=self.draw.random() < 0.05)
        elif draw < 0.98 and self.device.pending:
            self.device.complete(self.draw.choice(list(self.device.pending)))
        elif draw >= 0.99:
            self.device.empty_cache()

    def pools(self) -> list[Pool]:
        return [self.device.large, self.device.small]

    def segments(self) -> list[list[Block]]:
        """All blocks, by segment and in order of place."""
        firsts: dict[int, Block] = {}
        known = [*self.live, *self.device.pending]
        known += [block for pool in self.pools() for block in pool.in_order()]
        known += [block for pool in self.pools() for found in pool.free_sets.values() for block in found.unmapped]
        for block in known:
            first = block
            while first.prev is not None:
                first = first.prev
            firsts[id(first)] = first
        chains = []
        for first in firsts.values():
            chain = [first]
            while chain[-1].next is not None:
                chain.append(chain[-1].next)
            chains.append(chain)
        return chains

    def check(self) -> None:
        device = self.device
        chains = self.segments()
        blocks = [block for chain in chains for block in chain]
        in_use = [block for block in blocks if block.state == USED]
        pending = [block for block in blocks if block.state == PENDING]
        free = [block for block in blocks if block.state == FREE]
        allocated = sum(block.size for block in in_use)
        active = allocated + sum(block.size for block in pending)
        assert {id(block) for block in in_use} == {id(block) for block in self.live}
        assert device.allocated_bytes == allocated
        assert set(device.pending) == set(pending)
        assert device.reserved_bytes == active + sum(block.size for block in free)
        assert self.capacity_bytes is None or device.reserved_bytes <= self.capacity_bytes
        for chain in chains:
            self._check_chain(chain)
        for pool in self.pools():
            for found in pool.free_sets.values():
                assert found.keys == sorted(found.key(block) for block in found.blocks)
                assert all(block.state == FREE and block.home is found for block in found.blocks)
                assert found.unmapped_addresses == sorted(block.address for block in found.unmapped)
        in_sets = {id(block) for pool in self.pools() for block in pool.in_order()}
        assert in_sets == {id(block) for block in free}

    def _check_chain(self, chain: list[Block]) -> None:
        segment = chain[0].segment
        assert chain[0].start == segment.start
        assert chain[-1].start + chain[-1].size == segment.start + segment.nbytes
        for left, right in pairwise(chain):
            assert left.start + left.size == right.start
            assert right.prev is left
            assert not (left.state == right.state and left.state in (FREE, UNMAPPED))
        for block in chain:
            assert block.size > 0
            assert block.size % 512 == 0
            if block.state == UNMAPPED:
                assert (block.start - segment.start) % segment.granule_bytes == 0
                assert block.size % segment.granule_bytes == 0


@pytest.mark.slow
@settings(max_examples=100, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 1 << 32))
def test_every_byte_is_accounted_for_after_every_step(seed: int) -> None:
    world = World(random.Random(seed))
    for number in range(200):
        world.step()
        if number % 3 == 0:
            world.check()
    world.check()


@settings(max_examples=100)
@given(seed=st.integers(0, 1 << 32))
def test_when_all_is_freed_all_can_be_given_back(seed: int) -> None:
    world = World(random.Random(seed))
    for _ in range(250):
        world.step()
    while world.live:
        world.device.free(world.live.pop())
    world.device.empty_cache()
    world.check()
    device = world.device
    assert (device.reserved_bytes, device.allocated_bytes) == (0, 0)


@settings(max_examples=100)
@given(seed=st.integers(0, 1 << 32))
def test_the_detailed_statistics_agree_with_the_figures(seed: int) -> None:
    world = World(random.Random(seed))
    for _ in range(250):
        world.step()
    device, shown = world.device, world.statistics.as_dict()
    for name, current, peak in (
        ("allocated_bytes", device.allocated_bytes, device.allocated_peak_bytes),
        ("reserved_bytes", device.reserved_bytes, device.reserved_peak_bytes),
    ):
        assert (shown[f"{name}.all.current"], shown[f"{name}.all.peak"]) == (current, peak), name
        pools = shown[f"{name}.small_pool.current"] + shown[f"{name}.large_pool.current"]
        assert pools == current
        assert shown[f"{name}.all.allocated"] - shown[f"{name}.all.freed"] == current
    assert shown["allocation.all.current"] == len(world.live)


@settings(max_examples=60)
@given(seed=st.integers(0, 1 << 32))
def test_the_same_calls_have_the_same_outcome(seed: int) -> None:
    traces = []
    for _ in range(2):
        world = World(random.Random(seed))
        for _ in range(250):
            world.step()
        traces.append(world.statistics.trace)
    assert traces[0] == traces[1]


@settings(max_examples=60)
@given(seed=st.integers(0, 1 << 32))
def test_a_replay_at_the_recorded_addresses_repeats_the_recording(seed: int) -> None:
    recorded = World(random.Random(seed))
    addresses: list[int] = []

    def noted() -> Iterator[int]:
        for address in placed_addresses("ascending"):
            addresses.append(address)
            yield address

    recorded.device.addresses = noted()
    again = World(random.Random(seed))
    for _ in range(250):
        recorded.step()
    again.device.addresses = recorded_addresses(addresses)
    for _ in range(250):
        again.step()
    assert again.statistics.trace == recorded.statistics.trace


@settings(max_examples=60)
@given(seed=st.integers(0, 1 << 32))
def test_moving_all_segments_alike_changes_nothing(seed: int) -> None:
    shift = 5 << 60
    near = World(random.Random(seed), addresses=placed_addresses("ascending"))
    far = World(random.Random(seed), addresses=(address + shift for address in placed_addresses("ascending")))
    for _ in range(250):
        near.step()
        far.step()
    moved = [
        entry if entry[0] == "oom" else (entry[0], entry[1] + shift, *entry[2:]) for entry in near.statistics.trace
    ]
    assert far.statistics.trace == moved


@settings(max_examples=40)
@given(seed=st.integers(0, 1 << 32))
def test_streams_count_by_their_order_alone(seed: int) -> None:
    few, many = (0, 1), (7, 94_000_000_000_000)
    small = World(random.Random(seed), streams=few)
    large = World(random.Random(seed), streams=many)
    for _ in range(250):
        small.step()
        large.step()
    renamed = dict(zip(few, many, strict=True))
    assert large.statistics.trace == [(*entry[:3], renamed[entry[3]]) for entry in small.statistics.trace]
