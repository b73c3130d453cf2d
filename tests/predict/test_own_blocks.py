"""An operator's own allocations, as the allocator's history tells them, in the records of a step."""

import torch

from memwall.predict.cuda.own_blocks import OwnBlock, own_blocks, with_own_blocks
from memwall.predict.cuda_allocator.allocator_events import ALLOC, events_of_steps
from memwall.trace.records import ModuleCall, Op, SavedTensor, Step, Storage

MIB = 1 << 20


def taken(address: int, num_bytes: int) -> tuple[bool, int, int]:
    return True, address, num_bytes


def freed(address: int, num_bytes: int) -> tuple[bool, int, int]:
    return False, address, num_bytes


def test_a_workspace_that_makes_room_for_the_next_passes() -> None:
    """GIVEN a convolution's backward: a result, its workspace, another result, its workspace."""
    events = (taken(1, 8), taken(2, 64), freed(2, 64), taken(3, 4), taken(2, 60), freed(2, 60))
    assert own_blocks(events) == (
        OwnBlock(8, is_freed=False),
        OwnBlock(64, is_freed=True, passes=True),
        OwnBlock(4, is_freed=False),
        OwnBlock(60, is_freed=True),
    )


def test_of_blocks_that_overlap_those_at_the_highest_point_stay() -> None:
    events = (taken(1, 10), taken(2, 20), freed(1, 10), taken(3, 40), freed(2, 20), freed(3, 40), taken(4, 5))
    assert own_blocks(events) == (
        OwnBlock(20, is_freed=True),
        OwnBlock(40, is_freed=True),
        OwnBlock(5, is_freed=False),
    )


def test_an_argument_that_is_let_go_of_is_no_block_of_its_own() -> None:
    assert own_blocks((freed(7, 99), taken(1, 8))) == (OwnBlock(8, is_freed=False),)


def storage(num_bytes: int, birth: int, death: int) -> Storage:
    return Storage(
        nbytes=num_bytes,
        device="cuda:0",
        category="activation",
        birth=birth,
        dropped=death,
        death=death,
        module=0,
        phase="forward",
        batched=False,
    )


def step() -> Step:
    """Two operations: the first reads an input and makes two results, the second reads both."""
    one = Op(name=0, module=0, phase="forward", seconds=0.0, flops=0, inputs=(0,), outputs=(1, 2), writes=())
    two = Op(name=0, module=0, phase="backward", seconds=0.0, flops=0, inputs=(1, 2), outputs=(), writes=(2,))
    return Step(
        kind="first",
        ops=(one, two),
        storages=(storage(MIB, -1, 2), storage(2 * MIB, 0, 2), storage(3 * MIB, 0, 2)),
        saved=(SavedTensor(storage=2, module=0, nbytes=3 * MIB, packed=1, unpacked=1, released=2),),
        calls=(ModuleCall(module=0, start=0, end=1, backward_start=1, backward_end=2, inputs=(0,), outputs=(2,)),),
        marks=(("forward", 0), ("backward", 1)),
        wall_seconds=0.0,
        process_peak_bytes=0,
    )


def test_blocks_stand_in_the_order_of_allocation_and_records_follow() -> None:
    blocks = (
        OwnBlock(2 * MIB, is_freed=False),
        OwnBlock(40 * MIB, is_freed=True, passes=True),
        OwnBlock(3 * MIB, is_freed=False),
        OwnBlock(50 * MIB, is_freed=True),
    )
    (found,) = with_own_blocks([step()], [blocks, ()], torch.device("cuda", 0))
    assert [one.nbytes // MIB for one in found.storages] == [1, 2, 40, 3, 50]
    assert (found.ops[0].outputs, found.ops[1].writes) == ((1, 3), (3,))
    assert (found.saved[0].storage, found.calls[0].outputs) == (3, (3,))
    events = events_of_steps((found,), num_repeats=1).events
    assert [(action == ALLOC, num_bytes // MIB) for action, _, num_bytes, _ in events] == [
        (True, 1),
        (True, 2),
        (True, 40),
        (False, 0),
        (True, 3),
        (True, 50),
        (False, 0),
    ]


def test_what_is_neither_returned_nor_freed_is_held_from_then_on() -> None:
    """GIVEN the workspace of a library, which the first step makes THEN it stands when the next one begins."""
    blocks = [(), (OwnBlock(32 * MIB, is_freed=False),), (), ()]
    first, second = with_own_blocks([step(), step()], blocks, torch.device("cuda", 0))
    (made,), (stands,) = ([s for s in each.storages if s.nbytes == 32 * MIB] for each in (first, second))
    assert (made.birth, made.death) == (1, 2)
    assert (stands.birth, stands.death) == (-1, 2)
