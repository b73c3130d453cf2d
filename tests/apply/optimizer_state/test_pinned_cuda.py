"""State of a CUDA device in pinned host memory, or on disk: the bits of a plain run, less of the device's memory."""

import weakref
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from optimizer_runs import Make, in_groups, same
from plans import a_plan
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import memwall
from memwall.apply.optimizer_state.open_state import open_optimizer_state
from memwall.apply.optimizer_state.staged import StagedSpace
from memwall.errors import StoreError
from memwall.planning.techniques.cpu_step import StepOnCpu
from memwall.planning.techniques.optimizer_state import OptimizerPlacement
from memwall.predict.state_on_disk import staging_bytes
from memwall.session.session import Session
from memwall.store.pinned_arena import PinnedArena
from memwall.trace.modules import fingerprint

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]
MIB = 1 << 20
SIZES = (*[2 * 4 * 256 * 256] * 8, 2 * 4 * 256 * 2048)
"""State of the matrices of a model whose last one has more than a bucket."""
HOST = OptimizerPlacement(tier="host", resident_bytes=0, bucket_bytes=4 * MIB, min_bytes=16 << 10)
DISK = OptimizerPlacement(tier="disk", resident_bytes=0, bucket_bytes=4 * MIB, min_bytes=16 << 10)
ON_CPU = StepOnCpu(bucket_bytes=4 * MIB, min_bytes=16 << 10)


def trained(make: Make, disk: Path, *actions: OptimizerPlacement, num_plans: int = 1) -> tuple[list[Tensor], Any, int]:
    """Parameters and state on the CPU, and the bytes that stand on the device after four steps."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(12))).cuda()
    optimizer = make(in_groups(model))
    plan = a_plan(*actions, device="cuda", model_fingerprint=fingerprint([model]))
    with memwall.fit(model, optimizer, plan=plan, disk=str(disk)):
        for _ in range(4):
            model(torch.ones(4, 512, device="cuda")).square().mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        standing_bytes = torch.cuda.memory_allocated()
        state = {
            number: {key: value.cpu() for key, value in tensors.items() if isinstance(value, Tensor)}
            for number, tensors in optimizer.state_dict()["state"].items()
        }
    return [parameter.detach().cpu() for parameter in model.parameters()], state, standing_bytes


@pytest.mark.parametrize("placement", [HOST, DISK], ids=["host", "disk"])
@pytest.mark.parametrize(
    "make",
    [
        partial(torch.optim.AdamW, lr=1e-2, foreach=False),
        partial(torch.optim.AdamW, lr=1e-2, foreach=True),
        partial(torch.optim.AdamW, lr=1e-2, fused=True),
        partial(torch.optim.AdamW, lr=1e-2, capturable=True),
        partial(torch.optim.SGD, lr=1e-2, momentum=0.9),
    ],
    ids=["for-loop", "foreach", "fused", "capturable", "sgd"],
)
def test_training_is_bitwise_equal_and_the_device_holds_less(
    make: Make, placement: OptimizerPlacement, tmp_path: Path
) -> None:
    *plain, plain_bytes = trained(make, tmp_path)
    *away, away_bytes = trained(make, tmp_path, placement)
    assert same(plain, away)
    assert plain_bytes - away_bytes > 10 * MIB


def test_a_larger_parameter_passes_alone_and_what_it_passes_through_is_lent_again(tmp_path: Path) -> None:
    def trained_apart(*, is_on_disk: bool) -> tuple[list[Tensor], Any]:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8)), nn.Linear(256, 2048)).cuda()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        with ExitStack() as closing:
            if is_on_disk:
                state, close = open_optimizer_state(
                    optimizer,
                    disk=str(tmp_path),
                    capacity_bytes=None,
                    host_limit_bytes=staging_bytes(SIZES, MIB),
                    resident_bytes=0,
                    bucket_bytes=MIB,
                    min_bytes=16 << 10,
                )
                closing.callback(close)
            for _ in range(4):
                model(torch.ones(4, 256, device="cuda")).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            if is_on_disk:
                assert state.away_bytes == sum(SIZES)
                assert state.bytes_written == 4 * sum(SIZES)
                assert state.bytes_read == 3 * sum(SIZES)
            state_dict = optimizer.state_dict()["state"]
        return [parameter.detach().cpu() for parameter in model.parameters()], state_dict

    plain, plain_state = trained_apart(is_on_disk=False)
    away, away_state = trained_apart(is_on_disk=True)
    assert same(plain, away)
    for number, tensors in plain_state.items():
        assert same({key: value.cpu() for key, value in tensors.items()}, away_state[number])


def test_without_host_memory_to_pass_through_it_is_said_what_is_missing(tmp_path: Path) -> None:
    parameter = nn.Parameter(torch.ones(512, 512, device="cuda"))
    optimizer = torch.optim.AdamW([parameter])
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    with pytest.raises(StoreError, match=r"pinned"):
        open_optimizer_state(
            optimizer,
            disk=str(tmp_path),
            capacity_bytes=None,
            host_limit_bytes=1 << 20,
            resident_bytes=0,
            bucket_bytes=MIB,
            min_bytes=16 << 10,
        )
    assert all(value.device == parameter.device for value in optimizer.state[parameter].values() if value.ndim)


def test_other_sizes_pin_no_more_than_is_foreseen_of_them(tmp_path: Path) -> None:
    """GIVEN host memory for what is foreseen WHEN a plan follows with smaller buckets THEN steps go on."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8)), nn.Linear(256, 2048)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    state, close = open_optimizer_state(
        optimizer,
        disk=str(tmp_path),
        capacity_bytes=None,
        host_limit_bytes=staging_bytes(SIZES, 2 * MIB),
        resident_bytes=0,
        bucket_bytes=2 * MIB,
        min_bytes=16 << 10,
    )
    for bucket_bytes in (2 * MIB, MIB, 2 * MIB):
        state.settle(resident_bytes=0, bucket_bytes=bucket_bytes)
        for _ in range(2):
            model(torch.ones(4, 256, device="cuda")).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert isinstance(state._space, StagedSpace)
        assert state._space.pinned_bytes <= staging_bytes(SIZES, bucket_bytes)
    close()


