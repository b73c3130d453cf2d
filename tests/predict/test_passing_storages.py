"""Storages that an operation allocates and frees before it asks for anything else, as the allocator meets them."""

import pytest

from memwall.predict.call_rules import BlockCalls, Treatment
from memwall.predict.cuda_allocator.step_peaks import step_peaks
from memwall.predict.cuda_allocator.torch_releases import profile_for
from memwall.predict.treatment import StepModel
from memwall.trace.records import ModuleCall, Op, Phase, SavedTensor, Step, Storage

MIB = 1 << 20
PROFILE, _ = profile_for("2.13.0")
PHASES: tuple[Phase, ...] = ("forward", "forward", "backward", "backward")


def storage(num_mib: int, birth: int, death: int) -> Storage:
    return Storage(
        nbytes=num_mib * MIB,
        device="cuda:0",
        category="activation",
        birth=birth,
        dropped=min(death, birth + 1) if death > birth else death,
        death=death,
        module=0,
        phase="forward",
        batched=False,
        dtype="float32",
    )


def step_of(*storages: Storage) -> Step:
    """Two operations of a block, and the two of its backward, the first of which asks for what the block saved."""
    return Step(
        kind="steady",
        ops=tuple(
            Op(name=0, module=0, phase=phase, seconds=0.0, flops=0, inputs=(), outputs=(), writes=())
            for phase in PHASES
        ),
        storages=storages,
        saved=(SavedTensor(storage=0, module=0, nbytes=storages[0].nbytes, packed=1, unpacked=2, released=3),),
        calls=(ModuleCall(module=0, start=0, end=2, backward_start=2, backward_end=4, inputs=(), outputs=()),),
        marks=(),
        wall_seconds=0.0,
        process_peak_bytes=0,
    )


def reserved_mib(step: Step) -> int:
    peaks = step_peaks((step,), PROFILE)
    assert peaks is not None
    return max(peak.reserved_bytes for peak in peaks) // MIB


def treated(step: Step, treatment: Treatment) -> Step:
    block = BlockCalls(path="block", module=0, calls=step.calls, saved=((0,),))
    return StepModel(step, ("aten.mm.default",), (block,)).treated({"block": treatment})


@pytest.mark.parametrize("at", [0, 1, 2, 3])
def test_a_workspace_stands_where_operations_run_again_before_it(at: int) -> None:
    """GIVEN one of 500 MiB, at each operation THEN a block that is recomputed before the third takes none away."""
    saved = storage(100, 0, 3)
    plain = step_of(saved, storage(500, at, at))
    assert reserved_mib(plain) == 600
    changed = treated(plain, Treatment(recompute=True))
    assert len(changed.ops) == 5
    (birth, death), *again = ((one.birth, one.death) for one in changed.storages if one.nbytes == 500 * MIB)
    assert birth == death == at + (at >= 2)
    assert again == ([(2, 2)] if at == 0 else [])
    assert reserved_mib(changed) >= 500


@pytest.mark.parametrize("at", [-1, 4])
def test_what_has_no_life_within_the_step_is_not_asked_for(at: int) -> None:
    saved = storage(100, 0, 3)
    assert reserved_mib(step_of(saved, storage(500, at, at))) == reserved_mib(step_of(saved)) == 100


def test_what_comes_back_packed_when_it_is_asked_for_does_not_pass_beside_what_unpacks_it() -> None:
    """GIVEN a block that nothing is read ahead for THEN its packed bytes are counted once, by what they need more."""
    packed = Treatment(offload=True, is_packed=True)
    plain = treated(step_of(storage(100, 0, 3)), packed)
    assert len(plain.storages) == 4
    assert not any(one.birth == one.death for one in plain.storages)


@pytest.mark.parametrize("at", [1, 2])
def test_a_workspace_makes_no_room_for_packed_bytes(at: int) -> None:
    """GIVEN one at the operation that bytes are packed, or unpacked, before: it is gone where results are made."""
    packed, saved = Treatment(offload=True, is_packed=True), storage(100, 0, 3)
    plain, beside = (treated(step_of(saved, *more), packed) for more in ((), (storage(500, at, at),)))
    assert [one for one in beside.storages if one.nbytes != 500 * MIB] == list(plain.storages)