@pytest.mark.parametrize("action", [HOST, DISK, ON_CPU], ids=["host", "disk", "stepped on the CPU"])
def test_host_memory_of_an_optimizer_that_was_replaced_and_dropped_is_unpinned(
    action: OptimizerPlacement | StepOnCpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GIVEN a host with room for one WHEN each epoch has a new optimizer THEN the ones before are gone."""
    arenas: list[PinnedArena] = []
    begin = PinnedArena.__init__

    def noted(arena: PinnedArena, *args: Any, **options: Any) -> None:
        arenas.append(arena)
        begin(arena, *args, **options)

    monkeypatch.setattr(PinnedArena, "__init__", noted)
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(12))).cuda()
    plan = a_plan(action, device="cuda", model_fingerprint=fingerprint([model]))
    session = Session(plan=plan, disk=str(tmp_path), host_capacity_bytes=44 * MIB)
    session.attach(model, None)
    known = register_optimizer_step_pre_hook(lambda optimizer, *_: session.add_optimizer(optimizer))
    pinned, made = [], []
    with session, ExitStack() as closing:
        closing.callback(known.remove)
        for _ in range(4):
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            for _ in range(2):
                model(torch.ones(4, 512, device="cuda")).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            made.append(weakref.ref(optimizer))
            pinned.append(sum(arena.pinned_bytes for arena in arenas))
            del optimizer
            assert sum(one() is not None for one in made) == 1
    assert pinned == [pinned[0]] * 4
    assert pinned[0] > 0
    assert sum(arena.pinned_bytes for arena in arenas) == 0


def test_state_comes_back_for_good_without_a_bucket_beside_it(tmp_path: Path) -> None:
    """GIVEN state in host memory WHEN the session ends THEN the device is asked for what that takes, and no more."""
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(12))).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    plan = a_plan(HOST, device="cuda", model_fingerprint=fingerprint([model]))
    with memwall.fit(model, optimizer, plan=plan, disk=str(tmp_path)):
        for _ in range(2):
            model(torch.ones(4, 512, device="cuda")).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        before_bytes = torch.cuda.memory_stats()["allocated_bytes.all.allocated"]
    asked_bytes = torch.cuda.memory_stats()["allocated_bytes.all.allocated"] - before_bytes
    moved = [
        v for state in optimizer.state.values() for v in state.values() if v.is_cuda and v.nbytes >= HOST.min_bytes
    ]
    assert asked_bytes == sum(value.nbytes for value in moved) == 24 * MIB
